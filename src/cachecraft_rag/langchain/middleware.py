"""`CacheCraftMiddleware`: the documents that an agent's tools found are chunks of its conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from langchain_core.messages import ToolMessage

from cachecraft_rag.errors import MissingDependencyError
from cachecraft_rag.langchain._capture import target_of
from cachecraft_rag.langchain._documents import document_chunks, documents_in

try:
    from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
except ImportError as error:
    raise MissingDependencyError(
        "CacheCraftMiddleware needs LangChain's agents: run "
        "`pip install 'cachecraft-rag[langchain]' langchain`"
    ) from error


class CacheCraftMiddleware(AgentMiddleware[Any, Any, Any]):
    """Before each call of the model, tells its engine the documents in the conversation's tool messages,
    for the tenant of that model. Messages are not changed, and other models are left alone.

    Capture does this where one engine and tenant are in use; this also does where there are several, and
    after a restart, for conversations that a checkpointer brings back. The retrieval tool has to put its
    documents beside its text: `response_format="content_and_artifact"`.

    Example:
        tool = create_retriever_tool(retriever, "search", "Finds passages.",
                                     response_format="content_and_artifact")
        agent = create_agent(llm, [tool], middleware=[CacheCraftMiddleware()])
    """

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        _tell(request)
        return handler(request)

    async def awrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
    ) -> ModelResponse[Any]:
        # In a thread: hashing many texts takes milliseconds of the caller's loop.
        await asyncio.to_thread(_tell, request)
        return await handler(request)


def _tell(request: ModelRequest[Any]) -> None:
    target = target_of(request.model, request.model_settings.get("tenant"))
    if target is None:
        return
    results = [message for message in request.messages if isinstance(message, ToolMessage)]
    target.tell(document_chunks(document for each in results for document in documents_in(each.artifact)))
