"""docs/performance.md from the results of all benchmarks.

python -m benchmarks.performance report
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.performance_parts.page import write_page
from benchmarks.quality.results import ROOT


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.performance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("report",))
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of the page")
    print(f"written: {write_page(parser.parse_args().docs)}")


if __name__ == "__main__":
    main()
