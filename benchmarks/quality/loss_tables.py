"""Tables of where reuse loses: which questions, chunks, layers. From result files and from `loss` files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from benchmarks.quality.tables import Cell, markdown
from benchmarks.quality.ways import OUR_REGIME, OURS, Way

LOSS = Path(__file__).with_name("loss")
NOTHING, EVIDENCE, OTHERS = "nothing", "evidence", "others"
COMPUTED = (NOTHING, EVIDENCE, OTHERS)
"""What is computed in full; each is the tenant where the rest is cached."""
_NUM_GROUPS = 6
_WAY = Way(OURS, 0.15, OUR_REGIME).name


def question_table(cells: Sequence[Cell]) -> str:
    """How the KL of ours at 15 % is spread over questions and answer tokens."""
    header = (
        "model and set", "items", "mean KL", "median KL", "worst tenth's share of the KL",
        "KL of the first token", "disagree", "disagree at the first token",
    )  # fmt: skip
    return markdown(header, (_question_row(cell) for cell in cells if cell.rows.get(_WAY)))


def chunk_table(found: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    """KL by what was computed in full."""
    header = ("model and set", "items", "KL, nothing in full", "KL, evidence in full", "KL, others in full")
    return markdown(header, (_chunk_row(name, items) for name, items in found.items()))


def layer_table(found: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    """Mean distance of values, over groups of neighbouring layers from the lowest to the highest."""
    groups = [f"layers {group}/{_NUM_GROUPS}" for group in range(1, _NUM_GROUPS + 1)]
    rows = (_layer_row(name, role, items) for name, items in found.items() for role in (EVIDENCE, OTHERS))
    return markdown(("model and set", "chunks", *groups), rows)


def loss_files(folder: Path = LOSS) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for path in sorted(folder.glob("*.json")):
        yield path.stem.replace("-", " on ", 1), json.loads(path.read_text(encoding="utf-8"))


def _question_row(cell: Cell) -> list[str]:
    rows = list(cell.rows[_WAY].values())
    values = sorted((row.kl for row in rows), reverse=True)
    worst = values[: max(1, len(values) // 10)]
    return [
        cell.name,
        str(len(rows)),
        f"{fmean(values):.4f}",
        f"{median(values):.4f}",
        f"{100 * sum(worst) / sum(values):.0f} %",
        f"{fmean(row.kl_first for row in rows):.4f}",
        f"{fmean(not row.agree for row in rows):.2f}",
        f"{fmean(row.divergence == 0 for row in rows):.2f}",
    ]


def _chunk_row(name: str, found: Sequence[dict[str, Any]]) -> list[str]:
    means = [fmean(one["kl"][tenant] for one in found) for tenant in COMPUTED]
    return [name, str(len(found)), *(f"{mean:.4f}" for mean in means)]


def _layer_row(name: str, role: str, found: Sequence[dict[str, Any]]) -> list[str]:
    by_layer = np.mean([one["distance"][role] for one in found if one["distance"][role]], axis=0)
    return [name, role, *(f"{group.mean():.3f}" for group in np.array_split(by_layer, _NUM_GROUPS))]
