"""SemBlend's vLLM connector: token-identical runs of earlier requests, moved to where they are wanted."""

from pathlib import Path

from answer import answer, read_job


def settings(folder: Path) -> dict[str, object]:
    # Its default provider only discovers. Jaccard needs no embedding model.
    return {
        "mode": "semantic_span_experimental",
        "provider": "semblend",
        "embedder_type": "jaccard",
        "min_prompt_tokens": 128,
        "min_semantic_span": 128,
        "min_similarity": 0.3,
        "min_reuse_ratio": 0.1,
        "skip_when_exact_prefix_ratio_at_least": 0.9,
        "multi_donor_spans": True,
        "enable_prompt_text": True,
        "capture_async_copy": False,
        "kv_storage_path": str(folder / "kv"),
        "audit_path": str(folder / "audit.jsonl"),
        "model_id": "benchmark",
    }


if __name__ == "__main__":
    job = read_job()
    answer(
        job,
        {
            "kv_connector": "SemBlendVllmConnector",
            "kv_connector_module_path": "semblend_vllm_connector.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": settings(Path(job["folder"])),
        },
        enable_prefix_caching=True,
        disable_hybrid_kv_cache_manager=True,
    )
