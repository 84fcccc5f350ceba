"""Control messages, carried out in steps: between steps a command waits for side threads, not the scheduler.

With no request running, vLLM takes no step in which a later answer could be sent. So what is not done at
once is answered with `awaits`, and the driver asks again with `await`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

from cachecraft_rag.chunks import ChunkKey, DocumentRef
from cachecraft_rag.errors import InternalError
from cachecraft_rag.store.base import ChunkStore
from cachecraft_rag.store.journal import Action, Entry
from cachecraft_rag.vllm_connector.cold_side import ColdSide
from cachecraft_rag.vllm_connector.messages import ControlMessage
from cachecraft_rag.vllm_connector.shared_changes import OnApplied, SharedChanges, Steps, apply_change

logger = logging.getLogger(__name__)

Reply = Mapping[str, Any]


@dataclass(slots=True, eq=False)
class _Running:
    message: ControlMessage
    steps: Generator[Future[Any], Any, Any]
    waits_for: Future[Any] | None = None


class Commands:
    """Used from the scheduler's thread only.

    Args:
        cold: None without cold tiers.
        changes: None where no other process shares the store.
        on_applied: told of a change that is in the books where there are no `changes` to tell it.
        figures: what the scheduler side adds to the store's `stats`.
        size_bytes: of a record of a chunk of so many tokens.
    """

    def __init__(
        self,
        store: ChunkStore,
        cold: ColdSide | None,
        changes: SharedChanges | None,
        on_applied: OnApplied,
        figures: Callable[[], Mapping[str, Any]],
        size_bytes: Callable[[int], int],
    ) -> None:
        self._store = store
        self._cold = cold
        self._changes = changes
        self._on_applied = on_applied
        self._figures = figures
        self._size_bytes = size_bytes
        self._awaited: dict[str, _Running] = {}

    def carry_out(self, message: ControlMessage) -> Reply:
        """The reply for now: a `result`, an `error`, or what it `awaits`."""
        if message.action == "await":
            running = self._awaited.pop(message.arguments["control_id"], None)
            return self._advance(running) if running else {"error": "no such command is awaited"}
        return self._advance(_Running(message, self._steps(message)))

    def _advance(self, running: _Running) -> Reply:
        try:
            while running.waits_for is None or running.waits_for.done():
                result = running.waits_for.result() if running.waits_for else None
                running.waits_for = running.steps.send(result)
        except StopIteration as end:
            return {"result": end.value}
        except Exception as error:
            logger.exception("control message %s failed", running.message.action)
            return {"error": f"{running.message.action} failed: {error}"}
        self._awaited[running.message.control_id] = running
        return {"awaits": running.message.control_id}

    def _steps(self, message: ControlMessage) -> Steps:
        args = message.arguments
        match message.action:
            case "invalidate":
                entry = Entry(
                    action=Action.INVALIDATE,
                    tenant=args["tenant"],
                    doc_id=args["doc_id"],
                    version=args.get("version"),
                )
                return (yield from self._change(entry))
            case "replace":
                entry = Entry(
                    action=Action.REPLACE,
                    tenant=args["tenant"],
                    doc_id=args["doc_id"],
                    version=args["version"],
                    keys=tuple(map(ChunkKey, args["keys"])),
                )
                return (yield from self._change(entry))
            case "invalidate_chunks":
                keys = tuple(map(ChunkKey, args["keys"]))
                entry = Entry(action=Action.INVALIDATE_CHUNKS, tenant=args["tenant"], keys=keys)
                return (yield from self._change(entry))
            case "purge":
                return (yield from self._change(Entry(action=Action.PURGE, tenant=args["tenant"])))
            case "drop_chunks":
                return (yield from self._drop_chunks(args["tenant"], list(map(ChunkKey, args["keys"]))))
            case "prefetch":
                if self._cold is not None:
                    self._cold.seek(args["tenant"], map(ChunkKey, args["keys"]))
                return None
            case "worth_computing":
                return self._worth_computing(args["tenant"], args["chunks"])
            case "flush":
                if self._changes is not None:
                    self._changes.keep_position()
                if self._cold is not None:
                    yield self._cold.flush()
                return None
            case "stats":
                cold = {"tiers": self._cold.stats()} if self._cold else {}
                return {**cold, **asdict(self._store.stats()), **self._figures()}
            case "check":
                return (yield from self._check(bool(args.get("repair"))))
        raise InternalError(f"unknown control action {message.action!r}")

    def _worth_computing(self, tenant: str, chunks: Sequence[Sequence[Any]]) -> list[ChunkKey]:
        """Keys of the chunks (key, tokens, document or None) that are not stored, of a current version, and
        for which there is room beside those before them, with nothing having to go."""
        spare_bytes, worth = self._store.spare_bytes(tenant), []
        for key, num_tokens, where in chunks:
            is_current = where is None or self._store.is_current(tenant, DocumentRef(*where))
            size_bytes = self._size_bytes(num_tokens)
            if is_current and size_bytes <= spare_bytes and not self._store.holds(tenant, ChunkKey(key)):
                worth.append(ChunkKey(key))
                spare_bytes -= size_bytes
        return worth

    def _change(self, entry: Entry) -> Steps:
        """A change of documents: complete in every tier, and binding for all processes, when it returns."""
        if self._changes is None:
            num_dropped = apply_change(self._store, entry)
            self._on_applied(entry, True)
        else:
            num_dropped = yield from self._changes.make(entry)
        if self._cold is not None:
            yield self._cold.settled()
        return num_dropped

    def _check(self, repair: bool) -> Steps:
        faults = self._store.check(repair)
        if self._cold is None:
            return faults
        if repair:
            self._cold.drop_orphaned()
            yield self._cold.settled()
        found = yield self._cold.check(repair)
        if not found or not repair:
            return [*faults, *found]
        left = yield self._cold.check()
        done = f"repaired: {len(set(found) - set(left))} of {len(found)} faults of the cold tiers"
        return [*faults, *found, done, *(f"not repaired: {fault}" for fault in left)]

    def _drop_chunks(self, tenant: str, keys: list[ChunkKey]) -> Steps:
        records = [record for key in keys for record in self._store.variants(tenant, key)]
        for record in records:
            self._store.discard(record.record_id)
        if self._cold is not None:
            yield self._cold.drop(tenant, keys)
        return len(records)
