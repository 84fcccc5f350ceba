"""Many requests with churn: does memory stay flat, does reuse last, are the answers still right?

    python -m benchmarks.soak                                      10,000 requests on a tiny model
    python -m benchmarks.soak --model default --requests 546       the default model, each answer checked
    python -m benchmarks.soak --requests 500 --json soak.json

The exit code is 1 when a criterion fails. What is checked, and figures: docs/soak.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.soak_parts.churn import Churn, Mix
from benchmarks.soak_parts.driving import Soak, Texts
from benchmarks.soak_parts.figures import Criterion, Outcome, Sample, judge, memory_slope
from benchmarks.soak_parts.texts import Passages, Words
from benchmarks.soak_parts.workers import ask_workers, let_functions_be_sent
from benchmarks.tiny_models import CONFIGS, tiny_model
from rich.console import Console
from rich.table import Table

from cachecraft_rag import CacheCraftConfig, CacheCraftEngine, default_model

NUM_IN_FLIGHT = 8
SEED = 11
VERDICTS = {True: "passed", False: "FAILED", None: "not judged"}


@dataclass(frozen=True, slots=True)
class Setup:
    """What is put under load; the store holds about a quarter of what there is to store."""

    folder: Path
    texts: Texts
    mix: Mix
    store_bytes: int
    engine_args: dict[str, Any]


def tiny_setup(name: str, folder: Path) -> Setup:
    engine_args = {"max_model_len": 1024, "max_num_batched_tokens": 512, "num_gpu_blocks_override": 120}
    mix = Mix(num_documents=300, num_chunks=(2, 5), check_every=50)
    return Setup(tiny_model(name, folder), Words(), mix, 16 << 20, engine_args)


def default_setup() -> Setup:
    texts = Passages.read()
    mix = Mix(num_documents=len(texts.texts), num_chunks=(2, 3), check_every=1, purge_every=100)
    return Setup(default_model(), texts, mix, 192 << 20, {"max_model_len": 2048})


def make_engine(setup: Setup, in_process: bool = False) -> CacheCraftEngine:
    config = CacheCraftConfig(
        host_store_bytes=setup.store_bytes,
        self_test=False,
        # With random weights reuse does change answers: feedback does its work, but changes nothing.
        quality_target=0.0,
        quality_threshold=0.0,
        max_first_token_kl=1e9,
    )
    return CacheCraftEngine(
        setup.folder, config=config, in_process=in_process, dtype="float32", seed=0, **setup.engine_args
    )


def show_sample(console: Console, sample: Sample) -> None:
    rate = sample.num_questions / sample.time_s
    console.print(
        f"{sample.num_questions:6d} requests, {rate:4.1f}/s: driver {sample.driver_bytes / 1e6:6.1f} MB, "
        f"engine {sample.engine_bytes / 1e6:7.1f} MB ({sample.free_bytes / 1e6:.1f} free), "
        f"{sample.num_records:4d} records, hit rate {sample.hit_rate:5.1%}, "
        f"reused {sample.reused_share:5.1%}, {sample.num_faults} faults"
    )


def show(outcome: Outcome, criteria: Sequence[Criterion], console: Console) -> None:
    table = Table("criterion", "figure", "aim", "verdict")
    for each in criteria:
        table.add_row(each.name, each.figure, each.aim, VERDICTS[each.has_passed])
    console.print(table)
    console.print(f"{outcome.num_aborted} aborted, {dict(outcome.counts)}")
    if len(outcome.samples) >= 6:
        for name in ("driver_bytes", "engine_bytes", "free_bytes"):
            slope = memory_slope(outcome.samples, name)
            console.print(f"{name}: {slope.value:+.2f} ± {slope.error:.2f} MB per 1,000 requests")


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="llama", choices=["default", *CONFIGS])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--sample-every", type=int, default=None, help="default: a hundredth, at least 20")
    parser.add_argument("--in-flight", type=int, default=NUM_IN_FLIGHT)
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    return parser.parse_args(given)


def main() -> None:
    args = arguments()
    console = Console(width=140)
    sample_every = args.sample_every or max(20, args.requests // 100)
    let_functions_be_sent()
    with tempfile.TemporaryDirectory() as folder:
        setup = default_setup() if args.model == "default" else tiny_setup(args.model, Path(folder))
        with make_engine(setup) as engine:
            engine.start()
            soak = Soak(
                engine,
                setup.texts,
                args.in_flight,
                sample_every,
                partial(ask_workers, engine),
                partial(show_sample, console),
            )
            outcome = asyncio.run(soak.run(Churn(setup.mix, SEED).events(args.requests)))
    criteria = judge(outcome)
    show(outcome, criteria, console)
    if args.json:
        figures = {"criteria": [asdict(each) for each in criteria], **asdict(outcome)}
        args.json.write_text(json.dumps(figures, indent=1))
    if any(each.has_passed is False for each in criteria):
        sys.exit(1)


if __name__ == "__main__":
    main()
