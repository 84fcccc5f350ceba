"""Chat messages → the prompt text the model's own chat template makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from cachecraft_rag.errors import InvalidRequestError
from cachecraft_rag.segments.contents import locate_contents
from cachecraft_rag.segments.messages import PlainMessage, plain_messages
from cachecraft_rag.segments.prompt import PromptText
from cachecraft_rag.segments.tool_text import as_text, knows_tools, takes_system

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[Mapping[str, Any]]


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Tools = (),
    add_generation_prompt: bool = True,
) -> PromptText:
    """Render `messages` with the tokenizer's chat template, and find their contents in the outcome.

    Args:
        messages: `{"role": str, "content": str | list of {"type": "text", "text": str}}`, passed on
            in order as they are; text blocks are joined by a newline. In OpenAI's form an assistant's
            may have `tool_calls`, with arguments as a mapping or as JSON text, and a tool's
            `tool_call_id` and `name`.
        tools: in OpenAI's form. A template that does not show tools gets them, their calls and their
            results as text: see `tool_text`.
        add_generation_prompt: end with the template's opening of an assistant turn.

    Raises:
        InvalidRequestError: a message breaks the form above, the model has no chat template, or
            the template refuses the messages (the roles must alternate, for example).
    """
    plain = plain_messages(messages)
    if not tokenizer.chat_template:
        raise InvalidRequestError(
            "the model has no chat template, so chat messages cannot be rendered: use complete() "
            "with a finished prompt"
        )
    template = partial(_apply, tokenizer, add_generation_prompt)
    shown = _shown_by(tokenizer) if tools or any(map(_is_about_tools, plain)) else None
    is_text = shown is not None and not shown.tools
    in_system = shown is not None and shown.system

    def render(contents: Sequence[str]) -> str:
        filled = [{**message, "content": content} for message, content in zip(plain, contents, strict=True)]
        return (
            template(as_text(filled, tools, in_system=in_system), ()) if is_text else template(filled, tools)
        )

    contents = [message["content"] for message in plain]
    text = render(contents)
    return PromptText(text, locate_contents(render, contents, text))


def shows_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer has a chat template that shows tools."""
    return bool(tokenizer.chat_template) and _shown_by(tokenizer).tools


@dataclass(frozen=True, slots=True)
class _Shown:
    """What a chat template shows of a chat."""

    template: Any
    tools: bool
    system: bool


_shown: WeakKeyDictionary[PreTrainedTokenizerBase, _Shown] = WeakKeyDictionary()


def _shown_by(tokenizer: PreTrainedTokenizerBase) -> _Shown:
    """Found by rendering, once for a tokenizer; once more when it was given another template."""
    known = _shown.get(tokenizer)
    if known is None or known.template != tokenizer.chat_template:
        render = partial(_apply, tokenizer, True)
        known = _Shown(tokenizer.chat_template, knows_tools(render), takes_system(render))
        _shown[tokenizer] = known
    return known


def _is_about_tools(message: PlainMessage) -> bool:
    return message["role"] == "tool" or "tool_calls" in message


def _apply(
    tokenizer: PreTrainedTokenizerBase,
    add_generation_prompt: bool,
    messages: Sequence[PlainMessage],
    tools: Tools,
) -> str:
    # Not at the top: only rendering needs jinja2, which comes with vLLM and not with this package.
    from jinja2 import TemplateError

    try:
        rendered = tokenizer.apply_chat_template(
            list(messages),
            tools=[dict(tool) for tool in tools] or None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    # TypeError: DeepSeek's templates join the arguments of a call to text as if they were text.
    except (TemplateError, TypeError) as error:
        raise InvalidRequestError(f"the model's chat template refused the messages: {error}") from error
    return str(rendered)
