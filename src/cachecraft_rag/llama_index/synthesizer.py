"""`CacheCraftSynthesizer`: retrieved passages go to the model whole, and as the chunks they are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.llms.llm import LLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers.base import BaseSynthesizer
from llama_index.core.schema import NodeWithScore
from llama_index.core.types import RESPONSE_TEXT_TYPE
from llama_index.core.utils import get_tokenizer

from cachecraft_rag.chunks import Chunk
from cachecraft_rag.llama_index._answering import engine_backed, tenant_of
from cachecraft_rag.llama_index._base import EngineBackedLLM
from cachecraft_rag.llama_index._convert import REPORT_KEY
from cachecraft_rag.llama_index._passages import SEPARATOR, Passage, fit, to_passages
from cachecraft_rag.llama_index._shared import as_shared

logger = logging.getLogger(__name__)

_NODES = "cachecraft_nodes"
_ACCOUNT = "cachecraft_account"


class CacheCraftSynthesizer(BaseSynthesizer):
    """Answers from all passages in one prompt: system prompt, passages, question.

    Each passage stands in it whole. Where the window is too small, those with the lowest scores are left
    out. `Response.metadata["cachecraft"]` holds "dropped", the ids of the nodes left out, and, once the
    answer has been read, "report", a `ReuseReport` as a dictionary.

    Args:
        llm: a `CacheCraftLLM`, or any other model, to which no chunks are passed; None takes
            LlamaIndex's `Settings.llm`.
        text_qa_template: has `{context_str}` and `{query_str}`; what stands before `{context_str}`
            should be the same for every question, or no prefix is. None takes LlamaIndex's.
        streaming: hand the answer out in pieces.
        empty_response: the answer where nothing was retrieved.

    Raises:
        PromptTooLongError: when answering: not one passage fits the window.

    Example:
        engine = index.as_query_engine(llm=llm, response_synthesizer=CacheCraftSynthesizer(llm))
        print(engine.query("Who?").metadata["cachecraft"]["dropped"])
    """

    tells_engine = True

    def __init__(
        self,
        llm: LLM | None = None,
        *,
        text_qa_template: BasePromptTemplate | None = None,
        streaming: bool = False,
        empty_response: str | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        super().__init__(
            llm=llm,
            callback_manager=callback_manager,
            streaming=streaming,
            empty_response=empty_response,
        )
        self._text_qa_template = text_qa_template or DEFAULT_TEXT_QA_PROMPT_SEL

    def synthesize(
        self,
        query: Any,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        account: dict[str, Any] = {}
        own = {_NODES: nodes, _ACCOUNT: account}
        response = super().synthesize(query, nodes, additional_source_nodes, **own, **response_kwargs)
        return _with_account(response, account)

    async def asynthesize(
        self,
        query: Any,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        account: dict[str, Any] = {}
        own = {_NODES: nodes, _ACCOUNT: account}
        response = await super().asynthesize(query, nodes, additional_source_nodes, **own, **response_kwargs)
        return _with_account(response, account)

    def get_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        request = self._request(query_str, text_chunks, response_kwargs)
        if request is None:
            return self._empty_response_generator() if self._streaming else self._empty_response
        llm = self._llm
        if isinstance(llm, EngineBackedLLM):
            return self._stream(llm, request) if self._streaming else self._answer(llm, request)
        ask = llm.stream if self._streaming else llm.predict
        return ask(self._text_qa_template, **request.variables) or self._empty_response

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        # In a thread: counting tokens may start the engine.
        request = await asyncio.to_thread(self._request, query_str, text_chunks, response_kwargs)
        if request is None:
            return self._empty_response_agenerator() if self._streaming else self._empty_response
        llm = self._llm
        if isinstance(llm, EngineBackedLLM):
            return self._astream(llm, request) if self._streaming else await self._aanswer(llm, request)
        ask = llm.astream if self._streaming else llm.apredict
        return await ask(self._text_qa_template, **request.variables) or self._empty_response

    def _answer(self, llm: EngineBackedLLM, request: _Request) -> str:
        return self._text_of(llm, request, llm.chat(self._messages(request), chunks=request.told_to(llm)))

    async def _aanswer(self, llm: EngineBackedLLM, request: _Request) -> str:
        response = await llm.achat(self._messages(request), chunks=request.told_to(llm))
        return self._text_of(llm, request, response)

    def _stream(self, llm: EngineBackedLLM, request: _Request) -> Generator[str, None, None]:
        for piece in llm.stream_chat(self._messages(request), chunks=request.told_to(llm)):
            request.note(piece)
            yield piece.delta or ""

    async def _astream(self, llm: EngineBackedLLM, request: _Request) -> AsyncGenerator[str, None]:
        async for piece in await llm.astream_chat(self._messages(request), chunks=request.told_to(llm)):
            request.note(piece)
            yield piece.delta or ""

    def _text_of(self, llm: EngineBackedLLM, request: _Request, response: ChatResponse) -> str:
        request.note(response)
        return llm._parse_output(response.message.content or "") or self._empty_response

    def _messages(self, request: _Request) -> list[ChatMessage]:
        # The call that `LLM.predict` makes: it puts the model's own system prompt in front.
        messages: list[ChatMessage] = self._llm._get_messages(self._text_qa_template, **request.variables)
        return messages

    def _request(
        self, query_str: str, text_chunks: Sequence[str], response_kwargs: dict[str, Any]
    ) -> _Request | None:
        """What to ask; None where there is no passage."""
        variables = {**response_kwargs, "query_str": query_str}
        nodes = variables.pop(_NODES, None)
        account = variables.pop(_ACCOUNT, {})
        passages = _named_by_place(text_chunks) if nodes is None else to_passages(nodes)
        if not passages:
            return None
        head = self._messages(_Request({**variables, "context_str": ""}))
        kept, dropped = fit(passages, self._llm, head, _token_counter(self._llm))
        account["dropped"] = [passage.name for passage in dropped]
        if dropped:
            logger.warning(
                "the window of %d tokens is too small for %d of %d passages, left out: %s",
                self._llm.metadata.context_window,
                len(dropped),
                len(passages),
                ", ".join(account["dropped"]),
            )
        variables["context_str"] = SEPARATOR.join(passage.text for passage in kept)
        return _Request(variables, [passage.chunk for passage in kept], account)

    def _get_prompts(self) -> PromptDictType:
        return {"text_qa_template": self._text_qa_template}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        self._text_qa_template = prompts.get("text_qa_template", self._text_qa_template)


@dataclass(frozen=True, slots=True)
class _Request:
    """Variables of the prompt template, the chunks in it, and the account to fill."""

    variables: dict[str, Any]
    chunks: list[Chunk] = field(default_factory=list)
    account: dict[str, Any] = field(default_factory=dict)

    def told_to(self, llm: EngineBackedLLM) -> list[Chunk]:
        return as_shared(llm.engine, tenant_of(llm), self.chunks)

    def note(self, response: ChatResponse) -> None:
        report = response.additional_kwargs.get(REPORT_KEY)
        if report is not None:
            self.account["report"] = report


def _token_counter(llm: LLM) -> Callable[[str], int]:
    ours = engine_backed(llm)
    encode = get_tokenizer() if ours is None else ours.engine.encode
    return lambda text: len(encode(text))


def _named_by_place(texts: Sequence[str]) -> list[Passage]:
    """Passages of a caller who has texts only, no nodes."""
    present = [text.strip() for text in texts if text.strip()]
    return [Passage(text, Chunk(text), f"text {index}") for index, text in enumerate(present)]


def _with_account(response: RESPONSE_TYPE, account: dict[str, Any]) -> RESPONSE_TYPE:
    # A streamed answer adds its report to the same dictionary when it has been read.
    if account:
        response.metadata = {**(response.metadata or {}), REPORT_KEY: account}
    return response
