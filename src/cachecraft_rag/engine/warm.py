"""Filling the store ahead of the first question."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cachecraft_rag.chunks import Chunk
from cachecraft_rag.engine.api import Completion, SamplingOptions
from cachecraft_rag.engine.calls import Call, Prepared
from cachecraft_rag.engine.options import CallOptions
from cachecraft_rag.errors import InvalidRequestError, PromptTooLongError

if TYPE_CHECKING:
    from cachecraft_rag.retrieval import Encoder

NUM_NEIGHBOURS = 7
"""Neighbours in `warm(neighbours=True)`."""
_MAX_AT_ONCE = 32
_SEPARATOR = "\n\n"


@dataclass(frozen=True, slots=True)
class WarmGroup:
    """Chunks that are cached together.

    Attributes:
        members: to be stored, each behind others of the group.
        context: stored by other groups; they stand before the members.
    """

    members: tuple[Chunk, ...]
    context: tuple[Chunk, ...] = ()

    def halves(self) -> tuple[WarmGroup, ...]:
        """The group in two, or without its context; () if there is nothing to leave out."""
        middle = len(self.members) // 2
        if middle:
            parts = (self.members[:middle], self.members[middle:])
            return tuple(WarmGroup(part, self.context) for part in parts)
        return (WarmGroup(self.members),) if self.context else ()


@dataclass(frozen=True, slots=True)
class WarmPrompts:
    """How groups are asked: chunks behind the system prompt, for one token."""

    system: str | None
    tenant: str | None
    has_chat_template: bool

    def calls(self, group: WarmGroup) -> list[tuple[Call, int]]:
        """Calls, each with the index of the first chunk that it stores.

        The members stand behind the context in one order and in reverse, and each prompt stores its
        second half: so every member sees at least half of the group, at the price of computing it
        twice. A prompt for each member, behind all the others, would cost a group of 8 eight times.
        """
        num_chunks, num_context = len(group.members) + len(group.context), len(group.context)
        first = max(num_chunks // 2, num_context)
        num_left = first - num_context
        calls = [(self._call([*group.context, *group.members]), first)]
        if num_left:
            calls.append((self._call([*group.context, *reversed(group.members)]), num_chunks - num_left))
        return calls

    def _call(self, chunks: Sequence[Chunk]) -> Call:
        # "exact": a chunk that is stored behind the same prefix is not computed again, any other is
        # computed behind it rather than stored from moved KV.
        options = CallOptions(reuse="exact", tenant=self.tenant, sampling=SamplingOptions(max_tokens=1))
        make = _messages if self.has_chat_template else _text
        text = _SEPARATOR.join(chunk.text.strip() for chunk in chunks)
        return Call(make(self.system, text), tuple(chunks), options)


def check_count(neighbours: object) -> int:
    """A number of neighbours.

    Raises:
        InvalidRequestError: it is no whole number from 0 on.
    """
    if not isinstance(neighbours, int) or neighbours < 0:
        raise InvalidRequestError(f"neighbours is {neighbours!r}: use True, False or a number from 0 on")
    return NUM_NEIGHBOURS if neighbours is True else int(neighbours)


def make_groups(
    chunks: Sequence[Chunk], num_neighbours: int = 0, encoder: Encoder | None = None
) -> list[WarmGroup]:
    """The distinct texts of `chunks`, each alone or in groups of neighbours.

    KV computed in a context like that of later prompts needs less repair (FusionRAG, arXiv 2601.12904).
    """
    distinct = list({c.text.strip(): c for c in chunks if c.text.strip()}.values())
    if not num_neighbours or len(distinct) < 2:
        return [WarmGroup((chunk,)) for chunk in distinct]
    from cachecraft_rag.retrieval import group_neighbours

    groups = group_neighbours([chunk.text for chunk in distinct], num_neighbours + 1, encoder)
    return [
        WarmGroup(
            tuple(distinct[place] for place in group.members),
            tuple(distinct[place] for place in group.context),
        )
        for group in groups
    ]


def prepare_group(
    group: WarmGroup, prompts: WarmPrompts, prepare: Callable[[Call], Prepared]
) -> Iterator[Prepared]:
    """The group's calls, ready to be sent; a group that exceeds the window is cut into smaller ones.

    Raises:
        PromptTooLongError: a chunk alone does not fit.
    """
    try:
        prepared = [_storing_from(prepare(call), first) for call, first in prompts.calls(group)]
    except PromptTooLongError:
        parts = group.halves()
        if not parts:
            raise
        for part in parts:
            yield from prepare_group(part, prompts, prepare)
        return
    yield from prepared


async def run_calls(
    calls: Iterable[Prepared],
    answer: Callable[[Prepared], Awaitable[Completion]],
    on_done: Callable[[int], object],
) -> int:
    """Run the calls side by side; the number of chunks they found or left in the store.

    Args:
        on_done: called with that number of each call.
    """
    slots = asyncio.Semaphore(_MAX_AT_ONCE)

    async def one(call: Prepared) -> int:
        async with slots:
            completion = await answer(call)
        num_stored = _count_stored(completion, call.spec.store_from)
        on_done(num_stored)
        return num_stored

    return sum(await asyncio.gather(*map(one, calls)))


def _storing_from(prepared: Prepared, first: int) -> Prepared:
    """The call as one that stores its chunks from `first` on: those before it are context."""
    # A prompt may hold fewer chunks than were passed, where a text occurs within another.
    spec = replace(prepared.spec, store_from=min(first, max(0, len(prepared.spec.chunks) - 1)))
    params = spec.to_params() if prepared.request.params is not None else None
    return replace(prepared, spec=spec, request=replace(prepared.request, params=params))


def _count_stored(completion: Completion, first: int) -> int:
    report = completion.report
    num_tokens, num_stored = report.num_stored_tokens, 0
    for chunk in report.chunks[first:]:
        is_new = not chunk.num_reused_tokens and 0 < chunk.num_tokens <= num_tokens
        num_tokens -= chunk.num_tokens if is_new else 0
        num_stored += is_new or chunk.num_reused_tokens > 0
    return num_stored


def _messages(system: str | None, text: str) -> list[dict[str, str]]:
    user = {"role": "user", "content": text}
    return [user] if system is None else [{"role": "system", "content": system}, user]


def _text(system: str | None, text: str) -> str:
    return text if system is None else f"{system}\n\n{text}"
