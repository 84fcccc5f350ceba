"""A member's own, cautious view of its lease."""

from __future__ import annotations

from collections.abc import Callable

RENEWALS_PER_LEASE = 3
_NEVER = float("-inf")


class Lease:
    """Until when this process may believe that the others wait for it.

    Counted from before a request was sent, so that it ends here no later than in the journal. Once it has
    run out there may be changes that nobody waited with: a renewal then is a promise only, and comes into
    force when everything that the journal had after it has been read.
    """

    def __init__(self, length_s: float, clock: Callable[[], float]) -> None:
        self.length_s = length_s
        self._clock = clock
        self.until_s = _NEVER
        self.promised_until_s = _NEVER
        self._renew_at_s = _NEVER

    def is_due(self) -> bool:
        """Whether it is time to renew."""
        return self._clock() >= self._renew_at_s

    def renewed(self, sent_s: float) -> bool:
        """A request sent at `sent_s` renewed it; returns whether it had not run out until now."""
        is_unbroken = self._clock() < self.until_s
        if is_unbroken:
            self.until_s = sent_s + self.length_s
        else:
            self.promised_until_s = sent_s + self.length_s
        self._renew_at_s = sent_s + self.length_s / RENEWALS_PER_LEASE
        return is_unbroken

    def fulfil(self, promised_until_s: float) -> None:
        """Everything was read after the request that promised this."""
        self.until_s = max(self.until_s, promised_until_s)

    def drop(self) -> None:
        self.until_s = self.promised_until_s = _NEVER
