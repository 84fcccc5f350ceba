"""`create_cachecraft_rag_chain`: question → documents → answer."""

from __future__ import annotations

from typing import Any

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import BasePromptTemplate, ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from cachecraft_rag.errors import InvalidRequestError
from cachecraft_rag.langchain.stuff import stuff_chunks

DEFAULT_SYSTEM_PROMPT = (
    "Answer the question from the passages. If they do not hold the answer, say that you do not know."
)
"""The same for every question, so chunks can be warmed behind it: `engine.warm(..., system=...)`."""


def default_prompt() -> ChatPromptTemplate:
    """Variables: `context`, `input` and, if given, `chat_history`, a list of messages.

    The passages come behind the history: a follow-up question then begins with the whole conversation as
    it was, which vLLM has in its prefix cache.
    """
    return ChatPromptTemplate.from_messages(
        [
            ("system", DEFAULT_SYSTEM_PROMPT),
            MessagesPlaceholder("chat_history", optional=True),
            ("human", "{context}\n\nQuestion: {input}"),
        ]
    )


def create_cachecraft_rag_chain(
    retriever: Runnable[Any, Any],
    model: Runnable[Any, Any],
    prompt: BasePromptTemplate[Any] | None = None,
    *,
    document_prompt: BasePromptTemplate[str] | None = None,
    output_parser: Runnable[Any, Any] | None = None,
) -> Runnable[Any, dict[str, Any]]:
    """A chain as of LangChain's `create_retrieval_chain`: it takes a question, or a mapping with the
    question as `input`, and gives that mapping with `context` (the documents) and `answer` added.

    Any retriever and any model will do. Documents are put into the prompt by `stuff_chunks`, so an engine
    behind `model` knows them as chunks.

    Args:
        retriever: what takes text, as retrievers do, gets the question; another runnable gets the whole
            mapping, for example one of `create_history_aware_retriever`.
        prompt: with the variables `context`, `input` and whatever else calls give; None: `default_prompt`.
        document_prompt: renders one document; None shows its `page_content`.
        output_parser: None gives `answer` as text. `RunnablePassthrough()` gives the model's message,
            whose `response_metadata["cachecraft"]` is the report.

    Raises:
        ConfigurationError: `prompt` has no variable `context`.
        InvalidRequestError: when called: there is no question.

    Example:
        chain = create_cachecraft_rag_chain(retriever, llm)
        print(chain.invoke("Who was the engineer?")["answer"])
    """
    stuff = stuff_chunks(prompt or default_prompt(), llm=model, document_prompt=document_prompt)
    answer = stuff | model | (output_parser or StrOutputParser())
    return (
        RunnableLambda(_variables)
        | RunnablePassthrough.assign(context=_from_variables(retriever))
        | RunnablePassthrough.assign(answer=answer)
    ).with_config(run_name="cachecraft_rag_chain")


def _variables(given: Any) -> dict[str, Any]:
    if isinstance(given, str):
        return {"input": given}
    if not isinstance(given, dict) or not isinstance(given.get("input"), str):
        raise InvalidRequestError(
            f"the chain was given {given!r:.80}: pass the question, or a mapping with it as 'input'"
        )
    return given


def _from_variables(retriever: Runnable[Any, Any]) -> Runnable[Any, Any]:
    if _takes_text(retriever):
        return RunnableLambda(_question) | retriever
    return retriever


def _question(variables: dict[str, Any]) -> str:
    question: str = variables["input"]
    return question


def _takes_text(retriever: Runnable[Any, Any]) -> bool:
    # Not `isinstance(..., BaseRetriever)`, which LangChain asks: `retriever | rerank` is none.
    try:
        return retriever.InputType is str
    except TypeError:  # it does not say
        return False
