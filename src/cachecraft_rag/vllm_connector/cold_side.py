"""The scheduler side's share of the cold tiers: what is looked for, read, written and dropped.

    look_up ──► seek ──► find (side thread) ──► read order ──► workers ──► commit
    commit ──► write order ──► workers ──► all ranks wrote ──► manifest (side thread)
    read order from a slow tier ──► workers copy it to faster ones ──► manifest (side thread)
    invalidate ──► drop (side thread) ──► the reply goes out when it is done

Decisions are made on the scheduler's thread, on results that side threads left behind. A request
waits for what it seeks up to a deadline; then it is planned with what is there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from cachecraft_rag.chunks import ChunkKey, RecordMeta
from cachecraft_rag.store.base import ChunkStore
from cachecraft_rag.store.cold import ColdStore, ColdVariant
from cachecraft_rag.store.record_format import BlobEntry
from cachecraft_rag.vllm_connector.cold_jobs import Loading, Wanted, Writing
from cachecraft_rag.vllm_connector.steps import ColdFacts, ColdRead, LoadedPart, WrittenPart

logger = logging.getLogger(__name__)

NUM_FINDERS = 2
MAX_TIERS_KEPT = 4096
"""Records of which it is remembered from where they were read, for the reports of who waited for them."""


class Orphans:
    """Texts of which all KV has to go, from the books of the host tier to the cold tiers."""

    def __init__(self) -> None:
        self._keys: list[tuple[str, tuple[ChunkKey, ...]]] = []

    def add(self, tenant: str, keys: Sequence[ChunkKey]) -> None:
        self._keys.append((tenant, tuple(keys)))

    def take(self) -> list[tuple[str, tuple[ChunkKey, ...]]]:
        keys, self._keys = self._keys, []
        return keys


@dataclass(frozen=True, slots=True)
class Search:
    """What a request waits for, and until when by the clock of `ColdSide`."""

    wanted: frozenset[Wanted]
    deadline_s: float


def joined(searches: Iterable[Search | None]) -> Search | None:
    """One search for what all of them want, None if none wants anything."""
    wanting = [search for search in searches if search is not None]
    if not wanting:
        return None
    wanted = frozenset().union(*(search.wanted for search in wanting))
    return Search(wanted, min(search.deadline_s for search in wanting))


class ColdSide:
    """Used from the scheduler's thread only.

    Args:
        store: the books of the host tier, into which records are read.
        deadline_s: longest that a request waits for cold records.
        orphans: filled by `store`.
        may_publish: whether others will learn when the record's document changes; asked on `changer`.
        clock: seconds that only go forward.
        make_executor: from a number of threads to what runs them.
    """

    def __init__(
        self,
        cold: ColdStore,
        store: ChunkStore,
        num_ranks: int,
        deadline_s: float,
        orphans: Orphans,
        clock: Callable[[], float] = time.monotonic,
        make_executor: Callable[[int], Executor] = ThreadPoolExecutor,
        may_publish: Callable[[RecordMeta], bool] = lambda meta: True,
    ) -> None:
        self._cold = cold
        self._store = store
        self._num_ranks = num_ranks
        self._deadline_s = deadline_s
        self._orphans = orphans
        self._may_publish = may_publish
        self._clock = clock
        self._finders = make_executor(NUM_FINDERS)
        # One thread: a manifest that was ordered before a drop is written before it.
        self._changer = make_executor(1)
        self._finding: dict[Wanted, Future[list[ColdVariant]]] = {}
        self._loading: dict[int, Loading] = {}
        self._writing: dict[int, Writing] = {}
        self._publishing: set[Future[None]] = set()
        self._reads: list[ColdRead] = []
        self._writes: list[RecordMeta] = []
        self._tier_of: dict[int, str] = {}
        self._flushes: list[Future[None]] = []
        self._dropping: list[tuple[Future[Any], Callable[[Wanted], bool]]] = []
        self._faults: list[Exception] = []  # of drops; the changer's own

    @property
    def changer(self) -> Executor:
        """The thread that changes the cold tiers; what is submitted there runs in order."""
        return self._changer

    # --- requests -----------------------------------------------------------------------------

    def seek(self, tenant: str, keys: Iterable[ChunkKey]) -> Search | None:
        """Look for chunks of which the host tier has nothing; None if it has something of each, or if what
        is missing is being dropped."""
        missing = ((tenant, key) for key in keys if not self._store.holds(tenant, key))
        wanted = frozenset(each for each in missing if not self._is_dropped(each))
        for each in wanted - self._under_way:
            self._finding[each] = self._finders.submit(self._cold.find, *each)
        return Search(wanted, self._clock() + self._deadline_s) if wanted else None

    def is_pending(self, search: Search) -> bool:
        """Whether waiting longer may still bring something in time."""
        self._take_found()
        return self._clock() < search.deadline_s and bool(search.wanted & self._under_way)

    def tier_of(self, record_id: int) -> str:
        """The cold tier that a record was read from since the host tier took it in; else empty."""
        return self._tier_of.get(record_id, "")

    @property
    def _under_way(self) -> set[Wanted]:
        return self._finding.keys() | {loading.wanted for loading in self._loading.values()}

    def _take_found(self) -> None:
        for wanted, found in list(self._finding.items()):
            if not found.done():
                continue
            del self._finding[wanted]
            try:
                self._read_best(wanted, found.result())
            except Exception:
                logger.exception("a search of the cold tiers failed")

    def _read_best(self, wanted: Wanted, found: Sequence[ColdVariant]) -> None:
        """Order the variant that saw the most context; the store may refuse it."""
        for variant in sorted(found, key=lambda each: len(each.meta.prefix_chunks), reverse=True):
            document = variant.meta.document
            meta = replace(
                variant.meta,
                record_id=self._store.next_record_id(wanted[0]),
                generation=self._store.generation(
                    wanted[0], document.doc_id if document else None, wanted[1]
                ),
            )
            if self._store.reserve(meta).accepted:
                order = ColdRead(meta.record_id, variant, self._cold.faster_tiers(variant))
                self._loading[meta.record_id] = Loading(wanted, variant.tier)
                if order.copy_to:
                    self._writing[meta.record_id] = Writing(meta, order)
                self._reads.append(order)
                return

    # --- records ------------------------------------------------------------------------------

    def keep(self, meta: RecordMeta) -> None:
        """A record was committed to the host tier: write it behind, if it is worth it.

        KV computed behind approximate KV is not: approximations would pile up over restarts.
        """
        if meta.prefix_is_exact and meta.record_id not in self._loading:
            self._writing[meta.record_id] = Writing(meta)
            self._writes.append(meta)

    def take_orders(self) -> tuple[tuple[RecordMeta, ...], tuple[ColdRead, ...]]:
        """Writes and reads for the workers, since the last call."""
        self._take_found()
        self._start_flushes()
        going = {each.wanted for each in self._writing.values() if each.is_dropped}
        held: list[RecordMeta] = []
        writes: list[RecordMeta] = []
        for meta in self._writes:
            # What is written while its text is being dropped would be dropped with it.
            wanted = meta.tenant, meta.key
            (held if wanted in going or self._is_dropped(wanted) else writes).append(meta)
        self._writes = held
        reads, self._reads = tuple(self._reads), []
        return tuple(writes), reads

    def take_facts(self, facts: Mapping[int, ColdFacts]) -> None:
        """What the ranks did, by rank."""
        for rank, of_rank in facts.items():
            for record_id, loaded in of_rank.loaded.items():
                self._take_loaded(record_id, loaded)
            for record_id, written in of_rank.written.items():
                self._take_written(record_id, rank, written)

    def _take_loaded(self, record_id: int, part: LoadedPart) -> None:
        loading = self._loading.get(record_id)
        if loading is None:
            return
        loading.parts.append(part)
        if len(loading.parts) < self._num_ranks:
            return
        if all(each.is_loaded for each in loading.parts) and not loading.is_dropped:
            if self._store.commit(record_id, loading.parts[0].profile):
                self._note_tier(record_id, loading.tier)
        else:
            self._store.abandon(record_id)
        del self._loading[record_id]

    def _note_tier(self, record_id: int, tier: str) -> None:
        self._tier_of[record_id] = tier
        while len(self._tier_of) > MAX_TIERS_KEPT:
            del self._tier_of[next(iter(self._tier_of))]

    def _take_written(self, record_id: int, rank: int, part: WrittenPart) -> None:
        writing = self._writing.get(record_id)
        if writing is None:
            return
        writing.parts[rank] = part
        if len(writing.parts) < self._num_ranks:
            return
        del self._writing[record_id]
        parts = [writing.parts[each] for each in range(self._num_ranks)]
        tiers = frozenset.intersection(*(frozenset(each.tiers) for each in parts))
        entries = [each.entry for each in parts if each.entry is not None]
        is_whole = bool(tiers) and len(entries) == self._num_ranks
        copied = writing.copied
        if not is_whole or writing.is_dropped or not self._is_current(writing.meta):
            # What a copy was made of is not its own to withdraw.
            withdrawn = self._change(self._cold.withdraw, writing.meta, copied.copy_to if copied else None)
            self._dropping.append((withdrawn, lambda wanted: wanted == writing.wanted))
        elif copied is None:
            self._change(self._publish, writing.meta, entries, tiers)
        else:
            # Who published it first has seen to it that all learn when its document changes.
            self._change(self._cold.promote, copied.variant, tiers)

    def _publish(self, meta: RecordMeta, entries: Sequence[BlobEntry], tiers: frozenset[str]) -> None:
        if self._may_publish(meta):
            self._cold.publish(meta, entries, tiers)
        else:
            self._cold.withdraw(meta)

    def _is_current(self, meta: RecordMeta) -> bool:
        doc_id = meta.document.doc_id if meta.document else None
        return self._store.generation(meta.tenant, doc_id, meta.key) == meta.generation

    def _change(self, change: Callable[..., None], *arguments: Any) -> Future[None]:
        future = self._changer.submit(change, *arguments)
        self._publishing.add(future)
        future.add_done_callback(self._note_changed)
        return future

    def _note_changed(self, future: Future[None]) -> None:
        self._publishing.discard(future)
        if future.exception() is not None:
            logger.warning("a cold tier was not changed: %s", future.exception())

    # --- control ------------------------------------------------------------------------------

    def drop_orphaned(self, *, is_news: bool = True) -> Future[int]:
        """Drop the texts that documents have left since the last call; not if that was long ago, as they
        may have come back."""
        orphaned = self._orphans.take()
        if not is_news:
            orphaned = []
        going = {(tenant, key) for tenant, keys in orphaned for key in keys}
        return self._drop(lambda: sum(self._cold.drop(*each) for each in orphaned), going.__contains__)

    def drop(self, tenant: str, keys: Sequence[ChunkKey]) -> Future[int]:
        going = {(tenant, key) for key in keys}
        return self._drop(lambda: self._cold.drop(tenant, keys), going.__contains__)

    def drop_all(self) -> Future[int]:
        return self._drop(self._cold.drop_all, lambda wanted: True)

    def drop_tenant(self, tenant: str) -> Future[int]:
        return self._drop(lambda: self._cold.drop_tenant(tenant), lambda wanted: wanted[0] == tenant)

    def settled(self) -> Future[None]:
        """Done when all drops ordered before are; it fails if any has failed since the last call."""
        return self._changer.submit(self._raise_faults)

    def _drop(self, drop: Callable[[], int], is_going: Callable[[Wanted], bool]) -> Future[int]:
        """Drop on the changer. Meanwhile nothing of it is looked for, and what is on its way in or out of
        the tiers goes too: it would come back into what has dropped it."""
        for wanted in [each for each in self._finding if is_going(each)]:
            del self._finding[wanted]
        for meta in [each for each in self._writes if is_going((each.tenant, each.key))]:
            self._writes.remove(meta)
            self._writing.pop(meta.record_id, None)
        under_way: list[Loading | Writing] = [*self._loading.values(), *self._writing.values()]
        for each in under_way:
            each.is_dropped = each.is_dropped or is_going(each.wanted)
        future = self._changer.submit(self._noting_faults, drop)
        self._dropping.append((future, is_going))
        return future

    def _is_dropped(self, wanted: Wanted) -> bool:
        self._dropping = [each for each in self._dropping if not each[0].done()]
        return any(is_going(wanted) for _, is_going in self._dropping)

    def _noting_faults(self, drop: Callable[[], int]) -> int:
        try:
            return drop()
        except Exception as fault:
            self._faults.append(fault)
            raise

    def _raise_faults(self) -> None:
        faults, self._faults = self._faults, []
        if faults:
            raise faults[0]

    def flush(self) -> Future[None]:
        """Done when all that was committed before is in the cold tiers, as safe as they can make it."""
        self._flushes.append(Future())
        return self._flushes[-1]

    def _start_flushes(self) -> None:
        if not self._flushes or self._writing or self._publishing:
            return
        flushes, self._flushes = self._flushes, []
        self._changer.submit(self._flush, flushes)

    def _flush(self, flushes: Sequence[Future[None]]) -> None:
        try:
            self._cold.flush()
        except Exception as error:
            for flush in flushes:
                flush.set_exception(error)
        else:
            for flush in flushes:
                flush.set_result(None)

    def stats(self) -> dict[str, Any]:
        return self._cold.stats()

    def check(self, repair: bool = False) -> Future[list[str]]:
        return self._changer.submit(self._cold.check, repair)

    def close(self) -> None:
        self._finders.shutdown(wait=False, cancel_futures=True)
        self._changer.shutdown(wait=True)
        self._cold.close()
