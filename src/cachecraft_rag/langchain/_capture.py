"""Capture: engines are told of the documents that any retriever returns, without being asked to.

One callback handler for the whole process hears of every retrieval. It knows the text and not for whom
it was retrieved, so it speaks only while there is one answer to that: one engine and one tenant. Telling
is no promise: what is reused is what stands word for word in a prompt.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.runnables import RunnableSequence
from langchain_core.runnables.base import RunnableBindingBase

from cachecraft_rag.chunks import Chunk
from cachecraft_rag.engine import ChatEngine
from cachecraft_rag.errors import CacheCraftError
from cachecraft_rag.langchain._documents import document_chunks

logger = logging.getLogger(__name__)

TOLD_TAG = "cachecraft"
"""Tag of the runs whose documents need no capture: `CacheCraftRetriever` tells of them itself."""
_OUR_TYPES = "cachecraft"
"""How `_type` begins in the parameters of our models' runs."""


@runtime_checkable
class EngineUser(Protocol):
    """One of our models."""

    @property
    def chat_engine(self) -> ChatEngine: ...
    @property
    def tenant(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Target:
    """Whom to tell."""

    engine: ChatEngine
    tenant: str | None
    is_shared: bool = False

    def tell(self, chunks: Sequence[Chunk]) -> None:
        """Never raises, nor starts the engine. Takes milliseconds where it runs."""
        if not chunks:
            return
        try:
            self.engine.prefetch(chunks, tenant=self.tenant)
        except CacheCraftError as error:
            logger.warning("retrieved documents were not announced, so they may not be reused: %s", error)


def target_of(model: Any, tenant: str | None = None) -> Target | None:
    """The engine and tenant behind a model, also one that is bound or the first step of a sequence;
    None for models that are not ours.

    Args:
        tenant: named by the call: goes before that of the model.
    """
    while isinstance(model, (RunnableBindingBase, RunnableSequence)):
        if isinstance(model, RunnableSequence):
            model = model.first
            continue
        tenant = tenant or model.kwargs.get("tenant")
        model = model.bound
    return Target(model.chat_engine, tenant or model.tenant) if isinstance(model, EngineUser) else None


def only_target() -> Target | None:
    """The one engine and tenant in use; None if there are none or several, or capture is stopped."""
    return _listener.only_target()


def start_capture(user: EngineUser) -> None:
    """Count `user` among those who use an engine, for as long as it lives, and listen to retrievers."""
    _listener.add(user, lambda model: Target(model.chat_engine, model.tenant))


def count_target(user: Any, read: Callable[[Any], Target]) -> None:
    """Count `user`, whose target `read` gives: its documents are for that one alone."""
    _listener.add(user, read)


def stop_capture() -> None:
    """From now on engines of this process are told only of what `CacheCraftRetriever`, `stuff_chunks`
    or `CacheCraftMiddleware` pass on, each with its `llm`."""
    _listener.is_on = False


def resume_capture() -> None:
    """Undo `stop_capture`."""
    _listener.is_on, _listener.has_many_tenants = True, False


class _Capture(BaseCallbackHandler):
    """Hears of every retrieval and of every call of our models.

    Attributes:
        has_many_tenants: a call was made while more than one tenant was in use. For good, as a tenant may
            be named by the call alone, whose documents were retrieved before.
    """

    ignore_agent = True
    ignore_chain = True
    ignore_retry = True
    ignore_custom_event = True

    def __init__(self) -> None:
        self.is_on = True
        self.has_many_tenants = False
        self._lock = threading.Lock()
        # By id: models compare by value and cannot be hashed.
        self._users: dict[int, tuple[weakref.ref[Any], Callable[[Any], Target]]] = {}
        self._is_registered = False

    def add(self, user: Any, read: Callable[[Any], Target]) -> None:
        key = id(user)
        with self._lock:
            self._users[key] = weakref.ref(user, lambda _: self._users.pop(key, None)), read
            if not self._is_registered:
                _register(self)
                self._is_registered = True

    def only_target(self) -> Target | None:
        if not self.is_on or self.has_many_tenants:
            return None
        targets = self._targets()
        return targets.pop() if len(targets) == 1 else None

    def on_retriever_end(
        self, documents: Sequence[Document], *, tags: list[str] | None = None, **_: Any
    ) -> None:
        if TOLD_TAG in (tags or ()):
            return
        target = self.only_target()
        if target is not None:
            target.tell(document_chunks(documents, is_shared=target.is_shared))

    def on_chat_model_start(self, serialized: dict[str, Any], messages: Any, **run: Any) -> None:
        self._note_tenant(run.get("invocation_params") or {})

    def on_llm_start(self, serialized: dict[str, Any], prompts: list[str], **run: Any) -> None:
        self._note_tenant(run.get("invocation_params") or {})

    def _note_tenant(self, parameters: dict[str, Any]) -> None:
        if str(parameters.get("_type", "")).startswith(_OUR_TYPES):
            tenants = {target.tenant for target in self._targets()} | {parameters.get("tenant")}
            self.has_many_tenants |= len(tenants) > 1

    def _targets(self) -> set[Target]:
        """Those of all live users whose engine is not closed."""
        with self._lock:
            users = list(self._users.values())
        alive = [(user, read) for ref, read in users if (user := ref()) is not None]
        targets = {read(user) for user, read in alive}
        return {target for target in targets if not getattr(target.engine, "is_closed", False)}


_listener = _Capture()


def _register(handler: _Capture) -> None:
    # Not at the top: this import loads LangSmith's client.
    from langchain_core.tracers.context import register_configure_hook

    # The default is what every context sees: a value set here would be seen by this one alone.
    register_configure_hook(ContextVar("cachecraft_capture", default=handler), inheritable=True)
