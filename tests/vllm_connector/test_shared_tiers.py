"""What an engine finds of a folder and a Redis that others used before it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachecraft_rag.chunks import ChunkKey, RecordMeta
from cachecraft_rag.store.cold import ColdStore
from cachecraft_rag.store.cold_settings import ColdSettings, open_journal, open_tiers
from cachecraft_rag.store.host import HostChunkStore
from cachecraft_rag.store.journal import Action, Entry
from cachecraft_rag.vllm_connector.cold_side import Orphans
from cachecraft_rag.vllm_connector.shared_tiers import open_cold, open_shared

KEY = ChunkKey("k1")
META = RecordMeta(
    record_id=1, key=KEY, tenant="a", num_tokens=3, start=4, size_bytes=100, prefix_hash="p1", generation=0
)


@pytest.fixture
def settings_for(redis_server: Any, tmp_path: Path, request: Any) -> Callable[[str], ColdSettings]:
    """Of an engine with this folder, all on one Redis; the model is the test's own."""

    def make(folder: str) -> ColdSettings:
        return ColdSettings(
            namespace=request.node.name,
            disk_dir=str(tmp_path / folder),
            disk_bytes=1 << 22,
            redis_url=redis_server.url,
            redis_bytes=1 << 22,
        )

    return make


def write(settings: ColdSettings) -> None:
    """A variant in all tiers."""
    cold = open_cold(settings, 1)
    assert cold is not None
    entry, tiers = cold.put_part(META, 0, np.ones((2, 3), np.float32), None)
    cold.publish(META, [entry], tiers)
    assert set(tiers) == {"disk", "redis"}
    cold.close()


def run_engine(settings: ColdSettings) -> None:
    """An engine's start and end: its position is kept on the way."""
    host, orphans = HostChunkStore(1000, 2), Orphans()
    shared = open_shared(settings, host, 1, orphans)
    assert shared is not None
    changes = shared.make_changes(lambda entry, is_news: None)
    assert changes.catch_up()
    changes.keep_position()
    changes.close()
    shared.cold.close()


def tiers_with(settings: ColdSettings) -> set[str]:
    """Tiers that still have the variant."""
    found = set()
    for name, tier in open_tiers(settings).items():
        cold = ColdStore({name: tier}, settings.namespace, 1)
        if cold.find("a", KEY):
            found.add(name)
        cold.close()
    return found


def test_a_new_folder_takes_nothing_from_redis(settings_for: Callable[[str], ColdSettings]) -> None:
    """Even though it cannot say how far it has followed the journal."""
    write(settings_for("one"))
    run_engine(settings_for("two"))
    assert "redis" in tiers_with(settings_for("two"))


def test_a_folder_that_kept_up_keeps_what_it_has(settings_for: Callable[[str], ColdSettings]) -> None:
    """Its position can be continued."""
    settings = settings_for("one")
    run_engine(settings)
    write(settings)
    run_engine(settings)
    assert tiers_with(settings) == {"disk", "redis"}


@pytest.mark.parametrize("miss", ["no position", "compacted"])
def test_a_folder_that_missed_changes_is_emptied(
    settings_for: Callable[[str], ColdSettings], tmp_path: Path, miss: str
) -> None:
    """And nothing but the folder: in Redis, whoever made the changes dropped what they concern."""
    settings = settings_for("one")
    run_engine(settings)
    write(settings)
    if miss == "no position":
        (position,) = (tmp_path / "one").glob("position-*")
        position.unlink()
    else:
        journal = open_journal(settings)
        journal.append(
            [Entry(action=Action.INVALIDATE, tenant="a", doc_id=name, version=None) for name in "xyz"]
        )
        journal.compact(keep=0)
        journal.close()
    run_engine(settings)
    assert tiers_with(settings) == {"redis"}
