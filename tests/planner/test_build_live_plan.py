"""Plans whose tokens the workers choose: who competes, for how large a budget."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.chunks import Span
from cachecraft_rag.events import ChunkDecision, Reason
from cachecraft_rag.planner.build import build_plan
from cachecraft_rag.planner.live import LiveMethod
from cachecraft_rag.planner.plan import PlanRequest
from cachecraft_rag.planner.strategies import STRATEGIES, StoredScore

LIVE = sorted(name for name, strategy in STRATEGIES.items() if isinstance(strategy.score, LiveMethod))
STORED = sorted(name for name, strategy in STRATEGIES.items() if isinstance(strategy.score, StoredScore))
CHUNK_TOKENS = 10


def plan_for(chunks, records=(), num_tokens=200, strategy="question", **options):
    request = PlanRequest(num_tokens, chunks, strategy, alpha=0.6, **options)
    return build_plan(request, lambda key: [r for r in records if r.key == key])


def outcomes(plan):
    return [(chunk.decision, chunk.reason) for chunk in plan.chunks]


def assert_valid(plan):
    plan.validate()
    assert plan.num_kept + plan.num_recomputed + plan.num_computed == plan.num_tokens
    for candidate in plan.live.candidates if plan.live else ():
        assert any(k.start <= candidate.span.start and candidate.span.end <= k.end for k in plan.kept)


@st.composite
def worlds(draw, make_record, make_chunks):
    """A prompt of up to five chunks; each is missing, moved or exact. Its last token may be a chunk's."""
    fates = draw(st.lists(st.sampled_from(["missing", "moved", "exact"]), max_size=5))
    keys = "abcde"[: len(fates)]
    chunks = make_chunks(keys, CHUNK_TOKENS)
    records = [
        make_record(
            key=key,
            record_id=10 + index,
            prefix="xy",
            inter=draw(st.none() | st.just((0.5, 0.5))),
            prefix_hash=f"new-{index}" if fate == "exact" else "old",
        )
        for index, (key, fate) in enumerate(zip(keys, fates, strict=True))
        if fate != "missing"
    ]
    num_tokens = 5 + CHUNK_TOKENS * len(fates) + draw(st.integers(0, 3))
    return fates, chunks, records, num_tokens


shares = st.sampled_from([0.01, 0.15, 0.3, 0.5, 0.99])


@pytest.mark.parametrize("strategy", LIVE)
@given(data=st.data(), share=shares, granularity=st.integers(1, 8))
def test_all_chunks_of_moved_kv_compete(make_record, make_chunks, strategy, data, share, granularity):
    """And no others: not the missing, not the exact, and of each only what lies in the context."""
    fates, chunks, records, num_tokens = data.draw(worlds(make_record, make_chunks))
    plan = plan_for(chunks, records, num_tokens, strategy, share=share, granularity=granularity)
    assert_valid(plan)
    moved = [c.span for c, fate in zip(chunks, fates, strict=True) if fate == "moved"]
    assert (plan.live.spans if plan.live else ()) == tuple(s.clip(0, plan.context_end) for s in moved)
    if plan.live:
        assert (plan.live.method, plan.live.granularity) == (STRATEGIES[strategy].score, granularity)
    expected = {"missing": ChunkDecision.COMPUTED, "moved": ChunkDecision.REPAIRED}
    assert [c.decision for c in plan.chunks] == [expected.get(f, ChunkDecision.EXACT) for f in fates]


@pytest.mark.parametrize("strategy", LIVE)
@given(data=st.data(), share=shares, ratio=st.none() | shares)
def test_the_budget_is_the_sum_of_the_shares(make_record, make_chunks, strategy, data, share, ratio):
    """Rounded up once, over all candidates, not chunk by chunk."""
    _, chunks, records, num_tokens = data.draw(worlds(make_record, make_chunks))
    plan = plan_for(chunks, records, num_tokens, strategy, share=share, recompute_ratio=ratio)
    if plan.live:
        # No chunk of the old prefixes stands in the prompt, so `focus` wants its whole share as well.
        exact_share = Fraction(str(share if ratio is None else ratio))
        assert plan.live.num_tokens == math.ceil(exact_share * plan.live.num_candidates)


def test_float_noise_is_not_a_token(make_record, make_chunks):
    """0.07 * 100 is 7.000000000000001, yet 7 % of 100 tokens are 7."""
    record = make_record(key="a", num_tokens=100, prefix="x", inter=(1.0,))
    plan = plan_for(make_chunks("a", 100), [record], recompute_ratio=0.07)
    assert plan.live.num_tokens == 7


@pytest.mark.parametrize("strategy", LIVE)
def test_a_ratio_of_zero_leaves_nothing_to_choose(make_record, make_chunks, strategy):
    """The KV is taken as it is, and nothing is measured."""
    record = make_record(key="a", prefix="x", inter=(1.0,))
    plan = plan_for(make_chunks("a"), [record], strategy=strategy, share=0.3, recompute_ratio=0.0)
    assert plan.live is None
    assert outcomes(plan) == [(ChunkDecision.REUSED, Reason.OTHER_PREFIX)]
    assert plan.num_recomputed == 0


@pytest.mark.parametrize("strategy", LIVE)
def test_a_ratio_of_one_recomputes_everything(make_record, make_chunks, strategy):
    """There is nothing to choose, and nothing is loaded."""
    record = make_record(key="a", prefix="x", inter=(1.0,))
    plan = plan_for(make_chunks("a"), [record], strategy=strategy, share=0.3, recompute_ratio=1.0)
    assert (plan.live, plan.loads) == (None, ())
    assert outcomes(plan) == [(ChunkDecision.REPAIRED, Reason.RECOMPUTE_ALL)]
    assert plan.is_exact


@pytest.mark.parametrize("strategy", STORED)
def test_stored_scores_need_no_workers(make_record, make_chunks, strategy):
    """Their tokens are in the plan from the start."""
    record = make_record(key="a", prefix="x", inter=(1.0,))
    assert plan_for(make_chunks("a"), [record], strategy=strategy, share=0.3).live is None


def test_epic_takes_the_first_tokens_of_each_chunk(make_record, make_chunks):
    """Though the stored scores rise to the end of the chunks."""
    records = [make_record(key=k, record_id=i, prefix="x", inter=(1.0,)) for i, k in enumerate("ab")]
    plan = plan_for(make_chunks("ab"), records, strategy="epic", share=0.3)
    assert [chunk.recompute for chunk in plan.chunks] == [(Span(5, 8),), (Span(15, 18),)]


def test_candidates_carry_their_stored_need(make_record, make_chunks):
    """Of the tokens in the context, in their order; None where a record has no profile."""
    records = [
        make_record(key="a", record_id=1, prefix="x"),
        make_record(key="b", record_id=2, prefix="x", inter=(1.0,), scores=range(10)),
    ]
    plan = plan_for(make_chunks("ab"), records, num_tokens=25, strategy="focus", share=0.3)
    first, second = plan.live.candidates
    assert first.need is None
    assert second.span == Span(15, 24)
    np.testing.assert_array_equal(second.need, np.arange(9))


def test_focus_competes_only_with_chunks_that_miss_context(make_record, make_chunks):
    """Chunk c stands behind its old neighbours and is taken as it is; d saw none of them."""
    records = [
        make_record(key="c", record_id=1, prefix="ab", inter=(0.5, 0.5)),
        make_record(key="d", record_id=2, prefix="xy", inter=(0.5, 0.5)),
    ]
    plan = plan_for(make_chunks("abcd"), records, strategy="focus", share=0.3)
    assert [decision for decision, _ in outcomes(plan)][2:] == [ChunkDecision.REUSED, ChunkDecision.REPAIRED]
    assert plan.live.spans == (Span(35, 45),)
    assert plan.live.num_tokens == 3


@pytest.mark.parametrize("strategy", LIVE)
def test_until_tokens_are_chosen_all_are_approximate(make_record, make_chunks, strategy):
    """Blocks are named before the workers choose, so exactness must not count on any choice."""
    record = make_record(key="a", prefix="x", inter=(1.0,))
    plan = plan_for(make_chunks("a"), [record], strategy=strategy, share=0.9)
    assert plan.exact_until == 5
    assert plan.kept == (Span(5, 15),)
    assert plan.num_recomputed == 0


@pytest.mark.parametrize("strategy", LIVE)
def test_exact_only_leaves_nothing_to_choose(make_record, make_chunks, strategy):
    """Without approximate KV there is nothing to repair."""
    records = [make_record(key="a", prefix_hash="new-0"), make_record(key="b", record_id=2)]
    plan = plan_for(make_chunks("ab"), records, strategy=strategy, share=0.3, exact_only=True)
    assert plan.live is None and plan.is_exact
