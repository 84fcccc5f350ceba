"""cachecraft-rag: what it saves is what its own report counts, what it computes twice counted twice."""

from __future__ import annotations

import time
from typing import Any

from answer import read_job, write_result

from cachecraft_rag import CacheCraftConfig, CacheCraftEngine, Chunk


def ask(engine: CacheCraftEngine, asked: dict[str, Any]) -> dict[str, Any]:
    chunks = [Chunk(each["text"], doc_id=each["name"]) for each in asked["documents"]]
    began, ttft_s, completion = time.perf_counter(), -1.0, None
    for delta in engine.stream_chat(asked["messages"], chunks=chunks, max_tokens=asked["max_tokens"]):
        if ttft_s < 0 and delta.token_ids:
            ttft_s = time.perf_counter() - began
        completion = delta.completion or completion
    assert completion is not None  # the last piece carries it
    report = completion.report
    num_computed = report.num_computed_tokens + report.num_recomputed_tokens + report.num_probe_tokens
    return {
        "ttft_s": ttft_s,
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "num_prompt": report.num_prompt_tokens,
        "num_saved": report.num_prompt_tokens - num_computed,
        "prompt_token_ids": list(completion.prompt_token_ids),
    }


def main() -> None:
    job = read_job()
    # Feedback answers again in idle time, which is not to be measured here.
    config = CacheCraftConfig(preset="balanced", feedback_share=0.0)
    with CacheCraftEngine(job["model"], config=config, **job["engine_args"]) as engine:
        parts = [[ask(engine, asked) for asked in job[part]] for part in ("warm_up", "measured")]
    write_result(*parts)


if __name__ == "__main__":
    main()
