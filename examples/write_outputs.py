"""Run the example notebooks and write them with their outputs, from the .py files: `make outputs`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent / "notebooks"
TIMEOUT_S = 900
# For the kernel and vLLM's processes: what they say about this machine is not for the reader.
QUIET = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1"}


def main(names: list[str]) -> None:
    """Write those named, or all."""
    os.environ.update(QUIET)
    for source in sorted(FOLDER.glob("*.py")):
        if names and source.stem not in names:
            continue
        print(source.stem, flush=True)
        notebook = jupytext.read(source)
        notebook.metadata.pop("jupytext", None)
        NotebookClient(notebook, timeout=TIMEOUT_S, resources={"metadata": {"path": FOLDER}}).execute()
        for number, cell in enumerate(notebook.cells):
            cell["id"] = f"cell-{number}"  # a random one would change with every run
            cell.metadata.pop("execution", None)
            if cell.cell_type == "code":
                cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        nbformat.write(notebook, source.with_suffix(".ipynb"))


if __name__ == "__main__":
    main(sys.argv[1:])
