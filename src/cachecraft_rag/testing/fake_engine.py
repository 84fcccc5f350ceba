"""`FakeEngine`: an engine without a model, for testing code that calls one.

It answers at once with canned text, needs neither vLLM nor torch, and gives reports like those of
the real engine: a chunk seen for the first time is computed, later it is reused.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from cachecraft_rag.chunks import Chunk, chunk_key
from cachecraft_rag.engine.api import Completion, CompletionDelta, Message
from cachecraft_rag.engine.options import CallOptions, check_chunks, check_messages, check_prompt
from cachecraft_rag.engine.reports import absent_chunk
from cachecraft_rag.engine.router import asked_for_full
from cachecraft_rag.errors import EngineClosedError
from cachecraft_rag.events import (
    ChunkDecision,
    ChunkReport,
    PromptPiece,
    Reason,
    RequestDecision,
    ReuseReport,
)
from cachecraft_rag.testing.answers import FakeAnswer, Reply, in_form, tool_calls

_DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class FakeCall:
    """One recorded call.

    Attributes:
        method: the name of the method, e.g. "achat".
        prompt: the prompt as the fake rendered it.
        messages: as they were passed; empty for the `complete` family and `prefetch`.
        options: keyword arguments besides `chunks`, as they were passed.
    """

    method: str
    prompt: str = ""
    messages: tuple[Message, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


class FakeEngine:
    """A `ChatEngine` with no model behind it.

    A "token" is a word with the white space before it; chunks and the texts around them are cut into
    tokens each on its own. Chunks are matched by their text, whether
    passed with this call, with an earlier one, or to `prefetch`. Arguments are checked as by the
    real engine, so a test also finds an unknown option or a chunk that is a plain string.

    Where a call is bound to a form (a forced tool, `structured`), a canned text that has not that form
    gives way to an example that has.

    Args:
        reply: what to answer; see `Reply`.
        has_tool_parser: what the property says; tool calls are answered either way.

    Example:
        engine = FakeEngine("Paris")
        assert engine.chat([{"role": "user", "content": "Capital of France?"}]).text == "Paris"
        assert engine.calls[0].method == "chat"
    """

    def __init__(
        self,
        reply: Reply = "fake answer",
        *,
        model_name: str = "fake-model",
        max_model_len: int = 4096,
        has_tool_parser: bool = True,
    ) -> None:
        self.calls: list[FakeCall] = []
        self._reply = reply
        self._num_replies = 0
        self._model_name = model_name
        self._max_model_len = max_model_len
        self._has_tool_parser = has_tool_parser
        self._known: dict[str, dict[str, Chunk]] = {}
        self._prefixes: dict[tuple[str, str], set[str]] = {}
        self._is_closed = False

    @property
    def model_name(self) -> str:
        return self._model_name

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def is_started(self) -> bool:
        return not self._is_closed

    @property
    def has_tool_parser(self) -> bool:
        return self._has_tool_parser

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def last_call(self) -> FakeCall:
        """The newest call; IndexError when there was none."""
        return self.calls[-1]

    def encode(self, text: str) -> list[int]:
        return list(_token_ids(_words(text)))

    def chat(
        self, messages: Sequence[Message], *, chunks: Sequence[Chunk] = (), **options: Any
    ) -> Completion:
        return self._chat("chat", messages, chunks, options)

    async def achat(
        self, messages: Sequence[Message], *, chunks: Sequence[Chunk] = (), **options: Any
    ) -> Completion:
        return self._chat("achat", messages, chunks, options)

    def stream_chat(
        self, messages: Sequence[Message], *, chunks: Sequence[Chunk] = (), **options: Any
    ) -> Iterator[CompletionDelta]:
        return _deltas(self._chat("stream_chat", messages, chunks, options))

    def astream_chat(
        self, messages: Sequence[Message], *, chunks: Sequence[Chunk] = (), **options: Any
    ) -> AsyncIterator[CompletionDelta]:
        return _as_async(_deltas(self._chat("astream_chat", messages, chunks, options)))

    def complete(self, prompt: str, *, chunks: Sequence[Chunk] = (), **options: Any) -> Completion:
        return self._complete("complete", prompt, chunks, options)

    async def acomplete(self, prompt: str, *, chunks: Sequence[Chunk] = (), **options: Any) -> Completion:
        return self._complete("acomplete", prompt, chunks, options)

    def stream_complete(
        self, prompt: str, *, chunks: Sequence[Chunk] = (), **options: Any
    ) -> Iterator[CompletionDelta]:
        return _deltas(self._complete("stream_complete", prompt, chunks, options))

    def astream_complete(
        self, prompt: str, *, chunks: Sequence[Chunk] = (), **options: Any
    ) -> AsyncIterator[CompletionDelta]:
        return _as_async(_deltas(self._complete("astream_complete", prompt, chunks, options)))

    def prefetch(self, chunks: Sequence[Chunk], *, tenant: str | None = None) -> None:
        self._record("prefetch", chunks, tenant=tenant)

    def warm(
        self, chunks: Sequence[Chunk], *, system: str | None = None, tenant: str | None = None, **options: Any
    ) -> int:
        chosen = self._record("warm", chunks, system=system, tenant=tenant, **options)
        texts = {chunk.text.strip() for chunk in chosen if chunk.text.strip()}
        for text in texts:
            self._prefixes.setdefault((tenant or _DEFAULT_TENANT, text), set()).add(system or "")
        return len(texts)

    def replace(
        self, doc_id: str, version: str | None, chunks: Sequence[Chunk], *, tenant: str | None = None
    ) -> int:
        kept = {chunk.text.strip() for chunk in check_chunks(chunks)}
        dropped = self._drop(tenant, lambda chunk: chunk.doc_id == doc_id and chunk.text.strip() not in kept)
        named = [Chunk(chunk.text, doc_id, version, chunk.is_shared) for chunk in chunks]
        self._record("replace", named, doc_id=doc_id, version=version, tenant=tenant)
        return dropped

    def invalidate(self, doc_id: str, version: str | None = None, *, tenant: str | None = None) -> int:
        self._record("invalidate", (), doc_id=doc_id, version=version, tenant=tenant)
        return self._drop(tenant, lambda chunk: chunk.doc_id == doc_id and version in (None, chunk.version))

    def invalidate_chunk(self, chunk: Chunk | str, *, tenant: str | None = None) -> int:
        named = Chunk(chunk) if isinstance(chunk, str) else chunk
        self.calls.append(FakeCall("invalidate_chunk", chunks=(named,), options={"tenant": tenant}))
        return self._drop(tenant, lambda known: known.text.strip() == named.text.strip())

    def close(self) -> None:
        self._is_closed = True

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _chat(
        self, method: str, messages: Sequence[Message], chunks: Sequence[Chunk], options: Mapping[str, Any]
    ) -> Completion:
        prompt = render_messages(check_messages(messages))
        return self._answer(FakeCall(method, prompt, tuple(messages), check_chunks(chunks), dict(options)))

    def _complete(
        self, method: str, prompt: str, chunks: Sequence[Chunk], options: Mapping[str, Any]
    ) -> Completion:
        return self._answer(FakeCall(method, check_prompt(prompt), (), check_chunks(chunks), dict(options)))

    def _record(self, method: str, chunks: Sequence[Chunk], **options: Any) -> tuple[Chunk, ...]:
        """Note a call that answers nothing, and remember its chunks."""
        self._refuse_if_closed()
        chosen = check_chunks(chunks)
        self.calls.append(FakeCall(method, chunks=chosen, options=options))
        self._remember(options["tenant"] or _DEFAULT_TENANT, chosen)
        return chosen

    def _drop(self, tenant: str | None, is_meant: Callable[[Chunk], bool]) -> int:
        """Forget the chunks that are meant; how many of them were stored."""
        owner = tenant or _DEFAULT_TENANT
        known = self._known.get(owner, {})
        texts = [text for text, chunk in known.items() if is_meant(chunk)]
        for text in texts:
            del known[text]
        return sum(self._prefixes.pop((owner, text), None) is not None for text in texts)

    def _answer(self, call: FakeCall) -> Completion:
        self._refuse_if_closed()
        options = CallOptions.from_kwargs(call.options)
        self.calls.append(call)
        answer = in_form(self._next_reply(call.prompt), options)
        report = self._report(call, options)
        words = _words(answer.text)
        kept = words[: options.sampling.max_tokens]
        finished = "tool_calls" if answer.tool_calls else "stop"
        return Completion(
            text="".join(kept),
            token_ids=_token_ids(kept),
            finish_reason=finished if len(kept) == len(words) else "length",
            tool_calls=tool_calls(answer, len(self.calls)),
            report=report,
            prompt_token_ids=_token_ids([word for piece in report.pieces for word in _words(piece.text)]),
            logprobs=_fake_logprobs(kept) if options.sampling.logprobs is not None else None,
        )

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise EngineClosedError("this FakeEngine was closed: make another one")

    def _next_reply(self, prompt: str) -> str | FakeAnswer:
        if callable(self._reply):
            return self._reply(prompt)
        if isinstance(self._reply, (str, FakeAnswer)):
            return self._reply
        index = min(self._num_replies, len(self._reply) - 1)
        self._num_replies += 1
        return self._reply[index]

    def _remember(self, tenant: str, chunks: Sequence[Chunk]) -> None:
        known = self._known.setdefault(tenant, {})
        known.update((chunk.text.strip(), chunk) for chunk in chunks if chunk.text.strip())

    def _report(self, call: FakeCall, options: CallOptions) -> ReuseReport:
        tenant = options.tenant or _DEFAULT_TENANT
        self._remember(tenant, call.chunks)
        found = _find(call.prompt, self._known.get(tenant, {}))
        pieces = _pieces(call.prompt, found)
        reports = [
            self._report_chunk(call.prompt[:at], pieces[at], chunk, tenant, options) for at, chunk in found
        ]
        matched = {chunk.text.strip() for _, chunk in found}
        reports += [_absent(chunk, tenant) for chunk in call.chunks if chunk.text.strip() not in matched]
        num_tokens = sum(piece.num_tokens for piece in pieces.values())
        num_reused = sum(report.num_reused_tokens for report in reports)
        return ReuseReport(
            request_id=f"fake-{len(self.calls)}",
            decision=RequestDecision.REUSE if num_reused else RequestDecision.FULL,
            reason=_request_reason(options, reports),
            strategy="" if options.reuse == "off" else options.reuse,
            num_prompt_tokens=num_tokens,
            num_reused_tokens=num_reused,
            num_computed_tokens=num_tokens - num_reused,
            ttft_s=0.0,
            chunks=tuple(reports),
            pieces=tuple(pieces.values()),
        )

    def _report_chunk(
        self, prefix: str, piece: PromptPiece, chunk: Chunk, tenant: str, options: CallOptions
    ) -> ChunkReport:
        prefixes = self._prefixes.get((tenant, piece.text), set())
        decision, reason = _decide(prefixes, prefix, options)
        if options.store:
            self._prefixes.setdefault((tenant, piece.text), set()).add(prefix)
        num_tokens = piece.num_tokens
        is_computed = decision is ChunkDecision.COMPUTED
        return ChunkReport(
            chunk_key=chunk_key(tenant, _token_ids(_words(piece.text))),
            doc_id=chunk.doc_id,
            version=chunk.version,
            decision=decision,
            reason=reason,
            start=piece.start,
            num_tokens=num_tokens,
            num_reused_tokens=0 if is_computed else num_tokens,
            num_computed_tokens=num_tokens if is_computed else 0,
            tier="" if is_computed else "host",
            same_predecessors=decision is ChunkDecision.EXACT,
        )


def render_messages(messages: Sequence[Message]) -> str:
    """The fake's chat template: one `role: content` line per message, its tool calls behind it."""
    return "\n".join(
        f"{message['role']}: {_content(message.get('content') or '')}{_written(message.get('tool_calls'))}"
        for message in messages
    )


def _written(tool_calls: Any) -> str:
    return "".join(f" {json.dumps(call['function'], sort_keys=True)}" for call in tool_calls or ())


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block["text"] for block in content)


def _words(text: str) -> list[str]:
    return re.findall(r"\s*\S+|\s+$", text)


def _token_ids(words: Sequence[str]) -> tuple[int, ...]:
    return tuple(zlib.crc32(word.encode()) & 0x7FFFFFFF for word in words)


def _fake_logprobs(words: Sequence[str]) -> tuple[Mapping[int, float], ...]:
    return tuple({token_id: 0.0} for token_id in _token_ids(words))


def _find(prompt: str, known: Mapping[str, Chunk]) -> list[tuple[int, Chunk]]:
    """Non-overlapping matches in prompt order; at one place the longest text wins."""
    if not known:
        return []
    pattern = "|".join(re.escape(text) for text in sorted(known, key=len, reverse=True))
    return [(match.start(), known[match.group()]) for match in re.finditer(pattern, prompt)]


def _pieces(prompt: str, found: Sequence[tuple[int, Chunk]]) -> dict[int, PromptPiece]:
    """The prompt cut at its chunks: position in the text → piece, in order."""
    ends = {at + len(chunk.text.strip()) for at, chunk in found}
    edges = sorted({0, len(prompt), *ends, *(at for at, _ in found)})
    pieces, num_tokens = {}, 0
    for start, end in pairwise(edges):
        pieces[start] = PromptPiece(prompt[start:end], num_tokens, len(_words(prompt[start:end])))
        num_tokens += pieces[start].num_tokens
    return pieces


def _decide(prefixes: set[str], prefix: str, options: CallOptions) -> tuple[ChunkDecision, Reason]:
    if (full := asked_for_full(options)) is not None:
        return ChunkDecision.COMPUTED, full
    if not prefixes:
        return ChunkDecision.COMPUTED, Reason.NOT_CACHED
    if prefix in prefixes:
        return ChunkDecision.EXACT, Reason.SAME_PREFIX
    if options.reuse == "exact":
        return ChunkDecision.COMPUTED, Reason.NO_EXACT_VARIANT
    return ChunkDecision.REUSED, Reason.OTHER_PREFIX


def _absent(chunk: Chunk, tenant: str) -> ChunkReport:
    return absent_chunk(chunk, chunk_key(tenant, _token_ids(_words(chunk.text.strip()))))


def _request_reason(options: CallOptions, reports: Sequence[ChunkReport]) -> Reason:
    if (full := asked_for_full(options)) is not None:
        return full
    present = [report for report in reports if report.reason is not Reason.NOT_IN_PROMPT]
    if not present:
        return Reason.NO_CHUNKS
    reused = [report for report in present if report.num_reused_tokens]
    moved = [report for report in reused if report.reason is not Reason.SAME_PREFIX]
    return (moved or reused or present)[0].reason


def _deltas(completion: Completion) -> Iterator[CompletionDelta]:
    for word in _words(completion.text):
        yield CompletionDelta(word, _token_ids([word]))
    yield CompletionDelta("", (), completion)


async def _as_async(deltas: Iterator[CompletionDelta]) -> AsyncIterator[CompletionDelta]:
    for delta in deltas:
        yield delta
