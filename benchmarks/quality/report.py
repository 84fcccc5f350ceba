"""docs/quality.md and its pictures, from all result files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.quality.curves import draw
from benchmarks.quality.loss_tables import chunk_table, layer_table, loss_files, question_table
from benchmarks.quality.results import ResultFile, result_files
from benchmarks.quality.tables import (
    Cell,
    ablation_table,
    has_pairs,
    mean_table,
    paired_table,
    preset_table,
    result_table,
    tried_table,
    variants_table,
)
from benchmarks.quality.ways import FULL

_INTRO = Path(__file__).with_name("intro.md")
_TRIED = Path(__file__).with_name("tried")
_ODD = 1


def write_report(results_folder: Path, docs: Path) -> None:
    """Write `docs/quality.md` and `docs/quality/*.png`.

    Raises:
        SystemExit: there are no results.
    """
    files = [results for results in result_files(results_folder) if len(results.rows()) > 0]
    if not files:
        raise SystemExit(
            f"no result files in {results_folder}: `python -m benchmarks.quality run` makes them"
        )
    cells = [Cell.of(results) for results in files]
    for results, cell in zip(files, cells, strict=True):
        draw(cell, docs / "quality" / f"{results.path.stem}.png")
    blocks = [
        _INTRO.read_text(encoding="utf-8").rstrip(),
        *_summary(cells),
        *_loss(cells),
        *_tried(),
        *_parts(files, cells),
    ]
    (docs / "quality.md").write_text("\n\n".join(blocks) + "\n", encoding="utf-8")


def _summary(cells: Sequence[Cell]) -> Iterator[str]:
    yield "## Mean over models and sets"
    yield f"Over {_names(cells)}; only ways that each of them has."
    yield mean_table(cells)
    yield "### Presets"
    yield "A preset is a share of the reused tokens to recompute: a point on the curve of `focus`."
    yield preset_table(cells)
    yield "## Ablations at 15 %"
    yield "The cache, the granularity or the score changed. Differences are paired, way minus ours."
    yield ablation_table(cells)
    yield "### Variants of a chunk"
    yield (
        "`focus` at 15 % where each chunk was computed in full prefill of two other prompts and the better "
        "variant is taken (`traffic`), or of one (`single`)."
    )
    yield variants_table(cells)
    yield "## Ours against each other strategy, on the odd half"
    yield (
        "`focus` over `neighbours` minus the other way at the same ratio; a negative KL difference and a "
        "positive agreement difference mean that ours is nearer to full prefill. The interval columns say "
        "where the paired 95 % bootstrap interval lies."
    )
    yield "### All models and sets"
    yield paired_table(cells, _ODD) if has_pairs(cells, _ODD) else "Not measured yet."
    for cell in cells:
        if has_pairs([cell], _ODD):
            yield f"### {cell.model}, {cell.set_name}"
            yield paired_table([cell], _ODD)


def _loss(cells: Sequence[Cell]) -> Iterator[str]:
    yield "## Where the loss sits"
    yield "Over questions and answer tokens, `focus` at 15 % over `neighbours`:"
    yield question_table(cells)
    found = dict(loss_files())
    if not found:
        return
    yield (
        "Over chunks, nothing repaired: KL where nothing, the chunks that hold the evidence, or as many "
        "others drawn at random are computed in full (`python -m benchmarks.quality loss`):"
    )
    yield chunk_table(found)
    yield (
        "Over layers: distance of cached values from those of full prefill, relative to their size, mean "
        "over a sixth of the layers each, from the lowest to the highest:"
    )
    yield layer_table(found)


def _tried() -> Iterator[str]:
    """Variants that were measured and left out: their rows stay, their code is gone."""
    tried = [Cell.of(results) for results in result_files(_TRIED)]
    yield "## Variants that were tried"
    yield (_TRIED / "intro.md").read_text(encoding="utf-8").rstrip()
    for kind in dict.fromkeys(cell.model for cell in tried):
        yield f"### {kind.capitalize()}"
        yield tried_table([cell for cell in tried if cell.model == kind])


def _parts(files: Sequence[ResultFile], cells: Sequence[Cell]) -> Iterator[str]:
    for results, cell in zip(files, cells, strict=True):
        yield f"## {cell.name}"
        yield f"{len(cell.rows.get(FULL, {}))} items. {_origin(results)}"
        yield result_table(cell)
        yield f"![KL and agreement over the budget](quality/{results.path.stem}.png)"


def _origin(results: ResultFile) -> str:
    metas = results.metas()
    commits = ", ".join(dict.fromkeys(f"`{meta['commit']}`" for meta in metas))
    command = f"python -m benchmarks.quality run --model {results.model} --set {results.set_name}"
    facts = {key: value for key, value in metas[-1].items() if key not in ("commit", "set")}
    return f"Command: `{command}`. Commits (`+`: with changes): {commits}. Settings: `{json.dumps(facts)}`."


def _names(cells: Sequence[Cell]) -> str:
    return ", ".join(cell.name for cell in cells)
