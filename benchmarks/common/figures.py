"""Pictures for pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def panels(target: Path, title: str, count: int = 2, width_inches: float = 11) -> Iterator[Any]:
    """Axes side by side to draw on; written as one PNG to `target` at the end."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, count, figsize=(width_inches, 4.5), layout="constrained")
    yield axes
    figure.suptitle(title)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Without the version of matplotlib in it, the same figures give the same file.
    figure.savefig(target, dpi=110, metadata={"Software": None})
    plt.close(figure)
