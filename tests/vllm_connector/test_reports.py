"""From plan to report: every token of the prompt is counted once, whatever became of the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.chunks import AttentionProfile, ChunkKey, DocumentRef, RecordMeta, Span
from cachecraft_rag.events import ChunkDecision, ChunkReport, Reason, RequestDecision, ReuseReport
from cachecraft_rag.planner.build import build_plan
from cachecraft_rag.planner.plan import PlanRequest, ReusePlan
from cachecraft_rag.planner.strategies import STRATEGIES
from cachecraft_rag.report_view import Fate, parts_of
from cachecraft_rag.vllm_connector.messages import ChunkRef, RequestSpec
from cachecraft_rag.vllm_connector.reports import build_report
from cachecraft_rag.vllm_connector.request_state import RequestState
from cachecraft_rag.vllm_connector.steps import JobFacts

CHUNK_TOKENS = 10
LEAD_TOKENS = 5
TAIL_TOKENS = 6
SEPARATOR = (7, 8)
KINDS = ("exact", "moved", "missing")


def make_refs(kinds: Sequence[str]) -> tuple[ChunkRef, ...]:
    """Chunks behind a lead text, a separator between two; a chunk's key tells what is stored of it."""
    stride = CHUNK_TOKENS + len(SEPARATOR)
    return tuple(
        ChunkRef(
            Span(LEAD_TOKENS + i * stride, LEAD_TOKENS + i * stride + CHUNK_TOKENS),
            ChunkKey(f"{kind}-{i}"),
            f"here-{i}",
            DocumentRef(f"doc-{i}", "v1"),
            SEPARATOR if i + 1 < len(kinds) else (),
        )
        for i, kind in enumerate(kinds)
    )


def prompt_tokens(num_chunks: int, num_tail: int) -> int:
    num_separators = max(0, num_chunks - 1)
    return LEAD_TOKENS + CHUNK_TOKENS * num_chunks + len(SEPARATOR) * num_separators + num_tail


def stored(ref: ChunkRef, index: int) -> list[RecordMeta]:
    kind = ref.key.partition("-")[0]
    if kind == "missing":
        return []
    scores = np.random.default_rng(index).random(CHUNK_TOKENS).astype(np.float32)
    return [
        RecordMeta(
            record_id=100 + index,
            key=ref.key,
            tenant="t",
            num_tokens=CHUNK_TOKENS,
            start=3,
            size_bytes=1,
            prefix_hash=ref.prefix_hash if kind == "exact" else "elsewhere",
            # Every other record was followed by something else when it was cached.
            separator=SEPARATOR if index % 2 else (9,),
            profile=AttentionProfile(0.3, 0.3, (), scores),
        )
    ]


def make_plan(refs: Sequence[ChunkRef], num_tokens: int, ratio: float, strategy: str) -> ReusePlan:
    index = {ref.key: stored(ref, i) for i, ref in enumerate(refs)}
    request = PlanRequest(num_tokens, refs, strategy, alpha=0.3, recompute_ratio=ratio)
    return build_plan(request, index.__getitem__)


def make_state(
    kinds: Sequence[str],
    *,
    num_tail: int = TAIL_TOKENS,
    ratio: float = 0.3,
    strategy: str = "cachecraft",
    local: int = 0,
    ran_job: bool = True,
    failed: Sequence[int] = (),
    full_reason: Reason | None = None,
) -> RequestState:
    refs = make_refs(kinds)
    num_tokens = prompt_tokens(len(refs), num_tail)
    plan = None if full_reason else make_plan(refs, num_tokens, ratio, strategy)
    return RequestState(
        request=SimpleNamespace(num_prompt_tokens=num_tokens),
        spec=RequestSpec("r1", "t", refs),
        plan=plan,
        full_reason=full_reason,
        first_local_tokens=local,
        ran_job=ran_job,
        facts=make_facts(plan, failed) if ran_job else None,
    )


def make_facts(plan: ReusePlan | None, failed: Sequence[int]) -> JobFacts:
    """What workers would answer; of a live selection they choose all that the budget allows."""
    chosen: tuple[Span, ...] = ()
    if plan is not None and plan.live is not None:
        missing = [chunk.span for chunk in plan.chunks if chunk.record_id in failed]
        chosen = plan.live.without(missing).choose(None, plan.live.num_tokens)
    return JobFacts(0.5, 0.25, 4096, tuple(failed), select_s=0.125, num_probe_tokens=4, chosen=chosen)


@st.composite
def states(draw: st.DrawFn) -> RequestState:
    """Any prompt, plan and fate: local hits of any length, failed loads, plans that did not run."""
    kinds = draw(st.lists(st.sampled_from(KINDS), max_size=5))
    # No tail: the prompt ends with a chunk, whose last token the model's own forward computes.
    num_tail = draw(st.integers(0, 3))
    num_tokens = prompt_tokens(len(kinds), num_tail)
    ids = [100 + i for i in range(len(kinds))]
    return make_state(
        kinds,
        num_tail=num_tail,
        ratio=draw(st.sampled_from([0.0, 0.15, 0.5, 1.0])),
        strategy=draw(st.sampled_from(sorted(STRATEGIES))),
        local=draw(st.integers(-1, num_tokens - 1)),
        ran_job=draw(st.booleans()),
        failed=draw(st.lists(st.sampled_from(ids), unique=True)) if ids else (),
        full_reason=draw(st.none() | st.just(Reason.REUSE_OFF)),
    )


def fate_of_tokens(state: RequestState) -> list[str]:
    """What became of each token of the prompt, one by one: reused, recomputed or computed."""
    plan = state.executed_plan
    failed = state.facts.failed_records if state.facts else ()
    fates = []
    for position in range(state.num_prompt_tokens):
        if position < state.first_local_tokens:
            fates.append("reused")
            continue
        chunks = [c for c in plan.chunks if position in c.loaded_span.positions()] if plan else []
        loaded = [c for c in chunks if c.record_id is not None and c.record_id not in failed]
        if plan is None or not loaded:
            fates.append("computed")
        else:
            is_kept = any(position in span.positions() for span in plan.kept)
            fates.append("reused" if is_kept else "recomputed")
    return fates


def counts(report: ReuseReport | ChunkReport) -> dict[str, int]:
    names = ("reused", "recomputed", "computed")
    return {name: number for name in names if (number := getattr(report, f"num_{name}_tokens"))}


@given(states())
def test_counts_are_those_of_the_tokens(state: RequestState) -> None:
    """The request's and each chunk's counts are what counting token by token gives."""
    report, fates = build_report(state), fate_of_tokens(state)
    assert counts(report) == Counter(fates)
    for chunk in report.chunks:
        assert counts(chunk) == Counter(fates[chunk.start : chunk.start + chunk.num_tokens])


@given(states())
def test_counts_add_up(state: RequestState) -> None:
    """Every token of the prompt and of each chunk is counted once."""
    report = build_report(state)
    assert sum(counts(report).values()) == report.num_prompt_tokens
    assert all(sum(counts(chunk).values()) == chunk.num_tokens for chunk in report.chunks)


@given(states())
def test_every_token_is_shown_as_what_became_of_it(state: RequestState) -> None:
    """A report's parts place each token; those recomputed within a chunk are only counted."""
    report = build_report(state)
    names = {Fate.EXACT: "reused", Fate.REUSED: "reused", Fate.RECOMPUTED: "recomputed", Fate.NEW: "computed"}
    shown = [names[part.fate] for part in parts_of(report) for _ in range(part.num_tokens)]
    fates = fate_of_tokens(state)
    for chunk in report.chunks:
        inside = slice(chunk.start, chunk.start + chunk.num_tokens)
        assert Counter(shown[inside]) == Counter(fates[inside])
        shown[inside] = fates[inside]
    assert shown == fates


@given(states())
def test_decisions_fit_their_counts(state: RequestState) -> None:
    """Exact and reused chunks have no token computed again, and a tier is named iff KV came from it."""
    for chunk in build_report(state).chunks:
        if chunk.decision is ChunkDecision.EXACT and chunk.reason is Reason.PREFIX_CACHE:
            assert counts(chunk) == {"reused": chunk.num_tokens}
        if chunk.decision is ChunkDecision.COMPUTED:
            assert not chunk.num_recomputed_tokens
        assert bool(chunk.tier) is (chunk.decision is not ChunkDecision.COMPUTED)


@given(states())
def test_reports_survive_the_way_back(state: RequestState) -> None:
    """A report as plain data and back is the same report."""
    report = build_report(state)
    assert ReuseReport.from_dict(report.to_dict()) == report


def only_chunk(state: RequestState) -> ChunkReport:
    [chunk] = build_report(state).chunks
    return chunk


@pytest.mark.parametrize(
    ("kind", "decision", "reason"),
    [
        ("exact", ChunkDecision.EXACT, Reason.SAME_PREFIX),
        ("moved", ChunkDecision.REPAIRED, Reason.OTHER_PREFIX),
        ("missing", ChunkDecision.COMPUTED, Reason.NOT_CACHED),
    ],
)
def test_a_chunk_is_reported_as_planned(kind: str, decision: ChunkDecision, reason: Reason) -> None:
    """What was planned and ran is reported with the plan's decision and reason."""
    chunk = only_chunk(make_state([kind]))
    assert (chunk.decision, chunk.reason) == (decision, reason)
    assert (chunk.doc_id, chunk.version) == ("doc-0", "v1")


def test_a_chunk_in_the_prefix_cache_is_exact() -> None:
    """What vLLM's own prefix cache held is exact, whatever was planned for it."""
    chunk = only_chunk(make_state(["moved"], local=LEAD_TOKENS + CHUNK_TOKENS, ran_job=False))
    assert (chunk.decision, chunk.reason) == (ChunkDecision.EXACT, Reason.PREFIX_CACHE)
    assert chunk.tier == "prefix_cache"


def test_a_failed_load_is_said_so() -> None:
    """A record that could not be loaded makes its chunk computed, and the request names the cause."""
    report = build_report(make_state(["moved", "exact"], failed=[100]))
    assert [chunk.reason for chunk in report.chunks] == [Reason.LOAD_FAILED, Reason.SAME_PREFIX]
    assert report.reason is Reason.LOAD_FAILED
    assert report.chunks[0].num_computed_tokens == CHUNK_TOKENS


@pytest.mark.parametrize(
    ("state", "decision", "reason"),
    [
        (make_state(["moved", "exact"]), RequestDecision.REUSE, Reason.OTHER_PREFIX),
        (make_state(["exact"]), RequestDecision.REUSE, Reason.SAME_PREFIX),
        (make_state(["missing"], ran_job=False), RequestDecision.FULL, Reason.NOT_CACHED),
        (make_state(["missing"], ran_job=False, local=3), RequestDecision.REUSE, Reason.PREFIX_CACHE),
        (make_state([], ran_job=False), RequestDecision.FULL, Reason.NO_CHUNKS),
        (
            make_state(["moved"], ran_job=False, full_reason=Reason.REUSE_OFF),
            RequestDecision.FULL,
            Reason.REUSE_OFF,
        ),
    ],
    ids=["moved", "exact", "missing", "local hit", "no chunks", "asked for full"],
)
def test_a_request_has_one_reason(state: RequestState, decision: RequestDecision, reason: Reason) -> None:
    """The request's decision and reason sum up those of its chunks."""
    report = build_report(state)
    assert (report.decision, report.reason) == (decision, reason)


def test_times_and_bytes_are_the_workers() -> None:
    """What the worker measured is in the report."""
    report = build_report(make_state(["moved"]))
    assert (report.load_s, report.recompute_s, report.loaded_bytes) == (0.5, 0.25, 4096)
    assert (report.select_s, report.num_probe_tokens) == (0.125, 4)


def test_a_chunk_of_which_nothing_was_chosen_was_reused() -> None:
    """The plan calls it repaired until the workers have chosen."""
    state = make_state(["moved", "moved"], ratio=0.05, strategy="question")
    assert state.plan is not None
    assert [chunk.decision for chunk in state.plan.chunks] == [ChunkDecision.REPAIRED] * 2
    decisions = [chunk.decision for chunk in build_report(state).chunks]
    assert sorted(decisions) == [ChunkDecision.REPAIRED, ChunkDecision.REUSED]
