"""Who is compared: what each needs, and the script that answers with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

SCRIPTS = Path(__file__).with_name("scripts")


@dataclass(frozen=True, slots=True)
class Peer:
    """One way of answering.

    Attributes:
        what: one line for the reader.
        script: run as `python SCRIPT JOB RESULT`, see `job`.
        requirements: installed for it, with what they need.
        bare: installed without what they need: their own wishes would replace the engine's libraries.
        environment: variables of its process.
        warms_up: False for a way that keeps nothing.
    """

    name: str
    what: str
    script: Path
    requirements: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    warms_up: bool = True

    @property
    def has_own_environment(self) -> bool:
        return bool(self.requirements or self.bare)


OURS = Peer("ours", "cachecraft-rag, preset balanced", SCRIPTS / "ours.py")
FULL = Peer("full", "full prefill, no cache", SCRIPTS / "full.py", warms_up=False)
PREFIX = Peer("prefix", "vLLM's prefix caching", SCRIPTS / "prefix.py")
# What LMCache itself asks for holds cupy and cuda-python, and older numpy and protobuf than vLLM's. What is
# listed is what its server and its vLLM client import without a GPU (shared notes on peers, section 5).
LMCACHE = Peer(
    "lmcache",
    "LMCache 0.5.6, server mode, --engine-type blend",
    SCRIPTS / "lmcache_server.py",
    requirements=(
        "aiofile",
        "aiofiles",
        "awscrt",
        "caio",
        "nvtx",
        "opentelemetry-exporter-prometheus",
        "py-cpuinfo",
        "redis",
        "sortedcontainers",
    ),
    bare=("lmcache==0.5.6",),
    environment={"DO_NOT_TRACK": "1", "LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0"},
)
SEMBLEND = Peer(
    "semblend",
    "SemBlend 0.2.8, semantic spans: moved, never recomputed",
    SCRIPTS / "with_semblend.py",  # not `semblend.py`: that would be imported instead of the package
    bare=("semblend-vllm-connector==0.2.8", "semblend==0.3.25"),
)
PEERS: Mapping[str, Peer] = {peer.name: peer for peer in (OURS, FULL, PREFIX, LMCACHE, SEMBLEND)}


def chosen_peers(names: tuple[str, ...]) -> list[Peer]:
    """The peers of these names; ours first, as its prompts are what the others are asked.

    Raises:
        SystemExit: an unknown name.
    """
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise SystemExit(f"unknown peer {', '.join(unknown)}: choose from {', '.join(PEERS)}")
    return [PEERS[name] for name in dict.fromkeys((OURS.name, *names))]
