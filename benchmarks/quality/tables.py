"""From the rows of result files to Markdown tables. All figures come from the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.quality.results import ResultFile, Row
from benchmarks.quality.stats import Estimate, bootstrap_mean
from benchmarks.quality.ways import BUDGETS, FULL, OUR_REGIME, OURS, Way

from cachecraft_rag.config import PRESET_SHARES

_ABLATION_RATIO = 0.15


@dataclass(frozen=True, slots=True)
class Cell:
    """One model on one set: way name → item id → row."""

    model: str
    set_name: str
    rows: Mapping[str, Mapping[str, Row]]

    @classmethod
    def of(cls, results: ResultFile) -> Cell:
        rows: dict[str, dict[str, Row]] = {}
        for row in results.rows():
            rows.setdefault(row.way, {})[row.item] = row
        return cls(results.model, results.set_name, rows)

    @property
    def name(self) -> str:
        return f"{self.model} on {self.set_name}"

    def way_names(self) -> list[str]:
        """Full prefill, then the ways in the order of strategy, regime and budget."""
        ways = [Way.parse(name) for name in self.rows if name != FULL]
        return [FULL, *(way.name for way in sorted(ways, key=_sort_key))]

    def values(self, way: str, value: Callable[[Row], float], *, half: int | None = None) -> dict[str, float]:
        """item id → value, of all items or of one half (0 even, 1 odd)."""
        rows = self.rows.get(way, {})
        return {item: float(value(row)) for item, row in rows.items() if half in (None, row.position % 2)}


def result_table(cell: Cell) -> str:
    """One row per way: what full prefill's answers keep, and what it cost."""
    header = (
        "way", "items", "KL (nats)", "first-token KL", "agreement", "F1", "F1, % of full", "EM", "contains",
        "ROUGE-L", "F1 where full > 0", "charged budget", "not cached",
    )  # fmt: skip
    return markdown(header, (_result_row(cell, way) for way in cell.way_names()))


def mean_table(cells: Sequence[Cell]) -> str:
    """The mean over cells, of the ways that all cells have."""
    header = ("way", "KL (nats)", "agreement", "F1, % of full", "charged budget")
    return markdown(header, (_mean_row(cells, way) for way in common_ways(cells)))


def ablation_table(cells: Sequence[Cell]) -> str:
    """Ours at 15 % and what differs from it in one part: cache, score or granularity."""
    base = Way(OURS, _ABLATION_RATIO, OUR_REGIME)
    names = [name for name in common_ways(cells) if name != FULL and _is_ablation(Way.parse(name), base)]
    header = ("way", "KL (nats)", "agreement", "KL minus that of ours", "agreement minus that of ours")
    return markdown(header, (_ablation_row(cells, name, base.name) for name in names))


def preset_table(cells: Sequence[Cell]) -> str:
    """The presets as points on the measured curve of ours."""
    header = ("preset", "way", "KL (nats)", "agreement", "F1, % of full", "charged budget")
    ways = {name: Way(OURS, share, OUR_REGIME).name for name, share in PRESET_SHARES.items()}
    measured = common_ways(cells)
    return markdown(
        header, ([f"`{name}`", *_mean_row(cells, ways[name])] for name in ways if ways[name] in measured)
    )


def variants_table(cells: Sequence[Cell]) -> str:
    """Ours at 15 % over the better of two variants of each chunk, against one variant."""
    header = ("model and set", "pairs", "KL, one variant", "KL, better of two", "difference")
    several, one = (Way(OURS, _ABLATION_RATIO, regime).name for regime in ("traffic", "single"))
    with_both = [cell for cell in cells if cell.rows.get(several) and cell.rows.get(one)]
    return markdown(header, (_variants_row(cell, several, one) for cell in with_both))


def tried_table(cells: Sequence[Cell]) -> str:
    """Variants of ours, each minus the way that stands first in its file."""
    header = ("variant", "items", "KL (nats)", "agreement", "KL minus that of the first row")
    base = next(iter(cells[0].rows))
    names = [name for name in cells[0].rows if all(name in cell.rows for cell in cells)]
    return markdown(header, (_tried_row(cells, name, base) for name in names))


def paired_table(cells: Sequence[Cell], half: int) -> str:
    """Ours minus each other strategy at the same ratio, on the items of one half that both have."""
    header = (
        "budget",
        "other way",
        "pairs",
        "KL difference",
        "interval",
        "agreement difference",
        "interval ",
    )
    return markdown(header, _paired_rows(cells, half))


def has_pairs(cells: Sequence[Cell], half: int) -> bool:
    return any(True for _ in _paired_rows(cells, half))


def common_ways(cells: Sequence[Cell]) -> list[str]:
    return [name for name in cells[0].way_names() if all(cell.rows.get(name) for cell in cells)]


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def kl(row: Row) -> float:
    return row.kl


def agreement(row: Row) -> float:
    return float(row.agree)


def estimate(cells: Sequence[Cell], way: str, value: Callable[[Row], float]) -> Estimate:
    return bootstrap_mean([list(cell.values(way, value).values()) for cell in cells])


def paired(
    cells: Sequence[Cell], way: str, other: str, value: Callable[[Row], float], half: int | None = None
) -> tuple[Estimate, int]:
    """`way` minus `other` over the items that both have, and the number of these pairs.

    Raises:
        ValueError: a cell has no such item.
    """
    differences = []
    for cell in cells:
        ours, others = cell.values(way, value, half=half), cell.values(other, value, half=half)
        differences.append([ours[item] - others[item] for item in ours if item in others])
    return bootstrap_mean(differences), sum(map(len, differences))


def _sort_key(way: Way) -> tuple[str, str, int, float]:
    return way.strategy, way.regime, way.granularity, -1.0 if way.ratio is None else way.ratio


def _result_row(cell: Cell, way: str) -> list[str]:
    rows = list(cell.rows.get(way, {}).values())
    full = cell.rows.get(FULL, {})
    answered = [row.f1 for row in rows if row.item in full and full[row.item].f1 > 0]
    prompt_tokens = sum(row.num_prompt_tokens for row in rows)
    return [
        f"`{way}`",
        str(len(rows)),
        str(estimate([cell], way, kl)),
        f"{_mean(row.kl_first for row in rows):.4f}",
        f"{_mean(map(agreement, rows)):.3f}",
        f"{_mean(row.f1 for row in rows):.3f}",
        _percent_of_full(cell, way),
        f"{_mean(row.exact_match for row in rows):.3f}",
        f"{_mean(row.contains for row in rows):.3f}",
        f"{_mean(row.rouge_l for row in rows):.3f}",
        f"{_mean(answered):.3f}",
        f"{_mean(row.charged for row in rows):.3f}",
        f"{100 * sum(row.num_missing_tokens for row in rows) / prompt_tokens:.1f} %",
    ]


def _mean_row(cells: Sequence[Cell], way: str) -> list[str]:
    return [
        f"`{way}`",
        str(estimate(cells, way, kl)),
        str(estimate(cells, way, agreement)),
        f"{_mean(_share_of_full(cell, way) * 100 for cell in cells):.1f} %",
        f"{_mean(_mean(cell.values(way, lambda row: row.charged).values()) for cell in cells):.3f}",
    ]


def _ablation_row(cells: Sequence[Cell], way: str, base: str) -> list[str]:
    kl_gap, _ = paired(cells, way, base, kl)
    agreement_gap, _ = paired(cells, way, base, agreement)
    own = [str(estimate(cells, way, kl)), str(estimate(cells, way, agreement))]
    gaps = ["", ""] if way == base else [str(kl_gap), str(agreement_gap)]
    return [f"`{way}`", *own, *gaps]


def _variants_row(cell: Cell, several: str, one: str) -> list[str]:
    gap, num_pairs = paired([cell], several, one, kl)
    items = cell.rows[several].keys() & cell.rows[one].keys()
    means = [_mean(cell.rows[way][item].kl for item in items) for way in (one, several)]
    return [cell.name, str(num_pairs), *(f"{mean:.4f}" for mean in means), str(gap)]


def _tried_row(cells: Sequence[Cell], name: str, base: str) -> list[str]:
    gap, num_pairs = paired(cells, name, base, kl)
    own = [str(estimate(cells, name, kl)), str(estimate(cells, name, agreement))]
    return [name, str(num_pairs), *own, "" if name == base else str(gap)]


def _is_ablation(way: Way, base: Way) -> bool:
    if way.ratio not in (base.ratio, None) or way.recomputes_all:
        return False
    return way.strategy == base.strategy or (way.regime == base.regime and way.granularity == 1)


def _paired_rows(cells: Sequence[Cell], half: int) -> Iterator[list[str]]:
    for budget in BUDGETS:
        ours = Way(OURS, budget, OUR_REGIME)
        for name in common_ways(cells):
            if name == FULL or not _is_rival(Way.parse(name), budget):
                continue
            try:
                kl_gap, num_pairs = paired(cells, ours.name, name, kl, half)
                agreement_gap, _ = paired(cells, ours.name, name, agreement, half)
            except ValueError:  # not measured on this half of every cell yet
                continue
            numbers = [str(kl_gap), kl_gap.reading, str(agreement_gap), agreement_gap.reading]
            yield [f"{budget:.0%}", f"`{name}`", str(num_pairs), *numbers]


def _is_rival(way: Way, budget: float) -> bool:
    return way.strategy != OURS and not way.recomputes_all and way.ratio in (budget, None)


def _percent_of_full(cell: Cell, way: str) -> str:
    return f"{100 * _share_of_full(cell, way):.1f} %"


def _share_of_full(cell: Cell, way: str) -> float:
    """F1 as a share of full prefill's on the same items; NaN where that is zero."""
    own, full = cell.values(way, _f1), cell.values(FULL, _f1)
    total = sum(full[item] for item in own if item in full)
    return sum(own.values()) / total if total else float("nan")


def _f1(row: Row) -> float:
    return row.f1


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return fmean(values) if values else float("nan")
