from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.errors import InvalidRequestError
from cachecraft_rag.segments.contents import MAX_RENDERS, locate_contents

MARK = "<|im_end|>\n<|im_start|>assistant\n"

Template = Callable[[Sequence[str]], str]


def template(alter: Callable[[str], str] = str) -> Template:
    """A chat template that puts each content, as `alter` makes it, before a mark."""
    return lambda contents: "<|im_start|>\n" + "".join(f"{alter(content)}{MARK}" for content in contents)


def located(render: Template, *contents: str) -> list[str]:
    text = render(contents)
    return [text[start:end] for start, end in locate_contents(render, contents, text)]


def spans(render: Template, *contents: str) -> list[tuple[int, int]]:
    return list(locate_contents(render, contents, render(contents)))


def without_thoughts(content: str) -> str:
    return content.split("</think>")[-1].lstrip("\n")


def refuse_unless_greeting(content: str) -> str:
    if not content.startswith("Hello"):
        raise InvalidRequestError("say hello first")
    return content


def test_contents_are_located_in_order() -> None:
    """Each range covers one content and nothing of the template."""
    assert spans(template(), "one", "three") == [(13, 16), (13 + 3 + len(MARK), 13 + 8 + len(MARK))]
    assert located(template(), "one", "three") == ["one", "three"]


@pytest.mark.parametrize("content", [MARK.strip(), f"a{MARK}b", "assistant", "0", "user\n" * 3])
def test_a_content_that_spells_the_template_is_located_where_it_stands(content: str) -> None:
    """What the template itself wrote is never taken for a content."""
    core = content.strip()
    assert spans(template(), content)[0][0] == len("<|im_start|>\n")
    assert located(template(), "before", content, "after") == ["before", core, "after"]


@pytest.mark.parametrize("alter", [str, str.strip, str.lstrip, str.rstrip], ids=lambda alter: alter.__name__)
def test_white_space_around_a_content_is_left_out(alter: Callable[[str], str]) -> None:
    """Whether or not the template trims, the range is that of the stripped content."""
    assert located(template(alter), " \n one\n", "two\t", "  three") == ["one", "two", "three"]


def test_equal_contents_have_a_range_each() -> None:
    """Two messages with one text are two places."""
    first, second = spans(template(), "same", "same")
    assert second[0] == first[1] + len(MARK)


def test_contents_that_hold_one_another() -> None:
    """A content that is part of another is not located inside it."""
    assert located(template(), "a b c", "b", f"b{MARK}b") == ["a b c", "b", f"b{MARK}b"]


def test_blank_contents_have_no_range() -> None:
    """No chunk can stand in white space, and templates treat an empty content in their own way."""
    assert located(template(lambda content: content or "(empty)"), "", " \n", "one") == ["one"]


def test_a_template_may_reorder_repeat_and_drop() -> None:
    """Ranges follow the rendered text, not the messages."""
    assert located(lambda contents: f"{contents[2]}|{contents[0]}|{contents[0]}.", "a", "b", "c") == [
        "c",
        "a",
        "a",
    ]


@pytest.mark.parametrize("alter", [str.upper, str.capitalize, str.title, lambda c: c.replace("o", "0")])
def test_an_altered_content_has_no_range(alter: Callable[[str], str]) -> None:
    """Text that the template rewrote is no longer the caller's."""
    assert located(template(alter), "one two", "two o'clock") == []


def test_an_altered_content_costs_the_others_nothing() -> None:
    """Contents that the template keeps are located beside one that it cuts or reacts to."""
    thoughts = "<think>Who?</think>\n\nIt was me."
    assert located(template(without_thoughts), "one", thoughts, "two") == ["one", "two"]
    shout = template(lambda content: content.upper() if content.startswith("!") else content)
    others = [str(n) for n in range(20)]
    assert located(shout, *others[:7], "!help", *others[7:], "!me") == others


def test_a_refusal_of_the_nonces_is_no_error() -> None:
    """The real contents were accepted, so the chat stands; only the range is missing."""
    assert located(template(refuse_unless_greeting), "Hello") == []


def test_the_number_of_renders_is_bounded() -> None:
    """A template that alters every content of a long chat does not make the search long."""
    calls: list[int] = []

    def render(contents: Sequence[str]) -> str:
        calls.append(len(contents))
        return template(str.capitalize)(contents)

    assert located(render, *["one"] * 500) == []
    assert len(calls) == 1 + MAX_RENDERS


@given(st.lists(st.text(MARK[:4] + " \n01<|ab", max_size=12), max_size=6))
def test_any_contents_are_located(contents: list[str]) -> None:
    """Whatever the contents spell, the ranges are those that building the text by hand gives."""
    expected, position = [], len("<|im_start|>\n")
    for content in contents:
        lead = len(content) - len(content.lstrip())
        if content.strip():
            expected.append((position + lead, position + lead + len(content.strip())))
        position += len(content) + len(MARK)
    assert spans(template(), *contents) == expected
