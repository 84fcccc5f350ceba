"""A call on its way: as it came in, as it is sent, and what has come of it so far."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cachecraft_rag.chunks import Chunk, PromptLayout
from cachecraft_rag.engine.answer_reader import AnswerReader, AsWritten
from cachecraft_rag.engine.api import Message
from cachecraft_rag.engine.backend import BackendOutput, BackendRequest
from cachecraft_rag.engine.options import CallOptions
from cachecraft_rag.events import ChunkReport
from cachecraft_rag.vllm_connector.messages import RequestSpec


@dataclass(frozen=True, slots=True)
class Call:
    """One call as it came in, its arguments checked.

    Attributes:
        prompt: finished text, or chat messages still to be rendered.
        started_s: `time.perf_counter()` at entry; time to first token counts from here.
    """

    prompt: str | Sequence[Message]
    chunks: tuple[Chunk, ...]
    options: CallOptions
    started_s: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call turned into tokens, ready to be sent."""

    call: Call
    layout: PromptLayout
    spec: RequestSpec
    request: BackendRequest
    absent: tuple[ChunkReport, ...]
    reader: AnswerReader = field(default_factory=AsWritten)

    def with_spec(self, spec: RequestSpec) -> Prepared:
        """The same call under another spec, and under its request id."""
        params = None if self.request.params is None else spec.to_params()
        request = replace(self.request, request_id=spec.request_id, params=params)
        return replace(self, spec=spec, request=request)


@dataclass(slots=True)
class Answer:
    """What has come of an answer so far."""

    started_s: float
    ttft_s: float = -1.0
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Mapping[int, float]] = field(default_factory=list)
    finish_reason: str | None = None
    params: Mapping[str, Any] | None = None

    def add(self, output: BackendOutput) -> None:
        if self.ttft_s < 0 and output.token_ids:
            self.ttft_s = time.perf_counter() - self.started_s
        self.text.append(output.text)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.finish_reason = output.finish_reason
        self.params = output.kv_transfer_params or self.params
