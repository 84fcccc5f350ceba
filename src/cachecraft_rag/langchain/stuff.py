"""`stuff_chunks`: a prompt with the documents in it, each in a content block of its own."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage
from langchain_core.prompt_values import ChatPromptValue, PromptValue, StringPromptValue
from langchain_core.prompts import BasePromptTemplate, PromptTemplate, aformat_document, format_document
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda

from cachecraft_rag.errors import ConfigurationError, InvalidRequestError
from cachecraft_rag.langchain._capture import only_target, target_of
from cachecraft_rag.langchain._documents import document_chunk

DEFAULT_DOCUMENT_PROMPT = PromptTemplate.from_template("{page_content}")


def stuff_chunks(
    prompt: BasePromptTemplate[Any],
    *,
    llm: Any = None,
    document_prompt: BasePromptTemplate[str] | None = None,
    document_separator: str = "\n\n",
    document_variable_name: str = "context",
) -> Runnable[dict[str, Any], PromptValue]:
    """A runnable in the place of `prompt`: from its variables, with a list of documents under
    `document_variable_name`, to the prompt of the model.

    The text is the one that LangChain's `create_stuff_documents_chain` makes: documents rendered by
    `document_prompt`, joined by `document_separator`. In chat prompts it is cut into text blocks at a line
    break before and after each document, which is left out, because our engine joins blocks by one; a
    document next to no line break shares its block. Other models take the same blocks, and may join them
    without that line break.

    The engine is told each document's rendered text, which is then the chunk: metadata that
    `document_prompt` shows is part of it, so leave out what changes from question to question.

    Args:
        llm: the model behind the prompt, bound or not; its engine is told. None, or another model: the
            engine and tenant in use, if there is only one (as for captured documents).

    Raises:
        ConfigurationError: `prompt` has no variable of that name.
        InvalidRequestError: when called: there are no documents under that name.

    Example:
        inputs = {"context": retriever, "question": RunnablePassthrough()}
        chain = inputs | stuff_chunks(prompt, llm=llm) | llm
    """
    if document_variable_name not in prompt.input_variables:
        raise ConfigurationError(
            f"prompt has no variable {document_variable_name!r} for the documents: it has "
            f"{', '.join(map(repr, prompt.input_variables)) or 'none'}"
        )
    form = document_prompt or DEFAULT_DOCUMENT_PROMPT

    def stuff(variables: dict[str, Any], config: RunnableConfig) -> PromptValue:
        documents = _documents(variables, document_variable_name)
        texts = [format_document(document, form) for document in documents]
        _tell(llm, documents, texts)
        mark = _mark(texts)
        value = prompt.invoke({**variables, document_variable_name: mark}, config)
        return _filled(value, mark, texts, document_separator)

    async def astuff(variables: dict[str, Any], config: RunnableConfig) -> PromptValue:
        documents = _documents(variables, document_variable_name)
        texts = [await aformat_document(document, form) for document in documents]
        # In a thread: hashing many texts takes milliseconds of the caller's loop.
        await asyncio.to_thread(_tell, llm, documents, texts)
        mark = _mark(texts)
        value = await prompt.ainvoke({**variables, document_variable_name: mark}, config)
        return _filled(value, mark, texts, document_separator)

    return RunnableLambda(stuff, astuff, name="stuff_chunks")


def split_blocks(parts: Sequence[str], texts: Sequence[str]) -> list[str]:
    """Blocks which, joined by "\\n", are `parts[0] + texts[0] + parts[1] + ... + parts[-1]`.

    No block is blank, unless all of it is.

    Args:
        parts: what stands around the documents' texts; one more than those.
    """
    before, *after = parts
    blocks: list[str] = []
    head, cut, tail = before.rpartition("\n")
    if cut and head.strip():
        blocks, before = [head], tail
    block = before
    for text, part in zip(texts, after, strict=True):
        block += text
        head, cut, tail = part.partition("\n")
        if cut and (block + head).strip():
            blocks.append(block + head)
            block = tail
        else:
            block += part
    if blocks and not block.strip():
        blocks[-1] += "\n" + block
    else:
        blocks.append(block)
    return blocks


def _documents(variables: Mapping[str, Any], name: str) -> list[Document]:
    if not isinstance(variables, Mapping) or name not in variables:
        raise InvalidRequestError(
            f"stuff_chunks was given no documents: pass a mapping with a list of them as {name!r}"
        )
    documents = variables[name]
    if isinstance(documents, (list, tuple)):
        strangers = [each for each in documents if not isinstance(each, Document)]
    else:
        strangers = [documents]
    if strangers:
        raise InvalidRequestError(
            f"{name!r} holds a {type(strangers[0]).__name__}: give stuff_chunks the list of documents as the "
            "retriever returned it, not a text made of them"
        )
    return list(documents)


def _tell(llm: Any, documents: Sequence[Document], texts: Sequence[str]) -> None:
    target = target_of(llm) or only_target()
    if target is None:
        return
    pairs = zip(documents, texts, strict=True)
    chunks = [document_chunk(document, text, is_shared=target.is_shared) for document, text in pairs]
    target.tell([chunk for chunk in chunks if chunk is not None])


def _mark(texts: Sequence[str]) -> str:
    """What stands for the documents until the prompt is rendered; nothing where there are none."""
    # Digits survive a template that changes case or escapes, and no text can guess them.
    return str(secrets.randbelow(10**32)).zfill(32) if texts else ""


def _filled(value: PromptValue, mark: str, texts: Sequence[str], separator: str) -> PromptValue:
    if not mark:
        return value
    if isinstance(value, ChatPromptValue):
        return ChatPromptValue(messages=[_filled_message(m, mark, texts, separator) for m in value.messages])
    # A prompt of one text: for a completion model, or the only message of a chat.
    return StringPromptValue(text=value.to_string().replace(mark, separator.join(texts)))


def _filled_message(message: BaseMessage, mark: str, texts: Sequence[str], separator: str) -> BaseMessage:
    content = message.content
    if isinstance(content, str):
        if mark not in content:
            return message
        return message.model_copy(update={"content": list(_blocks(content, mark, texts, separator))})
    blocks: list[Any] = []
    for block in content:
        text = block if isinstance(block, str) else block.get("text")
        if isinstance(text, str) and mark in text:
            blocks += _blocks(text, mark, texts, separator)
        else:
            blocks.append(block)
    return message.model_copy(update={"content": blocks})


def _blocks(content: str, mark: str, texts: Sequence[str], separator: str) -> Iterator[dict[str, str]]:
    first, *others = content.split(mark)
    parts = [first]
    for part in others:
        parts += [separator] * (len(texts) - 1) + [part]
    for text in split_blocks(parts, [*texts] * len(others)):
        yield {"type": "text", "text": text}
