"""Feedback on the default model: clean traffic, one corrupted chunk, then a store that is all wrong.

python breaker_cell.py [NUM_CLEAN_REQUESTS]      prints one JSON line
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cachecraft_rag import CacheCraftConfig, CacheCraftEngine, Chunk, default_model
from cachecraft_rag.engine import Completion
from cachecraft_rag.engine.quality import first_token_kl

Prompt = tuple[list[Chunk], str]
DATA = Path(__file__).parents[2] / "examples" / "data"
SYSTEM = "Answer the question from the passages below in a few words."
NUM_CHUNKS = 4
NUM_OUTPUT_TOKENS = 8
SHARE = 0.2
BUDGET = 0.15
NUM_PROBES = 6
AMPLITUDES = (0.3, 1.5)
NUM_TRIES = 6
KL_RANGE = (0.35, 0.9)
MOST_REQUESTS = 120


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


class Run:
    """The engine, the traffic, and the worker's records."""

    def __init__(self) -> None:
        self.chunks = {
            row["doc_id"]: Chunk(row["text"], doc_id=row["doc_id"]) for row in read("passages.jsonl")
        }
        self.questions = read("questions.jsonl")
        self.random = random.Random(3)
        config = CacheCraftConfig(
            self_test=False, host_store_bytes=1024**3, feedback_share=SHARE, recompute_ratio=BUDGET
        )
        self.engine = CacheCraftEngine(default_model(), config=config, in_process=True, max_model_len=4096)
        self.engine.start()
        self.engine.warm(list(self.chunks.values()), system=SYSTEM)

    @property
    def feedback(self) -> dict[str, Any]:
        figures: dict[str, Any] = self.engine.stats()["feedback"]
        return figures

    @property
    def sinks(self) -> dict[int, Any]:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        sinks: dict[int, Any] = get_kv_transfer_group().worker_side._records
        return sinks

    def prompts(self, victim: Chunk | None = None) -> Iterator[Prompt]:
        """A question, its own passage, others at random, in any order; with `victim` among them."""
        while True:
            row = self.random.choice(self.questions)
            needed = list(dict.fromkeys([self.chunks[row["doc_id"]], *([victim] if victim else [])]))
            others = [chunk for chunk in self.chunks.values() if chunk not in needed]
            order = needed + self.random.sample(others, NUM_CHUNKS - len(needed))
            self.random.shuffle(order)
            yield order, row["question"]

    def ask(self, order: Sequence[Chunk], question: str, **options: Any) -> Completion:
        user = "\n\n".join([*(chunk.text for chunk in order), question])
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]
        return self.engine.chat(messages, chunks=order, max_tokens=NUM_OUTPUT_TOKENS, **options)

    def serve(self, order: Sequence[Chunk], question: str) -> Completion:
        """One request of the traffic, then the idle time that feedback waits for."""
        completion = self.ask(order, question)
        self.engine.drain_feedback()
        return completion

    def first_token(self, probe: Prompt, reuse: str) -> Mapping[int, float]:
        """Log-probabilities of the first token, apart from the traffic."""
        options = {"store": False, "logprobs": 20, "recompute_ratio": BUDGET}
        logprobs = self.ask(*probe, reuse=reuse, **options).logprobs
        assert logprobs
        return logprobs[0]

    def mean_kl(self, probes: Sequence[Prompt], fulls: Sequence[Mapping[int, float]]) -> float:
        """First-token KL from full compute, whose log-probabilities are `fulls`."""
        reused = (self.first_token(probe, self.engine.config.strategy) for probe in probes)
        return sum(map(first_token_kl, fulls, reused)) / len(probes)

    def spoil(self, record_ids: Sequence[int], amplitude: float) -> dict[int, torch.Tensor]:
        """Add Gaussian noise of `amplitude` standard deviations of each channel; gives what was there."""
        generator, before = torch.Generator().manual_seed(0), {}
        for record_id in record_ids:
            sink = self.sinks[record_id]
            kv = before[record_id] = sink.kv
            noise = torch.randn(kv.shape, generator=generator) * kv.float().std(dim=2, keepdim=True)
            sink.kv = (kv.float() + amplitude * noise).to(kv.dtype)
        return before

    def restore(self, before: dict[int, torch.Tensor]) -> None:
        for record_id, kv in before.items():
            if record_id in self.sinks:
                self.sinks[record_id].kv = kv


def clean_traffic(run: Run, num_requests: int) -> dict[str, Any]:
    traffic = run.prompts()
    reuses = sum(run.serve(*next(traffic)).report.decision == "reuse" for _ in range(num_requests))
    return {"num_requests": num_requests, "num_reuses": reuses, **run.feedback}


def corrupt_chunk(run: Run) -> dict[str, Any]:
    victim = run.chunks[run.questions[7]["doc_id"]]
    traffic = run.prompts(victim)
    probes = [next(traffic) for _ in range(NUM_PROBES)]
    fulls = [run.first_token(probe, "off") for probe in probes]
    report = run.ask(*probes[0], reuse=run.engine.config.strategy, store=False).report
    chunk = next(chunk for chunk in report.chunks if chunk.doc_id == victim.doc_id)
    assert chunk.variant is not None
    result: dict[str, Any] = {"victim": chunk.chunk_key, "kl_before": run.mean_kl(probes, fulls)}
    low, high = AMPLITUDES
    for _ in range(NUM_TRIES):
        amplitude = (low + high) / 2
        before = run.spoil([chunk.variant], amplitude)
        kl = run.mean_kl(probes, fulls)
        result |= {"amplitude": amplitude, "kl_corrupt": kl}
        if KL_RANGE[0] <= kl <= KL_RANGE[1]:
            break
        run.restore(before)
        low, high = (amplitude, high) if kl < KL_RANGE[0] else (low, amplitude)
    start = run.feedback
    result["num_requests_to_catch"] = requests_until(run, traffic, lambda now: bool(now["quarantined"]))
    caught = run.feedback
    result["num_samples_to_catch"] = caught["num_examined"] - start["num_examined"]
    result["quarantined"] = caught["quarantined"]
    reports = {c.doc_id: c for c in run.serve(*next(traffic)).report.chunks}
    result["fallback"] = [reports[victim.doc_id].decision, reports[victim.doc_id].reason]
    result["on_probation"] = run.feedback["on_probation"]
    after = {c.doc_id: c for c in run.serve(*next(traffic)).report.chunks}
    result["after_recaching"] = after[victim.doc_id].decision
    result["num_requests_to_release"] = requests_until(run, traffic, lambda now: not now["on_probation"])
    result["kl_after"] = run.mean_kl(probes, fulls)
    return {
        **result,
        **{k: run.feedback[k] for k in ("num_quarantines", "num_releases", "num_breaker_openings")},
    }


def corrupt_store(run: Run) -> dict[str, Any]:
    traffic = run.prompts()
    start = run.feedback
    before = run.spoil(list(run.sinks), AMPLITUDES[-1])
    opened = requests_until(run, traffic, lambda now: now["breaker"] == "open")
    num_samples = run.feedback["num_examined"] - start["num_examined"]
    reason = run.serve(*next(traffic)).report.reason
    run.restore(before)
    closed = requests_until(run, traffic, lambda now: now["breaker"] == "closed")
    return {
        "num_requests_to_open": opened,
        "num_samples_to_open": num_samples,
        "reason": reason,
        "num_requests_to_close": closed,
        "decision_after": run.serve(*next(traffic)).report.decision,
    }


def requests_until(run: Run, traffic: Iterator[Prompt], is_reached: Any) -> int:
    """Requests served until the feedback's figures are so; one more than allowed if they never are."""
    for number in range(MOST_REQUESTS):
        if is_reached(run.feedback):
            return number
        run.serve(*next(traffic))
    return MOST_REQUESTS + 1


def main() -> None:
    num_clean = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    seconds, run, result = {}, Run(), {}
    parts = {
        "clean": lambda: clean_traffic(run, num_clean),
        "chunk": lambda: corrupt_chunk(run),
        "store": lambda: corrupt_store(run),
    }
    for name, part in parts.items():
        started_s = time.monotonic()
        result[name] = part()
        seconds[name] = round(time.monotonic() - started_s, 1)
        print(name, json.dumps(result[name]), seconds[name], file=sys.stderr, flush=True)
    result["work_s"], result["seconds"] = run.feedback["work_s"], seconds
    run.engine.close()
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
