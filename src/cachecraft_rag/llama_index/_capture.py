"""Zero configuration: LlamaIndex's own events tell which texts will stand in the prompts to come.

What was seen is a hint and no more: the engine reuses the KV of a text only where it finds the very
text in a prompt.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent
from llama_index.core.instrumentation.span import BaseSpan
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler
from llama_index.core.llms.llm import LLM
from llama_index.core.response_synthesizers.base import BaseSynthesizer
from llama_index_instrumentation import root_dispatcher

from cachecraft_rag.chunks import Chunk
from cachecraft_rag.errors import CacheCraftError
from cachecraft_rag.llama_index._answering import (
    Answering,
    LiveModels,
    answering_for,
    answering_of,
)
from cachecraft_rag.llama_index._passages import to_rendered_chunks, to_shown_chunks
from cachecraft_rag.llama_index._shared import as_shared

logger = logging.getLogger(__name__)

# Spans of streams that nobody reads to the end are never left.
_MAX_OPEN_SPANS = 4096


def start_capture(llm: LLM | None = None) -> None:
    """Watch what LlamaIndex retrieves, so that its own synthesizers, chat engines and agents reuse it.

    Every `CacheCraftLLM` calls this when it is made; it has no effect after `stop_capture`. Without `llm`
    it also undoes `stop_capture`. A text is told to the engine of the model that will answer from it, for
    that model's tenant; where this cannot be found out, and models of several engines or tenants are
    alive, it is told to none. `CacheCraftRetriever` and `CacheCraftSynthesizer` do not need it.
    """
    _capture.start(llm)


def stop_capture() -> None:
    """Watch no longer, for the whole process, until `start_capture()`."""
    _capture.stop()


@dataclass(frozen=True, slots=True)
class _OpenSpan:
    parent_id: str | None
    answering: Answering | None


class _CaptureSpans(BaseSpanHandler[BaseSpan]):
    """Sees the nodes a synthesizer is given, when rerankers and their like are through with them."""

    @classmethod
    def class_name(cls) -> str:
        return "CacheCraftCaptureSpans"

    def span_enter(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any | None = None,
        parent_id: str | None = None,
        tags: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        _capture.enter(id_, parent_id, instance, bound_args.arguments)

    def span_exit(self, id_: str, *_: Any, **kwargs: Any) -> None:
        _capture.leave(id_)

    def span_drop(self, id_: str, *_: Any, **kwargs: Any) -> None:
        _capture.leave(id_)

    # Abstract in the base class, and of no use to it once the three methods above are overridden.
    def new_span(self, *_: Any, **kwargs: Any) -> None:
        return None

    def prepare_to_exit_span(self, *_: Any, **kwargs: Any) -> None:
        return None

    def prepare_to_drop_span(self, *_: Any, **kwargs: Any) -> None:
        return None


class _CaptureEvents(BaseEventHandler):
    """Sees what was retrieved where no synthesizer follows: in agents and workflows."""

    @classmethod
    def class_name(cls) -> str:
        return "CacheCraftCaptureEvents"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        if isinstance(event, RetrievalEndEvent):
            _capture.retrieved(event)


class _Capture:
    """The state of the two handlers, which are of the whole process as LlamaIndex's dispatcher is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models = LiveModels()
        self._open: OrderedDict[str, _OpenSpan] = OrderedDict()
        self._spans, self._events = _CaptureSpans(), _CaptureEvents()
        self._is_stopped = False

    def start(self, llm: LLM | None) -> None:
        with self._lock:
            if llm is None:
                self._is_stopped = False
            else:
                self._models.see(answering_of(llm))
            if not self._is_stopped:
                self._detach()
                root = root_dispatcher
                root.add_span_handler(self._spans)
                root.add_event_handler(self._events)

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
            self._detach()
            self._open.clear()

    def _detach(self) -> None:
        root = root_dispatcher
        root.span_handlers = [each for each in root.span_handlers if each is not self._spans]
        root.event_handlers = [each for each in root.event_handlers if each is not self._events]

    def enter(
        self, span_id: str, parent_id: str | None, instance: object, arguments: Mapping[str, Any]
    ) -> None:
        answering = answering_for(instance)
        with self._lock:
            self._open[span_id] = _OpenSpan(parent_id, answering)
            if len(self._open) > _MAX_OPEN_SPANS:
                self._open.popitem(last=False)
        if isinstance(instance, LLM):
            # Copies, and tenants of single calls, are seen here for the first time.
            self._models.see(answering_of(instance, _tenant_of(arguments)))
        if isinstance(instance, BaseSynthesizer) and "nodes" in arguments and answering is not None:
            _tell(answering, to_shown_chunks(arguments["nodes"]))

    def leave(self, span_id: str) -> None:
        with self._lock:
            self._open.pop(span_id, None)

    def retrieved(self, event: RetrievalEndEvent) -> None:
        answering = self._answering_in(event.span_id) or self._models.sole()
        if answering is not None:
            _tell(answering, to_rendered_chunks(event.nodes))

    def _answering_in(self, span_id: str | None) -> Answering | None:
        """Who answers, by the innermost of the spans around that says it."""
        with self._lock:
            while span_id is not None and (span := self._open.get(span_id)) is not None:
                if span.answering is not None:
                    return span.answering
                span_id = span.parent_id
        return None


def _tenant_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    options = arguments.get("kwargs")
    tenant = options.get("tenant") if isinstance(options, dict) else None
    return {} if tenant is None else {"tenant": tenant}


def _tell(answering: Answering, chunks: Sequence[Chunk]) -> None:
    engine = answering.engine
    if engine is None or not chunks:
        return
    try:
        engine.prefetch(as_shared(engine, answering.tenant, chunks), tenant=answering.tenant)
    except CacheCraftError as error:
        # The user's retrieval goes on; the texts are computed in full.
        logger.warning("what was retrieved could not be told to the engine: %s", error)


_capture = _Capture()
