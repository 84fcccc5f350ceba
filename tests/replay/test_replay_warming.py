"""The replay of warming, on traces small enough to count by hand."""

from __future__ import annotations

import pytest
from benchmarks.replay.predictors import Frequency, Predictor, Recency, Sequence
from benchmarks.replay.simulate import Cache, replay
from benchmarks.replay.traces import Access, Request, Trace
from benchmarks.replay.warming import Rule, Warming
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.store.policies import gdsf, lru, with_ttl

SIZE = 10
PREDICTORS = {
    "none": lambda: None,
    "recency": Recency,
    "frequency": lambda: Frequency(3.0),
    "sequence": lambda: Sequence(by_conversation=False),
}
asked = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True), min_size=1, max_size=15)


def trace_of(requests: list[list[int]], period_s: float = 1.0) -> Trace:
    return Trace(
        "small",
        tuple(
            Request(turn * period_s, tuple(Access(chunk, SIZE, SIZE) for chunk in chunks))
            for turn, chunks in enumerate(requests)
        ),
    )


@given(asked, st.integers(1, 6))
def test_without_a_predictor_it_is_the_plain_replay(requests: list[list[int]], num_fitting: int) -> None:
    """Nothing is warmed, and the store's policy alone decides."""
    trace, capacity = trace_of(requests), num_fitting * SIZE
    found = Warming(Cache(gdsf, capacity, True), capacity, None, Rule.BETTER, 100.0).run(trace)
    rates, _ = replay(trace, gdsf, capacity, True)
    assert found.served == pytest.approx(rates.tokens)
    assert found.num_warmed_tokens == found.num_wasted_tokens == 0


@given(asked, st.integers(1, 6), st.sampled_from(sorted(PREDICTORS)), st.sampled_from(Rule))
def test_what_was_wasted_was_warmed(
    requests: list[list[int]], num_fitting: int, name: str, rule: Rule
) -> None:
    """Whoever predicts, the store is never overfull, and the budget is kept: two chunks a gap."""
    trace, capacity = trace_of(requests), num_fitting * SIZE
    cache, predictor = Cache(gdsf, capacity, True), PREDICTORS[name]()
    found = Warming(cache, capacity, predictor, rule, 2 * SIZE / 0.8).run(trace)
    assert 0 <= found.num_wasted_tokens <= found.num_warmed_tokens <= 2 * SIZE * (len(requests) - 1)
    assert cache.spare_tokens >= 0


def test_what_expired_is_warmed_into_its_room() -> None:
    """A chunk is asked for every second turn and expires after one: warming serves all but the first; the
    one that nobody asks for again is warmed for nothing."""
    trace, capacity = trace_of([[0, 1], [0], [0], [0]], period_s=2.0), 2 * SIZE
    cold = Warming(Cache(with_ttl(lru, 1.5), capacity, True), capacity, None, Rule.ROOM, 100.0).run(trace)
    frequency = Frequency(3600.0)
    warm = Warming(Cache(with_ttl(lru, 1.5), capacity, True), capacity, frequency, Rule.ROOM, 100.0)
    found = warm.run(trace)
    assert cold.served == 0.0 and found.served == pytest.approx(3 / 5)
    assert (found.num_warmed_tokens, found.num_wasted_tokens) == (6 * SIZE, 3 * SIZE)


def test_nothing_goes_for_a_chunk_that_is_wanted_less() -> None:
    """Room for one: of the two the one asked for more often is brought back, not the other."""
    trace = trace_of([[0], [0], [1], [0], [1]])
    frequency: Predictor = Frequency(3600.0)
    found = Warming(Cache(lru, SIZE, False), SIZE, frequency, Rule.BETTER, 100.0).run(trace)
    assert found.num_warmed_tokens == SIZE and found.num_wasted_tokens == 0
    assert found.served == pytest.approx(2 / 5)


def test_sequence_model_follows_conversations() -> None:
    """What came after a chunk in a conversation is expected after it; in other hands it is another one."""
    model, mixed = Sequence(by_conversation=True), Sequence(by_conversation=False)
    turns = [(0, 1), (5, 2), (1, 1), (0, 3)]  # chunk and conversation
    for turn, (chunk, conversation) in enumerate(turns):
        request = Request(float(turn), (Access(chunk, SIZE, SIZE),), conversation)
        model.see(request)
        mixed.see(request)
    assert list(model.candidates()) == [1] and list(mixed.candidates()) == [5]
    assert model.score(1, 4.0) > model.score(5, 4.0) == 0.0
