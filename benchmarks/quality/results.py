"""Result files: one per model and set, JSON lines, appended to as answers come."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"
_DIGITS = 5
_ANSWER_CHARACTERS = 120
_KEYS = {
    "item": "i",
    "position": "p",
    "way": "w",
    "kl": "kl",
    "kl_first": "k1",
    "agree": "ag",
    "divergence": "dv",
    "f1": "f1",
    "exact_match": "em",
    "contains": "ct",
    "rouge_l": "rl",
    "answer": "a",
    "num_prompt_tokens": "np",
    "num_reused_tokens": "nr",
    "num_recomputed_tokens": "nc",
    "num_missing_tokens": "nm",
    "charged": "ch",
}
_FIELDS = {key: name for name, key in _KEYS.items()}


@dataclass(frozen=True, slots=True)
class Row:
    """One answer to one item.

    Attributes:
        position: place of the item in the fixed order.
        kl: KL(full prefill || way) in nats, mean over the first answer tokens, forced along full
            prefill's answer; `kl_first` of the first token alone.
        agree: whether the answer is full prefill's, as text: white space that ends it does not count.
        divergence: first step with another token, None if there is none.
        num_missing_tokens: chunk tokens that were computed, as they were not in the store.
        charged: budget spent, see `metrics.charged_ratio`.
    """

    item: str
    position: int
    way: str
    kl: float
    kl_first: float
    agree: bool
    divergence: int | None
    f1: float
    exact_match: float
    contains: float
    rouge_l: float
    answer: str
    num_prompt_tokens: int
    num_reused_tokens: int
    num_recomputed_tokens: int
    num_missing_tokens: int
    charged: float

    def to_json(self) -> str:
        values = {key: _short(getattr(self, name)) for name, key in _KEYS.items()}
        return json.dumps(values, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Row:
        return cls(**{_FIELDS[key]: value for key, value in data.items()})


@dataclass(frozen=True, slots=True)
class ResultFile:
    """The rows of one model and set; lines with "meta" name the commit of the rows below them."""

    model: str
    set_name: str
    folder: Path = RESULTS

    @property
    def path(self) -> Path:
        return self.folder / f"{self.model}-{self.set_name}.jsonl"

    def metas(self) -> list[dict[str, Any]]:
        return [line["meta"] for line in self._lines() if "meta" in line]

    def rows(self) -> list[Row]:
        """All rows; of two for the same item and way the last."""
        rows = (Row.from_dict(line) for line in self._lines() if "meta" not in line)
        return list({(row.item, row.way): row for row in rows}.values())

    def done(self) -> set[tuple[str, str]]:
        return {(row.item, row.way) for row in self.rows()}

    def begin(self, meta: dict[str, Any]) -> None:
        """Add a line of facts if they differ from those of the last run.

        Raises:
            SystemExit: the file was made over another pool of chunks, so its rows do not compare.
        """
        self._drop_cut_line()
        metas = self.metas()
        if metas and metas[-1]["pool"] != meta["pool"]:
            raise SystemExit(
                f"{self.path.name} was made with pool={metas[-1]['pool']}, not {meta['pool']}: give the "
                "same --items, or another folder with --out"
            )
        if not metas or metas[-1] != meta:
            self._append([json.dumps({"meta": meta}, ensure_ascii=False)])

    def append(self, rows: Iterable[Row]) -> None:
        self._append(row.to_json() for row in rows)

    def _append(self, lines: Iterable[str]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as stream:
            stream.writelines(f"{line}\n" for line in lines)

    def _lines(self) -> Iterator[dict[str, Any]]:
        if not self.path.is_file():
            return
        # Not `splitlines`: an answer may hold one of Unicode's other line ends. What follows the last
        # newline was cut off with the run that wrote it.
        for line in self.path.read_text(encoding="utf-8").split("\n")[:-1]:
            yield json.loads(line)

    def _drop_cut_line(self) -> None:
        if self.path.is_file():
            data = self.path.read_bytes()
            self.path.write_bytes(data[: data.rfind(b"\n") + 1])


def result_files(folder: Path = RESULTS) -> list[ResultFile]:
    names = (path.stem.split("-", 1) for path in sorted(folder.glob("*-*.jsonl")))
    return [ResultFile(model, set_name, folder) for model, set_name in names]


def commit() -> str:
    """Short name of the checked-out commit, with "+" if the code was changed since; "" without git."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "src")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, _DIGITS)
    return value[:_ANSWER_CHARACTERS] if isinstance(value, str) else value
