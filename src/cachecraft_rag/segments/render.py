"""Chat messages → the prompt text the model's own chat template makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from cachecraft_rag.errors import InvalidRequestError
from cachecraft_rag.segments.contents import locate_contents
from cachecraft_rag.segments.prompt import PromptText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KEYS = frozenset({"role", "content"})


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
) -> PromptText:
    """Render `messages` with the tokenizer's chat template, and find their contents in the outcome.

    Args:
        messages: `{"role": str, "content": str | list of {"type": "text", "text": str}}`, passed on
            in order as they are; text blocks are joined by a newline.
        add_generation_prompt: end with the template's opening of an assistant turn.

    Raises:
        InvalidRequestError: a message breaks the form above, the model has no chat template, or
            the template refuses the messages (the roles must alternate, for example).
    """
    plain = _plain_messages(messages)
    if not tokenizer.chat_template:
        raise InvalidRequestError(
            "the model has no chat template, so chat messages cannot be rendered: use complete() "
            "with a finished prompt"
        )
    roles = [message["role"] for message in plain]
    contents = [message["content"] for message in plain]
    render = partial(_render, tokenizer, add_generation_prompt, roles)
    text = render(contents)
    return PromptText(text, locate_contents(render, contents, text))


def _render(
    tokenizer: PreTrainedTokenizerBase,
    add_generation_prompt: bool,
    roles: Sequence[str],
    contents: Sequence[str],
) -> str:
    # Not at the top: only rendering needs jinja2, which comes with vLLM and not with this package.
    from jinja2 import TemplateError

    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
    try:
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except TemplateError as error:
        raise InvalidRequestError(f"the model's chat template refused the messages: {error}") from error
    return str(rendered)


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequestError(
            f"messages is a {type(messages).__name__}: give a list of "
            '{"role": ..., "content": ...}, or use complete() for one text'
        )
    if not messages:
        raise InvalidRequestError("messages is empty: give at least one message")
    return [_plain_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _plain_message(where: str, message: Mapping[str, Any]) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(
            f"{where} is a {type(message).__name__}: a message is a mapping with role and content"
        )
    missing, unknown = _KEYS - set(message), set(message) - _KEYS
    if missing or unknown:
        wrong = f"lacks {sorted(missing)}" if missing else f"has unknown keys {sorted(map(str, unknown))}"
        raise InvalidRequestError(f"{where} {wrong}: a message has exactly role and content")
    role = message["role"]
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"{where} has the role {role!r}: a role is a non-empty string")
    return {"role": role, "content": _plain_content(where, message["content"])}


def _plain_content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "\n".join(_block_text(f"{where}.content[{i}]", b) for i, b in enumerate(content))
    raise InvalidRequestError(
        f"{where}.content is a {type(content).__name__}: it is a string or a list of text blocks"
    )


def _block_text(where: str, block: Any) -> str:
    kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
    if kind != "text":
        raise InvalidRequestError(
            f"{where} is of type {kind!r}: only text blocks are supported, "
            'of the form {"type": "text", "text": ...}'
        )
    text = block.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where} has the text {text!r}: a text block holds a string")
    return text
