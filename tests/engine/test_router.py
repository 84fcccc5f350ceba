"""What the driver writes into the spec of a request."""

from __future__ import annotations

import textwrap

import pytest

from cachecraft_rag.chunks import Chunk, ChunkKey, PromptLayout, Segment, SegmentKind, Span
from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.engine.calls import Call
from cachecraft_rag.engine.complexity import features, predict
from cachecraft_rag.engine.options import CallOptions
from cachecraft_rag.engine.router import FullCompute, make_spec, route, route_engine
from cachecraft_rag.errors import ConfigurationError
from cachecraft_rag.events import Reason
from cachecraft_rag.planner.limits import PlanLimits
from cachecraft_rag.vllm_connector.messages import RequestSpec

LAYOUT = PromptLayout(
    (1, 2, 3),
    (
        Segment(Span(0, 1), SegmentKind.TEXT, "a"),
        Segment(Span(1, 3), SegmentKind.CHUNK, "b", Chunk("b", "doc"), ChunkKey("key"), "before"),
    ),
)
CONFIG = CacheCraftConfig(strategy="naive", preset="faithful", recompute_ratio=0.5, granularity=4)
MODES = ("auto", "exact", "naive", "cachecraft")


def spec_for(full: FullCompute | None = None, **options: object) -> RequestSpec:
    return make_spec("id", "tenant", LAYOUT, CallOptions(**options), CONFIG, full)  # type: ignore[arg-type]


def test_auto_plans_with_the_configuration() -> None:
    """ "auto" takes strategy, preset, ratio and granularity from the configuration."""
    spec = spec_for()
    assert (spec.strategy, spec.alpha, spec.recompute_ratio, spec.granularity) == ("naive", 0.6, 0.5, 4)
    assert not spec.exact_only
    assert spec.full_reason is None


def test_named_strategy_and_ratio_are_obeyed() -> None:
    """What the caller names wins over the configuration, a ratio of zero too."""
    spec = spec_for(reuse="cachecraft", recompute_ratio=0.0)
    assert (spec.strategy, spec.recompute_ratio) == ("cachecraft", 0.0)


def test_exact_forbids_everything_else() -> None:
    """ "exact" is a restriction, not a strategy."""
    spec = spec_for(reuse="exact")
    assert spec.exact_only
    assert spec.strategy == "naive"


def test_full_compute_is_told_with_its_reason() -> None:
    """Reason and detail of the decision travel in the spec."""
    spec = spec_for(FullCompute(Reason.SELF_TEST_FAILED, "gap"))
    assert (spec.full_reason, spec.full_detail) == (Reason.SELF_TEST_FAILED, "gap")


def test_limits_hold_for_auto_alone() -> None:
    """A strategy that the caller named, and exact reuse, are not measured by the plan's limits."""
    config = CacheCraftConfig(max_missing_share=0.25, max_overhead_share=0.75)
    limits = [
        make_spec("id", "tenant", LAYOUT, CallOptions(reuse=mode), config, None).limits for mode in MODES
    ]
    assert limits == [PlanLimits(0.25, 0.75), None, None, None]


def test_chunks_carry_place_key_and_document() -> None:
    """The chunk is described by its span, key, prefix and document."""
    (chunk,) = spec_for().chunks
    assert (chunk.span, chunk.key, chunk.prefix_hash) == (Span(1, 3), "key", "before")
    assert chunk.document is not None
    assert chunk.document.doc_id == "doc"


def test_spec_survives_the_way_to_the_scheduler() -> None:
    """The spec comes back from plain parameters as it was."""
    spec = spec_for(FullCompute(Reason.ENGINE_FAULT, "boom"), store=False)
    assert RequestSpec.from_params(spec.to_params()) == spec


def layout_of(*pieces: tuple[int, bool]) -> PromptLayout:
    """Segments of so many tokens, each a chunk or not."""
    segments, start = [], 0
    for index, (length, is_chunk) in enumerate(pieces):
        span = Span(start, start + length)
        chunk = Chunk("text", f"doc-{index}") if is_chunk else None
        kind = SegmentKind.CHUNK if is_chunk else SegmentKind.TEXT
        segments.append(Segment(span, kind, "text", chunk, ChunkKey(f"k{index}") if is_chunk else None))
        start = span.end
    return PromptLayout(tuple(range(start)), tuple(segments))


def separators(layout: PromptLayout) -> list[tuple[int, ...]]:
    spec = make_spec("id", "tenant", layout, CallOptions(), CONFIG, None)
    return [chunk.separator for chunk in spec.chunks]


def test_short_text_between_two_chunks_travels_with_the_first() -> None:
    """Blank lines between chunks do; long text, and what follows the last chunk, do not."""
    assert separators(layout_of((1, False), (3, True), (2, False), (3, True), (2, False))) == [(4, 5), ()]
    assert separators(layout_of((3, True), (5, False), (3, True))) == [(), ()]
    assert separators(layout_of((3, True), (3, True), (1, False), (2, True))) == [(), (6,), ()]


PASSAGE = (
    "The river flows from the hills through three towns to the sea, and the old bridge over it was built by "
    "the people of the second town, who still keep it open from six in the morning until ten at night."
)
OTHER = (
    "The queen answered the letter of the captain in June, after her ministers had read it aloud in the hall "
    "and found in it no word about the ships that had left the northern harbour in the spring before."
)
HARD = (
    "Which of the two bridges that were built by the company of Ada Lund's brother in the city where the "
    "Nordic Museum is located is older than the tower?"
)


def prompt_with(*pieces: str | Chunk) -> PromptLayout:
    """A prompt of ten tokens a piece; chunks are those that the matcher found."""
    segments = []
    for index, piece in enumerate(pieces):
        span = Span(10 * index, 10 * index + 10)
        if isinstance(piece, Chunk):
            segments.append(Segment(span, SegmentKind.CHUNK, piece.text, piece, ChunkKey(f"k{index}")))
        else:
            segments.append(Segment(span, SegmentKind.TEXT, piece))
    return PromptLayout(tuple(range(10 * len(pieces))), tuple(segments))


def decide(
    *pieces: str | Chunk,
    passed: tuple[Chunk, ...] = (),
    num_output_tokens: int = 64,
    config: CacheCraftConfig | None = None,
    **options: object,
) -> FullCompute | None:
    """The router's decision on a plain prompt."""
    layout = prompt_with(*(pieces or (Chunk(PASSAGE), "When is it open?")))
    call = Call(layout.text, passed, CallOptions(**options))  # type: ignore[arg-type]
    return route(call, layout, num_output_tokens, config or CacheCraftConfig())


def assert_full(decision: FullCompute | None, reason: Reason) -> None:
    assert decision is not None
    assert decision.reason is reason


@pytest.mark.parametrize("mode", MODES)
def test_plain_request_is_planned(mode: str) -> None:
    """Nothing stands against reuse of a question on one passage."""
    assert decide(reuse=mode) is None


@pytest.mark.parametrize("mode", [*MODES, "off"])
def test_precision_critical_holds_whatever_reuse_says(mode: str) -> None:
    """A critical request is computed in full, and says that this is why."""
    assert_full(decide(reuse=mode, precision_critical=True), Reason.PRECISION_CRITICAL)


def test_engine_may_be_precision_critical() -> None:
    """One setting marks all requests of an engine."""
    assert_full(route_engine(CacheCraftConfig(precision_critical=True)), Reason.PRECISION_CRITICAL)
    assert route_engine(CacheCraftConfig()) is None


def test_off_is_obeyed() -> None:
    """The caller's own word needs no other reason."""
    assert_full(decide(reuse="off", num_output_tokens=10**6), Reason.REUSE_OFF)


def test_long_output_is_computed_in_full() -> None:
    """The limit itself is still short enough, and both figures are in the detail."""
    config = CacheCraftConfig(max_output_tokens_for_reuse=100)
    assert decide(num_output_tokens=100, config=config) is None
    decision = decide(num_output_tokens=101, config=config)
    assert_full(decision, Reason.LONG_OUTPUT)
    assert decision is not None and "101" in decision.detail and "=100" in decision.detail


def test_default_limit_of_the_output() -> None:
    """Without a setting, reuse ends above 8,000 tokens."""
    assert decide(num_output_tokens=8000) is None
    assert_full(decide(num_output_tokens=8001), Reason.LONG_OUTPUT)


@pytest.mark.parametrize(
    "alter",
    [
        str.upper,
        lambda text: textwrap.fill(text, 30),
        lambda text: "\n".join(f"> {line}" for line in textwrap.wrap(text, 40)),
        lambda text: text.replace(",", "&#44;"),
        lambda text: text[:130] + "...",
    ],
    ids=["case", "wrapped", "quoted", "escaped", "cut"],
)
def test_altered_chunks_are_computed_in_full(alter) -> None:
    """What common templates do to a text is recognised, and named instead of `no_chunks_matched`."""
    prompt = f"Context:\n{alter(PASSAGE)}\n\nQuestion: when?"
    assert_full(decide(prompt, passed=(Chunk(PASSAGE),)), Reason.ALTERED_CHUNKS)


def test_chunks_that_were_left_out_are_not_altered() -> None:
    """Callers may pass more than a prompt holds: what is not there at all does not count."""
    passed = (Chunk(PASSAGE), Chunk(OTHER), Chunk("Short."), Chunk("  "))
    assert decide(Chunk(PASSAGE), "When is it open?", passed=passed) is None
    assert decide("When is it open?", passed=passed) is None


def test_share_of_altered_chunks_is_a_setting() -> None:
    """One of two is not most of them; a stricter setting takes one."""
    pieces = (Chunk(PASSAGE), OTHER.upper(), "When is it open?")
    passed = (Chunk(PASSAGE), Chunk(OTHER))
    assert decide(*pieces, passed=passed) is None
    strict = CacheCraftConfig(max_altered_share=0.4)
    assert_full(decide(*pieces, passed=passed, config=strict), Reason.ALTERED_CHUNKS)


def test_complex_question_is_computed_in_full() -> None:
    """Above the limit only, by the estimate that the detail tells."""
    complexity = predict(features(HARD, 1, 20))
    pieces = (Chunk(PASSAGE), HARD)
    assert decide(*pieces, config=CacheCraftConfig(max_complexity=min(1.0, complexity + 0.001))) is None
    decision = decide(*pieces, config=CacheCraftConfig(max_complexity=complexity - 0.001))
    assert_full(decision, Reason.COMPLEX_QUESTION)
    assert decision is not None and f"{complexity:.2f}" in decision.detail


def test_simple_question_passes_where_a_hard_one_does_not() -> None:
    """One limit tells the two apart."""
    config = CacheCraftConfig(max_complexity=0.5)
    assert decide(Chunk(PASSAGE), "When is it open?", config=config) is None
    assert_full(decide(Chunk(PASSAGE), HARD, config=config), Reason.COMPLEX_QUESTION)


def test_complexity_is_off_by_default() -> None:
    """No question is complex until a limit is set."""
    assert decide(Chunk(PASSAGE), " ".join([HARD] * 50)) is None


def test_nothing_to_reuse_needs_no_reason_of_the_router() -> None:
    """Without a chunk in the prompt the report says that, and no rule hides it."""
    config = CacheCraftConfig(max_complexity=0.0, max_output_tokens_for_reuse=1)
    assert decide(HARD, config=config) is None


@pytest.mark.parametrize("mode", ["exact", "naive", "cachecraft", "recompute_all"])
def test_a_named_strategy_is_not_overruled(mode: str) -> None:
    """Every rule for "auto" holds at once, and yields to the caller's choice."""
    config = CacheCraftConfig(max_complexity=0.0, max_output_tokens_for_reuse=1, max_altered_share=0.0)
    pieces, passed = (Chunk(PASSAGE), OTHER.upper(), HARD), (Chunk(OTHER),)
    assert decide(*pieces, passed=passed, config=config) is not None
    assert decide(*pieces, passed=passed, config=config, reuse=mode) is None


@pytest.mark.parametrize(
    "name", ["max_altered_share", "max_complexity", "max_missing_share", "max_overhead_share"]
)
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), True, "half"])
def test_shares_outside_of_their_range_are_refused(name: str, value: object) -> None:
    """The error names the setting, its value and the range."""
    with pytest.raises(ConfigurationError, match=rf"{name} is {value!r}.*\[0, 1\]"):
        CacheCraftConfig(**{name: value})  # type: ignore[arg-type]


def test_negative_output_limit_is_refused() -> None:
    """Zero is the least: every answer is long then."""
    with pytest.raises(ConfigurationError, match="max_output_tokens_for_reuse is -1"):
        CacheCraftConfig(max_output_tokens_for_reuse=-1)


def test_thresholds_come_from_the_environment() -> None:
    """Each limit can be set without code."""
    config = CacheCraftConfig.from_env(
        {"CACHECRAFT_MAX_COMPLEXITY": "0.7", "CACHECRAFT_PRECISION_CRITICAL": "true"}
    )
    assert (config.max_complexity, config.precision_critical) == (0.7, True)


def test_decision_reaches_the_report(make_engine) -> None:
    """What the router says of a call is what its report says, chunk by chunk too."""
    engine = make_engine(CacheCraftConfig(self_test=False, max_output_tokens_for_reuse=40))
    reports = [
        engine.complete(f"{PASSAGE}\n\nWhen?", chunks=[Chunk(PASSAGE)], max_tokens=max_tokens).report
        for max_tokens in (40, 41)
    ]
    assert [report.reason for report in reports] == [Reason.OTHER_PREFIX, Reason.LONG_OUTPUT]
    assert Reason.LONG_OUTPUT.sentence in reports[1].why


def test_output_is_counted_as_far_as_the_window_goes(make_engine) -> None:
    """To ask for far more tokens than fit is to ask for no limit, not for a long answer."""
    engine = make_engine()
    report = engine.complete(f"{PASSAGE}\n\nWhen?", chunks=[Chunk(PASSAGE)], max_tokens=10**6).report
    assert report.reason is Reason.OTHER_PREFIX


def test_precision_critical_engine_needs_no_self_test(make_engine) -> None:
    """It reuses nothing, so there is nothing to prove, and no other reason to give."""
    engine = make_engine(CacheCraftConfig(precision_critical=True))
    report = engine.complete(f"{PASSAGE}\n\nWhen?", chunks=[Chunk(PASSAGE)], reuse="naive").report
    assert report.reason is Reason.PRECISION_CRITICAL
