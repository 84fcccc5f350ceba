"""From chunks and variants to decisions, reasons and spans."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.chunks import ChunkKey, DocumentRef, Span
from cachecraft_rag.errors import InvalidRequestError, PlanError
from cachecraft_rag.events import ChunkDecision, Reason
from cachecraft_rag.planner.build import build_plan
from cachecraft_rag.planner.plan import Load, PlanRequest
from cachecraft_rag.planner.strategies import STRATEGIES
from cachecraft_rag.vllm_connector.messages import ChunkRef

EXACT = (ChunkDecision.EXACT, Reason.SAME_PREFIX)
REUSED = (ChunkDecision.REUSED, Reason.OTHER_PREFIX)
REPAIRED = (ChunkDecision.REPAIRED, Reason.OTHER_PREFIX)
RECOMPUTED = (ChunkDecision.REPAIRED, Reason.RECOMPUTE_ALL)


def computed_for(reason):
    return (ChunkDecision.COMPUTED, reason)


def plan_for(chunks, records=(), num_tokens=100, strategy="cachecraft", alpha=0.6, **options):
    """The plan of a prompt with `chunks` in it over an index that holds `records`."""
    request = PlanRequest(num_tokens, chunks, strategy, alpha, **options)
    return build_plan(request, lambda key: [r for r in records if r.key == key])


def outcomes(plan):
    return [(chunk.decision, chunk.reason) for chunk in plan.chunks]


def assert_covers_context_once(plan):
    counts = [0] * plan.context_end
    for span in (*plan.kept, *plan.recompute):
        for position in span.positions():
            counts[position] += 1
    assert counts == [1] * plan.context_end
    total = plan.num_kept + plan.num_recomputed + plan.num_computed
    assert total == plan.num_tokens


def assert_loads_only_equal_text(plan, records):
    by_id = {record.record_id: record for record in records}
    chunk_at = {chunk.span.start: chunk for chunk in plan.chunks}
    for load in plan.loads:
        chunk, record = chunk_at[load.span.start], by_id[load.record_id]
        assert (record.key, record.num_tokens) == (chunk.key, len(chunk.span))


@st.composite
def prompts(draw, make_record):
    """Random chunks with gaps, an index of random variants, and a random request."""
    keys = draw(st.lists(st.sampled_from("abcde"), max_size=6))
    sizes = dict(zip("abcde", draw(st.lists(st.integers(1, 30), min_size=5, max_size=5)), strict=True))
    position, chunks = draw(st.integers(0, 9)), []
    for index, key in enumerate(keys):
        span = Span(position, position + sizes[key])
        chunks.append(ChunkRef(span, ChunkKey(key), f"new-{index}"))
        position = span.end + draw(st.integers(0, 3))
    end = chunks[-1].span.end if chunks else 1
    records = draw(st.lists(variants(make_record, sizes), max_size=8, unique_by=lambda r: r.record_id))
    request = PlanRequest(
        num_tokens=end + draw(st.integers(0, 5)),
        chunks=tuple(chunks),
        strategy=draw(st.sampled_from(sorted(STRATEGIES))),
        alpha=draw(st.sampled_from([0.1, 0.3, 0.6, 2.0])),
        recompute_ratio=draw(st.none() | st.floats(0, 1)),
        granularity=draw(st.integers(1, 8)),
        exact_only=draw(st.booleans()),
        refusals=draw(st.dictionaries(st.integers(0, 5), st.just(Reason.TOO_SHORT), max_size=2)),
    )
    return request, records


@st.composite
def variants(draw, make_record, sizes):
    key = draw(st.sampled_from("abcde"))
    prefix = draw(st.text("abcde", max_size=4))
    weights = st.lists(st.floats(0, 5), min_size=len(prefix), max_size=len(prefix))
    return make_record(
        key=key,
        record_id=draw(st.integers(0, 99)),
        num_tokens=sizes[key] + draw(st.sampled_from([0, 0, 0, 1])),
        prefix=prefix,
        inter=draw(st.none() | weights),
        prefix_hash=draw(st.sampled_from(["new-0", "new-1", "old"])),
        prefix_is_exact=draw(st.booleans()),
    )


@given(data=st.data())
def test_every_token_is_planned_once(make_record, data):
    """Kept and recomputed positions tile the context, and KV is only taken of the same tokens."""
    request, records = data.draw(prompts(make_record))
    plan = build_plan(request, lambda key: [r for r in records if r.key == key])
    assert_covers_context_once(plan)
    assert_loads_only_equal_text(plan, records)


@given(data=st.data())
def test_the_order_of_variants_does_not_matter(make_record, data):
    """The same index gives the same plan, however it lists its variants."""
    request, records = data.draw(prompts(make_record))
    shuffled = data.draw(st.permutations(records))
    plans = [
        build_plan(request, lambda key, rs=rs: [r for r in rs if r.key == key]) for rs in (records, shuffled)
    ]
    assert plans[0] == plans[1]


@given(data=st.data())
def test_exact_only_and_recompute_all_are_exact(make_record, data):
    """Neither keeps a single approximate token, whatever is stored."""
    request, records = data.draw(prompts(make_record))
    plan = build_plan(request, lambda key: [r for r in records if r.key == key])
    if request.exact_only or request.strategy == "recompute_all":
        assert plan.is_exact
    if request.strategy == "recompute_all":
        assert plan.num_kept == 0


@given(ratio=st.floats(0, 1), num_tokens=st.integers(1, 200))
def test_the_ratio_is_the_share_of_recomputed_tokens(make_record, make_chunks, ratio, num_tokens):
    """Rounded up, at single-token granularity."""
    record = make_record(key="a", num_tokens=num_tokens, prefix="x", inter=(1.0,))
    chunks = make_chunks("a", num_tokens)
    plan = plan_for(chunks, [record], num_tokens=num_tokens + 10, recompute_ratio=ratio)
    assert ratio * num_tokens - 1e-6 <= plan.num_recomputed < ratio * num_tokens + 1


def test_float_noise_is_not_a_token(make_record, make_chunks):
    """0.07 * 100 is 7.000000000000001, yet 7 % of 100 tokens are 7."""
    record = make_record(key="a", num_tokens=100, prefix="x", inter=(1.0,))
    plan = plan_for(make_chunks("a", 100), [record], num_tokens=120, recompute_ratio=0.07)
    assert plan.num_recomputed == 7


def test_same_prefix_is_exact_and_untouched(make_record, make_chunks):
    """Equal tokens before it, exact then: nothing is recomputed, whatever the ratio."""
    older, newer = (make_record(key="a", record_id=i, prefix_hash="new-0") for i in (3, 4))
    plan = plan_for(make_chunks("a"), [newer, older], recompute_ratio=0.9)
    (chunk,) = plan.chunks
    assert outcomes(plan) == [EXACT]
    assert (chunk.record_id, chunk.variant, chunk.cached_start, chunk.recompute) == (4, 4, 7, ())
    assert plan.is_exact


def test_same_prefix_behind_approximate_kv_is_not_exact(make_record, make_chunks):
    """The hash alone does not prove exactness; the record's history does."""
    record = make_record(key="a", prefix_hash="new-0", prefix_is_exact=False)
    plan = plan_for(make_chunks("a"), [record])
    assert outcomes(plan) == [REUSED]
    assert plan.exact_until == 5


def test_an_exact_variant_beats_one_that_fits_well(make_record, make_chunks):
    """A newer variant with no overhead is still second to the identical prefix."""
    exact = make_record(key="a", record_id=1, prefix_hash="new-0")
    fitting = make_record(key="a", record_id=2)
    assert plan_for(make_chunks("a"), [exact, fitting]).chunks[0].record_id == 1


def test_repair_takes_the_best_tokens_of_the_chunk(make_record, make_chunks):
    """The scores rise to the end of the chunk [5, 15), so its last three tokens are repaired."""
    record = make_record(key="a", prefix="x", inter=(1.0,))
    plan = plan_for(make_chunks("a"), [record], recompute_ratio=0.3)
    assert outcomes(plan) == [REPAIRED]
    assert plan.chunks[0].recompute == (Span(12, 15),)


def test_granularity_reaches_the_selection(make_record, make_chunks):
    """One token asked for, one run of four taken: the short last run has the best mean."""
    record = make_record(key="a", prefix="x", inter=(1.0,))
    plan = plan_for(make_chunks("a"), [record], recompute_ratio=0.3, granularity=4)
    assert plan.chunks[0].recompute == (Span(9, 15),)


def test_without_a_profile_the_head_is_repaired(make_record, make_chunks):
    """alpha .3 with CCI 1 and no overlap: the first 3 of 10 tokens."""
    plan = plan_for(make_chunks("xa"), [make_record(key="a", prefix="y")], alpha=0.3)
    assert plan.chunks[1].recompute == (Span(15, 18),)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("naive", REUSED), ("cachecraft", REPAIRED), ("recompute_all", RECOMPUTED)],
)
def test_strategies_differ_in_what_they_repair(make_record, make_chunks, strategy, expected):
    """The same variant behind other text: kept as it is, repaired, recomputed."""
    record = make_record(key="a", prefix="x", inter=(1.0,))
    assert outcomes(plan_for(make_chunks("a"), [record], strategy=strategy)) == [expected]


def test_recompute_all_recomputes_exact_chunks_too(make_record, make_chunks):
    """It is the proof that the recompute pass equals a prefill, so it must not load anything."""
    record = make_record(key="a", prefix_hash="new-0")
    plan = plan_for(make_chunks("a"), [record], strategy="recompute_all")
    assert outcomes(plan) == [RECOMPUTED]
    assert plan.recompute == (Span(0, 15),)
    assert plan.uses_store


def test_a_full_ratio_is_recompute_all(make_record, make_chunks):
    """Every token of the chunk is recomputed, so the reason says so and nothing is loaded."""
    record = make_record(key="a", prefix="x", inter=(1.0,))
    plan = plan_for(make_chunks("a"), [record], recompute_ratio=1.0)
    assert outcomes(plan) == [RECOMPUTED]
    assert plan.loads == ()


def test_missing_and_repeated_chunks(make_record, make_chunks):
    """A chunk that is missing twice is named once as missing, then as repeated."""
    plan = plan_for(make_chunks("abab"), [make_record(key="b")])
    assert [chunk.reason for chunk in plan.chunks] == [
        Reason.NOT_CACHED,
        Reason.OTHER_PREFIX,
        Reason.REPEATED_IN_PROMPT,
        Reason.OTHER_PREFIX,
    ]


def test_exact_only_refuses_other_prefixes(make_record, make_chunks):
    """Chunk a has the same prefix, b another one, c is not stored."""
    records = [make_record(key="a", record_id=1, prefix_hash="new-0"), make_record(key="b")]
    plan = plan_for(make_chunks("abc"), records, exact_only=True)
    expected = [EXACT, computed_for(Reason.NO_EXACT_VARIANT), computed_for(Reason.NOT_CACHED)]
    assert outcomes(plan) == expected


def test_refused_chunks_are_not_looked_up(make_record, make_chunks):
    """The given reason is kept, and the index is never asked."""
    asked = []
    request = PlanRequest(100, make_chunks("ab"), "naive", 0.3, refusals={0: Reason.SUPERSEDED_VERSION})
    plan = build_plan(request, lambda key: asked.append(key) or [])
    expected = [computed_for(Reason.SUPERSEDED_VERSION), computed_for(Reason.NOT_CACHED)]
    assert outcomes(plan) == expected
    assert asked == ["b"]


@pytest.mark.parametrize("fault", [{"num_tokens": 11}, {"key": "b"}])
def test_kv_of_other_tokens_is_never_used(make_record, make_chunks, fault):
    """An index that answers with another length or key is not believed."""
    record = make_record(**{"key": "a", **fault})
    plan = build_plan(PlanRequest(100, make_chunks("a"), "naive", 0.3), lambda key: [record])
    assert outcomes(plan) == [computed_for(Reason.NOT_CACHED)]


def test_same_predecessors_means_same_chunks_in_order(make_record, make_chunks):
    """Chunk c was cached behind a, b; chunk d behind b, a, c."""
    records = [
        make_record(key="c", record_id=1, prefix="ab"),
        make_record(key="d", record_id=2, prefix="bac"),
    ]
    plan = plan_for(make_chunks("abcd"), records)
    assert [chunk.same_predecessors for chunk in plan.chunks] == [False, False, True, False]


def test_the_new_prefix_decides_the_overhead(make_record, make_chunks):
    """Behind its old chunks the variant needs nothing; with their order swapped it does."""
    record = make_record(key="c", prefix="ab", inter=(0.5, 0.5))
    assert outcomes(plan_for(make_chunks("abc"), [record]))[2] == REUSED
    assert outcomes(plan_for(make_chunks("bac"), [record]))[2] == REPAIRED


def test_a_chunk_that_ends_the_prompt_leaves_one_token(make_record, make_chunks):
    """The last token is always computed by the model's own forward."""
    record = make_record(key="a", prefix="x", inter=(1.0,))
    plan = plan_for(make_chunks("a"), [record], num_tokens=15, recompute_ratio=0.3)
    assert plan.context_end == 14
    assert plan.chunks[0].recompute == (Span(12, 14),)
    assert (plan.num_kept, plan.num_recomputed, plan.num_computed) == (7, 3, 5)


def test_context_ends_with_the_last_chunk(make_record, make_chunks):
    """The question behind it is left to the model's own forward, and so is a bare prompt."""
    assert plan_for(make_chunks("ab")).context_end == 25
    assert plan_for(()).context_end == 0


def test_the_document_is_carried_along(make_record):
    """Reports name the document of this prompt, not the one at capture."""
    document = DocumentRef("d", "2")
    chunk = ChunkRef(Span(0, 10), ChunkKey("a"), "new-0", document)
    assert plan_for([chunk], [make_record(key="a")]).chunks[0].document == document
    assert plan_for([chunk]).chunks[0].document == document


def test_faulty_requests_are_refused(make_record, make_chunks):
    """Unknown strategies are the caller's error; impossible prompts and records are ours."""
    with pytest.raises(InvalidRequestError):
        plan_for(make_chunks("a"), strategy="magic")
    with pytest.raises(PlanError):
        plan_for(make_chunks("ab")[::-1])
    with pytest.raises(PlanError):
        plan_for((), num_tokens=0)
    short = make_record(key="a", prefix="x", inter=(1.0,), scores=(1.0, 2.0))
    with pytest.raises(PlanError, match="2 token scores for 10 tokens"):
        plan_for(make_chunks("a"), [short], recompute_ratio=0.3)


def separated(chunks, separator=(3, 4)):
    """The chunks pulled apart, with `separator` between two of them."""
    return tuple(
        replace(
            chunk,
            span=chunk.span.shift(index * len(separator)),
            separator=separator if index + 1 < len(chunks) else (),
        )
        for index, chunk in enumerate(chunks)
    )


def test_the_separator_comes_with_the_chunk_it_followed(make_record, make_chunks):
    """Short text between chunks is taken over where the same text followed the chunk at capture."""
    first, second = separated(make_chunks("cd"))
    records = [replace(make_record("c", 1), separator=(3, 4)), make_record("d", 2)]
    plan = plan_for((first, second), records, strategy="naive")
    assert_covers_context_once(plan)
    assert plan.kept == (Span(5, 17), Span(17, 27))
    assert plan.loads == (Load(1, Span(5, 17)), Load(2, Span(17, 27)))
    assert (plan.num_kept, plan.num_recomputed) == (22, 0)


@pytest.mark.parametrize("stored", [(), (3,), (4, 3), (3, 4, 5)])
def test_other_text_between_chunks_is_computed(make_record, make_chunks, stored):
    """KV of a separator is used for exactly that separator."""
    records = [replace(make_record("c", 1), separator=stored), make_record("d", 2)]
    plan = plan_for(separated(make_chunks("cd")), records, strategy="naive")
    assert_covers_context_once(plan)
    assert Span(15, 17) in plan.recompute


def test_a_chunk_that_keeps_nothing_brings_no_separator(make_record, make_chunks):
    """Where the whole chunk is computed again, what follows it is too."""
    records = [replace(make_record("c", 1), separator=(3, 4)), make_record("d", 2)]
    plan = plan_for(separated(make_chunks("cd")), records, strategy="recompute_all")
    assert plan.kept == () and plan.is_exact
