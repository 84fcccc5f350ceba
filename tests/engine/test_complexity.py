"""What is taken for the question, and what its wording says of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.engine.complexity import FEATURES, features, predict, question_of

SIMPLE = "Where is the bridge?"
HARD = (
    "Which of the two bridges that were built by the company of Ada Lund's brother in the city where the "
    "Nordic Museum is located is older than the tower, and who did not pay for both?"
)


def count(name: str, question: str) -> int:
    """How often a cue was found."""
    return round(math.expm1(features(question, 0, 0)[name]))


@pytest.mark.parametrize(
    ("name", "question", "expected"),
    [
        ("words", "Who isn't Ada's long-lost aunt?", 5),
        ("words", "桥在哪里", 2),
        ("wh_words", "Who wrote it, and when?", 2),
        ("wh_words", "谁写了什么", 2),
        ("hops", "Who is the father of the man who wrote Emma?", 2),
        ("hops", "Who is Ada's brother?", 1),
        ("hops", "Who wrote it?", 0),
        ("hops", "谁是作者的父亲", 1),
        ("comparisons", "Is Ada older than Bo, or are both the same age?", 5),
        ("comparisons", "甲比乙更高", 2),
        ("aggregations", "How many in total? List all of them.", 4),
        ("aggregations", "一共有多少", 2),
        ("negations", "Who did not pay, and who wasn't there without Bo?", 3),
        ("negations", "谁没有来", 1),
        ("negations", "有什么不同", 0),
        ("numbers", "What happened on 5 March 1,920?", 3),
        ("names", "When did Ada Lund leave the City of London?", 2),
        ("names", "Where is it?", 0),
        ("names", "谁写了《红楼梦》", 1),
    ],
)
def test_cues_are_counted(name: str, question: str, expected: int) -> None:
    """Each kind of cue is found in English, and where there is a list in Chinese."""
    assert count(name, question) == expected


def test_prompt_is_described_beside_the_question() -> None:
    """The number of chunks and the length of the prompt are features, larger when they are."""
    small, large = features(SIMPLE, 2, 300), features(SIMPLE, 20, 3000)
    assert small["chunks"] < large["chunks"]
    assert small["prompt_tokens"] < large["prompt_tokens"]


def test_hard_question_is_estimated_above_a_simple_one() -> None:
    """Hops, comparison and names raise the estimate well across the middle."""
    assert predict(features(SIMPLE, 8, 1000)) < 0.3
    assert predict(features(HARD, 8, 1000)) > 0.7


@given(st.text(max_size=300), st.integers(0, 1000), st.integers(0, 10**6))
def test_any_text_has_an_estimate(question: str, num_chunks: int, num_prompt_tokens: int) -> None:
    """Every text has all features and an estimate in [0, 1]."""
    values = features(question, num_chunks, num_prompt_tokens)
    assert tuple(values) == FEATURES
    assert 0.0 <= predict(values) <= 1.0


@pytest.mark.parametrize(
    ("prompt", "question"),
    [
        ("Rules.\n\nFirst.\n\nSecond.\n\nWhere is it now?", "Where is it now?"),
        ("Rules.\n\nFirst.\n---\nSecond.\n\nwho was there", "who was there"),
        ("Where is it now?\n\nFirst.\n\nSecond.\n\nAnswer:", "Where is it now?"),
        ("First.\n\nSecond.\n\n去哪\uff1f", "去哪\uff1f"),
        ("Where is it now?", "Where is it now?"),
        ("Where is it now?\n\nSecond.", "Where is it now?"),
    ],
    ids=["behind", "behind, no mark", "before", "Chinese", "no chunk", "one chunk"],
)
def test_question_is_found_in_a_prompt(prompt: str, question: str) -> None:
    """It stands behind the chunks, or before them where nothing behind them is a question."""
    assert question_of(prompt, ["First.", "Second."]) == question


def test_question_of_a_chat_is_in_the_last_message_of_the_user() -> None:
    """Earlier turns, and chunks in the system message, do not count; content may come in blocks."""
    blocks = [{"type": "text", "text": "First."}, {"type": "text", "text": "Where is it now?"}]
    messages = [
        {"role": "system", "content": "Rules.\n\nSecond."},
        {"role": "user", "content": "Who was it?"},
        {"role": "assistant", "content": "Ada."},
        {"role": "user", "content": blocks},
    ]
    assert question_of(messages, ["First.", "Second."]) == "Where is it now?"


def test_chat_without_a_user_has_no_question() -> None:
    """A lone system message asks nothing."""
    assert question_of([{"role": "system", "content": "Rules."}], []) == ""
