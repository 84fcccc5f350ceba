"""A sampling profiler for all threads of this process, which asks whose code is at work.

A sample of a thread belongs to the innermost frame of ours or of vLLM: what a function of ours has torch
or a tokenizer do is its own time, what it has vLLM do is not. Threads that wait belong to nobody.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

INTERVAL_S = 0.002
OURS, VLLM = "cachecraft_rag", "vllm"
KERNELS = ("/vllm_connector/gathered_attention.py",)
"""The model's attention, computed instead of vLLM's kernel: part of what a prefill is, not of what we add."""
WAITING = ("/threading.py", "/selectors.py", "/queue.py", "/concurrent/futures/thread.py")


@dataclass(frozen=True, slots=True)
class Place:
    """A function in a file."""

    file: str
    function: str


@dataclass(slots=True)
class Sampler:
    """Counts samples by owner within `running`."""

    counts: Counter[str] = field(default_factory=Counter)
    num_samples: int = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        stop = threading.Event()
        thread = threading.Thread(target=self._sample, args=(stop,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _sample(self, stop: threading.Event) -> None:
        own = threading.get_ident()
        while not stop.wait(INTERVAL_S):
            frames = sys._current_frames()
            # Once for each instant, however many threads are at it: shares are of wall time.
            owners = {owner_of(list(_stack(frame))) for thread, frame in frames.items() if thread != own}
            self.counts.update(owner for owner in owners if owner)
            self.num_samples += 1

    def shares(self) -> list[tuple[str, float]]:
        """Owner and its share of all samples, largest first."""
        return [(owner, count / self.num_samples) for owner, count in self.counts.most_common()]


def owner_of(stack: Sequence[Place]) -> str:
    """Whose a stack is, innermost frame first: "vllm", "module:function" of ours, "" for nobody."""
    if not stack or stack[0].file.endswith(WAITING):
        return ""
    for place in stack:
        if place.file.endswith(KERNELS):
            return VLLM
        if f"/{OURS}/" in place.file:
            return f"{place.file.split(f'/{OURS}/', 1)[1]}:{place.function}"
        if f"/{VLLM}/" in place.file:
            return VLLM
    return ""


def _stack(frame: FrameType | None) -> Iterator[Place]:
    while frame is not None:
        yield Place(frame.f_code.co_filename, frame.f_code.co_qualname)
        frame = frame.f_back
