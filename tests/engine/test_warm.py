"""The calls that fill the store: what stands before each chunk, and what is kept of it."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.chunks import Chunk, ChunkKey, PromptLayout, Span
from cachecraft_rag.engine.api import Completion, SamplingOptions
from cachecraft_rag.engine.backend import BackendRequest
from cachecraft_rag.engine.calls import Call, Prepared
from cachecraft_rag.engine.warm import NUM_NEIGHBOURS, check_count, first_that_fits, run_calls, warm_calls
from cachecraft_rag.errors import EngineError, InvalidRequestError, MissingDependencyError, PromptTooLongError
from cachecraft_rag.events import ChunkDecision, ChunkReport, Reason, RequestDecision, ReuseReport
from cachecraft_rag.vllm_connector.messages import ChunkRef, RequestSpec

RIVER = Chunk("river 1 0", doc_id="r")
BROOK = Chunk("brook .9 .1", doc_id="b")
POND = Chunk("pond .6 .7", doc_id="p")
QUEEN = Chunk("queen 0 1", doc_id="q")
ALL = (RIVER, BROOK, POND, QUEEN)
MAX_CHARACTERS = 40


def numbers_in(texts: Sequence[str]) -> np.ndarray:
    """Each text says where it lies."""
    return np.array([[float(n) for n in re.findall(r"[\d.]+", text)] for text in texts])


def calls_of(chunks: Sequence[Chunk], num_neighbours: int = 0, **options) -> list[tuple[Call, ...]]:
    if num_neighbours:
        pytest.importorskip("faiss")
    options = {"system": None, "tenant": None, "has_chat_template": False, **options}
    return warm_calls(chunks, num_neighbours=num_neighbours, encoder=numbers_in, **options)


def standing_in(call: Call) -> tuple[Chunk, ...]:
    """The chunks of a plain prompt, in order; they are the call's own."""
    assert call.prompt == "\n\n".join(chunk.text for chunk in call.chunks)
    return call.chunks


def prepare(call: Call) -> Prepared:
    """What an engine with a window of `MAX_CHARACTERS` makes of a plain call; a token is a character."""
    if len(call.prompt) > MAX_CHARACTERS:
        raise PromptTooLongError(f"{len(call.prompt)} characters")
    refs, start = [], 0
    for chunk in call.chunks:
        refs.append(ChunkRef(Span(start, start + len(chunk.text)), ChunkKey(chunk.text), "p"))
        start += len(chunk.text) + 2
    spec = RequestSpec("r", "t", tuple(refs))
    request = BackendRequest("r", (1,), SamplingOptions(), "", spec.to_params())
    return Prepared(call, PromptLayout((), ()), spec, request, ())


def assert_stores_last_of(prepared: Prepared, chunks: Sequence[Chunk]) -> None:
    """The call shows `chunks` and its request, as sent, asks to store the last of them."""
    assert prepared.call.chunks == tuple(chunks)
    sent = RequestSpec.from_params(prepared.request.params)
    assert sent is not None and sent == prepared.spec
    assert [ref.key for ref in sent.chunks[sent.store_from :]] == [chunks[-1].text]


def stored_by(prepared: Prepared) -> Iterator[str]:
    """Texts that the request, as sent, asks to store."""
    sent = RequestSpec.from_params(prepared.request.params)
    assert sent is not None
    return (ref.key for ref in sent.chunks[sent.store_from :])


def without_faiss(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "faiss" else find_spec(name)
    )


@pytest.mark.usefixtures("one_faiss_thread")
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=15), st.integers(0, 16))
def test_every_distinct_text_is_stored_exactly_once(lies_at, num_neighbours: int) -> None:
    """Whatever fits the window beside it; what stands before a chunk is never stored."""
    chunks = [Chunk(f"{x} {y}") for x, y in lies_at]
    prepared = [first_that_fits(prepare, calls) for calls in calls_of(chunks, num_neighbours)]
    stored = Counter(text for call in prepared for text in stored_by(call))
    assert stored == dict.fromkeys((chunk.text for chunk in chunks), 1)
    assert all(len(call.call.prompt) <= MAX_CHARACTERS for call in prepared)


def test_each_distinct_text_gets_calls() -> None:
    """Texts that differ in the white space around them are the same one; blank ones are dropped."""
    calls = calls_of([RIVER, Chunk(f" {RIVER.text}\n"), QUEEN, Chunk(" \n")])
    assert [[call.prompt for call in each] for each in calls] == [[RIVER.text], [QUEEN.text]]


def test_calls_store_exact_kv_and_generate_one_token() -> None:
    """In the tenant asked for; KV that is stored behind the same prefix is not computed again."""
    ((call,),) = calls_of([RIVER], tenant="one")
    assert (call.options.reuse, call.options.tenant, call.options.store) == ("exact", "one", True)
    assert call.options.sampling.max_tokens == 1


def test_the_nearest_neighbour_stands_last() -> None:
    """Right before the chunk itself, as the nearest of what a retriever would show with it."""
    first_choices = [standing_in(each[0]) for each in calls_of(ALL, 2)]
    assert first_choices == [
        (POND, BROOK, RIVER),
        (POND, RIVER, BROOK),
        (BROOK, QUEEN, POND),
        (BROOK, POND, QUEEN),
    ]


def test_the_last_resort_is_the_chunk_alone() -> None:
    """Should its neighbours not fit the window, it is stored all the same."""
    for each, chunk in zip(calls_of(ALL, 2), ALL, strict=True):
        assert len(each) == 2
        assert standing_in(each[1]) == (chunk,)


@pytest.mark.parametrize("num_neighbours", [3, 4, 100])
def test_there_may_be_fewer_chunks_than_neighbours_asked_for(num_neighbours: int) -> None:
    """All the others then stand before each; a chunk is never its own neighbour."""
    for each, chunk in zip(calls_of(ALL, num_neighbours), ALL, strict=True):
        assert sorted(c.text for c in each[0].chunks) == sorted(c.text for c in ALL)
        assert each[0].chunks[-1] == chunk


def test_a_single_chunk_has_no_neighbours() -> None:
    """There is one call, and no encoder is asked."""
    ((call,),) = calls_of([RIVER, Chunk(RIVER.text)], 4)
    assert standing_in(call)[-1].text == RIVER.text


@pytest.mark.parametrize(("chunks", "num_neighbours"), [(ALL, 0), ((RIVER, Chunk(RIVER.text)), 4)])
def test_without_neighbours_faiss_is_not_needed(
    monkeypatch: pytest.MonkeyPatch, chunks: Sequence[Chunk], num_neighbours: int
) -> None:
    """Nor an encoder: the plain install warms chunks alone, and a single text has nothing beside it."""
    without_faiss(monkeypatch)
    calls = warm_calls(
        chunks,
        system=None,
        tenant=None,
        has_chat_template=False,
        num_neighbours=num_neighbours,
        encoder=lambda texts: pytest.fail("embedded"),
    )
    assert [len(each) for each in calls] == [1] * len({chunk.text for chunk in chunks})


def test_neighbours_without_faiss_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs it, not with an import error."""
    without_faiss(monkeypatch)
    with pytest.raises(MissingDependencyError, match=r"cachecraft-rag\[embeddings\]"):
        warm_calls(ALL, system=None, tenant=None, has_chat_template=False, num_neighbours=1)


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_neighbours_stand_behind_the_system_prompt(system: str | None) -> None:
    """As in a later prompt: one message of the system, one with the chunks."""
    calls = calls_of([RIVER, QUEEN], 1, system=system, has_chat_template=True)
    messages = [{"role": "system", "content": system}] if system else []
    content = f"{QUEEN.text}\n\n{RIVER.text}"
    assert calls[0][0].prompt == [*messages, {"role": "user", "content": content}]
    plain = calls_of([RIVER, QUEEN], 1, system=system)[0][0].prompt
    assert plain == (f"{system}\n\n{content}" if system else content)


def test_the_call_with_neighbours_is_taken_if_it_fits() -> None:
    """The neighbours are context: only the chunk behind them is stored."""
    calls = calls_of(ALL, 2)
    assert_stores_last_of(first_that_fits(prepare, calls[0]), (POND, BROOK, RIVER))


def test_a_prompt_too_long_falls_back_to_the_chunk_alone() -> None:
    """Its neighbours are left out rather than the chunk."""
    calls = calls_of(ALL, 3)
    assert_stores_last_of(first_that_fits(prepare, calls[0]), (RIVER,))


def test_a_chunk_that_does_not_fit_alone_is_an_error() -> None:
    """The caller is told, as without neighbours."""
    long = Chunk("long 1 1" + " " * MAX_CHARACTERS + ".")
    with pytest.raises(PromptTooLongError):
        first_that_fits(prepare, calls_of([long])[0])


def test_other_errors_are_not_taken_for_a_long_prompt() -> None:
    """A second attempt would hide them."""

    def refuse(call: Call) -> Prepared:
        raise InvalidRequestError("broken")

    with pytest.raises(InvalidRequestError, match="broken"):
        first_that_fits(refuse, calls_of(ALL, 2)[0])


def test_a_request_without_a_connector_stays_one() -> None:
    """Where reuse is off nothing is sent that asks for it."""

    def prepare_without(call: Call) -> Prepared:
        prepared = prepare(call)
        request = BackendRequest("r", (1,), SamplingOptions(), "")
        return Prepared(prepared.call, prepared.layout, prepared.spec, request, ())

    assert first_that_fits(prepare_without, calls_of([RIVER])[0]).request.params is None


@pytest.mark.parametrize("neighbours", [-1, 1.5, "4", None])
def test_the_number_of_neighbours_is_checked(neighbours: object) -> None:
    """The message tells what to write."""
    with pytest.raises(InvalidRequestError, match=r"neighbours is .*: use True, False or a number"):
        check_count(neighbours)


@pytest.mark.parametrize(
    ("neighbours", "expected"), [(False, 0), (0, 0), (1, 1), (3, 3), (True, NUM_NEIGHBOURS)]
)
def test_numbers_of_neighbours(neighbours: int, expected: int) -> None:
    """False is none, and True the default number, unlike the 1 that it equals."""
    assert check_count(neighbours) == expected


def completed(prepared: Prepared, *, num_stored_tokens: int = 0, reused: Sequence[int] = ()) -> Completion:
    """The answer to a call of whose chunks those at the places `reused` came from the store."""
    report = ReuseReport(
        prepared.spec.request_id,
        RequestDecision.FULL,
        Reason.NOT_CACHED,
        num_stored_tokens=num_stored_tokens,
        chunks=tuple(
            ChunkReport(
                ref.key,
                None,
                None,
                ChunkDecision.COMPUTED,
                Reason.NOT_CACHED,
                ref.span.start,
                len(ref.span),
                num_reused_tokens=len(ref.span) if place in reused else 0,
            )
            for place, ref in enumerate(prepared.spec.chunks)
        ),
    )
    return Completion("", (), "length", report)


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        ({"num_stored_tokens": 9}, 1),
        ({"reused": [2]}, 1),
        ({"reused": [0, 1], "num_stored_tokens": 9}, 1),
        ({"reused": [0, 1]}, 0),
        ({}, 0),
    ],
    ids=["stored", "found", "context found", "only context found", "neither"],
)
async def test_a_chunk_that_was_stored_or_found_counts(outcome: dict, expected: int) -> None:
    """Its neighbours do not; every call is reported as done, whatever came of it."""
    prepared = first_that_fits(prepare, calls_of(ALL, 2)[0])
    done: list[None] = []

    async def answer(call: Prepared) -> Completion:
        return completed(call, **outcome)

    assert await run_calls([prepared], answer, lambda: done.append(None)) == expected
    assert len(done) == 1


async def test_calls_run_side_by_side_within_a_limit() -> None:
    """vLLM batches them, and a large corpus does not queue up in it all at once."""
    prepared = first_that_fits(prepare, calls_of([RIVER])[0])
    calls = [replace(prepared, absent=()) for _ in range(100)]
    num_running, peak = 0, 0

    async def answer(call: Prepared) -> Completion:
        nonlocal num_running, peak
        num_running += 1
        peak = max(peak, num_running)
        for _ in range(3):
            await asyncio.sleep(0)
        num_running -= 1
        return completed(call, num_stored_tokens=9)

    assert await run_calls(calls, answer, lambda: None) == 100
    assert 1 < peak < 100


async def test_a_failed_call_ends_the_warm_up() -> None:
    """The caller hears of it instead of a number that is too small."""

    async def answer(call: Prepared) -> Completion:
        raise EngineError("dead")

    with pytest.raises(EngineError, match="dead"):
        await run_calls([first_that_fits(prepare, calls_of([RIVER])[0])], answer, lambda: None)


def test_warm_with_neighbours_sends_one_request_per_text(engine, backend, spec_of, tokenizer) -> None:
    """Each shows its neighbours and stores its own chunk only, for the whole engine's path."""
    pytest.importorskip("faiss")
    assert engine.warm(ALL, neighbours=1, encoder=numbers_in) == len(ALL)
    prompts = [tokenizer.decode(request.token_ids) for request in backend.requests]
    before = {RIVER: BROOK, BROOK: RIVER, POND: QUEEN, QUEEN: POND}
    for chunk, neighbour in before.items():
        assert sum(f"{neighbour.text}\n\n{chunk.text}" in prompt for prompt in prompts) == 1
    assert {(len(spec.chunks), spec.store_from) for spec in map(spec_of, backend.requests)} == {(2, 1)}


def test_warm_leaves_out_neighbours_that_do_not_fit(engine, backend, spec_of) -> None:
    """Two of these texts exceed the window of 512 tokens: each is stored alone rather than not at all."""
    pytest.importorskip("faiss")
    long = [Chunk(f"{name} {x} 1 " + "~" * 300) for x, name in enumerate(["hill", "dale"])]
    assert engine.warm(long, neighbours=1, encoder=numbers_in) == 2
    assert [(len(spec.chunks), spec.store_from) for spec in map(spec_of, backend.requests)] == [(1, 0)] * 2


def test_warm_refuses_a_chunk_that_does_not_fit_alone(engine, backend) -> None:
    """Before anything is sent."""
    with pytest.raises(PromptTooLongError, match="max_model_len is 512"):
        engine.warm([RIVER, Chunk("~" * 600)])
    assert backend.requests == []


def test_neighbours_stay_context_behind_a_system_prompt_that_is_a_chunk(engine, backend, spec_of) -> None:
    """A prompt may hold more chunks than were passed: still the last one alone is stored."""
    pytest.importorskip("faiss")
    engine.warm([Chunk("Be brief.")])
    del backend.requests[:]
    assert engine.warm(ALL, neighbours=1, encoder=numbers_in, system="Be brief.") == len(ALL)
    specs = [spec_of(request) for request in backend.requests]
    assert {(len(spec.chunks), spec.store_from) for spec in specs} == {(3, 2)}
    assert len({spec.chunks[-1].key for spec in specs}) == len(ALL)
