"""Namespaces: equal for equal KV, different for everything that changes it."""

from __future__ import annotations

from types import SimpleNamespace as Config

import pytest

from cachecraft_rag.engine.namespace import (
    namespace_facts,
    namespace_of,
    tenant_cache_salt,
    tenant_namespace,
)


def vllm_config(**changes: object) -> Config:
    """The part of vLLM's configuration that decides KV, with `a__b` for nested changes."""
    text = Config(model_type="llama", rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    config = Config(
        model_config=Config(
            model="org/model",
            revision=None,
            tokenizer="org/model",
            tokenizer_revision=None,
            dtype="bfloat16",
            quantization=None,
            hf_config=Config(quantization_config=None),
            hf_text_config=text,
        ),
        cache_config=Config(cache_dtype="auto"),
        parallel_config=Config(tensor_parallel_size=1),
    )
    for path, value in changes.items():
        *parents, name = path.split("__")
        target = config
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, name, value)
    return config


def namespace(version: str = "0.32.0", **changes: object) -> str:
    return namespace_of(namespace_facts(vllm_config(**changes), version))


def test_equal_facts_give_equal_namespaces() -> None:
    """The namespace is a function of the facts, so it can name files between processes."""
    assert namespace() == namespace()


@pytest.mark.parametrize(
    "change",
    [
        {"model_config__model": "org/other"},
        {"model_config__revision": "abc"},
        {"model_config__tokenizer": "org/other"},
        {"model_config__dtype": "float32"},
        {"model_config__quantization": "awq"},
        {"model_config__hf_config__quantization_config": {"bits": 4}},
        {"model_config__hf_text_config__rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"cache_config__cache_dtype": "fp8"},
        {"parallel_config__tensor_parallel_size": 2},
        {"version": "0.32.1"},
    ],
)
def test_each_fact_changes_the_namespace(change: dict) -> None:
    """Whatever changes the KV of a token changes the namespace."""
    assert namespace(**change) != namespace()


def test_tenant_names_cannot_be_composed_into_each_other() -> None:
    """No choice of names makes one tenant's namespace or salt another's."""
    assert tenant_namespace("a", "bc") != tenant_namespace("ab", "c")
    assert tenant_cache_salt("a", "bc") != tenant_cache_salt("ab", "c")
