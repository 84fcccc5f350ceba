"""Small facts that outlive a process: one JSON file each, in the cache folder."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def load_facts(path: Path) -> Any:
    """What `save_facts` wrote.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: it is no JSON.
    """
    return json.loads(path.read_text(encoding="utf-8"))


def save_facts(path: Path, facts: Mapping[str, Any]) -> None:
    """Write the file whole or not at all. A folder that cannot be written costs only that the facts
    must be found again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(facts, file)
        os.replace(file.name, path)
    except OSError as error:
        logger.warning("%s could not be written, so it is not remembered: %s", path, error)
