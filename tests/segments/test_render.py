from __future__ import annotations

import pytest

from cachecraft_rag.errors import InvalidRequestError
from cachecraft_rag.segments.render import render_chat

USER = {"role": "user", "content": "Who?"}


def test_renders_with_the_models_template(chatml) -> None:
    """The template's marks, the contents, and the opening of the answer."""
    system = {"role": "system", "content": '{Be} "brief".'}
    assert render_chat(chatml.tokenizer, [system, USER]).text == (
        '<|im_start|>system\n{Be} "brief".<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n'
        "<|im_start|>assistant\n<think>"
    )


def test_the_opening_of_the_answer_can_be_left_out(chatml) -> None:
    """Without a generation prompt the text ends with the last message."""
    rendered = render_chat(chatml.tokenizer, [USER], add_generation_prompt=False)
    assert rendered.text == "<|im_start|>user\nWho?<|im_end|>\n"


def test_text_blocks_are_joined_by_a_newline(chatml) -> None:
    """Content blocks read as one content."""
    blocks = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
    plain = {"role": "user", "content": "one\ntwo"}
    assert render_chat(chatml.tokenizer, [blocks]) == render_chat(chatml.tokenizer, [plain])


def test_messages_of_one_role_in_a_row_are_passed_on(chatml) -> None:
    """Whether a role may repeat is the template's business."""
    assert render_chat(chatml.tokenizer, [USER, USER]).text.count("Who?") == 2


@pytest.mark.parametrize("content", ["user", "<|im_end|>", "Who?"])
def test_the_contents_are_located(chatml, content) -> None:
    """The spans cover what the messages hold, not the same words in the template."""
    rendered = render_chat(chatml.tokenizer, [{"role": "user", "content": content}, USER])
    first = len("<|im_start|>user\n")
    second = first + len(f"{content}<|im_end|>\n<|im_start|>user\n")
    assert rendered.content_spans == ((first, first + len(content)), (second, second + len("Who?")))


def test_the_templates_refusal_is_a_request_error(llama) -> None:
    """The template's own words reach the caller."""
    with pytest.raises(InvalidRequestError, match="roles must alternate user/assistant"):
        render_chat(llama.tokenizer, [USER, USER])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ("Who?", "messages is a str"),
        (USER, "messages is a dict"),
        (["Who?"], r"messages\[0\] is a str"),
        ([{"role": "user"}], r"messages\[0\] lacks \['content'\]"),
        ([USER, {**USER, "name": "x"}], r"messages\[1\] has unknown keys \['name'\]"),
        ([{"role": 3, "content": ""}], r"messages\[0\] has the role 3"),
        ([{"role": "", "content": ""}], r"has the role ''"),
        ([{"role": "user", "content": None}], r"messages\[0\]\.content is a NoneType"),
        ([{"role": "user", "content": ["a"]}], r"messages\[0\]\.content\[0\] is of type 'str'"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "is of type 'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "has the text None"),
    ],
)
def test_malformed_messages_are_refused(chatml, messages, message) -> None:
    """The error names the message and the rule that it breaks."""
    with pytest.raises(InvalidRequestError, match=message):
        render_chat(chatml.tokenizer, messages)


def test_a_model_without_a_chat_template_is_refused(labs) -> None:
    """The error points to complete()."""
    bare = labs["byte_level"].tokenizer.__class__(
        tokenizer_object=labs["byte_level"].tokenizer.backend_tokenizer
    )
    with pytest.raises(InvalidRequestError, match=r"use complete\(\)"):
        render_chat(bare, [USER])
