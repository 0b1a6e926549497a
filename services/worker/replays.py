"""What a worker answers to who asks for a request's tokens."""

from meshift.schemas.identity import Owner
from meshift.schemas.logprobs import pack_logprobs
from meshift.schemas.requests import ReplayReply, ReplayState
from meshift.services.worker.moves.moved import Moved
from meshift.services.worker.requests import RequestRecord


def answer(owner: Owner, start: int, record: RequestRecord | None, moved: Moved | None) -> ReplayReply:
    """From a record that is here, or that was here and moved away. Raises InvalidRequest if `start` isn't one of its
    tokens'."""
    if record is not None and not record.muted:
        state = ReplayState.RUNNING if record.finish is None else ReplayState.FINISHED
        return _replay(owner, start, record, state)
    if moved is not None:
        reply = _replay(owner, start, moved.record, ReplayState.MOVED)
        return reply.model_copy(update={"moved_to": moved.destination, "hop": moved.destination_key.hop})
    return ReplayReply(owner=owner, state=ReplayState.UNKNOWN)


def _replay(owner: Owner, start: int, record: RequestRecord, state: ReplayState) -> ReplayReply:
    tokens, logprobs, finish = record.replay_from(start)
    return ReplayReply(
        owner=owner,
        state=state,
        start=start,
        tokens=tokens.tobytes(),
        logprobs=None if logprobs is None else pack_logprobs(logprobs),
        finish=finish,
    )
