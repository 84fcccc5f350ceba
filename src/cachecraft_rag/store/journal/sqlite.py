"""A document journal in a folder, shared by the processes of one machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from cachecraft_rag.store.journal.base import (
    DEFAULT_KEEP,
    DEFAULT_LIMIT,
    LOST_MEMBERS,
    MAX_LEASE_S,
    Entry,
    JournalError,
    Position,
    StartOverError,
    checked_lease,
    lease_clock,
)
from cachecraft_rag.store.journal.snapshot import can_fold, folded
from cachecraft_rag.store.journal.sqlite_file import Member, Rows, State, sealed_rows
from cachecraft_rag.store.journal.sqlite_folder import SqliteFolder


class SqliteJournal:
    """Entries in a SQLite file: what `append` returned survives a crash of the machine.

    Writers take turns, so the order of seqs is the order of commits. A damaged file is left aside and the
    next number begins; other processes see that at their next call. Not for network file systems, where
    SQLite's locks do not hold.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_lease_s: float = MAX_LEASE_S,
        timeout_s: float = 1.0,
        clock: Callable[[], float] = lease_clock,
    ) -> None:
        """Open the journal, or begin one; reads and checks all of it.

        Args:
            folder: of the journal alone; made with mode 0700.
            max_lease_s: longest lease; the same in all processes.
            timeout_s: longest wait for another process's write.
            clock: seconds that all processes agree on.

        Raises:
            JournalError: the folder cannot be used, or holds another format.
        """
        self._max_lease_s = max_lease_s
        self._clock = clock
        self._folder = SqliteFolder(folder, timeout_s, lambda: clock() + max_lease_s)
        self.end()

    @property
    def was_reset(self) -> bool:
        return self._folder.was_reset

    def end(self) -> Position:
        with self._folder.reading() as rows:
            state = rows.state()
        return Position(state.epoch, state.seq)

    def append(self, entries: Sequence[Entry]) -> Position:
        with self._folder.writing(durable=True) as rows:
            state = rows.state()
            last = state.seq + len(entries)
            rows.add(sealed_rows(replace(entry, seq=seq) for seq, entry in enumerate(entries, state.seq + 1)))
            rows.set_state(replace(state, seq=last))
        return Position(state.epoch, last)

    def read(self, after: Position, limit: int = DEFAULT_LIMIT) -> list[Entry]:
        with self._folder.reading() as rows:
            state = _checked(rows.state(), after)
            return rows.entries(state, after.seq, limit)

    def continues(self, position: Position) -> bool:
        with self._folder.reading() as rows:
            state = rows.state()
        return position.epoch == state.epoch and state.floor <= position.seq <= state.seq

    def join(self, name: str, lease_s: float) -> Position:
        until_s = self._clock() + checked_lease(lease_s, self._max_lease_s)
        # Members are lost in a crash of the machine, as all processes are: nothing is synced for them.
        with self._folder.writing(durable=False) as rows:
            for other, member in rows.members().items():
                if not self._lasts(member.until_s):
                    rows.drop_member(other)
            rows.set_member(name, Member(0, until_s))
            return Position(rows.state().epoch, 0)

    def acknowledge(self, name: str, position: Position, lease_s: float) -> None:
        checked_lease(lease_s, self._max_lease_s)
        with self._folder.writing(durable=False) as rows:
            _checked(rows.state(), position)
            rows.set_member(name, Member(position.seq, self._clock() + lease_s))

    def leave(self, name: str) -> None:
        with self._folder.writing(durable=False) as rows:
            rows.drop_member(name)

    def waiting_for(self, position: Position) -> tuple[str, ...]:
        with self._folder.reading() as rows:
            state = rows.state()
            members = rows.members()
        if position.epoch != state.epoch:
            raise StartOverError(f"epoch {position.epoch} of the journal is over")
        late = [n for n, m in members.items() if m.seq < position.seq and self._lasts(m.until_s)]
        return (*late, *([LOST_MEMBERS] if self._lasts(state.grace_until_s) else []))

    def compact(self, keep: int = DEFAULT_KEEP) -> int:
        with self._folder.reading() as rows:
            state = rows.state()
            upto = self._settled(rows, state.seq - keep)
            if upto <= state.floor:
                return 0
            past = rows.entries(state, 0, upto - state.floor)
        if not can_fold(past):
            return 0
        left = folded(past)
        kept = {*past} & {*left}
        gone = [entry.seq for entry in past if entry not in kept]
        new = sealed_rows(entry for entry in left if entry not in kept)
        # All that outside the transaction, and in it only what changes: meanwhile the others may write, and a
        # member may have joined.
        with self._folder.writing(durable=True) as rows:
            now = rows.state()
            if (now.epoch, now.floor) != (state.epoch, state.floor) or self._settled(rows, upto) < upto:
                return 0
            rows.drop_entries(gone)
            rows.add(new)
            rows.set_state(replace(now, floor=upto, num_folded=len(left)))
        return len(past) - len(left)

    def check(self) -> list[str]:
        try:
            with self._folder.connection() as rows:
                rows.audit()
        except JournalError as fault:
            return [str(fault)]
        return []

    def close(self) -> None:
        self._folder.close()

    def _settled(self, rows: Rows, upto: int) -> int:
        """The seq, at most `upto`, that no member with a lease is behind."""
        held = (member.seq for member in rows.members().values() if self._lasts(member.until_s))
        return min([upto, *held])

    def _lasts(self, until_s: float) -> bool:
        # A lease longer than any can be is from before the machine started, when its clock began again.
        return 0 < until_s - self._clock() <= self._max_lease_s


def _checked(state: State, position: Position) -> State:
    """The state.

    Raises:
        StartOverError: the position is of another epoch, inside the compacted past or ahead.
    """
    if position.epoch != state.epoch:
        raise StartOverError(f"epoch {position.epoch} of the journal is over")
    if 0 < position.seq < state.floor:
        raise StartOverError(f"entries {position.seq + 1} to {state.floor} were compacted")
    if position.seq > state.seq:
        raise StartOverError(f"the journal ends at {state.seq}, before {position.seq}")
    return state
