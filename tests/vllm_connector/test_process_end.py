"""What our connector does when vLLM ends."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from cachecraft_rag.vllm_connector.compat import freeze_own_process


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize(("multiprocessing", "is_frozen"), [("1", True), ("0", False)])
def test_only_a_process_of_vllm_is_frozen(
    multiprocessing: str, is_frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that has vLLM in its own process goes on, and needs its garbage collected."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", multiprocessing)
    freeze_own_process()
    assert (gc.get_freeze_count() > 0) is is_frozen
