"""The example notebooks are what their sources say, with outputs, and tell nothing about a machine.

That they run is checked by `make notebooks`.
"""

from __future__ import annotations

import re
from pathlib import Path

import jupytext
import nbformat
import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
SOURCES = sorted(FOLDER.glob("*.py"))
MACHINE = re.compile(r"/(?:root|home|work|tmp|usr|opt|Users)/|Traceback|WARNING|https?://(?:localhost|127\.)")


@pytest.fixture(params=SOURCES, ids=lambda path: path.stem)
def source(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def cells(notebook: nbformat.NotebookNode) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def test_notebooks_are_there() -> None:
    """Each source has a notebook and the other way round, and there are some."""
    assert SOURCES
    assert {path.stem for path in SOURCES} == {path.stem for path in FOLDER.glob("*.ipynb")}


def test_notebook_has_the_cells_of_its_source(source: Path) -> None:
    """A changed source asks for `make outputs`."""
    notebook = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    assert cells(notebook) == cells(jupytext.read(source))


def test_outputs_are_there_and_name_no_machine(source: Path) -> None:
    """Outputs are committed, without paths, hosts, warnings and errors."""
    notebook = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any(output.output_type in ("stream", "execute_result", "display_data") for output in outputs)
    assert [found for output in outputs if (found := MACHINE.findall(str(output.get("text", output))))] == []
