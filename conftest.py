"""What holds for tests and notebooks alike."""

from __future__ import annotations

import os


def share_of_cores(index: int, count: int) -> str:
    """The cores of one of `count` workers, as vLLM's CPU workers take them."""
    cores = sorted(os.sched_getaffinity(0))
    size = max(1, len(cores) // count)
    first = index * size % len(cores)
    return ",".join(map(str, cores[first : first + size]))


# Engines that run side by side would each use all cores, and every kernel would wait at its barriers for
# threads that the other engine's have put aside.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    count = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    cores = share_of_cores(int(worker.removeprefix("gw")), count)
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
