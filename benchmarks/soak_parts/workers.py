"""What the workers of a running engine say of themselves."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any

from cachecraft_rag import CacheCraftEngine


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """
    Attributes:
        num_records: whose KV each worker holds, those being filled included.
        stored_bytes: of the records of all workers.
        free_bytes: what the C allocator of all workers got from the system, holds, and nobody uses.
    """

    num_records: int
    stored_bytes: int
    free_bytes: int


def let_functions_be_sent() -> None:
    """Allow vLLM to send functions of ours to its workers. Before an engine starts."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"


def ask_workers(engine: CacheCraftEngine) -> WorkerFigures:
    """Needs `let_functions_be_sent`."""
    running: Any = engine._running
    ask, run = running._backend.collective_rpc, engine._live.loop.run
    figures = run(ask("cachecraft_stats"))
    return WorkerFigures(
        num_records=figures[0]["num_records"] + figures[0]["num_open"],
        stored_bytes=sum(each["num_bytes"] for each in figures),
        free_bytes=sum(run(ask(_free_bytes))),
    )


_MALLINFO2 = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Mallinfo2(ctypes.Structure):
    """Of glibc's malloc.h."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLINFO2)


def _free_bytes(worker: Any) -> int:
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:  # not glibc 2.33 or later: nothing is known to be free
        return 0
    mallinfo2.restype = _Mallinfo2
    return int(mallinfo2().fordblks)
