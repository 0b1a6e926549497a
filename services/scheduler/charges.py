"""What the scheduler dispatched and no report shows yet, so that a burst doesn't herd onto one instance."""

from dataclasses import dataclass

from meshift.schemas.identity import Owner

REPORTS_UNTIL_SEEN = 2
"""A report may have been on its way when the dispatch was made: the one after it certainly counts the request."""


@dataclass(slots=True)
class _Charge:
    tokens: int
    reports_left: int


class Charges:
    """Tokens by owner. State is bounded by the dispatches of two report intervals."""

    def __init__(self) -> None:
        self._by_owner: dict[Owner, list[_Charge]] = {}

    def charge(self, owner: Owner, tokens: int) -> None:
        """A dispatch of `tokens` to `owner`."""
        self._by_owner.setdefault(owner, []).append(_Charge(tokens, REPORTS_UNTIL_SEEN))

    def charged(self, owner: Owner) -> tuple[int, int]:
        """Tokens and requests on their way to `owner`."""
        charges = self._by_owner.get(owner)
        if charges is None:
            return 0, 0
        return sum(charge.tokens for charge in charges), len(charges)

    def on_report(self, owner: Owner) -> None:
        """`owner` reported."""
        charges = self._by_owner.get(owner)
        if charges is None:
            return
        for charge in charges:
            charge.reports_left -= 1
        left = [charge for charge in charges if charge.reports_left]
        if left:
            self._by_owner[owner] = left
        else:
            del self._by_owner[owner]

    def forget(self, owner: Owner) -> None:
        """`owner` is gone."""
        self._by_owner.pop(owner, None)
