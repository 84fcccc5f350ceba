"""A process's side of the document journal: what changed, and whether stored KV may be used."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence

from cachecraft_rag.store.journal.base import (
    DEFAULT_KEEP,
    DEFAULT_LIMIT,
    Action,
    Entry,
    Journal,
    JournalError,
    Position,
    StartOverError,
    lease_clock,
)
from cachecraft_rag.store.journal.lease import Lease
from cachecraft_rag.store.journal.snapshot import by

logger = logging.getLogger(__name__)

_RESET = Entry(action=Action.RESET, tenant="")


class Follower:
    """Reads the journal in a side thread, and holds this process's lease.

    The scheduler's thread calls `drain` before each plan, applies what it gives, and then asks `is_current`:
    only if that is true may the plan use stored KV. `drain` gives entries in the journal's order, those of
    this process included (`entry.author == follower.name`): applied there and nowhere else, they are applied
    once, and all processes come to the same state. A change applied ahead of its place, in the order of this
    process, would not: of two replacements at the same time each process would keep the other one's.

    What makes a change binding: an entry is acknowledged when it is in the inbox, so the next `drain` gives
    it; and while it is not, its author waits until this process's lease is over, and with it `is_current`.
    """

    def __init__(
        self,
        journal: Journal,
        name: str,
        *,
        lease_s: float = 3.0,
        poll_s: float = 0.05,
        compact_every: int = 10_000,
        clock: Callable[[], float] = lease_clock,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        """Does nothing before `start` or `poll`.

        Args:
            name: for people; a unique part is added, so that a process started again is another member.
            lease_s: how long the others wait for this process when it stops answering.
            poll_s: time between two looks at the journal.
            compact_every: entries between two compactions; the process that appends the last of them does it.
            clock: seconds; must go on while the machine sleeps.
            wait: how `append_and_wait` waits.
        """
        self.name = f"{name}:{uuid.uuid4().hex[:12]}"
        self.last_fault = ""
        self.position: Position | None = None
        """What `drain` gave goes at least so far: to keep beside cold records once it is applied to them."""
        self._journal = journal
        self._poll_s = poll_s
        self._kept: Position | None = None
        self._compact_every = compact_every
        self._clock = clock
        self._wait = wait
        self._inbox: deque[Entry] = deque()
        self._polling = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cachecraft-journal", daemon=True)
        self._position: Position | None = None
        self._must_reset = False
        self._lease = Lease(lease_s, clock)
        self._drained_until_s = self._lease.until_s

    def start(self) -> None:
        """Read what there is, then follow in a daemon thread."""
        self.poll()
        self._thread.start()

    # --- for the scheduler's thread: no lock, no I/O --------------------------------------------

    def drain(self) -> list[Entry]:
        """What is new, in order; each entry is given once."""
        # Read before the inbox: everything that came before this lease is in the inbox by now.
        lease_until_s, position = self._lease.until_s, self._position
        entries = []
        while self._inbox:
            entries.append(self._inbox.popleft())
        self._drained_until_s = lease_until_s
        self.position = position or self.position
        return entries

    def is_current(self) -> bool:
        """Whether nothing binding can be missing from what `drain` has given so far.

        False from the end of the lease until the first `drain` after this process has read everything again.
        """
        return self._clock() < self._drained_until_s and not self._stopping.is_set()

    # --- for side threads -----------------------------------------------------------------------

    def append(self, entries: Sequence[Entry]) -> Position:
        """Add entries without waiting for anybody.

        Raises:
            JournalError: see `Journal.append`.
        """
        position = self._journal.append(by(self.name, entries))
        self._compact_if_due(position.seq, len(entries))
        return position

    def append_and_wait(self, entries: Sequence[Entry], timeout_s: float) -> bool:
        """Add entries and wait until they are binding.

        Returns:
            True when this process's next `drain` gives them, and every other live process has acknowledged
            them or has no lease any more. False after `timeout_s`, or when they may have been lost since.

        Raises:
            JournalError: see `Journal.append`.
        """
        deadline_s = self._clock() + timeout_s
        position = self.append(entries)
        while not self._is_binding(position):
            if self._clock() >= deadline_s or self._is_lost(position):
                return False
            self._wait(self._poll_s)
        return True

    def poll(self) -> None:
        """Read the news, acknowledge them and renew the lease: one round of the side thread."""
        with self._polling:
            if self._stopping.is_set():
                return
            try:
                self._follow()
                self.last_fault = ""
            except StartOverError as fault:
                self._failed(fault)
                self._start_over()
            except JournalError as fault:
                self._failed(fault)

    def close(self) -> None:
        """Stop using stored KV, then leave. The journal stays open."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        # A round that `append_and_wait` is in the middle of would join again.
        with self._polling:
            try:
                self._journal.leave(self.name)
            except JournalError as fault:
                self._failed(fault)

    def _run(self) -> None:
        while not self._stopping.wait(self._poll_s):
            self.poll()

    # --- one round ------------------------------------------------------------------------------

    def _follow(self) -> None:
        if self._position is not None and self._lease.is_due():
            is_unbroken = self._acknowledge(self._position)
            if not is_unbroken and self._position.seq == 0:
                # Entries may have come and been compacted: from 0 on, `read` would not show that.
                self._kept, self._position = self._position, None
        position = self._position or self._join()
        # What was binding before the acknowledgement is in what is read after it; what comes later waits.
        promised_until_s = self._lease.promised_until_s
        news = self._news(position)
        if self._must_reset:
            self._inbox.append(_RESET)
            self._must_reset = False
        self._inbox.extend(news)
        self._position = Position(position.epoch, news[-1].seq) if news else position
        if news:
            self._acknowledge(self._position)
        self._lease.fulfil(promised_until_s)

    def _join(self) -> Position:
        sent_s = self._clock()
        start = self._journal.join(self.name, self._lease.length_s)
        self._lease.renewed(sent_s)
        kept = self._kept
        missed = not self._journal.continues(kept) if kept is not None else self._journal.was_reset
        self._must_reset = self._must_reset or missed
        return start

    def _acknowledge(self, position: Position) -> bool:
        """Returns whether the lease had not run out before."""
        sent_s = self._clock()
        self._journal.acknowledge(self.name, position, self._lease.length_s)
        return self._lease.renewed(sent_s)

    def _news(self, position: Position) -> list[Entry]:
        news = page = self._journal.read(position, DEFAULT_LIMIT)
        while len(page) >= DEFAULT_LIMIT:
            page = self._journal.read(Position(position.epoch, page[-1].seq), DEFAULT_LIMIT)
            news = news + page
        return news

    def _start_over(self) -> None:
        """Forget the place in the journal; the next round joins again."""
        self._lease.drop()
        self._must_reset = self._must_reset or self._position is not None
        self._position = None

    def _failed(self, fault: JournalError) -> None:
        if str(fault) != self.last_fault:
            logger.warning("%s follows the journal with difficulty: %s", self.name, fault)
        self.last_fault = str(fault)

    # --- one append -----------------------------------------------------------------------------

    def _is_binding(self, position: Position) -> bool:
        self.poll()
        try:
            return self._has_taken(position) and not self._journal.waiting_for(position)
        except JournalError as fault:
            self._failed(fault)
            return False

    def _has_taken(self, position: Position) -> bool:
        taken = self._position
        return taken is not None and taken.epoch == position.epoch and taken.seq >= position.seq

    def _is_lost(self, position: Position) -> bool:
        """Whether this process has read another epoch since: the entries may be in neither."""
        return self._position is not None and self._position.epoch != position.epoch

    def _compact_if_due(self, seq: int, num_entries: int) -> None:
        if seq // self._compact_every == (seq - num_entries) // self._compact_every:
            return
        try:
            self._journal.compact(DEFAULT_KEEP)
        except JournalError as fault:
            self._failed(fault)
