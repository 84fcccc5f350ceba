"""A changed document is replaced where KV of it may be stored, and invalidated otherwise."""

from __future__ import annotations

import pytest

from cachecraft_rag.chunks import Chunk
from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.engine.renewal import renew
from cachecraft_rag.testing import FakeEngine

OLD, NEW = (Chunk(f"The {word} mill burnt down.", doc_id="mill", version=word) for word in ("old", "new"))


class Idle(FakeEngine):
    """An engine that has not started."""

    def __init__(self, config: CacheCraftConfig) -> None:
        super().__init__()
        self.config = config

    @property
    def is_started(self) -> bool:
        return False


def changes(engine: FakeEngine) -> list[tuple[str, str, str | None]]:
    return [(call.method, call.options["doc_id"], call.options["tenant"]) for call in engine.calls]


def test_a_started_engine_replaces() -> None:
    """The old text is gone, the new one stands under its version."""
    engine = FakeEngine()
    engine.chat([{"role": "user", "content": OLD.text}], chunks=[OLD])
    assert renew(engine, "mill", "new", [NEW]) == 1
    assert engine.last_call.options["version"] == "new"
    assert engine.last_call.chunks == (NEW,)


def test_a_document_without_chunks_is_invalidated() -> None:
    """Nothing is left of it, for this tenant."""
    engine = FakeEngine()
    assert renew(engine, "mill", "new", [], tenant="t") == 0
    assert changes(engine) == [("invalidate", "mill", "t")]


@pytest.mark.parametrize(("disk_store_bytes", "expected"), [(0, "invalidate"), (1 << 30, "replace")])
def test_an_idle_engine_replaces_only_what_outlived_it(disk_store_bytes: int, expected: str) -> None:
    """To replace starts the engine, which KV on disk is worth and an empty memory is not."""
    engine = Idle(CacheCraftConfig(disk_store_bytes=disk_store_bytes))
    renew(engine, "mill", "new", [NEW], tenant="t")
    assert changes(engine) == [(expected, "mill", "t")]
