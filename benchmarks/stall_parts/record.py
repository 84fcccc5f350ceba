"""What `benchmarks.stall` measured, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "stall.json"
FULL = "full prefill"
"""The way that is vLLM's own chunked prefill."""


@dataclass(frozen=True)
class Row:
    """Medians over repeats, in seconds.

    Attributes:
        gap_s: longest time between two tokens of a decoding request while the prompt was computed.
        alone_gap_s: the same without the prompt.
        ttft_s: of the prompt beside the decoding requests.
        alone_ttft_s: of the prompt alone at the same tokens a step.
        whole_ttft_s: of the prompt alone at 8192 tokens a step.
        together_s, in_turn_s: until all of several such prompts have their first token.
    """

    way: str
    gap_s: float
    alone_gap_s: float
    ttft_s: float
    alone_ttft_s: float
    whole_ttft_s: float = 0.0
    together_s: float = 0.0
    in_turn_s: float = 0.0


@dataclass(frozen=True)
class StallRecord:
    """One run.

    Attributes:
        facts: of the run, see `common.facts`.
        settings: `context` and `step_tokens` in tokens, prompts `together`, and `repeats`.
    """

    facts: Mapping[str, Any]
    settings: Mapping[str, int]
    rows: Sequence[Row]


def save(record: StallRecord, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> StallRecord:
    data = json.loads(path.read_text(encoding="utf-8"))
    return StallRecord(data["facts"], data["settings"], [Row(**row) for row in data["rows"]])
