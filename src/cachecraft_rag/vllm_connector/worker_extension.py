"""The mixin that vLLM adds to its worker class: the driver's way into a worker.

vLLM asserts that none of these names is an attribute of the worker already, hence the prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from cachecraft_rag.errors import InternalError
from cachecraft_rag.vllm_connector import compat

if TYPE_CHECKING:
    from cachecraft_rag.vllm_connector.worker_side import WorkerSide


class CacheCraftWorkerExtension:
    """Called by name through `collective_rpc`; arguments and results are plain data."""

    def cachecraft_attach(self) -> dict[str, Any]:
        """Let the connector find the loaded model: `{"supported": bool, "reason": str}`."""
        try:
            _worker_side().attach(self.model_runner)  # type: ignore[attr-defined]
        except InternalError as error:
            return {"supported": False, "reason": str(error)}
        return {"supported": True, "reason": ""}

    def cachecraft_take_report(self, request_id: str) -> Mapping[str, Any] | None:
        """The report of a finished request as a dictionary, once; None if it is not here (yet)."""
        return _worker_side().take_answer(request_id)

    def cachecraft_take_reply(self, control_id: str) -> Mapping[str, Any] | None:
        """The answer to a control message, once; None if it is not here (yet)."""
        return _worker_side().take_answer(control_id)

    def cachecraft_stats(self) -> dict[str, int]:
        """Records and bytes held by this rank."""
        return _worker_side().stats()


def _worker_side() -> WorkerSide:
    return cast("WorkerSide", compat.worker_connector().worker_side)
