"""Stop strings in a text that arrives in pieces."""

from collections.abc import Sequence


class StopFilter:
    """Lets text through up to the first stop string. What may be the beginning of one is held back.

    The first stop string is the one whose last character comes first (of several that end there, the longest), so the
    result doesn't depend on where the text is cut into pieces. One character costs O(1) amortised per stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        # Longest first: of those that end at one character the first that is found wins.
        self._matchers = [_Matcher(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; nothing is let through after it."""

    def push(self, text: str) -> str:
        """The text that is certain not to belong to a stop string."""
        if self.matched is not None:
            return ""
        if not self._held and self._first_chars.isdisjoint(text):
            return text
        for index, char in enumerate(text):
            self.matched = self._advance(char)
            if self.matched is not None:
                whole, self._held = self._held + text[: index + 1], ""
                return whole[: -len(self.matched)]
        whole = self._held + text
        cut = len(whole) - max(matcher.progress for matcher in self._matchers)
        self._held = whole[cut:]
        return whole[:cut]

    def flush(self) -> str:
        """The text that was held back, once no text follows."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        found: str | None = None
        for matcher in self._matchers:
            if matcher.advance(char) and found is None:
                found = matcher.stop
        return found


class _Matcher:
    """Knuth, Morris, Pratt: how much of one stop string the text ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.progress = 0
        self._borders = _borders(stop)

    def advance(self, char: str) -> bool:
        """Take the next character; True if it completes the stop string. Not called again after that."""
        while self.progress and self.stop[self.progress] != char:
            self.progress = self._borders[self.progress - 1]
        if self.stop[self.progress] == char:
            self.progress += 1
        return self.progress == len(self.stop)


def _borders(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = borders[length - 1]
        if stop[index] == stop[length]:
            length += 1
        borders[index] = length
    return borders
