"""Filling the store ahead of the first question."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from cachecraft_rag.chunks import Chunk
from cachecraft_rag.engine.api import Completion, SamplingOptions
from cachecraft_rag.engine.calls import Call, Prepared
from cachecraft_rag.engine.options import CallOptions

_MAX_AT_ONCE = 32


def warm_calls(
    chunks: Sequence[Chunk], *, system: str | None, tenant: str | None, has_chat_template: bool
) -> list[Call]:
    """One call per distinct text: the chunk behind the system prompt, for one token."""
    # "exact": a chunk that is stored behind the same prefix is not computed again, any other is
    # computed behind it rather than stored from moved KV.
    options = CallOptions(reuse="exact", tenant=tenant, sampling=SamplingOptions(max_tokens=1))
    distinct = {chunk.text.strip(): chunk for chunk in chunks if chunk.text.strip()}
    make = _messages if has_chat_template else _text
    return [Call(make(system, text), (chunk,), options) for text, chunk in distinct.items()]


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
        return _is_stored(completion)

    return sum(await asyncio.gather(*map(one, calls)))


def _is_stored(completion: Completion) -> bool:
    report = completion.report
    return report.num_stored_tokens > 0 or report.num_reused_tokens > 0


def _messages(system: str | None, text: str) -> list[dict[str, str]]:
    user = {"role": "user", "content": text}
    return [user] if system is None else [{"role": "system", "content": system}, user]


def _text(system: str | None, text: str) -> str:
    return text if system is None else f"{system}\n\n{text}"
