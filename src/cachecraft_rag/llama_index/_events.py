"""What LlamaIndex's instrumentation is told."""

from __future__ import annotations

from llama_index.core.instrumentation.events import BaseEvent
from llama_index_instrumentation import get_dispatcher

from cachecraft_rag.events import ReuseReport

_dispatcher = get_dispatcher(__name__)


class ChunkReuseEvent(BaseEvent):
    """A request was answered, and this is what reuse did for it.

    Sent once per answered request, before LlamaIndex's own end event; for a stream with its last piece. A
    request that failed and a stream that was not read to its end send none. `span_id` is that of the
    endpoint, e.g. `CacheCraftLLM.achat-...`; `tags` are those of `instrument_tags`.
    """

    report: ReuseReport
    model_name: str

    @classmethod
    def class_name(cls) -> str:
        return "ChunkReuseEvent"


def tell_reuse(report: ReuseReport, model_name: str, span_id: str | None) -> None:
    """Send a `ChunkReuseEvent`; a handler that raises is LlamaIndex's to ignore, and it does."""
    _dispatcher.event(ChunkReuseEvent(report=report, model_name=model_name, span_id=span_id))
