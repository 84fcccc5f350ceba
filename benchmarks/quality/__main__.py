"""`python -m benchmarks.quality run ...` measures, `... report` writes docs/quality.md, `... segments`
checks how prompts are cut."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.quality.results import RESULTS, ROOT
from benchmarks.quality.segments import CHINESE_SETS, check_segments
from benchmarks.quality.ways import DEFAULT_WAYS, Way


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure what is not in the result file yet")
    # Names are checked by the run itself, so that `report` needs neither vLLM nor the models.
    run.add_argument("--model", default="gemma3", help="default or gemma3")
    run.add_argument("--set", default="hotpotqa_distractor100", help="name of an evaluation set")
    run.add_argument("--items", type=int, help="how many; the set's own number if not given")
    run.add_argument("--half", choices=("all", "even", "odd"), default="all")
    run.add_argument("--ways", type=Way.parse, nargs="+", default=list(DEFAULT_WAYS), metavar="WAY")
    report = commands.add_parser("report", help="write the tables and curves from all result files")
    report.add_argument("--docs", type=Path, default=ROOT / "docs")
    segments = commands.add_parser("segments", help="check how the prompts of sets are cut into chunks")
    segments.add_argument("--sets", nargs="+", default=list(CHINESE_SETS))
    segments.add_argument("--models", nargs="+", default=["default", "gemma3"])
    loss = commands.add_parser("loss", help="measure in which chunks and layers reuse loses")
    loss.add_argument("--model", default="gemma3", help="default or gemma3")
    loss.add_argument("--set", default="hotpotqa_distractor100", help="a set that names its evidence")
    loss.add_argument("--items", type=int, default=20)
    for command in (run, segments, loss):
        command.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    for command in (run, report):
        command.add_argument("--out", type=Path, default=RESULTS, help="folder of the result files")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse_arguments()
    if args.command == "report":
        from benchmarks.quality.report import write_report

        write_report(args.out, args.docs)
    elif args.command == "segments":
        from benchmarks.quality.models import MODELS

        if not check_segments([MODELS[name] for name in args.models], args.sets, args.data):
            raise SystemExit(1)
    elif args.command == "loss":
        from benchmarks.quality.items import SETS
        from benchmarks.quality.models import MODELS
        from benchmarks.quality.run import execute_loss

        print(execute_loss(MODELS[args.model], SETS[args.set], args.items, args.data))
    else:
        from benchmarks.quality.run import execute, make_run

        execute(make_run(args))


if __name__ == "__main__":
    main()
