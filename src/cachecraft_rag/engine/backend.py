"""What the engine needs of vLLM, as a protocol and two records; `backends` implements it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from cachecraft_rag.engine.api import SamplingOptions
from cachecraft_rag.vllm_connector.messages import ControlMessage

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class BackendRequest:
    """One request as vLLM gets it.

    Attributes:
        params: value of `kv_transfer_params`, None where no connector is attached.
        keeps_special_tokens: the text of the answer holds them too.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingOptions
    cache_salt: str
    params: Mapping[str, Any] | None = None
    keeps_special_tokens: bool = False


@dataclass(frozen=True, slots=True)
class BackendOutput:
    """New tokens of one request; `finish_reason` is set on the last one."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    logprobs: tuple[Mapping[int, float], ...] = ()
    kv_transfer_params: Mapping[str, Any] | None = None


class Backend(Protocol):
    """What the engine needs of vLLM.

    `generate` raises InvalidRequestError for what vLLM refuses, GenerationError for a fault of this
    one request, and EngineError when the engine is dead. Closing the generator aborts the request.
    """

    async def start(self) -> None: ...
    def generate(self, request: BackendRequest) -> AsyncGenerator[BackendOutput, None]: ...
    async def collective_rpc(self, method: str, *args: Any) -> list[Any]: ...
    async def send_control(self, message: ControlMessage) -> None: ...
    async def shutdown(self) -> None: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def vllm_config(self) -> VllmConfig: ...
