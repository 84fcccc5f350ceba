"""What every result says of its run: machine, commit, command, model."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.quality.results import commit


def machine() -> dict[str, Any]:
    """Processor, number of cores, and the load over the last minute."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    return {"cpu": model, "cores": os.cpu_count(), "load_1min": os.getloadavg()[0]}


def model_name(model: str | None) -> str:
    """What results call the model in this folder; None is the default model."""
    return Path(model).name if model else "SmolLM2-135M-Instruct (default)"


def run_facts(program: str, model: str, engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of the run that goes on now, taken at its start.

    Args:
        program: what comes before the arguments, such as `python -m benchmarks.stall`.
        model: a name, never a path.
    """
    return {
        "command": f"{program} {shlex.join(sys.argv[1:])}".strip(),
        "commit": commit(),
        "machine": machine(),
        "model": model,
        "engine_args": dict(engine_args),
    }


def origin(facts: Mapping[str, Any]) -> str:
    """The facts of a run in a sentence, for its section of a page."""
    host = facts["machine"]
    return (
        f"`{facts['command']}` at commit `{facts['commit']}` (`+`: with changes); {host['cores']} cores, "
        f"{host['cpu']}, load {host['load_1min']:.1f} at the start; model {facts['model']}, "
        f"`{json.dumps(facts['engine_args'])}`."
    )
