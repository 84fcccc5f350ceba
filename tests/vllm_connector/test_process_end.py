"""What our connector does when vLLM ends."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from cachecraft_rag.vllm_connector.connector import CacheCraftConnector


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize(("is_in_process", "is_frozen"), [(False, True), (True, False)])
def test_only_a_process_of_vllm_is_frozen(is_in_process: bool, is_frozen: bool) -> None:
    """A caller that has vLLM in its own process goes on, and needs its garbage collected."""
    connector = CacheCraftConnector.__new__(CacheCraftConnector)  # vLLM's own parts play no role
    connector.scheduler_side = connector.worker_side = None
    connector.is_in_process = is_in_process
    connector.shutdown()
    assert (gc.get_freeze_count() > 0) is is_frozen
