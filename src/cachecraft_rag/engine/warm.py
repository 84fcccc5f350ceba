"""Filling the store ahead of the first question."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from cachecraft_rag.chunks import SHARED_TENANT, Chunk
from cachecraft_rag.engine.api import Completion, SamplingOptions
from cachecraft_rag.engine.calls import Call, Prepared
from cachecraft_rag.engine.options import CallOptions
from cachecraft_rag.errors import InvalidRequestError, PromptTooLongError
from cachecraft_rag.events import Reason

if TYPE_CHECKING:
    from cachecraft_rag.retrieval import Encoder

NUM_NEIGHBOURS = 4
"""Nearest neighbours before a chunk in `warm(neighbours=True)`."""
_MAX_AT_ONCE = 32
_SEPARATOR = "\n\n"


def by_owner(tenant: str | None, chunks: Iterable[Chunk]) -> dict[str | None, list[Chunk]]:
    """The chunks by the tenant for which they are stored: shared ones for the shared tenant."""
    owners: dict[str | None, list[Chunk]] = {}
    for chunk in chunks:
        is_shared = chunk.is_shared or tenant == SHARED_TENANT
        owner = SHARED_TENANT if is_shared else tenant
        owners.setdefault(owner, []).append(replace(chunk, is_shared=is_shared))
    return owners


def warm_calls(
    chunks: Sequence[Chunk],
    *,
    system: str | None,
    tenant: str | None,
    has_chat_template: bool,
    num_neighbours: int = 0,
    encoder: Encoder | None = None,
) -> list[tuple[Call, ...]]:
    """Per distinct text, calls for one token in order of preference: the chunk behind the system prompt
    and its nearest neighbours among `chunks`, the nearest last; and, should that not fit the model's
    window, behind the system prompt alone.

    KV computed in a context like that of later prompts needs less repair (FusionRAG, arXiv 2601.12904).
    """
    # "exact": a chunk that is stored behind the same prefix is not computed again, any other is
    # computed behind it rather than stored from moved KV.
    options = CallOptions(reuse="exact", tenant=tenant, sampling=SamplingOptions(max_tokens=1))
    distinct = {chunk.text.strip(): chunk for chunk in chunks if chunk.text.strip()}
    texts = list(distinct)
    make = _messages if has_chat_template else _text

    def call(standing: Sequence[str]) -> Call:
        prompt = make(system, _SEPARATOR.join(standing))
        return Call(prompt, tuple(distinct[text] for text in standing), options)

    contexts = _contexts(texts, num_neighbours, encoder)
    return [
        tuple(call([*before, text]) for before in ((context, ()) if context else ((),)))
        for text, context in zip(texts, contexts, strict=True)
    ]


def first_that_fits(prepare: Callable[[Call], Prepared], calls: Sequence[Call]) -> Prepared:
    """The first of `calls` that fits the model's window, as one that stores its last chunk only.

    Raises:
        PromptTooLongError: none does.
    """
    for call in calls[:-1]:
        with suppress(PromptTooLongError):
            return _storing_last_chunk(prepare(call))
    return _storing_last_chunk(prepare(calls[-1]))


def check_count(neighbours: object) -> int:
    """A number of neighbours; True is the default number.

    Raises:
        InvalidRequestError: it is no whole number from 0 on.
    """
    if not isinstance(neighbours, int) or neighbours < 0:
        raise InvalidRequestError(f"neighbours is {neighbours!r}: use True, False or a number from 0 on")
    return NUM_NEIGHBOURS if neighbours is True else int(neighbours)


def _contexts(texts: Sequence[str], num_neighbours: int, encoder: Encoder | None) -> list[tuple[str, ...]]:
    if not num_neighbours or len(texts) < 2:
        return [() for _ in texts]
    from cachecraft_rag.retrieval import nearest_neighbours

    places = nearest_neighbours(texts, num_neighbours, encoder)
    return [tuple(texts[place] for place in reversed(nearest)) for nearest in places]


def _storing_last_chunk(prepared: Prepared) -> Prepared:
    """The call as one that stores its last chunk only: what stands before it is context."""
    spec = prepared.spec
    return prepared.with_spec(replace(spec, store_from=max(0, len(spec.chunks) - 1)))


async def run_calls(
    calls: Iterable[Prepared],
    answer: Callable[[Prepared], Awaitable[Completion]],
    on_done: Callable[[], object],
) -> int:
    """Run the calls side by side; the number of them whose chunk is in the store afterwards."""
    slots = asyncio.Semaphore(_MAX_AT_ONCE)

    async def one(call: Prepared) -> bool:
        async with slots:
            completion = await answer(call)
        on_done()
        return is_stored(completion)

    return sum(await asyncio.gather(*map(one, calls)))


def is_stored(completion: Completion) -> bool:
    report = completion.report
    in_prompt = [chunk for chunk in report.chunks if chunk.reason is not Reason.NOT_IN_PROMPT]
    return report.num_stored_tokens > 0 or any(chunk.num_reused_tokens for chunk in in_prompt[-1:])


def _messages(system: str | None, text: str) -> list[dict[str, str]]:
    user = {"role": "user", "content": text}
    return [user] if system is None else [{"role": "system", "content": system}, user]


def _text(system: str | None, text: str) -> str:
    return text if system is None else f"{system}\n\n{text}"
