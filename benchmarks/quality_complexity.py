"""Does the wording of a question tell whether reuse will change its answer? Fit, and cross-validate.

    python -m benchmarks.quality_complexity                  over benchmarks/quality/results
    python -m benchmarks.quality_complexity --label hops     over the sets alone, without results

The label `disagree` is an answer other than full prefill's at `--way`; `hops` is a question whose
evidence lies in several passages, which needs no run of a model. A length is judged as it is, longer
taken for harder. A predictor of several features is a logistic regression (L2, standardised); its AUC
is that of out-of-fold estimates, averaged over repeated stratified 5-fold splits in which an item that
two models answered stays on one side. All AUCs have a 95 % bootstrap interval over items. The estimator
is worth keeping if it beats prompt length, or chance where that does no better: the last column. The
weights of the model fitted on all rows are printed for `engine/complexity.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from benchmarks.quality.items import SETS, Item, load_items
from benchmarks.quality.results import RESULTS, result_files
from benchmarks.quality.stats import Estimate
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedGroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from cachecraft_rag.engine.complexity import FEATURES, features

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
WORDING = tuple(name for name in FEATURES if name not in ("chunks", "prompt_tokens"))
PREDICTORS = {
    "prompt length": ("prompt_tokens",),
    "question length": ("words",),
    "wording": WORDING,
    "wording and prompt": FEATURES,
}
BASELINE = "prompt length"
HOPS_SETS = {"xquad_en": False, "hotpotqa_distractor100": True, "musique_train100": True}
"""Whether the evidence of each question lies in several passages. nq_open is left out: it is written
without capitals, which would make names the best cue of all."""
NUM_FOLDS = 5
MIN_OF_EACH_LABEL = 2 * NUM_FOLDS
CHARACTERS_PER_TOKEN = 4
"""Stands in for a tokenizer where there is no result to take the length of the prompt from."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One labelled question: `label` is true where full compute is wanted."""

    group: str
    item: str
    values: dict[str, float]
    label: bool


@dataclass(frozen=True, slots=True)
class Judgement:
    """How well a predictor tells the labels apart, and how much better than the baseline."""

    auc: Estimate
    gain: Estimate


def samples_of_results(folder: Path, data: Path, way: str) -> Iterator[Sample]:
    """A sample per row of `way` in the result files."""
    for file in result_files(folder):
        rows = [row for row in file.rows() if row.way == way]
        items = {item.item_id: item for item in load_items(SETS[file.set_name], data)} if rows else {}
        for row in rows:
            item = items[row.item]
            values = features(item.question, len(item.chunks), row.num_prompt_tokens)
            yield Sample(f"{file.model} {file.set_name}", row.item, values, not row.agree)


def samples_of_sets(data: Path, num_items: int) -> Iterator[Sample]:
    """A sample per question; its label is whether its evidence lies in several passages."""
    for name, needs_several in HOPS_SETS.items():
        for item in islice(load_items(SETS[name], data), num_items):
            values = features(item.question, len(item.chunks), _approximate_length(item))
            yield Sample(name, item.item_id, values, needs_several)


def out_of_fold(samples: Sequence[Sample], names: Sequence[str], num_repeats: int) -> np.ndarray:
    """float64 (num_samples,): mean estimate of each sample by models that did not see its item.

    One feature is its own estimate: a fit could only turn its sign, and does so against the fold that
    was left out, which pushed the AUC of pure noise down to 0.28 and flattered all that is compared.
    """
    if len(names) == 1:
        return _matrix(samples, names)[:, 0]
    x, y, items = _matrix(samples, names), _labels(samples), [sample.item for sample in samples]
    estimates = np.zeros(len(y))
    for seed in range(num_repeats):
        folds = StratifiedGroupKFold(NUM_FOLDS, shuffle=True, random_state=seed)
        for train, test in folds.split(x, y, items):
            estimates[test] += _fit(x[train], y[train]).predict_proba(x[test])[:, 1]
    return estimates / num_repeats


def bootstrap(
    samples: Sequence[Sample], figure: Callable[[np.ndarray], float], num_resamples: int
) -> Estimate:
    """`figure` of row numbers, with all rows and over items drawn with replacement."""
    by_item: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        by_item.setdefault(sample.item, []).append(index)
    rows = [np.array(indices) for indices in by_item.values()]
    rng = np.random.default_rng(0)
    labels = _labels(samples)
    draws = (
        np.concatenate([rows[i] for i in rng.integers(len(rows), size=len(rows))])
        for _ in range(num_resamples)
    )
    figures = [figure(draw) for draw in draws if 0 < labels[draw].sum() < len(draw)]
    low, high = np.quantile(figures, (0.025, 0.975))
    return Estimate(figure(np.arange(len(samples))), float(low), float(high))


def judge(samples: Sequence[Sample], num_repeats: int, num_resamples: int) -> dict[str, Judgement]:
    """Each predictor's judgement, by its name."""
    labels = _labels(samples)
    scores = {name: out_of_fold(samples, names, num_repeats) for name, names in PREDICTORS.items()}

    def auc(name: str, rows: np.ndarray) -> float:
        return float(roc_auc_score(labels[rows], scores[name][rows]))

    def judgement(name: str) -> Judgement:
        return Judgement(
            bootstrap(samples, lambda rows: auc(name, rows), num_resamples),
            bootstrap(samples, lambda rows: auc(name, rows) - max(0.5, auc(BASELINE, rows)), num_resamples),
        )

    return {name: judgement(name) for name in PREDICTORS}


def weights(samples: Sequence[Sample], names: Sequence[str]) -> tuple[float, dict[str, float]]:
    """Intercept and weights for features as they come, not standardised, fitted on all samples."""
    pipeline = _fit(_matrix(samples, names), _labels(samples))
    scaler, model = pipeline[0], pipeline[1]
    raw = model.coef_[0] / scaler.scale_
    return float(model.intercept_[0] - raw @ scaler.mean_), dict(zip(names, raw.tolist(), strict=True))


def groups(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Samples by model and set, and all of them together; only where both labels are frequent enough."""
    names = list(dict.fromkeys(sample.group for sample in samples))
    found = {name: [sample for sample in samples if sample.group == name] for name in names}
    found["all"] = list(samples)
    return {name: part for name, part in found.items() if _rarer(part) >= MIN_OF_EACH_LABEL}


def print_table(
    console: Console, parts: dict[str, list[Sample]], judged: dict[str, dict[str, Judgement]]
) -> None:
    table = Table("rows", "n", "label true", "predictor", "AUC", f"gain over {BASELINE}")
    for group, by_name in judged.items():
        share = f"{_labels(parts[group]).mean():.2f}"
        for name, judgement in by_name.items():
            size = str(len(parts[group]))
            table.add_row(group, size, share, name, f"{judgement.auc:.3f}", f"{judgement.gain:.3f}")
    console.print(table)


def print_weights(console: Console, samples: Sequence[Sample], names: Sequence[str]) -> None:
    intercept, by_name = weights(samples, names)
    lines = "".join(f'        "{name}": {weight:.3f},\n' for name, weight in by_name.items())
    console.print(f"INTERCEPT = {intercept:.3f}\nMappingProxyType(\n    {{\n{lines}    }}\n)", markup=False)


def main() -> None:
    args = _arguments()
    console = Console(width=160)
    if args.label == "hops":
        samples = list(samples_of_sets(args.data, args.items))
    else:
        samples = list(samples_of_results(args.results, args.data, args.way))
    parts = groups(samples)
    if not parts:
        raise SystemExit(
            f"{len(samples)} rows, the rarer label on {_rarer(samples)}: it takes {MIN_OF_EACH_LABEL}; "
            f"measure more items of {args.way} with python -m benchmarks.quality run"
        )
    progress = track(parts.items(), "cross-validating", console=console)
    judged = {name: judge(part, args.repeats, args.resamples) for name, part in progress}
    print_table(console, parts, judged)
    print_weights(console, samples, PREDICTORS[args.predictor])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--label", choices=("disagree", "hops"), default="disagree")
    parser.add_argument("--way", default="focus@0.15/neighbours", help="rows of results to look at")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of result files")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the sets with their load.py")
    parser.add_argument("--items", type=int, default=100, help="items of each set, for --label hops")
    parser.add_argument(
        "--predictor", choices=tuple(PREDICTORS), default="wording", help="whose weights to print"
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--resamples", type=int, default=1000)
    return parser.parse_args()


def _fit(x: np.ndarray, y: np.ndarray):  # type: ignore[no-untyped-def]  # scikit-learn has no types
    return make_pipeline(StandardScaler(), LogisticRegression()).fit(x, y)


def _matrix(samples: Sequence[Sample], names: Sequence[str]) -> np.ndarray:
    return np.array([[sample.values[name] for name in names] for sample in samples])


def _labels(samples: Iterable[Sample]) -> np.ndarray:
    return np.array([sample.label for sample in samples], dtype=np.int64)


def _rarer(samples: Sequence[Sample]) -> int:
    num_true = int(_labels(samples).sum())
    return min(num_true, len(samples) - num_true)


def _approximate_length(item: Item) -> int:
    return sum(len(chunk.text) for chunk in item.chunks) // CHARACTERS_PER_TOKEN


if __name__ == "__main__":
    main()
