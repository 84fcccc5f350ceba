"""The same questions to cachecraft-rag, to vLLM, and to other projects that reuse KV.

    python -m benchmarks.peers                         all of them, four passages of 200 tokens a question
    python -m benchmarks.peers --peers full semblend   only these, and ours
    python -m benchmarks.peers --passages 10 --passage-tokens 400

The workload is that of `benchmarks.engine_replay passages`, in miniature: one request after the other, no
arrivals. Each peer runs in a process of its own; what another project needs is installed by pip into a
virtual environment of its own in the cache folder, on top of the vLLM that runs this. A peer that does not
install or run is shown with the last lines of what it said. Figures and limits: docs/peers.md.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain, cycle
from pathlib import Path
from typing import Any

from benchmarks.common.facts import model_name, run_facts
from benchmarks.common.text_table import show
from benchmarks.engine_replay import SMALL_PASSAGES
from benchmarks.engine_replay_parts.passages import SEED, passages_workload
from benchmarks.engine_replay_parts.texts import DATA, token_counter
from benchmarks.engine_replay_parts.workload import ReplayRequest, Workload
from benchmarks.peers_parts.job import Asked, Job, Result
from benchmarks.peers_parts.peer import OURS, PEERS, Peer, chosen_peers
from benchmarks.peers_parts.runner import try_peer
from benchmarks.peers_parts.table import compared
from rich.console import Console

from cachecraft_rag import default_model
from cachecraft_rag.models import cache_dir


def asked(request: ReplayRequest) -> Asked:
    documents = [{"name": passage.name, "text": passage.text} for passage in request.passages]
    return Asked(request.messages(), documents, request.max_tokens)


def first_job(workload: Workload, model: str, engine_args: Mapping[str, Any]) -> Job:
    """For who tokenises himself."""
    parts = ([asked(request) for request in part] for part in (regrouped(workload), workload.saturated))
    return Job(model, engine_args, "", *parts)


def regrouped(workload: Workload) -> Iterator[ReplayRequest]:
    """The warm-up: every measured passage once, in other company, before the warm-up's own questions.

    Popularity alone would need hundreds of requests until most of what is measured was seen before.
    """
    passages = list(dict.fromkeys(chain.from_iterable(request.passages for request in workload.saturated)))
    random.Random(SEED).shuffle(passages)
    size = len(workload.saturated[0].passages)
    for request, begin in zip(cycle(workload.warm_up), range(0, len(passages), size), strict=False):
        yield replace(request, passages=tuple(passages[begin : begin + size]))


def with_prompts(job: Job, ours: Result) -> Job:
    """The job with the token ids that ours answered: passages are tokenised one by one, so that a passage
    is the same tokens wherever it stands, which others need as well."""
    parts = (
        [replace(one, prompt_token_ids=answer.prompt_token_ids) for one, answer in zip(*pair, strict=True)]
        for pair in ((job.warm_up, ours.warm_up), (job.measured, ours.measured))
    )
    return replace(job, **dict(zip(("warm_up", "measured"), parts, strict=True)))


def run_all(
    peers: Sequence[Peer], job: Job, cache: Path, folder: Path, timeout_s: float, console: Console
) -> Iterator[tuple[str, Result | str]]:
    """Each peer's result or why it has none; the first is ours.

    Raises:
        SystemExit: ours failed, so that there are no prompts for the others.
    """
    for peer in peers:
        console.print(f"{peer.name}: {peer.what}", highlight=False)
        scratch = folder / peer.name
        scratch.mkdir()
        own = replace(job, folder=str(scratch), warm_up=job.warm_up if peer.warms_up else ())
        result = try_peer(peer, own, cache, folder, timeout_s, lambda text: console.print(text, markup=False))
        if peer is OURS:
            if isinstance(result, str):
                raise SystemExit("ours failed: there is nothing to compare with")
            job = with_prompts(job, result)
        yield peer.name, result


def save(results: Mapping[str, Result | str], facts: Mapping[str, Any], target: Path) -> None:
    found = {
        name: {"failure": result} if isinstance(result, str) else asdict(result)
        for name, result in results.items()
    }
    target.write_text(json.dumps({**facts, "peers": found}, indent=1) + "\n")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--peers", nargs="+", default=tuple(PEERS), metavar="PEER", help=", ".join(PEERS))
    parser.add_argument("--passages", type=int, default=SMALL_PASSAGES.num_passages, help="per question")
    parser.add_argument("--passage-tokens", type=int, default=SMALL_PASSAGES.passage_tokens)
    parser.add_argument("--requests", type=int, default=SMALL_PASSAGES.num_saturated, help="measured")
    parser.add_argument("--model", help="model folder; the default model if not given")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one peer's answers")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the sets with their load.py")
    parser.add_argument("--cache", type=Path, help="folder of the environments")
    parser.add_argument("--json", type=Path, default=Path(tempfile.gettempdir()) / "peers.json")
    return parser.parse_args(argv)


def main() -> None:
    # As an interruption does: what was started for a peer is ended with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    args, console = arguments(), Console(width=160)
    model = str(args.model or default_model())
    shape = replace(
        SMALL_PASSAGES,
        num_passages=args.passages,
        passage_tokens=args.passage_tokens,
        num_fill=0,
        num_warm_up=args.requests,
        num_saturated=args.requests,
        num_moderate=0,
    )
    workload = passages_workload(args.data, token_counter(model), shape)
    engine_args = {
        "dtype": args.dtype,
        "max_model_len": 8192,
        "enforce_eager": True,
        "block_size": 32,
        "kv_cache_memory_bytes": 2 << 30,
    }
    job = first_job(workload, model, engine_args)
    facts = {
        **run_facts("python -m benchmarks.peers", model_name(args.model), engine_args),
        "workload": {**asdict(shape), **workload.facts},
    }
    cache = args.cache or cache_dir() / "peers"
    folder = Path(tempfile.mkdtemp(prefix="peers-"))
    results: dict[str, Result | str] = {}
    for name, result in run_all(chosen_peers(tuple(args.peers)), job, cache, folder, args.timeout, console):
        results[name] = result
        save(results, facts, args.json)  # what was measured outlives a later failure
    show([compared(results)], console)
    console.print(f"written to {args.json}; what each said lies in {folder}", highlight=False)


if __name__ == "__main__":
    main()
