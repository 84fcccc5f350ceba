"""The load job of a request: what is loaded, computed, chosen from, and asked."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.chunks import ChunkKey, Span
from cachecraft_rag.errors import InternalError
from cachecraft_rag.events import ChunkDecision, Reason
from cachecraft_rag.planner.live import Candidate, LiveMethod, LiveSelection
from cachecraft_rag.planner.plan import ChunkPlan, Load, ReusePlan
from cachecraft_rag.vllm_connector.messages import ChunkRef, RequestSpec
from cachecraft_rag.vllm_connector.orders import make_job, work_tokens
from cachecraft_rag.vllm_connector.request_state import MAX_PROBE_TOKENS, RequestState
from cachecraft_rag.vllm_connector.steps import LoadJob

BLOCK = 16
CHUNKS = (Span(10, 40), Span(40, 60))
CONTEXT_END = 60
QUESTION_METHODS = (LiveMethod.QUESTION, LiveMethod.FOCUS)


def make_state(num_question_tokens: int, method: LiveMethod | None, local: int = 0) -> RequestState:
    """A prompt of text, two moved chunks and a question, whose live candidates are the chunks."""
    num_tokens = CONTEXT_END + num_question_tokens
    needs = [np.arange(len(span), dtype=np.float32) for span in CHUNKS]
    live = method and LiveSelection(method, 7, 4, tuple(map(Candidate, CHUNKS, needs)))
    moved = (ChunkDecision.REPAIRED, Reason.OTHER_PREFIX)
    plans = tuple(ChunkPlan(span, ChunkKey("k"), *moved, i, 0) for i, span in enumerate(CHUNKS))
    plan = ReusePlan(num_tokens, CONTEXT_END, plans, "focus", live)
    plan.validate()
    request = SimpleNamespace(
        request_id="vllm-r",
        num_prompt_tokens=num_tokens,
        prompt_token_ids=list(range(1000, 1000 + num_tokens)),
    )
    refs = tuple(ChunkRef(span, ChunkKey("k"), f"behind-{i}") for i, span in enumerate(CHUNKS))
    spec = RequestSpec("r", "t", refs)
    return RequestState(request, spec, plan, num_local_tokens=local)


def job_of(state: RequestState, num_allocated: int | None = None) -> LoadJob:
    """The job of a request for which blocks of `num_allocated` tokens were allocated, or of all."""
    num_tokens = state.num_prompt_tokens if num_allocated is None else num_allocated
    return make_job(state, list(range(100, 100 + -(-num_tokens // BLOCK))), BLOCK)


@pytest.mark.parametrize("method", QUESTION_METHODS)
@given(num_question=st.integers(1, 300), num_more=st.integers(0, 100))
def test_probe_is_the_question_as_far_as_it_has_blocks(
    method: LiveMethod, num_question: int, num_more: int
) -> None:
    """It begins behind the context and ends with the prompt, the blocks or the limit; what was promised of
    it is computed at the end, and the last token of the prompt is never promised."""
    state = make_state(num_question, method)
    promised_end = state.num_local_tokens + state.num_promised_tokens
    job = job_of(state, promised_end + num_more)
    num_slots = -(-(promised_end + num_more) // BLOCK) * BLOCK
    end = min(CONTEXT_END + num_question, num_slots, CONTEXT_END + MAX_PROBE_TOKENS)
    assert job.probe == Span(CONTEXT_END, end)
    assert job.tail == Span(CONTEXT_END, min(CONTEXT_END + num_question - 1, CONTEXT_END + MAX_PROBE_TOKENS))


@pytest.mark.parametrize("method", [*LiveMethod, None])
def test_promise_without_blocks_is_an_internal_error(method: LiveMethod | None) -> None:
    """A job must never write where the request has no block."""
    state = make_state(50, method)
    with pytest.raises(InternalError, match=f"promised {state.promised_end} tokens, but its blocks hold"):
        job_of(state, state.promised_end - BLOCK)


@pytest.mark.parametrize("method", [*LiveMethod, None])
@given(num_question=st.integers(1, 200))
def test_job_has_the_tokens_and_blocks_that_it_computes(method: LiveMethod | None, num_question: int) -> None:
    """Up to the end of the probe, and not one block further."""
    state = make_state(num_question, method)
    job = job_of(state)
    assert job.token_ids.tolist() == list(range(1000, 1000 + job.probe.end))
    assert (len(job.block_ids) - 1) * BLOCK < job.probe.end <= len(job.block_ids) * BLOCK
    assert job.token_ids.dtype == job.block_ids.dtype == np.int32


@pytest.mark.parametrize("method", [LiveMethod.DEVIATION, None])
def test_only_methods_that_ask_the_question_have_a_probe(method: LiveMethod | None) -> None:
    """The others need nothing behind the context."""
    job = job_of(make_state(50, method))
    assert job.probe == Span(CONTEXT_END, CONTEXT_END)
    assert len(job.token_ids) == CONTEXT_END


def test_candidates_in_the_local_hit_are_left_out() -> None:
    """What vLLM's own prefix cache holds is exact: the rest keep their need, and their part of the budget."""
    live = job_of(make_state(20, LiveMethod.FOCUS, local=32)).live
    assert live is not None
    assert live.spans == (Span(32, 40), Span(40, 60))
    assert live.candidates[0].need is not None
    assert live.candidates[0].need.tolist() == list(range(22, 30))
    # 28 of 50 candidate tokens are left, so 3.92 of 7.
    assert (live.num_tokens, live.granularity) == (4, 4)


def test_job_without_a_live_selection_has_none() -> None:
    """The plan's own tokens are computed and nothing is chosen."""
    job = job_of(make_state(20, None))
    assert (job.live, job.recompute) == (None, (Span(0, 10),))


def test_local_hit_shortens_loads_and_runs() -> None:
    """The rest of a chunk is loaded from the middle of its record."""
    job = job_of(make_state(20, LiveMethod.QUESTION, local=32))
    assert (job.start, job.recompute) == (32, ())
    assert job.loads == (Load(0, Span(32, 40), 22), Load(1, Span(40, 60)))


def test_job_names_the_text_before_the_first_chunk() -> None:
    """By its tenant and hash, under which its keys were captured from an earlier prompt."""
    assert job_of(make_state(20, LiveMethod.QUESTION)).lead == "lead:t:behind-0"


def test_tenants_share_no_text_before_a_shared_chunk() -> None:
    """The hash of what stands before it is the same for all of them; the keys of that text are not shared."""
    state = make_state(20, LiveMethod.QUESTION)
    assert state.spec is not None
    other = replace(state, spec=replace(state.spec, tenant="other"))
    assert job_of(state).lead != job_of(other).lead


def test_promise_without_a_plan_is_an_internal_error() -> None:
    """It must fail the request, not load anything."""
    state = make_state(20, None)
    state.plan = None
    with pytest.raises(InternalError, match="vllm-r was promised KV without a plan"):
        job_of(state)


@given(max_step=st.integers(1, 8192), share=st.floats(0, 1))
def test_jobs_get_what_the_forward_leaves_and_never_nothing(max_step: int, share: float) -> None:
    """All of a step without a forward; at least a fourth of one whose forward takes everything."""
    num_scheduled = int(share * max_step)
    num_tokens = work_tokens(max_step, num_scheduled)
    assert num_tokens >= max(1, max_step - num_scheduled, max_step // 4)
    assert num_tokens + num_scheduled <= 1.25 * max_step + 1
