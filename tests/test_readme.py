"""The README and the docs say what is true: examples run, names exist, links lead somewhere."""

from __future__ import annotations

import inspect
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import NonCallableMagicMock, create_autospec

import numpy as np
import pytest

import cachecraft_rag
from cachecraft_rag.config import PRESET_ALPHAS, REUSE_MODES
from cachecraft_rag.engine import CacheCraftEngine
from cachecraft_rag.events import ChunkDecision, Reason
from cachecraft_rag.planner.strategies import STRATEGIES
from cachecraft_rag.testing import FakeEngine

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "cachecraft_rag"
README = (ROOT / "README.md").read_text()
DOCS = {path.name: path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))}
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
ENGINE_ARGS = {"max_model_len"}
"""Arguments for vLLM that the examples use; another one has to be looked up there first."""


def example(mark: str) -> str:
    """The one example that contains `mark`."""
    block: str
    [block] = [block for block in BLOCKS if mark in block]
    return block


def names_in_table(header: str) -> list[str]:
    """The names in backticks in the first column of the README's table below `header`."""
    table = README.split(f"| {header} |", 1)[1].split("\n\n", 1)[0]
    first_cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    return [name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)]


def run_example(source: str) -> None:
    """Run it as a script, as a reader would."""
    exec(compile(source, "README.md", "exec"), {"__name__": "__main__"})


def checked_engine(fake: FakeEngine) -> NonCallableMagicMock:
    """An engine that refuses calls which the real one's signatures refuse, and answers like `fake`."""
    engine: NonCallableMagicMock = create_autospec(CacheCraftEngine, instance=True)
    engine.chat.side_effect = fake.chat
    engine.__enter__.return_value = engine
    return engine


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """Stands behind every engine that an example makes, directly or through an adapter."""
    fake = FakeEngine("Ada Lund")

    def make(*args: Any, **kwargs: Any) -> NonCallableMagicMock:
        arguments = inspect.signature(CacheCraftEngine).bind(*args, **kwargs).arguments
        assert set(arguments.get("vllm_engine_args", ())) <= ENGINE_ARGS
        return checked_engine(fake)

    monkeypatch.setattr(cachecraft_rag, "default_model", lambda: Path("a-model"), raising=False)
    monkeypatch.setattr(cachecraft_rag, "CacheCraftEngine", make, raising=False)
    return fake


def share_with_adapters(monkeypatch: pytest.MonkeyPatch, module: str, fake: FakeEngine) -> None:
    """Give the adapter the fake as its shared engine, and an encoder that needs no model."""
    monkeypatch.setattr(f"{module}.shared_engine", lambda model, config=None, **engine_args: fake)
    monkeypatch.setattr("cachecraft_rag.retrieval.SentenceEncoder.__call__", count_words)


def count_words(_: object, texts: Sequence[str]) -> np.ndarray:
    """Texts that share words are near."""
    vectors = np.zeros((len(texts), 256), dtype=np.float32)
    for vector, text in zip(vectors, texts, strict=True):
        for word in re.findall(r"\w+", text.lower()):
            vector[zlib.crc32(word.encode()) % 256] += 1
    return vectors


def assert_both_passages_were_used(fake: FakeEngine) -> None:
    """The engine was told of two passages, and both stand in the prompt that was answered."""
    told, asked = fake.calls[0], fake.last_call
    assert (told.method, len(told.chunks), asked.method) == ("prefetch", 2, "chat")
    assert all(chunk.text in asked.prompt for chunk in told.chunks)


def test_llama_index_example_runs(
    fake: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The LlamaIndex example retrieves, asks, and prints answer and reason."""
    pytest.importorskip("llama_index.core")
    share_with_adapters(monkeypatch, "cachecraft_rag.llama_index._handle", fake)
    run_example(example("llama_index.core"))
    assert_both_passages_were_used(fake)
    assert capsys.readouterr().out.splitlines() == ["Ada Lund", Reason.NOT_CACHED.sentence]


def test_langchain_example_runs(
    fake: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The LangChain example retrieves, asks, and prints answer and reason."""
    pytest.importorskip("langchain_core")
    share_with_adapters(monkeypatch, "cachecraft_rag.langchain._base", fake)
    run_example(example("cachecraft_rag.langchain import"))
    assert_both_passages_were_used(fake)
    assert capsys.readouterr().out.splitlines() == ["Ada Lund", Reason.NOT_CACHED.sentence]


def test_chinese_examples_run(
    fake: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of the Chinese README answer too."""
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.zh.md").read_text(), re.DOTALL | re.MULTILINE
    )
    for module in ("cachecraft_rag.llama_index._handle", "cachecraft_rag.langchain._base"):
        share_with_adapters(monkeypatch, module, fake)
    for block in blocks:
        run_example(block)
    assert capsys.readouterr().out.count("Ada Lund") == len(blocks) == 2


def test_engine_example_runs(fake: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """The plain example shows chunks computed first, and reused in another order."""
    run_example(example("out.report.why"))
    decisions = re.findall(r"^(?:north|south) (\w+)", capsys.readouterr().out, flags=re.MULTILINE)
    assert decisions == ["computed", "computed", "reused", "reused"]


def test_documents_example_fits_the_engine(fake: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """The example on tenants and versions calls methods that exist, with arguments they take."""
    run_example(example(".purge("))
    assert capsys.readouterr().out.count("dropped:") == 3


def test_tiers_example_fits_the_engine(fake: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """The example on disk and Redis gives settings that exist, and calls methods that exist."""
    run_example(example(".flush("))
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_every_example_is_tested() -> None:
    """No Python block of the README is left out of the tests above."""
    marks = ("llama_index.core", "cachecraft_rag.langchain import", "out.report.why", ".flush(", ".purge(")
    assert sorted(BLOCKS) == sorted(map(example, marks))


@pytest.mark.parametrize("mark", ["llama_index.core", "cachecraft_rag.langchain import"])
def test_framework_examples_are_short(mark: str) -> None:
    """What a reader must write for a framework takes less than 15 lines of code."""
    assert sum(1 for line in example(mark).splitlines() if line.strip()) < 15


def test_decisions_are_all_explained() -> None:
    """The table of decisions has the decisions of the code."""
    assert names_in_table("decision") == [decision.value for decision in ChunkDecision]


def test_reasons_that_the_code_gives_are_explained() -> None:
    """The table of reasons has all that the code gives, and no other."""
    code = "".join(path.read_text() for path in SOURCE.rglob("*.py") if path.name != "events.py")
    given = {reason.value for reason in Reason if re.search(rf"\bReason\.{reason.name}\b", code)}
    assert set(names_in_table("reason")) == given


def test_presets_are_all_explained() -> None:
    """The table of presets has the presets of the code, in their order."""
    assert names_in_table("preset") == list(PRESET_ALPHAS)


def test_named_reuse_modes_exist() -> None:
    """Every mode in the README is one, and every strategy is named."""
    named = set(re.findall(r'reuse="(\w+)"', README))
    assert named <= {*REUSE_MODES, *STRATEGIES}
    assert all(f'`"{name}"`' in README for name in STRATEGIES)


@pytest.mark.parametrize("name", DOCS)
def test_named_make_targets_exist(name: str) -> None:
    """Whoever types a command of the docs finds it in the Makefile."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make ([a-z]+)", DOCS[name], flags=re.MULTILINE))
    assert named <= targets
    assert named or name != "README.md"


@pytest.mark.parametrize("name", DOCS)
def test_links_lead_to_files(name: str) -> None:
    """Links that stay in the repository point to files that are there."""
    folder = ROOT if name == "README.md" else ROOT / "docs"
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)\)", DOCS[name])
    assert [link for link in links if not (folder / link).is_file()] == []


def test_map_names_files_that_exist() -> None:
    """Every file that docs/structure.md names is in the package or among the tests."""
    folders = (SOURCE, ROOT / "tests")
    files = {path.relative_to(ROOT).as_posix() for folder in folders for path in folder.rglob("*.py")}
    named = set(re.findall(r"\b((?:\w+/)*\w+\.py)\b", DOCS["structure.md"]))
    missing = {name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)}
    assert named and not missing
