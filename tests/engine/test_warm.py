"""The calls that fill the store: what stands before each chunk, and what is kept of it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest

from cachecraft_rag.chunks import Chunk, ChunkKey, PromptLayout, Span
from cachecraft_rag.engine.api import SamplingOptions
from cachecraft_rag.engine.backend import BackendRequest
from cachecraft_rag.engine.calls import Call, Prepared
from cachecraft_rag.engine.warm import check_count, first_that_fits, warm_calls
from cachecraft_rag.errors import InvalidRequestError, PromptTooLongError
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


@pytest.mark.parametrize(("neighbours", "expected"), [(False, 0), (0, 0), (3, 3)])
def test_numbers_of_neighbours(neighbours: int, expected: int) -> None:
    """False is none."""
    assert check_count(neighbours) == expected


def test_warm_with_neighbours_sends_one_request_per_text(engine, backend, spec_of, tokenizer) -> None:
    """Each shows its neighbours and stores its own chunk only, for the whole engine's path."""
    pytest.importorskip("faiss")
    assert engine.warm(ALL, neighbours=1, encoder=numbers_in) == len(ALL)
    prompts = [tokenizer.decode(request.token_ids) for request in backend.requests]
    before = {RIVER: BROOK, BROOK: RIVER, POND: QUEEN, QUEEN: POND}
    for chunk, neighbour in before.items():
        assert sum(f"{neighbour.text}\n\n{chunk.text}" in prompt for prompt in prompts) == 1
    assert {(len(spec.chunks), spec.store_from) for spec in map(spec_of, backend.requests)} == {(2, 1)}
