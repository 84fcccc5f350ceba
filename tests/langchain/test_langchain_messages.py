"""LangChain messages as the engine sees them."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.content import create_plaintext_block

from cachecraft_rag.engine import Completion
from cachecraft_rag.errors import InvalidRequestError
from cachecraft_rag.events import Reason, RequestDecision, ReuseReport
from cachecraft_rag.langchain import ChatCacheCraft
from cachecraft_rag.langchain._convert import chat_result
from cachecraft_rag.testing import FakeEngine


def sent(*messages: BaseMessage) -> list[Any]:
    """What the engine gets of these messages."""
    engine = FakeEngine()
    ChatCacheCraft(engine=engine).invoke(list(messages))
    return list(engine.last_call.messages)


def assert_refused(message: BaseMessage, match: str) -> None:
    engine = FakeEngine()
    with pytest.raises(InvalidRequestError, match=match):
        ChatCacheCraft(engine=engine).invoke([HumanMessage("hi"), message])
    assert not engine.calls


def test_roles_and_order_are_kept() -> None:
    """Each kind of message has its role, and repeats of a role are passed through."""
    messages = [
        SystemMessage("s"),
        HumanMessage("h"),
        HumanMessage("h2", name="ann"),
        AIMessage("a"),
        ToolMessage("t", tool_call_id="1"),
        ChatMessage(role="critic", content="c"),
    ]
    expected = [
        ("system", "s"),
        ("user", "h"),
        ("user", "h2"),
        ("assistant", "a"),
        ("tool", "t"),
        ("critic", "c"),
    ]
    assert [(m["role"], m["content"]) for m in sent(*messages)] == expected
    assert [m.keys() - {"role", "content"} for m in sent(*messages)] == [
        *[set()] * 4,
        {"tool_call_id"},
        set(),
    ]


def test_blocks_stay_separate_text_blocks() -> None:
    """Strings, text blocks and plain-text documents become text blocks, with ids left out."""
    document = create_plaintext_block("A document.", title="T", id="d1")
    [message] = sent(HumanMessage(["Read:", {"type": "text", "text": " this ", "id": "x"}, document]))
    assert message["content"] == [
        {"type": "text", "text": "Read:"},
        {"type": "text", "text": " this "},
        {"type": "text", "text": "A document."},
    ]


@pytest.mark.parametrize(
    "text", ["{braces} and {{more}}", 'a "quoted" word', "line\r\nend", "  led by spaces", "🙂"]
)
def test_text_is_passed_on_unchanged(text: str) -> None:
    """Nothing in a text is taken for markup."""
    assert sent(HumanMessage(text)) == [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image", "url": "https://example.org/a.png"},
        {"type": "reasoning", "reasoning": "hm"},
        {"text": "no type"},
    ],
)
def test_other_blocks_are_refused(block: dict[str, Any]) -> None:
    """The message says which block of which message, and what is read instead."""
    assert_refused(HumanMessage([block]), r"messages\[1\].content\[0\] is of type .*'text' or 'text-plain'")


def test_a_document_block_without_text_is_refused() -> None:
    """A plain-text block may point to a file; that is not read."""
    assert_refused(HumanMessage([{"type": "text-plain", "url": "https://example.org"}]), "has the text None")


def test_an_unknown_kind_of_message_is_refused() -> None:
    """Kinds without a role are named."""
    assert_refused(FunctionMessage("x", name="f"), "FunctionMessage")


@pytest.mark.parametrize(("num_stored", "expected"), [(2, 2), (9, 4)])
def test_cache_details_never_exceed_the_prompt(num_stored: int, expected: int) -> None:
    """A chunk that is reused and stored again is counted once: 10 prompt tokens, 6 of them reused."""
    report = ReuseReport(
        "r",
        RequestDecision.REUSE,
        Reason.OTHER_PREFIX,
        num_prompt_tokens=10,
        num_reused_tokens=6,
        num_computed_tokens=4,
        num_stored_tokens=num_stored,
    )
    completion = Completion("a", (1,), "stop", report, prompt_token_ids=tuple(range(10)))
    usage = chat_result(completion, "m").generations[0].message.usage_metadata
    assert usage["input_token_details"] == {"cache_read": 6, "cache_creation": expected}
