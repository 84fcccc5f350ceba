"""`CacheCraftCompletion`: the embedded engine as a LangChain model from text to text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import GenerationChunk, LLMResult

from cachecraft_rag.engine import Completion
from cachecraft_rag.langchain._base import EngineBacked
from cachecraft_rag.langchain._convert import llm_result, text_chunk

_MAX_THREADS = 64


class CacheCraftCompletion(EngineBacked, BaseLLM):
    """`ChatCacheCraft` for prompts that are finished texts: no chat template, no tools.

    Most models today are trained on their chat template and answer worse without it; this one is for
    base models, and for prompts that hold the template already. The prompts of a batch run at once.
    Each generation's `generation_info` has `finish_reason`, `usage_metadata` and the report under
    "cachecraft"; `llm_output` has the model's name and the token counts of all prompts.

    Args:
        model, engine, config, engine_args, temperature, max_tokens, stop, reuse, recompute_ratio, tenant,
            api_key, max_retries, timeout: as of `ChatCacheCraft`.

    Raises:
        ConfigurationError: an unknown argument, or one that breaks its rule.
        InvalidRequestError: a sampling or reuse option breaks its rule.

    Example:
        llm = CacheCraftCompletion(model=default_model(), max_tokens=64)
        text = llm.invoke("The capital of France is")
    """

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        options = self._options(stop, kwargs)
        # Threads, for the engine batches what waits at one time.
        with ThreadPoolExecutor(_MAX_THREADS) as pool:
            answers = pool.map(lambda prompt: self.chat_engine.complete(prompt, **options), prompts)
            return self._result(list(answers))

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        options = self._options(stop, kwargs)
        calls = [asyncio.ensure_future(self.chat_engine.acomplete(prompt, **options)) for prompt in prompts]
        try:
            return self._result(await asyncio.gather(*calls))
        finally:
            # After an error nobody waits for the others; where all are done this does nothing.
            for call in calls:
                call.cancel()

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        deltas = self.chat_engine.stream_complete(prompt, **self._options(stop, kwargs))
        return self._pieces(deltas, text_chunk, run_manager)

    def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        deltas = self.chat_engine.astream_complete(prompt, **self._options(stop, kwargs))
        return self._apieces(deltas, text_chunk, run_manager)

    def _result(self, completions: list[Completion]) -> LLMResult:
        for completion in completions:
            self._note(completion)
        return llm_result(completions, self.model_name)
