"""`stuff_chunks`: the text of LangChain's own stuffing, in one block per document."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate

from cachecraft_rag.chunks import Chunk
from cachecraft_rag.errors import ConfigurationError, InvalidRequestError
from cachecraft_rag.langchain import ChatCacheCraft, stop_capture, stuff_chunks
from cachecraft_rag.langchain._capture import resume_capture
from cachecraft_rag.langchain.stuff import split_blocks
from cachecraft_rag.testing import FakeEngine

TEMPLATE = "Use this:\n{context}\n\nQuestion: {question}"
PROMPT = ChatPromptTemplate.from_messages([("human", TEMPLATE)])
DOCUMENTS = [
    Document("One {brace} and 'quotes'.", metadata={"source": "a.md", "version": 2}),
    Document("Two\r\nlines, 🦉.", id="b"),
]
NAMED = PromptTemplate.from_template("{source}: {page_content}")


def texts_of(message: Any) -> list[str]:
    assert all(block["type"] == "text" for block in message.content)
    return [block["text"] for block in message.content]


def stuffed(prompt: Any = PROMPT, documents: Any = DOCUMENTS, **settings: Any) -> list[Any]:
    return stuff_chunks(prompt, **settings).invoke({"context": documents, "question": "Who?"}).to_messages()


def test_each_document_is_a_block() -> None:
    """Documents stand in blocks of their own, whatever signs they hold."""
    [message] = stuffed()
    assert isinstance(message, HumanMessage)
    assert [text.strip("\n") for text in texts_of(message)] == [
        "Use this:",
        DOCUMENTS[0].page_content,
        DOCUMENTS[1].page_content,
        "Question: Who?",
    ]


@pytest.mark.parametrize(
    "template", [TEMPLATE, "{context}", "C: {context} Q: {question}", "{context}\n{question}\n{context}"]
)
@pytest.mark.parametrize("separator", ["\n\n", "\n---\n", " | ", "\n"])
def test_the_engine_reads_what_langchain_would_have_written(template: str, separator: str) -> None:
    """The prompt is that of `create_stuff_documents_chain`, to the character."""
    prompt = ChatPromptTemplate.from_messages([("system", "Short."), ("human", template)])
    variables = {"context": [*DOCUMENTS, Document(" "), Document("")], "question": "Who?"}
    engine, classic_engine = FakeEngine(), FakeEngine()
    llm = ChatCacheCraft(engine=engine)
    (stuff_chunks(prompt, llm=llm, document_separator=separator) | llm).invoke(variables)
    create_stuff_documents_chain(
        ChatCacheCraft(engine=classic_engine), prompt, document_separator=separator
    ).invoke(variables)
    assert engine.last_call.prompt == classic_engine.last_call.prompt


@given(st.lists(st.tuples(st.text("a \n", max_size=4), st.text("b\n", max_size=4))), st.text("c \n"))
def test_blocks_joined_by_a_newline_are_the_whole_text(pairs: list[tuple[str, str]], last: str) -> None:
    """Nothing is lost or added by cutting, and no block is blank beside others."""
    parts, texts = [part for part, _ in pairs] + [last], [text for _, text in pairs]
    blocks = split_blocks(parts, texts)
    assert "\n".join(blocks) == "".join(part + text for part, text in pairs) + last
    assert len(blocks) == 1 or all(block.strip() for block in blocks)


async def test_async_is_the_same() -> None:
    """`ainvoke` gives the messages of `invoke`, and tells the engine too."""
    engine = FakeEngine()
    runnable = stuff_chunks(PROMPT, llm=ChatCacheCraft(engine=engine))
    variables = {"context": DOCUMENTS, "question": "Who?"}
    assert await runnable.ainvoke(variables) == runnable.invoke(variables)
    assert [call.method for call in engine.calls] == ["prefetch", "prefetch"]


def test_the_rendered_text_is_the_chunk() -> None:
    """Metadata that the prompt of a document shows belongs to the chunk."""
    engine = FakeEngine()
    stuffed(documents=DOCUMENTS[:1], document_prompt=NAMED, llm=ChatCacheCraft(engine=engine))
    assert engine.last_call.chunks == (Chunk("a.md: One {brace} and 'quotes'.", "a.md", "2"),)


def test_the_engine_of_the_model_is_told_for_its_tenant() -> None:
    """A bound model's tenant counts, and no other engine hears of the documents."""
    engine, other = FakeEngine(), ChatCacheCraft(engine=FakeEngine())
    stuffed(llm=ChatCacheCraft(engine=engine, tenant="a").bind(tenant="b") | str)
    assert engine.last_call.options == {"tenant": "b"}
    assert [chunk.doc_id for chunk in engine.last_call.chunks] == ["a.md", "b"]
    assert other.engine.calls == []


def test_stopped_capture_leaves_a_named_model() -> None:
    """What is told on request is no capture."""
    stop_capture()
    try:
        engine = FakeEngine()
        llm = ChatCacheCraft(engine=engine)
        stuffed()
        assert engine.calls == []
        stuffed(llm=llm)
        assert engine.last_call.method == "prefetch"
    finally:
        resume_capture()


def test_a_closed_engine_does_not_hinder_the_prompt() -> None:
    """Telling an engine is no reason to fail; its answer would be."""
    engine = FakeEngine()
    engine.close()
    assert len(stuffed(llm=ChatCacheCraft(engine=engine))) == 1


def test_plain_models_take_the_blocks() -> None:
    """Another chat model reads the same messages."""
    model = FakeListChatModel(responses=["plain"])
    chain = stuff_chunks(PROMPT, llm=model) | model
    assert chain.invoke({"context": DOCUMENTS, "question": "Who?"}).content == "plain"


def test_other_messages_and_blocks_stay() -> None:
    """History and blocks without documents pass unchanged; blocks with documents are cut."""
    picture = {"type": "image", "url": "http://x"}
    prompt = ChatPromptTemplate.from_messages(
        [
            SystemMessage("{not a variable}"),
            MessagesPlaceholder("history"),
            ("human", [{"type": "text", "text": "{context}\n{question}"}, {"type": "text", "text": "Now."}]),
        ]
    )
    history = [HumanMessage([picture])]
    variables = {"context": DOCUMENTS, "question": "Who?", "history": history}
    system, past, human = stuff_chunks(prompt).invoke(variables).to_messages()
    assert (system.content, past) == ("{not a variable}", history[0])
    assert [text.strip() for text in texts_of(human)] == [
        *(document.page_content for document in DOCUMENTS),
        "Who?",
        "Now.",
    ]


def test_a_prompt_of_one_text_stays_one() -> None:
    """For completion models, which have no messages."""
    value = stuff_chunks(PromptTemplate.from_template(TEMPLATE)).invoke(
        {"context": DOCUMENTS, "question": "Who?"}
    )
    context = "\n\n".join(document.page_content for document in DOCUMENTS)
    assert value.to_string() == TEMPLATE.format(context=context, question="Who?")


def test_no_documents_leave_an_empty_context() -> None:
    """A retriever that found nothing gives the template's own text."""
    [message] = stuffed(documents=[])
    assert message.content == TEMPLATE.format(context="", question="Who?")


def test_jinja_conditions_see_the_documents() -> None:
    """Templates that branch on the context take the branch with documents."""
    prompt = ChatPromptTemplate.from_messages(
        [("human", "{% if context %}{{ context }}{% else %}nothing{% endif %}")], template_format="jinja2"
    )
    assert texts_of(stuffed(prompt)[0])[0] == DOCUMENTS[0].page_content
    assert stuffed(prompt, [])[0].content == "nothing"


def test_documents_are_not_changed() -> None:
    """Rendering reads documents and no more."""
    before = [document.model_copy(deep=True) for document in DOCUMENTS]
    stuffed()
    assert before == DOCUMENTS


def test_a_prompt_without_the_variable_is_refused() -> None:
    """The error names the variable and those that there are."""
    with pytest.raises(ConfigurationError, match=r"'context'.*'question'"):
        stuff_chunks(ChatPromptTemplate.from_template("{question}"))


@pytest.mark.parametrize("wrong", [{}, {"context": "a text"}, {"context": [{"page_content": "x"}]}])
def test_what_is_no_list_of_documents_is_refused(wrong: dict[str, Any]) -> None:
    """A formatted text has lost the boundaries that this is for."""
    with pytest.raises(InvalidRequestError, match="documents"):
        stuff_chunks(PROMPT).invoke({"question": "Who?", **wrong})
