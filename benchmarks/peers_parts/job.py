"""What a peer's script is given and what it gives back, as JSON.

The scripts run in environments of their own and import none of this: the field names are the contract.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: `messages` and `documents` for who tokenises himself, `prompt_token_ids` for the rest."""

    messages: Sequence[Mapping[str, str]]
    documents: Sequence[Mapping[str, str]]
    max_tokens: int
    prompt_token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """Attributes:
    folder: empty, for whatever the peer wants to write.
    warm_up: answered first, in turn; their answers are returned too.
    """

    model: str
    engine_args: Mapping[str, Any]
    folder: str
    warm_up: Sequence[Asked]
    measured: Sequence[Asked]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


@dataclass(frozen=True, slots=True)
class Answered:
    """Attributes:
    num_saved: prompt tokens that were not computed, as the peer's engine counts them.
    """

    ttft_s: float
    token_ids: Sequence[int]
    text: str
    num_prompt: int
    num_saved: int
    prompt_token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """Answers in the order of the job's requests."""

    warm_up: Sequence[Answered]
    measured: Sequence[Answered]

    @classmethod
    def read(cls, path: Path) -> Result:
        """Raises: KeyError, TypeError or ValueError, if it is not a result."""
        found = json.loads(path.read_text())
        return cls(*([Answered(**each) for each in found[part]] for part in ("warm_up", "measured")))
