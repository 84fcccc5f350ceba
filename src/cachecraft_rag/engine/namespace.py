"""What makes two engines' KV interchangeable, as one hash: equal namespace, equal KV per token id."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from cachecraft_rag.engine.fingerprint import model_fingerprint

_ROPE_FIELDS = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "max_position_embeddings",
)


def namespace_facts(vllm_config: Any, vllm_version: str) -> dict[str, Any]:
    """The facts that decide a token's KV, as JSON-ready data.

    Args:
        vllm_config: a `vllm.config.VllmConfig`.
    """
    model, text = vllm_config.model_config, vllm_config.model_config.hf_text_config
    return {
        "model": model_fingerprint(str(model.model), model.revision),
        "tokenizer": model_fingerprint(str(model.tokenizer), model.tokenizer_revision),
        "model_type": getattr(text, "model_type", None),
        "dtype": str(model.dtype),
        "kv_cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "quantization": model.quantization,
        "quantization_config": _plain(getattr(model.hf_config, "quantization_config", None)),
        "rope": {name: _plain(getattr(text, name, None)) for name in _ROPE_FIELDS},
        # Kernels of another kind of device round differently: its KV is not the same KV.
        "device": vllm_config.device_config.device_type,
        "tensor_parallel_size": vllm_config.parallel_config.tensor_parallel_size,
        "vllm": vllm_version,
    }


def self_test_facts(facts: Mapping[str, Any], vllm_config: Any, release: str) -> dict[str, Any]:
    """What a self-test's result holds for: the same KV, computed by the same code."""
    return {
        **facts,
        "release": release,
        "enforce_eager": vllm_config.model_config.enforce_eager,
    }


def namespace_of(facts: Mapping[str, Any]) -> str:
    """Hash of the facts in canonical JSON, as 32 hex digits."""
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"), default=str)
    return _hash(canonical)


def tenant_namespace(namespace: str, tenant: str) -> str:
    """Namespace of one tenant's chunk keys: no key is ever equal across tenants."""
    return _hash(json.dumps([namespace, tenant]))


def tenant_cache_salt(tenant: str, part: str) -> str:
    """`cache_salt` of one part of a tenant's requests: vLLM's prefix cache is a second store of KV, in
    which no request finds anything of another salt."""
    return _hash(json.dumps(["cache_salt", tenant, part]))


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    """Nested configuration objects as dictionaries, so that equal ones hash equally."""
    return value.to_dict() if hasattr(value, "to_dict") else value
