"""vLLM behind one small asynchronous interface. Besides `tool_parsers` the only file of the engine that
imports vLLM.

All coroutines run on the engine's own loop. `AsyncBackend` is the product; `InProcessBackend` runs
everything in this process, for tests and debuggers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

# vLLM reads these when it is imported. VLLM_CPU_KVCACHE_SPACE is left alone: it wins over our default.
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm import SamplingParams
from vllm.config import StructuredOutputsConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor

from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.engine.api import KV_TRANSFER_PARAMS, SamplingOptions
from cachecraft_rag.engine.backend import Backend, BackendOutput, BackendRequest
from cachecraft_rag.engine.memory import choose_host_store_bytes, cold_settings
from cachecraft_rag.engine.namespace import namespace_facts, namespace_of
from cachecraft_rag.engine.tools import StructuredOutput
from cachecraft_rag.errors import ConfigurationError, EngineError, GenerationError, InvalidRequestError
from cachecraft_rag.vllm_connector.compat import (
    check_vllm_version,
    connector_engine_args,
    kernel_environment,
    unsupported_reason,
)
from cachecraft_rag.vllm_connector.messages import ControlMessage

T = TypeVar("T")
# CPU defaults. Blocks of 128 tokens, vLLM's CPU default, make the prefix cache miss short prompts;
# compiling takes 50 s of start-up where eager takes 12 s.
_CPU_DEFAULTS: Mapping[str, Any] = {"enforce_eager": True, "block_size": 32}
_CPU_KV_BYTES = 2 * 1024**3
_SAMPLING_FIELDS = tuple(
    field.name for field in dataclasses.fields(SamplingOptions) if field.name != "structured"
)
_SHUTDOWN_TIMEOUT_S = 20.0
_MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"


def make_vllm_config(
    model: str, engine_args: Mapping[str, Any], config: CacheCraftConfig, *, in_process: bool
) -> tuple[VllmConfig, str]:
    """vLLM's configuration and why our connector is not in it ("" if it is).

    Whether a model's KV can be moved is decided here, before attaching: with the connector
    attached, some models do not even start.

    Raises:
        ConfigurationError: an unknown engine argument.
    """
    # A CPU's executor is chosen by it here; its value at the user's is meant for `LLM`, not for us.
    os.environ[_MULTIPROCESSING] = "0" if in_process else "1"
    arguments = {**_defaults(engine_args), **engine_args, "model": model}
    plain = _engine_args(arguments).create_engine_config()
    reason = unsupported_reason(plain)
    if reason:
        return plain, reason
    os.environ.update(kernel_environment(plain.model_config))
    store_bytes = choose_host_store_bytes(config.host_store_bytes)
    namespace = namespace_of(namespace_facts(plain, check_vllm_version()))
    cold = cold_settings(config, namespace)
    attachment = connector_engine_args(config, store_bytes, cold, in_process=in_process)
    attached = _engine_args({**arguments, **attachment})
    return attached.create_engine_config(), ""


def make_backend(vllm_config: VllmConfig, *, in_process: bool) -> Backend:
    return InProcessBackend(vllm_config) if in_process else AsyncBackend(vllm_config)


class AsyncBackend:
    """vLLM's engine core and workers in processes of their own."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._vllm_config = vllm_config
        self._llm: AsyncLLM | None = None

    @property
    def vllm_config(self) -> VllmConfig:
        return self._vllm_config

    @property
    def tokenizer(self) -> Any:
        return self._engine.get_tokenizer()

    async def start(self) -> None:
        # Blocks the loop, on which nothing else runs yet, and ties vLLM's tasks to this loop.
        self._llm = AsyncLLM.from_vllm_config(self._vllm_config, disable_log_stats=True)

    async def generate(self, request: BackendRequest) -> AsyncGenerator[BackendOutput, None]:
        outputs = self._engine.generate(_prompt(request), _sampling_params(request), request.request_id)
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    yield _to_output(output)
        except Exception as error:
            raise _translated(error) from error

    async def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        with _command_faults(method):
            return list(await self._engine.collective_rpc(method, args=args))

    async def send_control(self, message: ControlMessage) -> None:
        with _command_faults(message.action):
            await self._engine.engine_core.add_request_async(_control_request(message))

    async def shutdown(self) -> None:
        if self._llm is not None:
            self._llm.shutdown(timeout=_SHUTDOWN_TIMEOUT_S)
            # Or it would end once more when it is collected, maybe after its modules are gone.
            self._llm = None

    @property
    def _engine(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineError("vLLM is not started")
        return self._llm


class InProcessBackend:
    """vLLM in this process; one thread owns it and steps it while requests are unfinished."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._vllm_config = vllm_config
        self._engine: LLMEngine | None = None
        self._owner = ThreadPoolExecutor(1, thread_name_prefix="cachecraft-vllm")
        self._queues: dict[str, asyncio.Queue[RequestOutput | Exception]] = {}
        self._pump: asyncio.Task[None] | None = None

    @property
    def vllm_config(self) -> VllmConfig:
        return self._vllm_config

    @property
    def tokenizer(self) -> Any:
        return self._llm.get_tokenizer()

    async def start(self) -> None:
        config = self._vllm_config
        executor = Executor.get_class(config)
        self._engine = await self._call(
            lambda: LLMEngine(config, executor, log_stats=False, multiprocess_mode=False)
        )

    async def generate(self, request: BackendRequest) -> AsyncGenerator[BackendOutput, None]:
        queue = self._queues[request.request_id] = asyncio.Queue()
        try:
            await self._call(lambda: self._add(request))
            self._ensure_pump()
            while True:
                output = await queue.get()
                if isinstance(output, Exception):
                    raise output
                yield _to_output(output)
                if output.finished:
                    return
        except Exception as error:
            raise _translated(error) from error
        finally:
            self._queues.pop(request.request_id, None)
            await self._call(lambda: self._llm.abort_request([request.request_id]))

    async def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        with _command_faults(method):
            # A finished or control request reaches the workers with the next step only.
            await self._step()
            return list(await self._call(lambda: self._llm.collective_rpc(method, args=args)))

    async def send_control(self, message: ControlMessage) -> None:
        with _command_faults(message.action):
            await self._call(lambda: self._llm.engine_core.add_request(_control_request(message)))

    async def shutdown(self) -> None:
        self._queues.clear()
        if self._pump is not None:
            await self._pump
        # Not on the owner's thread: at the end of the program an executor takes no more work.
        if self._engine is not None:
            self._engine.engine_core.shutdown()
        self._owner.shutdown(wait=False)

    @property
    def _llm(self) -> LLMEngine:
        if self._engine is None:
            raise EngineError("vLLM is not started")
        return self._engine

    def _add(self, request: BackendRequest) -> None:
        self._llm.add_request(request.request_id, _prompt(request), _sampling_params(request))

    def _ensure_pump(self) -> None:
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._step_while_busy())

    async def _step_while_busy(self) -> None:
        while self._queues:
            try:
                await self._step()
            except Exception as error:
                for queue in self._queues.values():
                    queue.put_nowait(error)
                return

    async def _step(self) -> None:
        for output in await self._call(self._llm.step):
            if queue := self._queues.get(output.request_id):
                queue.put_nowait(output)

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._owner, function)


def _defaults(engine_args: Mapping[str, Any]) -> dict[str, Any]:
    # Where the grammar allows it, a small model fills its answer with white space. Only a named backend
    # can forbid it: "auto" would take other backends for the schemas that xgrammar refuses.
    compact = StructuredOutputsConfig(backend="xgrammar", disable_any_whitespace=True)
    defaults: dict[str, Any] = {
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "structured_outputs_config": compact,
    }
    if current_platform.is_cpu():
        defaults |= _CPU_DEFAULTS
        if not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
            defaults["kv_cache_memory_bytes"] = _CPU_KV_BYTES
    return defaults


def _engine_args(arguments: Mapping[str, Any]) -> AsyncEngineArgs:
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    unknown = sorted(set(arguments) - known)
    if unknown:
        raise ConfigurationError(
            f"unknown vLLM engine argument {', '.join(map(repr, unknown))}: see the fields of "
            "vllm.engine.arg_utils.AsyncEngineArgs"
        )
    return AsyncEngineArgs(**arguments)


def _prompt(request: BackendRequest) -> Any:
    # The rendered form: a plain TokensPrompt would take a detour through a thread.
    return tokens_input(list(request.token_ids), cache_salt=request.cache_salt)


def _sampling_params(request: BackendRequest) -> SamplingParams:
    options = {name: getattr(request.sampling, name) for name in _SAMPLING_FIELDS}
    extra_args = dict(request.sampling.extra_args)
    if request.params:
        extra_args[KV_TRANSFER_PARAMS] = dict(request.params)
    return SamplingParams(
        **{**options, "stop": list(request.sampling.stop), "extra_args": extra_args or None},
        structured_outputs=_structured_outputs(request.sampling.structured),
        skip_special_tokens=not request.keeps_special_tokens,
        output_kind=RequestOutputKind.DELTA,
    )


def _structured_outputs(form: StructuredOutput | None) -> StructuredOutputsParams | None:
    if form is None:
        return None
    return StructuredOutputsParams(
        json=None if form.json_schema is None else dict(form.json_schema),
        json_object=form.json_object or None,
        regex=form.regex,
        choice=list(form.choice) or None,
    )


def _control_request(message: ControlMessage) -> EngineCoreRequest:
    """A request that is aborted as it arrives: it only fires the connector's `on_new_request`."""
    return EngineCoreRequest(
        request_id=f"control-{message.control_id}",
        prompt_token_ids=[0],
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=1, extra_args={KV_TRANSFER_PARAMS: message.to_params()}),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        abort_immediately=True,
    )


def _to_output(output: RequestOutput) -> BackendOutput:
    if not output.outputs:
        return BackendOutput("", (), "abort" if output.finished else None)
    piece = output.outputs[0]
    return BackendOutput(
        text=piece.text,
        token_ids=tuple(piece.token_ids),
        finish_reason=piece.finish_reason,
        logprobs=_to_logprobs(piece.logprobs or ()),
        kv_transfer_params=output.kv_transfer_params,
    )


def _to_logprobs(steps: Iterable[Any]) -> tuple[Mapping[int, float], ...]:
    return tuple({token: entry.logprob for token, entry in step.items()} for step in steps)


def _translated(error: Exception) -> Exception:
    if isinstance(error, EngineDeadError):
        return _died()
    if isinstance(error, (VLLMClientError, ValueError)):
        return InvalidRequestError(f"vLLM refused the request: {error}")
    return GenerationError(f"vLLM failed the request: {error!r}")


@contextmanager
def _command_faults(command: str) -> Iterator[None]:
    """Around a command of ours: no argument of a user's can be to blame for its failure."""
    try:
        yield
    except EngineError:
        raise
    except EngineDeadError as error:
        raise _died() from error
    except Exception as error:
        raise EngineError(f"vLLM failed the command {command!r}: {error!r}") from error


def _died() -> EngineError:
    return EngineError(
        "vLLM's engine process died; its own messages above say why (often: out of memory). "
        "Close this engine and make a new one"
    )
