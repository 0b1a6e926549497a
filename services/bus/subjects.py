"""NATS subjects and patterns: `*` stands for one token, a final `>` for one or more."""

from functools import lru_cache

from meshift.schemas.errors import InvalidRequest

_BLANKS = frozenset(" \t\r\n\f\v")


@lru_cache(maxsize=4096)
def check_subject(subject: str) -> str:
    """Return `subject` if a message can be sent there (no wildcards); raise `InvalidRequest` if not."""
    if "*" in subject or ">" in subject:
        raise InvalidRequest(f"subject {subject!r} has a wildcard", param="subject")
    return check_pattern(subject)


def check_pattern(pattern: str) -> str:
    """Return `pattern` if it can be subscribed to; raise `InvalidRequest` if not."""
    tokens = pattern.split(".")
    if not all(tokens) or not _BLANKS.isdisjoint(pattern):
        raise InvalidRequest(f"subject {pattern!r} has an empty token or a blank", param="subject")
    for index, token in enumerate(tokens):
        if ">" in token and (token != ">" or index != len(tokens) - 1):
            raise InvalidRequest(f"subject {pattern!r}: '>' must be the last token", param="subject")
        if "*" in token and token != "*":
            raise InvalidRequest(f"subject {pattern!r}: '*' must be a whole token", param="subject")
    return pattern


def is_pattern(subject: str) -> bool:
    """Whether a (valid) subject has wildcards."""
    return "*" in subject or subject.endswith(">")


def matches(pattern: str, subject: str) -> bool:
    """Whether a message to `subject` reaches a subscription to `pattern`."""
    wanted, given = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        if len(given) <= len(wanted):
            return False
        given = given[: len(wanted)]
    return len(wanted) == len(given) and all(w in ("*", g) for w, g in zip(wanted, given, strict=True))
