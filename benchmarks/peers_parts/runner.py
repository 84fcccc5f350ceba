"""Installs a peer in an environment of its own and runs its script there; says why where it cannot."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.peers_parts.job import Job, Result
from benchmarks.peers_parts.peer import Peer

INSTALL_TIMEOUT_S = 900.0
NUM_LAST_LINES = 8
# Left to itself vLLM keeps cores free, and how many depends on whether there is a connector: of two cores
# an engine without one computes on one.
ALL_CORES = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}


class PeerError(Exception):
    """A command of a peer's failed. Its text is what was run and the last it said."""


def install(peer: Peer, folder: Path) -> Path:
    """The Python of an environment that holds what the peer needs, in `folder`; made once.

    It sees the libraries of the environment that runs this, vLLM among them, behind its own: so all peers
    run the same engine, and nothing of theirs touches it.

    Raises:
        PeerError: something did not install.
    """
    if not peer.has_own_environment:
        return Path(sys.executable)
    wanted = repr((sys.version, sysconfig.get_path("purelib"), peer.requirements, peer.bare))
    home = folder / f"{peer.name}-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}"
    python, is_whole = home / "bin" / "python", home / "installed"
    if is_whole.exists():
        return python
    shutil.rmtree(home, ignore_errors=True)
    _call([sys.executable, "-m", "venv", "--without-pip", str(home)], INSTALL_TIMEOUT_S)
    _see_parent(python)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    for options, requirements in (([], peer.requirements), (["--no-deps"], peer.bare)):
        if requirements:
            _call([*pip, "--disable-pip-version-check", *options, *requirements], INSTALL_TIMEOUT_S)
    is_whole.touch()
    return python


def run(peer: Peer, python: Path, job: Job, folder: Path, timeout_s: float) -> Result:
    """The peer's answers; `folder` keeps the job, the result and all that was said.

    Raises:
        PeerError: the script failed, took too long, or left no result.
    """
    asked, answered = folder / f"{peer.name}.job.json", folder / f"{peer.name}.result.json"
    answered.unlink(missing_ok=True)
    job.write(asked)
    command = [str(python), str(peer.script), str(asked), str(answered)]
    said = _call(command, timeout_s, {**ALL_CORES, **peer.environment})
    (folder / f"{peer.name}.log").write_text(said)
    try:
        return Result.read(answered)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise PeerError(f"{shlex.join(command)} left no result: {error!r}") from error


def try_peer(
    peer: Peer, job: Job, cache: Path, folder: Path, timeout_s: float, say: Callable[[str], None]
) -> Result | str:
    """The result, or why there is none."""
    try:
        return run(peer, install(peer, cache), job, folder, timeout_s)
    except PeerError as error:
        say(f"{peer.name}: {error}")
        return str(error)


def _see_parent(python: Path) -> None:
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = Path(_call([str(python), "-c", query], INSTALL_TIMEOUT_S).strip())
    (own / "engine.pth").write_text(sysconfig.get_path("purelib") + "\n")


def _call(command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None) -> str:
    """What the command said on both of its outputs. It has a group of its own, which ends with it: engines
    and servers leave processes behind when they fail."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=timeout_s)
            how = f"ended with {process.returncode}"
        except subprocess.TimeoutExpired:
            how, said = f"was ended after {timeout_s:.0f} s", None
        finally:
            _end_group(process.pid)
        said = process.communicate()[0] if said is None else said
    if how != "ended with 0":
        raise PeerError(f"{shlex.join(command)} {how}:\n{_last_lines(said)}")
    return said


def _end_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def _last_lines(said: str) -> str:
    lines = [line.rstrip() for line in said.splitlines() if line.strip()]
    return "\n".join(lines[-NUM_LAST_LINES:])
