"""Proof on the loaded model that reuse does not change answers where it must not.

Two invariants are measured on small prompts: recomputing every token equals full compute, and reuse
behind the same prefix equals full compute. What counts as equal is measured too: two full computes
cut at different places differ by rounding.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from cachecraft_rag.chunks import Chunk
from cachecraft_rag.engine.api import Completion
from cachecraft_rag.engine.remembered import load_facts, save_facts
from cachecraft_rag.events import ReuseReport
from cachecraft_rag.models import cache_dir

Logprobs = Sequence[Mapping[int, float]]

_NUM_OUTPUT_TOKENS = 8
_NUM_LOGPROBS = 5
_NUM_CHUNKS = 3
_NUM_WORDS = 48
_MOST_TOKENS_PER_WORD = 4
_TOLERANCE_FLOAT32 = 1e-3
_TOLERANCE_16_BIT = 0.06
_SYSTEM = "Answer from the passages below and from nothing else."
_QUESTION = "Question: which of these words stand in all passages?"
_WORDS = (
    "river stone market winter letter garden silver bridge doctor paper window engine forest castle "
    "number island teacher music summer station colour village captain history morning water field "
    "north battle science queen mountain house record valley army harbour church temple railway"
)


@dataclass(frozen=True, slots=True)
class SelfTestResult:
    """Largest differences of log-probability, each against full compute of the same prompt.

    Attributes:
        recompute_all_gap: with every token of the reused chunks recomputed.
        exact_gap: with reuse behind the identical prefix.
        noise: of a second full compute, cut at another place.
        tolerance: what the gaps may reach; at least twice the noise.
        detail: why it did not pass, or why it was skipped.
    """

    passed: bool
    recompute_all_gap: float = 0.0
    exact_gap: float = 0.0
    noise: float = 0.0
    tolerance: float = 0.0
    detail: str = ""


class Testee(Protocol):
    """The part of the engine that is tested."""

    @property
    def max_model_len(self) -> int: ...
    def complete(self, prompt: str, *, chunks: Sequence[Chunk] = (), **options: Any) -> Completion: ...
    def purge(self, tenant: str | None = None) -> int: ...


def run_self_test(engine: Testee, dtype: str, min_chunk_tokens: int) -> SelfTestResult:
    """Measure both invariants; takes seven short requests and leaves nothing behind."""
    num_words = max(_NUM_WORDS, min_chunk_tokens)
    needed = (_NUM_CHUNKS * num_words + len(_SYSTEM)) * _MOST_TOKENS_PER_WORD
    if engine.max_model_len < needed:
        return SelfTestResult(True, detail=f"skipped: it needs max_model_len of at least {needed}")
    trial = _Trial(engine, num_words)
    try:
        return _judge(trial, dtype)
    finally:
        trial.clean()


def load_result(key: str) -> SelfTestResult | None:
    """The remembered result of an earlier process; None if there is none that can be read."""
    try:
        return SelfTestResult(**load_facts(_path(key)))
    except (OSError, ValueError, TypeError):
        return None


def save_result(key: str, result: SelfTestResult) -> None:
    """Remember `result`. A cache folder that cannot be written costs only the next start's time."""
    save_facts(_path(key), asdict(result))


def _path(key: str) -> Path:
    return cache_dir() / "self_test" / f"{key}.json"


class _Trial:
    """The requests of one self-test: reuse in one tenant, full compute in another."""

    def __init__(self, engine: Testee, num_words: int) -> None:
        self._engine = engine
        self._tenants = [f"self-test-{role}-{uuid.uuid4().hex}" for role in ("reuse", "full")]
        words = random.Random(0)
        texts = (" ".join(words.choices(_WORDS.split(), k=num_words)) + "." for _ in range(_NUM_CHUNKS))
        self.chunks = tuple(Chunk(text) for text in texts)

    def reuse(self, order: Sequence[Chunk], mode: str) -> Completion:
        return self._ask(_prompt(order), self._tenants[0], reuse=mode)

    def full(self, order: Sequence[Chunk]) -> Completion:
        return self._ask(_prompt(order), self._tenants[1], reuse="off")

    def full_in_two_pieces(self, order: Sequence[Chunk]) -> Completion:
        """Full compute cut where the first piece ends: vLLM's prefix cache holds that one."""
        prompt, tenant = _prompt(order), self._tenants[1]
        first = prompt.index(order[-1].text)
        self._ask(prompt[:first], tenant, reuse="off", read_prefix_cache=True)
        return self._ask(prompt, tenant, reuse="off", read_prefix_cache=True)

    def clean(self) -> None:
        for tenant in self._tenants:
            self._engine.purge(tenant)

    def _ask(self, prompt: str, tenant: str, *, reuse: str, read_prefix_cache: bool = False) -> Completion:
        # The chunks are named in full compute too: they decide where the prompt is cut into tokens.
        return self._engine.complete(
            prompt,
            chunks=self.chunks,
            tenant=tenant,
            reuse=reuse,
            read_prefix_cache=read_prefix_cache,
            max_tokens=_NUM_OUTPUT_TOKENS,
            ignore_eos=True,
            logprobs=_NUM_LOGPROBS,
        )


def _judge(trial: _Trial, dtype: str) -> SelfTestResult:
    order, other = trial.chunks, trial.chunks[::-1]
    full, full_other = trial.full(order), trial.full(other)
    cut = trial.full_in_two_pieces(order)
    trial.reuse(order, "auto")
    recomputed = trial.reuse(other, "recompute_all")
    exact = trial.reuse(order, "exact")
    noise = logprob_gap(cut, full)
    floor = _TOLERANCE_FLOAT32 if dtype == "float32" else _TOLERANCE_16_BIT
    tolerance = max(floor, 2 * noise)
    gaps = logprob_gap(recomputed, full_other), logprob_gap(exact, full)
    detail = _complaint(recomputed.report, exact.report, gaps, tolerance)
    return SelfTestResult(not detail, *gaps, noise, tolerance, detail)


def _complaint(
    recomputed: ReuseReport, exact: ReuseReport, gaps: tuple[float, float], tolerance: float
) -> str:
    """What is wrong, "" if nothing is. A path that was not taken proves nothing."""
    complaints = []
    if not recomputed.num_recomputed_tokens:
        complaints.append(f"recompute_all recomputed nothing: {recomputed.why}")
    if not exact.decisions()["exact"] or not exact.num_reused_tokens:
        complaints.append(f"exact reuse reused nothing: {exact.why}")
    for name, gap in zip(("recompute_all", "exact reuse"), gaps, strict=True):
        if not gap <= tolerance:  # so that NaN fails
            complaints.append(f"{name} differs from full compute by {gap:.4f} in log-probability")
    return "; ".join(complaints)


def logprob_gap(first: Completion, second: Completion) -> float:
    """Largest difference of log-probability over tokens in both top lists, at each step up to and
    including the first at which the chosen tokens differ: from there the prompts differ too.

    Infinite if a step has no token in common; NaN log-probabilities give NaN.
    """
    gaps = [0.0]
    steps = zip(first.token_ids, second.token_ids, first.logprobs or (), second.logprobs or (), strict=False)
    for token, other_token, logprobs, other_logprobs in steps:
        common = logprobs.keys() & other_logprobs.keys()
        if not common:
            return float("inf")
        gaps += [abs(logprobs[token_id] - other_logprobs[token_id]) for token_id in common]
        if token != other_token:
            break
    return float("nan") if any(gap != gap for gap in gaps) else max(gaps)


def _prompt(order: Sequence[Chunk]) -> str:
    return "\n\n".join([_SYSTEM, *(chunk.text for chunk in order), _QUESTION])
