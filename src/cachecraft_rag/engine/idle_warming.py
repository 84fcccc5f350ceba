"""Popular chunks that are not stored are computed while nobody asks. See docs/warming.md."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import groupby, islice
from operator import attrgetter
from typing import Any

from cachecraft_rag.chunks import ChunkKey
from cachecraft_rag.engine.api import Completion
from cachecraft_rag.engine.calls import Call, Prepared
from cachecraft_rag.engine.demand import DecayedCounts
from cachecraft_rag.engine.idle import IdleWork
from cachecraft_rag.engine.popular import Owned, Popular, popular_in
from cachecraft_rag.engine.warm import first_that_fits, is_stored, warm_calls

logger = logging.getLogger(__name__)

HALF_LIFE_S = 24 * 3600.0
"""Measured beside 1, 6 and 72 hours: see docs/warming.md."""
MIN_COUNT = 0.5
"""Asked for at least once within the last half-life."""
MAX_COUNTED = 4096
MAX_REMEMBERED = 4096
LOOK_AGAIN_S = 60.0
"""Room also appears while nobody asks, as records expire."""
_MAX_LOOKED_UP = 256


class IdleWarmer:
    """Counts requests for chunks and, as an `IdleJob`, computes the most wanted of those that are not
    stored, one a piece. Belongs to the engine's loop.

    The scheduler side says which are worth it: not stored, of a current version, and for which there is
    room without anything having to go. Shared chunks are left to `warm`: the head of a tenant's prompt
    must not stand before what all tenants read.

    Args:
        prepare: makes a request of a call.
        ask: answers a request without counting it as traffic.
        control: sends a command to the scheduler side and gives its result.
    """

    def __init__(
        self,
        idle: IdleWork,
        prepare: Callable[[Call], Prepared],
        ask: Callable[[Prepared], Awaitable[Completion]],
        control: Callable[..., Awaitable[Any]],
        *,
        clock: Callable[[], float] = time.monotonic,
        max_counted: int = MAX_COUNTED,
    ) -> None:
        self._idle = idle
        self._prepare = prepare
        self._ask = ask
        self._control = control
        self._clock = clock
        self._counts: DecayedCounts[Owned] = DecayedCounts(HALF_LIFE_S, max_counted)
        self._popular: dict[Owned, Popular] = {}
        self._warmed: OrderedDict[Owned, None] = OrderedDict()
        self._counters: Counter[str] = Counter()
        self._work_s = 0.0
        self._num_holds = 0
        self._is_due = False
        self._ranked: deque[Popular] = deque()
        self._missing: deque[Popular] = deque()
        self._timer: asyncio.TimerHandle | None = None
        idle.add(self)

    # --- what it sees of requests -------------------------------------------------------------

    def count(self, prepared: Prepared) -> None:
        """Count the chunks of a request that is about to be sent. O(chunks).

        Not of its answer: one that ends after its document was invalidated must not bring it back.
        """
        options = prepared.call.options
        # What `store=False` asks for is to leave nothing behind, here neither.
        if not options.store or prepared.spec.full_reason is not None:
            return
        now_s = self._clock()
        for popular in popular_in(prepared):
            self._popular[popular.owned] = popular
            if (gone := self._counts.add(popular.owned, now_s)) is not None:
                del self._popular[gone]
        self._look_anew()

    def note_hits(self, prepared: Prepared, completion: Completion) -> None:
        """Count what an answer took of warmed chunks."""
        for chunk in completion.report.chunks if self._warmed else ():
            if chunk.cached_start >= 0 and (prepared.spec.tenant, chunk.chunk_key) in self._warmed:
                self._counters["num_hits"] += 1
                self._counters["num_hit_tokens"] += chunk.num_reused_tokens

    async def hold(self) -> None:
        """Warm nothing until `forget`; when it returns nothing is on its way. What reached the store after a
        document was invalidated would be stored."""
        self._num_holds += 1
        await self._idle.pause()

    async def forget(self, tenant: str, *, doc_id: str | None = None, text: str | None = None) -> None:
        """End a `hold`, and forget the chunks of a document, those with a text, or all of the tenant: also
        those that were counted meanwhile, of requests that may have come before the change."""
        self._num_holds -= 1
        for popular in [p for p in self._popular.values() if p.is_of(tenant, doc_id, text)]:
            self._drop(popular)
        if doc_id is None and text is None:
            for owned in [owned for owned in self._warmed if owned[0] == tenant]:
                del self._warmed[owned]
        self._look_anew()
        self._idle.work_soon()

    # --- work ---------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return not self._num_holds and (self._is_due or bool(self._ranked) or bool(self._missing))

    async def do_piece(self) -> None:
        """Ask what is worth computing, or compute one chunk."""
        started_s = time.monotonic()
        try:
            await (self._warm(self._missing[0]) if self._missing else self._look_up())
        except Exception as error:
            # Warming must never be noticed; what failed once is not tried again until it is asked for.
            self._counters["num_failed"] += 1
            logger.warning("warming in idle time failed: %r", error)
            if self._missing:
                self._drop(self._missing.popleft())
            else:
                self._ranked.clear()
        finally:
            self._work_s += time.monotonic() - started_s
        if not self.has_work:
            self._look_later()

    async def drain(self) -> None:
        """Compute all that is worth it now, or as soon as no request runs."""
        self._is_due = True
        await self._idle.drain(self)

    def stop(self) -> None:
        """The engine is about to close."""
        if self._timer is not None:
            self._timer.cancel()

    async def _look_up(self) -> None:
        if self._is_due:
            self._is_due = False
            wanted = self._counts.most_wanted(MIN_COUNT, self._clock())
            self._ranked = deque(self._popular[owned] for owned in wanted)
        batch = list(islice(self._ranked, _MAX_LOOKED_UP))
        worth: set[Owned] = set()
        for tenant, group in groupby(sorted(batch, key=attrgetter("tenant")), key=attrgetter("tenant")):
            chunks = [popular.to_plain() for popular in group]
            keys = await self._control("worth_computing", tenant=tenant, chunks=chunks)
            worth.update((tenant, ChunkKey(key)) for key in keys or ())
        self._missing.extend(popular for popular in batch if popular.owned in worth)
        for _ in batch:
            self._ranked.popleft()

    async def _warm(self, popular: Popular) -> None:
        prepared = self._prepared(popular)
        completion = await self._ask(prepared)
        self._missing.popleft()
        self._counters["num_computed_tokens"] += completion.report.num_computed_tokens
        if not is_stored(completion):
            self._counters["num_not_stored"] += 1
            self._drop(popular)
            return
        self._counters["num_warmed"] += 1
        self._counters["num_warmed_tokens"] += popular.num_tokens
        self._warmed[popular.owned] = None
        if len(self._warmed) > MAX_REMEMBERED:
            self._warmed.popitem(last=False)

    def _prepared(self, popular: Popular) -> Prepared:
        calls = warm_calls(
            [popular.chunk],
            system=popular.system,
            tenant=popular.tenant,
            has_chat_template=popular.is_chat,
        )
        # What vLLM's own prefix cache holds is not computed, and so would not be stored.
        apart = [replace(c, options=replace(c.options, read_prefix_cache=False)) for c in calls[0]]
        prepared = first_that_fits(self._prepare, apart)
        last = prepared.spec.chunks[-1:]
        if [(prepared.spec.tenant_of(ref), ref.key) for ref in last] != [popular.owned]:
            raise LookupError(f"chunk {popular.key} is another one behind the head of its prompt")
        return prepared

    def _drop(self, popular: Popular) -> None:
        self._popular.pop(popular.owned, None)
        self._counts.discard(popular.owned)

    def _look_anew(self) -> None:
        """What was found out is out of date."""
        self._is_due = bool(self._popular)
        self._ranked.clear()
        self._missing.clear()

    def _look_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._popular:
            self._timer = asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._look_again)

    def _look_again(self) -> None:
        self._is_due = True
        self._idle.work_soon()

    # --- figures ------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Chunks counted, warmed (`num_not_stored`: the store refused them after all), and later used."""
        names = ("warmed", "warmed_tokens", "computed_tokens", "not_stored", "failed", "hits", "hit_tokens")
        return {
            "num_counted": len(self._counts),
            **{f"num_{name}": self._counters[f"num_{name}"] for name in names},
            "work_s": self._work_s,
        }
