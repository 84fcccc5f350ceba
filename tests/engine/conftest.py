"""A backend without vLLM, so that the engine's own logic is tested in milliseconds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.engine import CacheCraftEngine, lifecycle
from cachecraft_rag.engine.backend import BackendOutput, BackendRequest
from cachecraft_rag.engine.running import RunningEngine
from cachecraft_rag.errors import EngineError
from cachecraft_rag.events import ChunkDecision, ChunkReport, Reason, RequestDecision, ReuseReport
from cachecraft_rag.segments.known import KnownChunks
from cachecraft_rag.vllm_connector.messages import PARAMS_KEY, ChunkRef, ControlMessage, RequestSpec

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = ["The river flows from the hills to the sea.", "Who wrote the letter to the queen, and when?"]
MAX_MODEL_LEN = 512

Script = Exception | tuple[str, ...] | BackendOutput


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=CHATML)


class FakeBackend:
    """Answers each request by the next of `scripts`: an error, or the pieces of a text.

    Attributes:
        delivers_report: whether the report comes with the last output, or must be asked for.
        replies: result of each control action; an exception's text is answered as an error.
        polls_until_reply: questions that are answered with None first.
        gate: if set, no token comes after the first until it is set.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN, dtype="torch.float32")
        )
        self.scripts: deque[Script] = deque()
        self.requests: list[BackendRequest] = []
        self.num_aborted = 0
        self.delivers_report = True
        self.keeps_report = True
        self.replies: dict[str, Any] = {}
        self.controls: list[ControlMessage] = []
        self.polls_until_reply = 0
        self.polls: list[str] = []
        self.is_shut_down = False
        self.gate: asyncio.Event | None = None

    async def start(self) -> None: ...

    async def generate(self, request: BackendRequest) -> AsyncGenerator[BackendOutput, None]:
        self.requests.append(request)
        script = self.scripts.popleft() if self.scripts else ("one", " two")
        try:
            if isinstance(script, Exception):
                raise script
            if isinstance(script, BackendOutput):
                yield script
                return
            for index, piece in enumerate(script):
                yield BackendOutput(piece, (index,))
                if self.gate is not None:
                    await self.gate.wait()
            is_delivered = self.delivers_report and request.params is not None
            params = {PARAMS_KEY: self._report(request)} if is_delivered else None
            yield BackendOutput("", (), "stop", kv_transfer_params=params)
        except (asyncio.CancelledError, GeneratorExit):
            self.num_aborted += 1
            raise

    async def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        self.polls.append(method)
        if self.polls_until_reply > 0:
            self.polls_until_reply -= 1
            return [None]
        if method == "cachecraft_take_reply":
            return [self._reply(args[0])]
        sent = next(request for request in self.requests if request.request_id == args[0])
        return [self._report(sent) if self.keeps_report else None]

    async def send_control(self, message: ControlMessage) -> None:
        self.controls.append(message)

    async def shutdown(self) -> None:
        self.is_shut_down = True

    def _reply(self, control_id: str) -> dict[str, Any] | None:
        action = next(m.action for m in self.controls if m.control_id == control_id)
        result = self.replies.get(action)
        return {"error": str(result)} if isinstance(result, Exception) else {"result": result}

    def _report(self, request: BackendRequest) -> dict[str, Any]:
        """What a scheduler side that reuses every chunk would say."""
        spec = _spec_of(request)
        num_reused = 0 if spec.full_reason else sum(len(chunk.span) for chunk in spec.chunks)
        return ReuseReport(
            request_id=request.request_id,
            decision=RequestDecision.REUSE if num_reused else RequestDecision.FULL,
            reason=spec.full_reason or (Reason.OTHER_PREFIX if num_reused else Reason.NO_CHUNKS),
            detail=spec.full_detail,
            num_prompt_tokens=len(request.token_ids),
            num_reused_tokens=num_reused,
            num_computed_tokens=len(request.token_ids) - num_reused,
            chunks=tuple(_reused(chunk) for chunk in spec.chunks) if num_reused else (),
        ).to_dict()


def _reused(chunk: ChunkRef) -> ChunkReport:
    num_tokens, document = len(chunk.span), chunk.document
    return ChunkReport(
        chunk_key=chunk.key,
        doc_id=document and document.doc_id,
        version=document and document.version,
        decision=ChunkDecision.REPAIRED,
        reason=Reason.OTHER_PREFIX,
        start=chunk.span.start,
        num_tokens=num_tokens,
        num_reused_tokens=num_tokens,
    )


def _spec_of(request: BackendRequest) -> RequestSpec:
    spec = RequestSpec.from_params(request.params)
    assert spec is not None
    return spec


@pytest.fixture
def spec_of() -> Callable[[BackendRequest], RequestSpec]:
    """Reads the spec that a request carries."""
    return _spec_of


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_level_tokenizer()


def _save_tiny_llama(folder: Path, tokenizer: PreTrainedTokenizerFast, **settings: Any) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
        **settings,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def save_tiny_llama() -> Callable[..., Path]:
    """Saves a random Llama with 2 layers; takes the folder, a tokenizer, and further settings."""
    return _save_tiny_llama


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Folder of a random Llama with 2 layers, for real engines."""
    return _save_tiny_llama(tmp_path_factory.mktemp("tiny-model"), tokenizer)


class EngineProcess:
    """An engine in a process of its own (`engine_script.py`), which does what it is told.

    Args:
        engine_args: vLLM's.
        environment: variables of the process, beyond this one's.
        config: fields of `CacheCraftConfig`.
    """

    def __init__(
        self,
        model: Path,
        *,
        engine_args: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        **config: Any,
    ) -> None:
        script = str(Path(__file__).with_name("engine_script.py"))
        arguments = [sys.executable, script, json.dumps([str(model), config, engine_args or {}])]
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115  (closed with the process)
        self._process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **(environment or {})},
        )

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        self._errors.close()

    def __call__(self, action: str, *arguments: str, **options: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([action, arguments, options]) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT "))
        self._errors.seek(0)
        raise AssertionError(f"the engine died:\n{self._errors.read()[-6000:]}")

    def ask(self, order: str = "ab", **options: Any) -> dict[str, Any]:
        """The answer to a question behind the documents of this order; the store's books must add up."""
        answer: dict[str, Any] = self("ask", order=order, **options)
        assert answer.pop("check") == []
        return answer


@pytest.fixture
def run_engine() -> type[EngineProcess]:
    """Starts an engine in a process of its own."""
    return EngineProcess


@pytest.fixture
def backend(tokenizer: PreTrainedTokenizerFast) -> FakeBackend:
    return FakeBackend(tokenizer)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder that looks like a model's to the checks before the start."""
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


MakeEngine = Callable[..., CacheCraftEngine]


@pytest.fixture
def make_engine(
    backend: FakeBackend, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeEngine]:
    """Makes a `CacheCraftEngine` that starts on the fake backend."""
    with contextlib.ExitStack() as engines:

        def make(
            config: CacheCraftConfig | None = None,
            *,
            is_attached: bool = True,
            off: Any = None,
            tool_parser: Any = None,
        ) -> CacheCraftEngine:
            def start(settings: Any, loop: Any, known: KnownChunks) -> RunningEngine:
                if backend.is_shut_down:
                    raise EngineError("started after its end")
                running = RunningEngine(
                    backend,
                    settings.config,
                    known,
                    "test-model",
                    self_test_key="test-model",
                    is_attached=is_attached,
                    off=off,
                    tool_parser=tool_parser,
                )
                loop.run(backend.start())
                return running

            monkeypatch.setattr(lifecycle, "start_engine", start)
            config = config or CacheCraftConfig(self_test=False)
            return engines.enter_context(CacheCraftEngine(model_folder, config=config))

        yield make


@pytest.fixture
def engine(make_engine: MakeEngine) -> CacheCraftEngine:
    return make_engine()
