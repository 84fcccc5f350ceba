"""`FakeEngine`: what users' own tests may rely on."""

from __future__ import annotations

import pytest

from cachecraft_rag.chunks import Chunk
from cachecraft_rag.engine import ChatEngine
from cachecraft_rag.errors import EngineClosedError, InvalidRequestError
from cachecraft_rag.events import ChunkDecision, Reason
from cachecraft_rag.testing import FakeEngine

RIVER = Chunk("The river flows to the sea.", doc_id="river", version="1")
QUEEN = Chunk("The queen wrote in June.", doc_id="queen")


def prompt_of(*chunks: Chunk) -> str:
    return "\n\n".join([*(chunk.text for chunk in chunks), "When?"])


def decisions(engine: FakeEngine, *chunks: Chunk, **options: object) -> list[ChunkDecision]:
    report = engine.complete(prompt_of(*chunks), chunks=chunks, **options).report
    return [chunk.decision for chunk in report.chunks]


def test_it_has_the_engine_s_protocol() -> None:
    """Code that takes a `ChatEngine` takes the fake."""
    assert isinstance(FakeEngine(), ChatEngine)


def test_replies_are_canned_in_turn_or_computed() -> None:
    """One text, texts in turn (the last repeats), or a function of the prompt."""
    assert FakeEngine("same").complete("x").text == "same"
    in_turn = FakeEngine(["one", "two"])
    assert [in_turn.complete("x").text for _ in range(3)] == ["one", "two", "two"]
    assert FakeEngine(str.upper).complete("loud").text == "LOUD"


def test_calls_are_recorded_as_they_were_passed() -> None:
    """Method, messages, chunks and options can be asserted afterwards."""
    engine = FakeEngine()
    messages = [{"role": "user", "content": RIVER.text}]
    engine.chat(messages, chunks=[RIVER], reuse="off", max_tokens=3)
    call = engine.last_call
    assert (call.method, call.messages, call.chunks) == ("chat", tuple(messages), (RIVER,))
    assert call.options == {"reuse": "off", "max_tokens": 3}


def test_chunk_is_computed_then_reused() -> None:
    """First sight computes; the same prefix is exact; another prefix is reuse."""
    engine = FakeEngine()
    assert decisions(engine, RIVER, QUEEN) == [ChunkDecision.COMPUTED] * 2
    assert decisions(engine, RIVER, QUEEN) == [ChunkDecision.EXACT] * 2
    assert decisions(engine, QUEEN, RIVER) == [ChunkDecision.REUSED] * 2


@pytest.mark.parametrize(("reuse", "reason"), [("off", Reason.REUSE_OFF), ("exact", Reason.NO_EXACT_VARIANT)])
def test_reuse_modes_are_respected(reuse: str, reason: Reason) -> None:
    """ "off" reuses nothing, and "exact" nothing behind another prefix."""
    engine = FakeEngine()
    decisions(engine, RIVER)
    report = engine.complete(prompt_of(QUEEN, RIVER), reuse=reuse).report
    assert [chunk.reason for chunk in report.chunks] == [reason]


def test_tenants_and_unstored_requests_share_nothing() -> None:
    """What another tenant or a request without store computed is not reused."""
    engine = FakeEngine()
    decisions(engine, RIVER, tenant="a")
    assert decisions(engine, RIVER, store=False) == [ChunkDecision.COMPUTED]
    assert decisions(engine, RIVER) == [ChunkDecision.COMPUTED]


def test_counts_add_up() -> None:
    """Reused, recomputed and computed tokens make the prompt."""
    engine = FakeEngine()
    decisions(engine, RIVER)
    report = engine.complete(prompt_of(QUEEN, RIVER), chunks=[QUEEN]).report
    parts = report.num_reused_tokens + report.num_recomputed_tokens + report.num_computed_tokens
    assert parts == report.num_prompt_tokens
    assert report.num_reused_tokens > 0


def test_prefetched_chunks_are_found_and_absent_ones_reported() -> None:
    """`prefetch` makes a text known; a passed chunk outside the prompt is named."""
    engine = FakeEngine()
    engine.prefetch([RIVER])
    found, absent = engine.complete(prompt_of(RIVER), chunks=[QUEEN]).report.chunks
    assert (found.doc_id, found.version) == ("river", "1")
    assert (absent.doc_id, absent.reason) == ("queen", Reason.NOT_IN_PROMPT)


async def test_streams_give_word_by_word() -> None:
    """Both kinds of stream give the words and then the completion."""
    engine = FakeEngine("Paris is it")
    deltas = [delta async for delta in engine.astream_complete("Capital?")]
    assert [delta.text for delta in deltas] == ["Paris", " is", " it", ""]
    assert deltas == list(FakeEngine("Paris is it").stream_complete("Capital?"))


def test_long_reply_is_cut_at_max_tokens() -> None:
    """`max_tokens` counts words, and the finish reason says that it cut."""
    completion = FakeEngine("one two three").complete("x", max_tokens=2)
    assert (completion.text, completion.finish_reason) == ("one two", "length")


def test_wrong_arguments_are_refused_as_by_the_real_engine() -> None:
    """A test also finds what the real engine would refuse."""
    engine = FakeEngine()
    with pytest.raises(InvalidRequestError, match="best_of"):
        engine.complete("x", best_of=2)
    with pytest.raises(InvalidRequestError, match="chunks"):
        engine.complete("x", chunks=["text"])  # type: ignore[list-item]
    assert engine.calls == []


def test_closed_fake_says_so() -> None:
    """After `close` every call fails as the real one does."""
    with FakeEngine() as engine:
        pass
    with pytest.raises(EngineClosedError):
        engine.complete("x")


def test_one_moved_chunk_makes_the_reason() -> None:
    """An answer that is approximate by one chunk is not called exact for another one's sake."""
    engine, last = FakeEngine(), Chunk("The king slept.")
    engine.complete(prompt_of(RIVER, QUEEN, last), chunks=[RIVER, QUEEN, last])
    report = engine.complete(prompt_of(RIVER, last, QUEEN)).report
    assert report.decisions() == {"exact": 1, "reused": 2}
    assert report.reason is Reason.OTHER_PREFIX
