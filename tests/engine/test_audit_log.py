"""The audit log: what stands in it, how it is written, and that no request fails with it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cachecraft_rag.chunks import SHARED_TENANT, Chunk, ChunkKey
from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.engine import CacheCraftEngine, audit_log
from cachecraft_rag.engine.audit_log import AuditLog
from cachecraft_rag.errors import EngineError
from cachecraft_rag.events import ChunkDecision, ChunkReport, Reason, RequestDecision, ReuseReport

RIVER = Chunk("The river flows from the hills to the sea.", doc_id="river", version="1")
QUEEN = Chunk("The queen answered the letter in June.", doc_id="queen")
ABSENT = Chunk("Nobody quotes this one.", doc_id="absent")
PROMPT = f"{RIVER.text}\n\n{QUEEN.text}\n\nWhere?"
SECRETS = ("river flows", "queen", "Where")
"""Words of the prompt that no log may hold; `queen` stands in a document's name too."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no fault of the log: what is waited for is there when a call returns."""
    monkeypatch.setattr(audit_log, "DEADLINE_S", 20.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


@pytest.fixture
def logged(make_engine: Callable[..., CacheCraftEngine], path: Path) -> CacheCraftEngine:
    """A started engine that keeps an audit log."""
    engine = make_engine(CacheCraftConfig(self_test=False, audit_log=str(path)))
    engine.start()
    return engine


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def report(request_id: str) -> ReuseReport:
    chunk = ChunkReport(ChunkKey("k"), "d", "1", ChunkDecision.EXACT, Reason.SAME_PREFIX, 0, 8)
    return ReuseReport(request_id, RequestDecision.REUSE, Reason.SAME_PREFIX, chunks=(chunk,))


def add(log: AuditLog, *request_ids: str) -> None:
    """Lines that are written, or have failed, when this returns."""
    for request_id in request_ids:
        asyncio.run(log.answered("t", report(request_id)))


def ids_in(path: Path) -> list[str]:
    return [line["request_id"] for line in lines_of(path)]


# --- what stands in it --------------------------------------------------------------------------


def test_answer_has_one_line_with_what_stood_behind_it(logged: CacheCraftEngine, path: Path) -> None:
    """Document, version, key and decision of each chunk in the prompt, and none that was only passed."""
    out = logged.complete(PROMPT, chunks=[RIVER, QUEEN, ABSENT], tenant="t")
    (line,) = lines_of(path)
    chunks = [
        {
            "doc_id": "river",
            "version": "1",
            "chunk_key": out.report.chunks[0].chunk_key,
            "decision": "repaired",
        },
        {
            "doc_id": "queen",
            "version": None,
            "chunk_key": out.report.chunks[1].chunk_key,
            "decision": "repaired",
        },
    ]
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "event": "answer",
        "request_id": out.report.request_id,
        "tenant": "t",
        "decision": "reuse",
        "reason": "other_prefix",
        "chunks": chunks,
    }


@pytest.mark.parametrize("way", ["stream", "async", "async stream"])
def test_every_kind_of_call_is_logged_once(logged: CacheCraftEngine, path: Path, way: str) -> None:
    """The line is there when the answer is."""

    async def collect() -> None:
        async for _ in logged.astream_complete(PROMPT, chunks=[RIVER]):
            pass

    if way == "stream":
        list(logged.stream_complete(PROMPT, chunks=[RIVER]))
    else:
        asyncio.run(logged.acomplete(PROMPT, chunks=[RIVER]) if way == "async" else collect())
    assert [line["event"] for line in lines_of(path)] == ["answer"]


def test_answer_that_was_interrupted_is_logged_as_such(logged: CacheCraftEngine, path: Path, backend) -> None:
    """A part of it was handed out, so what stood behind it is told, though there is no report."""
    deltas = logged.stream_complete(PROMPT, chunks=[RIVER], tenant="t")
    next(deltas)
    deltas.close()
    logged.close()
    (line,) = lines_of(path)
    assert (line["event"], line["decision"], line["tenant"]) == ("interrupted", None, "t")
    assert [(chunk["doc_id"], chunk["version"]) for chunk in line["chunks"]] == [("river", "1")]


def test_answer_whose_reader_was_cancelled_is_logged_as_interrupted(
    logged: CacheCraftEngine, path: Path, backend
) -> None:
    """Also where the reader waits for the next piece."""

    async def read_one() -> None:
        backend.gate = asyncio.Event()
        pieces: asyncio.Queue[Any] = asyncio.Queue()

        async def read() -> None:
            async for delta in logged.astream_complete(PROMPT, chunks=[RIVER]):
                pieces.put_nowait(delta)

        reader = asyncio.create_task(read())
        await pieces.get()
        reader.cancel()
        await asyncio.wait([reader])

    asyncio.run(read_one())
    logged.close()
    assert [line["event"] for line in lines_of(path)] == ["interrupted"]


def test_answer_that_never_began_is_not_logged(logged: CacheCraftEngine, path: Path, backend) -> None:
    """Nothing was handed out, so nothing stood behind it."""
    backend.scripts.extend([EngineError("vLLM is dead")] * 2)
    with pytest.raises(EngineError):
        list(logged.stream_complete(PROMPT, chunks=[RIVER]))
    logged.close()
    assert not path.exists()


def test_changes_are_logged(logged: CacheCraftEngine, path: Path, backend) -> None:
    """Each with what it named and how many records it dropped."""
    backend.replies.update(replace=1, invalidate=2, invalidate_chunks=3, purge=4)
    logged.replace("river", "2", [RIVER], tenant="t")
    logged.invalidate("river", "2", tenant="t")
    logged.invalidate_chunk(RIVER, tenant="t")
    logged.purge(SHARED_TENANT)
    logged.close()
    lines = lines_of(path)
    assert [(line["event"], line["doc_id"], line["version"], line["num_dropped"]) for line in lines] == [
        ("replace", "river", "2", 1),
        ("invalidate", "river", "2", 2),
        ("invalidate_chunks", None, None, 3),
        ("purge", None, None, 4),
    ]
    assert [line["tenant"] for line in lines] == ["t", "t", "t", SHARED_TENANT]
    assert lines[0]["chunk_keys"] == lines[2]["chunk_keys"] != []
    assert {line["fault"] for line in lines} == {""}


def test_change_that_failed_is_logged_with_its_fault(logged: CacheCraftEngine, path: Path, backend) -> None:
    """Somebody has to repeat it."""
    backend.replies["purge"] = RuntimeError("a tier is gone")
    with pytest.raises(EngineError):
        logged.purge("t")
    logged.close()
    (line,) = lines_of(path)
    assert (line["event"], line["num_dropped"]) == ("purge", 0)
    assert "a tier is gone" in line["fault"]


def test_change_before_the_start_is_logged(make_engine, path: Path) -> None:
    """There was nothing to drop, and that is what the log says."""
    engine = make_engine(CacheCraftConfig(self_test=False, audit_log=str(path)))
    engine.invalidate("river")
    engine.close()
    assert [(line["event"], line["num_dropped"]) for line in lines_of(path)] == [("invalidate", 0)]


def test_no_text_is_logged(logged: CacheCraftEngine, path: Path) -> None:
    """Neither of prompts nor of chunks nor of answers."""
    logged.complete(PROMPT, chunks=[Chunk(RIVER.text), Chunk(QUEEN.text)])
    logged.invalidate_chunk(RIVER.text)
    logged.close()
    text = path.read_text()
    assert not [secret for secret in (*SECRETS, "one two") if secret in text]


def test_without_a_path_nothing_is_kept(engine: CacheCraftEngine) -> None:
    """The default: no file, no thread, no figures."""
    engine.complete(PROMPT)
    assert "audit" not in engine.stats()
    log = AuditLog(None)
    add(log, "1")
    assert log.stats() is None


# --- how it is written --------------------------------------------------------------------------


def test_file_is_the_owners_alone(path: Path) -> None:
    log = AuditLog(str(path))
    add(log, "1")
    log.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_several_logs_append_to_one_file(path: Path) -> None:
    """And leave alone what was there, with whatever mode it had."""
    path.write_text('{"request_id": "0"}\n')
    path.chmod(0o640)
    logs = [AuditLog(str(path)) for _ in range(2)]
    for number, log in enumerate([*logs, *logs], 1):
        add(log, str(number))
    for log in logs:
        log.close()
    assert ids_in(path) == ["0", "1", "2", "3", "4"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize(
    "rotate", [lambda p: p.rename(f"{p}.1"), lambda p: p.unlink()], ids=["moved", "removed"]
)
def test_rotation_begins_a_new_file(path: Path, rotate: Callable[[Path], object]) -> None:
    """The next line opens it; nothing goes to the old one any more."""
    log = AuditLog(str(path))
    add(log, "1")
    rotate(path)
    add(log, "2")
    path.rename(f"{path}.2")
    path.write_text("")
    add(log, "3")
    log.close()
    assert ids_in(path) == ["3"]
    assert ids_in(Path(f"{path}.2")) == ["2"]


def test_a_truncated_file_is_written_on_from_its_start(path: Path) -> None:
    """Rotation that copies and truncates leaves no hole."""
    log = AuditLog(str(path))
    add(log, "1", "2")
    os.truncate(path, 0)
    add(log, "3")
    log.close()
    assert ids_in(path) == ["3"]


def test_log_does_not_follow_a_change_of_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    """A relative path is meant where the engine was made."""
    monkeypatch.chdir(tmp_path)
    log = AuditLog(path.name)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    add(log, "1")
    log.close()
    assert ids_in(path) == ["1"]


# --- what goes wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize("spoil", [lambda p: p.mkdir(), os.mkfifo], ids=["folder", "pipe nobody reads"])
def test_fault_is_counted_and_logged_once(
    path: Path, spoil: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    """And when it is over, lines are written again."""
    spoil(path)
    log = AuditLog(str(path))
    with caplog.at_level(logging.WARNING):
        add(log, "1", "2")
    assert [r.getMessage() for r in caplog.records if "not complete" in r.getMessage()] == caplog.messages
    assert len(caplog.messages) == 1
    path.rename(f"{path}.aside")
    add(log, "3")
    log.close()
    stats = log.stats()
    assert stats is not None
    assert (stats["num_lines"], stats["num_failed"], ids_in(path)) == (1, 2, ["3"])
    assert stats["last_fault"]


def test_request_is_answered_though_nothing_can_be_logged(make_engine, path: Path) -> None:
    """The figures say how many lines are missing."""
    engine = make_engine(CacheCraftConfig(self_test=False, audit_log=str(path / "no" / "folder")))
    assert engine.complete(PROMPT).text == "one two"
    assert engine.purge() == 0
    stats = engine.stats()["audit"]
    assert (stats["num_lines"], stats["num_failed"]) == (0, 2)


def test_half_a_line_does_not_swallow_the_next(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk cuts a line; what comes after it stands in a line of its own."""
    log = AuditLog(str(path))
    add(log, "1")
    with monkeypatch.context() as patch:
        write = os.write
        patch.setattr(audit_log.os, "write", lambda descriptor, data: write(descriptor, data[:10]))
        add(log, "2")
    add(log, "3")
    log.close()
    lines = path.read_text().splitlines()
    assert [json.loads(lines[number])["request_id"] for number in (0, 2)] == ["1", "3"]
    assert len(lines[1]) == 10
    assert log.stats()["num_failed"] == 1  # type: ignore[index]


def test_lines_wait_in_limited_number(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that does not answer costs lines, not memory."""
    monkeypatch.setattr(audit_log, "MAX_WAITING_LINES", 2)
    os.mkfifo(path)
    log = AuditLog(str(path))
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    held = log._places
    assert held.acquire() and held.acquire()
    add(log, "1")
    held.release(2)
    add(log, "2")
    os.close(reader)
    log.close()
    assert (log.stats()["num_lines"], log.stats()["num_failed"]) == (1, 1)  # type: ignore[index]


def test_lines_after_the_end_are_counted(path: Path) -> None:
    log = AuditLog(str(path))
    log.close()
    log.close()
    add(log, "1")
    assert log.stats()["num_failed"] == 1  # type: ignore[index]
