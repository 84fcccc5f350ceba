"""Who will answer from what is being retrieved: which engine, and for which tenant."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, WeakKeyDictionary, ref

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.llms.llm import LLM
from llama_index.core.llms.structured_llm import StructuredLLM

from cachecraft_rag.engine.api import ChatEngine
from cachecraft_rag.errors import CacheCraftError
from cachecraft_rag.llama_index._handle import EngineHandle

if TYPE_CHECKING:
    from cachecraft_rag.llama_index._base import EngineBackedLLM


@dataclass(frozen=True, slots=True)
class Answering:
    """The model that will answer.

    Attributes:
        handle: its hold on an engine, weakly; None for a model of another make, and where the engine is
            told by somebody else.
    """

    handle: ReferenceType[EngineHandle] | None = None
    tenant: str | None = None

    @property
    def engine(self) -> ChatEngine | None:
        """The engine, not started by this; None where there is none to tell."""
        handle = self.handle() if self.handle is not None else None
        try:
            engine = handle.get() if handle is not None else None
        except CacheCraftError:
            return None
        return None if getattr(engine, "is_closed", False) else engine


NOT_TOLD = Answering()


def answering_for(instance: object) -> Answering | None:
    """Who answers from what is retrieved on behalf of `instance`; None where it does not say."""
    if getattr(type(instance), "tells_engine", False):
        return NOT_TOLD
    # The model of a retriever, if it has one, only writes queries.
    if isinstance(instance, BaseRetriever):
        return None
    llm = model_of(instance)
    return None if llm is None else answering_of(llm)


def answering_of(llm: LLM, call: Mapping[str, Any] | None = None) -> Answering:
    """`llm`, with the options of one call."""
    ours = engine_backed(llm)
    return NOT_TOLD if ours is None else Answering(ref(ours._handle), tenant_of(ours, call))


def engine_backed(llm: LLM | None) -> EngineBackedLLM | None:
    """The model of ours in `llm`, which may be wrapped for structured output; None if there is none."""
    inner: Any = llm.llm if isinstance(llm, StructuredLLM) else llm
    return inner if isinstance(getattr(inner, "_handle", None), EngineHandle) else None


def tenant_of(llm: EngineBackedLLM, call: Mapping[str, Any] | None = None) -> str | None:
    """For whom `llm` answers, with the options of one call."""
    tenant: str | None = llm._options(call or {})["tenant"]
    return tenant


def model_of(instance: object) -> LLM | None:
    """The model that an engine, synthesizer, agent or such holds, or that it is itself."""
    if isinstance(instance, LLM):
        return instance
    # Not getattr: a property might make LlamaIndex's default model.
    held: dict[str, Any] = getattr(instance, "__dict__", {})
    for name in ("_llm", "llm"):
        if isinstance(llm := held.get(name), LLM):
            return llm
    synthesizer = held.get("_response_synthesizer")
    return None if synthesizer is None else model_of(synthesizer)


class LiveModels:
    """The engines and tenants for which models are alive. Thread-safe; keeps nothing alive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tenants: WeakKeyDictionary[EngineHandle, set[str | None]] = WeakKeyDictionary()

    def see(self, answering: Answering) -> None:
        """Note a model that was made or used."""
        handle = answering.handle() if answering.handle is not None else None
        with self._lock:
            # Two are as good as a thousand, and cost no memory.
            if handle is not None and len(tenants := self._tenants.setdefault(handle, set())) < 2:
                tenants.add(answering.tenant)

    def sole(self) -> Answering | None:
        """The one engine and tenant, or None where there are several: it cannot be told then for whom a
        text is, and a report must not name another tenant's document."""
        with self._lock:
            seen = [
                Answering(ref(handle), tenant)
                for handle, tenants in self._tenants.items()
                for tenant in tenants
            ]
        alive = {(id(each.engine), each.tenant): each for each in seen if each.engine is not None}
        return next(iter(alive.values())) if len(alive) == 1 else None
