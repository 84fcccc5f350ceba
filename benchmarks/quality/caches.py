"""How chunks come into the store, one tenant for each regime.

alone: each behind the preamble only (`engine.warm`).
traffic: the variants that past requests leave, as Cache-Craft prescribes: each chunk computed in full
    prefill of two other prompts. single: of one.
neighbours: each behind the preamble and its nearest neighbours among the chunks
    (`engine.warm(neighbours=...)`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.quality.items import Item, distinct_chunks, shuffled
from benchmarks.quality.models import QaModel

from cachecraft_rag import CacheCraftEngine, Chunk

NUM_PAST_PROMPTS = {"single": 1, "traffic": 2}
MAX_AT_ONCE = 8


def fill(
    engine: CacheCraftEngine, model: QaModel, regime: str, items: Sequence[Item], past: Sequence[Item] = ()
) -> None:
    """Cache the chunks of `items` for the tenant `regime`.

    Args:
        past: other items over the same chunks, whose prompts are the traffic; without them it is the
            items' own chunks in other orders.
    """
    if regime in NUM_PAST_PROMPTS:
        prompts = past_prompts(items, past, NUM_PAST_PROMPTS[regime])
        asyncio.run(_replay(engine, model, regime, list(prompts)))
        return
    chunks = distinct_chunks(items)
    engine.warm(
        chunks,
        system=model.preamble,
        tenant=regime,
        neighbours=regime == "neighbours",
        show_progress=True,
    )


def past_prompts(items: Sequence[Item], past: Sequence[Item], times: int) -> Iterator[list[Chunk]]:
    """Chunk lists in which each chunk of `items` stands `times` times.

    From `past` items are taken in order, as long as they bring a chunk that was not seen often enough.
    What they do not bring comes from the items' own lists.
    """
    needed = Counter({chunk.text: times for chunk in distinct_chunks(items)})
    for item in past:
        if any(needed[chunk.text] > 0 for chunk in item.chunks):
            needed.subtract(chunk.text for chunk in item.chunks)
            yield shuffled(item.chunks, "past", item.item_id)
    for turn in range(times):
        yield from _own_prompts(items, needed, turn)


def _own_prompts(items: Iterable[Item], needed: Counter[str], turn: int) -> Iterator[list[Chunk]]:
    for item in items:
        if any(needed[chunk.text] > 0 for chunk in item.chunks):
            needed.subtract(chunk.text for chunk in item.chunks)
            yield _other_order(item, turn)


def _other_order(item: Item, turn: int) -> list[Chunk]:
    """The item's chunks in an order in which another chunk stands first; the prompt's own order
    would be no reuse but vLLM's prefix cache."""
    order = shuffled(item.chunks, "past", item.item_id, turn)
    return order[::-1] if order[0] == item.chunks[0] else order


async def _replay(
    engine: CacheCraftEngine, model: QaModel, tenant: str, prompts: Sequence[Sequence[Chunk]]
) -> None:
    slots = asyncio.Semaphore(MAX_AT_ONCE)

    async def one(chunks: Sequence[Chunk]) -> None:
        async with slots:
            await model.ask(engine, chunks, "What is said here?", reuse="off", tenant=tenant, max_tokens=1)

    await asyncio.gather(*map(one, prompts))
