"""What the scheduler side remembers of one running request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cachecraft_rag.chunks import Span
from cachecraft_rag.events import Reason
from cachecraft_rag.planner.live import LiveMethod
from cachecraft_rag.planner.plan import ReusePlan
from cachecraft_rag.vllm_connector.cold_side import Search
from cachecraft_rag.vllm_connector.messages import RequestSpec
from cachecraft_rag.vllm_connector.steps import JobFacts

MAX_PROBE_TOKENS = 128
"""Most tokens behind the context that are asked what they attend to: a question, not a history."""


@dataclass(frozen=True, slots=True)
class PendingCapture:
    """A stretch of the prompt to copy while it is computed, into a record or a lead buffer."""

    sink: int | str
    span: Span


@dataclass(slots=True, eq=False)
class RequestState:
    """One request between its first look-up and its end.

    Attributes:
        spec: what the driver asked; None for requests that did not come from our driver.
        plan: memoised: vLLM asks again whenever the request waits or was preempted.
        full_reason: why there is no plan.
        refusals: index of a chunk → why it may not be looked up, nor stored.
        generations: of each chunk's document at planning time.
        num_local_tokens: vLLM's own prefix hit at the latest look-up.
        first_local_tokens: the same at the first admission, for the report; -1 before it.
        reserved: records this request is filling.
        unstored: index of a chunk → why its KV was not taken into the store, where that is for the tenant
            to know.
        scratch: records in the workers only, whose keys the profiles of later chunks need.
        num_stored_tokens: tokens of the reserved records.
        pending: captures whose last token is not computed yet.
        ran_job: whether the plan was executed, as opposed to covered by vLLM's prefix cache.
        awaits_run: whether its next admission is that to the batch, after its job.
        is_loading: whether the workers have a job of this request that they have not answered yet.
        search: what is awaited from the cold tiers; planned once it is None.
        tiers: cold tier that a record was read from for this request; host memory where there is none.
        report: as it is sent, once all facts are in.
    """

    request: Any
    spec: RequestSpec | None
    plan: ReusePlan | None = None
    full_reason: Reason | None = None
    full_detail: str = ""
    refusals: dict[int, Reason] = field(default_factory=dict)
    generations: list[int] = field(default_factory=list)
    num_local_tokens: int = 0
    first_local_tokens: int = -1
    is_salted: bool = False
    is_admitted: bool = False
    ran_job: bool = False
    is_loading: bool = False
    awaits_run: bool = False
    reserved: list[int] = field(default_factory=list)
    unstored: dict[int, Reason] = field(default_factory=dict)
    scratch: list[int] = field(default_factory=list)
    num_stored_tokens: int = 0
    pending: list[PendingCapture] = field(default_factory=list)
    facts: JobFacts | None = None
    search: Search | None = None
    tiers: dict[int, str] = field(default_factory=dict)
    report: Mapping[str, Any] | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return int(self.request.num_prompt_tokens)

    @property
    def executed_plan(self) -> ReusePlan | None:
        """What the workers did, as far as it is known; None if they did nothing for this request."""
        if self.plan is None or not self.ran_job:
            return None
        return self.plan.resolve(self.facts.chosen if self.facts else ())

    @property
    def asks_question(self) -> bool:
        """Whether tokens are chosen by what the question attends to."""
        live = self.plan.live if self.plan else None
        return live is not None and live.method is not LiveMethod.DEVIATION

    @property
    def promised_end(self) -> int:
        """Behind the last token that a job fills: the context, and the question where it is asked.

        It is computed twice, and what is promised has blocks to put the first result in.
        """
        if self.plan is None:
            return 0
        num_asked = MAX_PROBE_TOKENS if self.asks_question else 0
        return min(self.num_prompt_tokens - 1, self.plan.context_end + num_asked)

    def note_computed(self, end: int) -> None:
        """All tokens before `end` are computed: captures that end there are done."""
        self.pending = [capture for capture in self.pending if capture.span.end > end]

    @property
    def num_promised_tokens(self) -> int:
        """Tokens beyond vLLM's own hit that the plan fills; 0 if nothing cached lies there."""
        plan = self.plan
        if plan is None:
            return 0
        ends = [chunk.span.end for chunk in plan.chunks if chunk.record_id is not None]
        if not ends or ends[-1] <= self.num_local_tokens:
            return 0
        return max(0, self.promised_end - self.num_local_tokens)
