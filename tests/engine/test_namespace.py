"""Namespaces: equal for equal KV, different for everything that changes it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace as Config

import pytest

from cachecraft_rag.engine.namespace import (
    namespace_facts,
    namespace_of,
    tenant_cache_salt,
    tenant_namespace,
)
from cachecraft_rag.models import CACHE_DIR_VARIABLE


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        (folder / name).write_text(f"contents of {name}")
    return folder


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
        device_config=Config(device_type="cpu"),
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
        {"device_config__device_type": "cuda"},
        {"version": "0.32.1"},
    ],
)
def test_each_fact_changes_the_namespace(change: dict) -> None:
    """Whatever changes the KV of a token changes the namespace."""
    assert namespace(**change) != namespace()


def test_the_model_is_its_files(model_folder: Path, tmp_path: Path) -> None:
    """A copy in another folder is the same model; what is not the model's own does not matter."""
    copy = tmp_path / "copy"
    shutil.copytree(model_folder, copy)
    (copy / "README.md").write_text("read me")
    assert namespace(model_config__model=str(copy)) == namespace(model_config__model=str(model_folder))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_files_exchanged_in_place_are_another_model(model_folder: Path, name: str) -> None:
    """Of the same size, and with the old time of change."""
    before = namespace(model_config__model=str(model_folder))
    facts = (model_folder / name).stat()
    changed = (model_folder / name).read_bytes()[:-1] + b"?"
    (model_folder / "new").write_bytes(changed)
    os.utime(model_folder / "new", ns=(facts.st_atime_ns, facts.st_mtime_ns))
    (model_folder / "new").replace(model_folder / name)
    assert namespace(model_config__model=str(model_folder)) != before


def test_digests_are_remembered(model_folder: Path, cache_folder: Path) -> None:
    """The second start reads no weights; a memory that is damaged only costs the reading."""
    first = namespace(model_config__model=str(model_folder))
    memory = json.loads((cache_folder / "fingerprints.json").read_text())
    weights = str(model_folder / "model.safetensors")
    memory[weights][1] = "remembered"
    (cache_folder / "fingerprints.json").write_text(json.dumps(memory))
    assert namespace(model_config__model=str(model_folder)) != first
    (cache_folder / "fingerprints.json").write_text("[1, 2")
    assert namespace(model_config__model=str(model_folder)) == first


def test_tenant_names_cannot_be_composed_into_each_other() -> None:
    """No choice of names makes one tenant's namespace or salt another's."""
    assert tenant_namespace("a", "bc") != tenant_namespace("ab", "c")
    assert tenant_cache_salt("a", "bc") != tenant_cache_salt("ab", "c")
