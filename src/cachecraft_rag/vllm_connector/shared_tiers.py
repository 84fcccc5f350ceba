"""How the two halves of the connector open what they share with other processes, or with a later one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cachecraft_rag.errors import StoreError
from cachecraft_rag.store.base import ChunkStore
from cachecraft_rag.store.cold import ColdStore
from cachecraft_rag.store.cold_settings import DISK, ColdSettings, open_journal, open_tiers
from cachecraft_rag.store.journal import Follower, Journal, Position
from cachecraft_rag.store.journal.position_file import PositionFile
from cachecraft_rag.vllm_connector.cold_io import ColdIO
from cachecraft_rag.vllm_connector.cold_side import ColdSide, Orphans
from cachecraft_rag.vllm_connector.shared_changes import OnApplied, SharedChanges

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SharedTiers:
    """The scheduler side's share."""

    cold: ColdSide
    make_changes: Callable[[OnApplied], SharedChanges]


def open_shared(
    settings: ColdSettings, store: ChunkStore, num_ranks: int, orphans: Orphans
) -> SharedTiers | None:
    """None without cold tiers, and where the journal cannot be opened: then nobody could say what in them is
    out of date."""
    cold = open_cold(settings, num_ranks)
    if cold is None:
        return None
    try:
        return _follow(settings, cold, store, num_ranks, orphans)
    except StoreError as error:
        logger.warning("cold tiers are left out: %s", error)
        cold.close()
        return None


def open_cold_io(settings: ColdSettings, rank: int, num_ranks: int) -> ColdIO | None:
    """One rank's share."""
    cold = open_cold(settings, num_ranks)
    return ColdIO(cold, rank) if cold is not None else None


def open_cold(settings: ColdSettings, num_ranks: int) -> ColdStore | None:
    """None without a cold tier that can be opened."""
    tiers = open_tiers(settings) if settings.has_tiers else {}
    return ColdStore(tiers, settings.namespace, num_ranks, settings.codec, settings.ttl_s) if tiers else None


def _follow(
    settings: ColdSettings, cold: ColdStore, store: ChunkStore, num_ranks: int, orphans: Orphans
) -> SharedTiers:
    journal = open_journal(settings)
    follower = Follower(journal, "engine")
    follower.start()
    positions = PositionFile(Path(settings.disk_dir) / f"position-{settings.name}.json")
    past = journal.end()
    if settings.disk_bytes and settings.redis_url:
        # Asked once the follower is a member: from then on nothing is compacted that it has not read.
        past = _catch_up_disk(cold, journal, positions)
    keep = positions.save if settings.disk_bytes else lambda position: None
    made: list[SharedChanges] = []

    def make_changes(on_applied: OnApplied) -> SharedChanges:
        made.append(SharedChanges(follower, store, side.changer, on_applied, past.seq, keep))
        return made[0]

    side = ColdSide(
        cold, store, num_ranks, settings.wait_s, orphans, may_publish=lambda meta: made[0].is_registered(meta)
    )
    return SharedTiers(side, make_changes)


def _catch_up_disk(cold: ColdStore, journal: Journal, positions: PositionFile) -> Position:
    """Up to where the folder has followed a journal that does not lie in it, and so may have gone on, or been
    lost, without it. What cannot catch up is dropped from the folder, and from nowhere else."""
    past = positions.load()
    if journal.continues(past):
        return past
    cold.drop_all([DISK])
    end = journal.end()
    positions.save(end)
    return end
