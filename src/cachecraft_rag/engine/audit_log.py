"""The audit log: which document versions stood behind each answer, and what was dropped. One JSON object
a line, never any text of prompts, chunks or answers; docs/store.md has the fields."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from typing import Any

from cachecraft_rag.chunks import ChunkKey
from cachecraft_rag.events import ChunkDecision, Reason, ReuseReport
from cachecraft_rag.vllm_connector.messages import RequestSpec

logger = logging.getLogger(__name__)

MAX_WAITING_LINES = 10_000
"""Beyond this the disk is stuck: lines are counted as failed rather than kept in memory."""
DEADLINE_S = 0.05
"""Longest that an answer or a change waits for its line to be written."""

# A pipe nobody reads, put in the file's place, fails at once instead of stopping the writer.
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
_MODE = 0o600


class AuditLog:
    """Appends lines in a thread of its own; what goes wrong is counted and logged once, never raised.

    Each line is one write to a file opened for appending, so that processes may share it. A file that
    was moved away or removed by rotation is made anew at the next line.

    Args:
        path: of the file; None for no log: then every call does nothing.
    """

    def __init__(self, path: str | None) -> None:
        # Absolute: a change of the working folder must not send the log elsewhere.
        self._path = os.path.abspath(path) if path else ""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="cachecraft-audit") if path else None
        self._places = threading.BoundedSemaphore(MAX_WAITING_LINES)
        self._descriptor: int | None = None
        self._is_torn = False
        self._num_lines = 0
        self._lock = threading.Lock()  # over what goes wrong, in any thread
        self._num_failed = 0
        self._last_fault = ""

    async def answered(self, tenant: str, report: ReuseReport) -> None:
        """An answer is about to be given; returns when its line is written, or at the deadline."""
        written = self._add(
            "answer",
            request_id=report.request_id,
            tenant=tenant,
            decision=report.decision,
            reason=report.reason,
            chunks=[
                _chunk(chunk.chunk_key, chunk.doc_id, chunk.version, chunk.decision)
                for chunk in report.chunks
                if chunk.reason is not Reason.NOT_IN_PROMPT
            ],
        )
        if written is not None:
            await asyncio.wait([asyncio.wrap_future(written)], timeout=DEADLINE_S)

    def interrupted(self, spec: RequestSpec) -> None:
        """A part of an answer was given, then the caller ended it: there is no report, only the prompt."""
        self._add(
            "interrupted",
            request_id=spec.request_id,
            tenant=spec.tenant,
            decision=None,
            reason=None,
            chunks=[
                _chunk(ref.key, ref.document.doc_id, ref.document.version, None)
                if ref.document
                else _chunk(ref.key, None, None, None)
                for ref in spec.chunks
            ],
        )

    def changed(
        self, action: str, tenant: str, arguments: Mapping[str, Any], *, num_dropped: int = 0, fault: str = ""
    ) -> None:
        """A document was replaced or invalidated, chunks were invalidated or a tenant purged; or it failed.
        Returns when its line is written, or at the deadline.

        Args:
            arguments: of the action: `doc_id`, `version` and `keys`, where it has them.
        """
        written = self._add(
            action,
            tenant=tenant,
            doc_id=arguments.get("doc_id"),
            version=arguments.get("version"),
            chunk_keys=list(arguments.get("keys", ())),
            num_dropped=num_dropped,
            fault=fault,
        )
        if written is not None:
            wait([written], timeout=DEADLINE_S)

    def stats(self) -> dict[str, Any] | None:
        """Counts, None where there is no log."""
        if self._writer is None:
            return None
        return {
            "num_lines": self._num_lines,
            "num_failed": self._num_failed,
            "last_fault": self._last_fault,
        }

    def close(self) -> None:
        """Write what waits, then close the file. Lines that come after it are counted as failed."""
        if self._writer is not None:
            self._writer.shutdown(wait=True)
            self._reopen(None)

    def _add(self, event: str, **facts: Any) -> Future[None] | None:
        if self._writer is None:
            return None
        line = json.dumps({"time": _now(), "event": event, **facts}, separators=(",", ":"))
        if not self._places.acquire(blocking=False):
            self._failed("the disk does not keep up")
            return None
        try:
            return self._writer.submit(self._append, line)
        except RuntimeError as fault:  # it was shut down
            self._failed(str(fault))
            return None

    # --- in the writer's thread ---------------------------------------------------------------

    def _append(self, line: str) -> None:
        self._places.release()
        try:
            descriptor = self._current_file()
            # What an earlier fault left half written must not swallow this line.
            data = (b"\n" if self._is_torn else b"") + line.encode() + b"\n"
            num_written = os.write(descriptor, data)
        except OSError as fault:
            self._failed(str(fault))
            return
        self._is_torn = num_written < len(data)
        if self._is_torn:
            self._failed(f"only {num_written} of {len(data)} bytes could be written")
        else:
            self._num_lines += 1

    def _current_file(self) -> int:
        """The descriptor of the file that has the path now.

        Raises:
            OSError: it cannot be opened.
        """
        if self._descriptor is None or not _is_same(self._descriptor, self._path):
            self._reopen(os.open(self._path, _FLAGS, _MODE))
        assert self._descriptor is not None
        return self._descriptor

    def _reopen(self, descriptor: int | None) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = descriptor
        self._is_torn = False

    def _failed(self, fault: str) -> None:
        with self._lock:
            is_first, self._num_failed, self._last_fault = not self._num_failed, self._num_failed + 1, fault
        if is_first:
            logger.warning("the audit log %s is not complete: %s", self._path, fault)


def _chunk(
    key: ChunkKey, doc_id: str | None, version: str | None, decision: ChunkDecision | None
) -> dict[str, Any]:
    return {"doc_id": doc_id, "version": version, "chunk_key": key, "decision": decision}


def _is_same(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
