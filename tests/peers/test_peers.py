"""The runner of the comparison with other projects, with peers that are plain scripts."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path

import pytest
from benchmarks.peers import first_job, regrouped, run_all, with_prompts
from benchmarks.peers_parts import peer as peers
from benchmarks.peers_parts.job import Answered, Asked, Job, Result
from benchmarks.peers_parts.peer import PEERS, Peer, chosen_peers
from benchmarks.peers_parts.runner import PeerError, install, run, try_peer
from benchmarks.peers_parts.table import compared
from rich.console import Console

ECHO = """
import json, os, sys
job = json.load(open(sys.argv[1]))
def answer(asked):
    ids = asked["prompt_token_ids"] or [len(asked["messages"][0]["content"])]
    return {"ttft_s": 0.5, "token_ids": ids[:1], "text": os.environ.get("WORD", ""), "num_prompt": len(ids),
            "num_saved": 0, "prompt_token_ids": ids}
parts = {part: [answer(one) for one in job[part]] for part in ("warm_up", "measured")}
json.dump(parts, open(sys.argv[2], "w"))
"""


def request(text: str) -> Asked:
    return Asked([{"role": "user", "content": text}], [], max_tokens=3)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job("model", {}, str(tmp_path), [request("a")], [request("bb"), request("ccc")])


def scripted(folder: Path, text: str, **settings: object) -> Peer:
    script = folder / "script.py"
    script.write_text(text)
    return Peer("fake", "a script", script, **settings)  # type: ignore[arg-type]


def wheel(folder: Path) -> Path:
    """A package with one module, as pip installs it."""
    path, info = folder / "tinypeer-1.0-py3-none-any.whl", "tinypeer-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tinypeer.py", "WORD = 'installed'\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tinypeer\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_a_script_answers_the_job(tmp_path: Path, job: Job) -> None:
    """Its answers come back in order, and it has the peer's environment."""
    peer = scripted(tmp_path, ECHO, environment={"WORD": "here"})
    result = run(peer, install(peer, tmp_path), job, tmp_path, timeout_s=60)
    assert [each.token_ids for each in result.measured] == [[2], [3]]
    assert {each.text for each in (*result.warm_up, *result.measured)} == {"here"}


def test_an_environment_holds_the_requirements_and_the_engine(tmp_path: Path, job: Job) -> None:
    """What is installed for a peer is importable there, beside this environment's libraries, and not here."""
    answers = ECHO.replace('os.environ.get("WORD", "")', "tinypeer.WORD + numpy.__name__")
    peer = scripted(tmp_path, "import numpy, tinypeer\n" + answers, bare=(str(wheel(tmp_path)),))
    python = install(peer, tmp_path / "cache")
    assert run(peer, python, job, tmp_path, timeout_s=60).warm_up[0].text == "installednumpy"
    assert importlib.util.find_spec("tinypeer") is None


def test_an_environment_is_made_once_and_anew_for_other_requirements(tmp_path: Path) -> None:
    """A second run does not install again; an environment of other requirements is not taken for it."""
    peer = scripted(tmp_path, ECHO, bare=(str(wheel(tmp_path)),))
    python = install(peer, tmp_path / "cache")
    (tmp_path / "tinypeer-1.0-py3-none-any.whl").unlink()
    assert install(peer, tmp_path / "cache") == python
    with pytest.raises(PeerError, match="tinypeer"):
        install(scripted(tmp_path, ECHO, bare=(*peer.bare, "other")), tmp_path / "cache")


def test_what_does_not_install_is_said(tmp_path: Path, job: Job) -> None:
    """The reason is pip's own, and nothing half made is taken for an environment later."""
    peer = scripted(tmp_path, ECHO, requirements=(str(tmp_path / "missing.whl"),))
    for _ in range(2):
        said: list[str] = []
        found = try_peer(peer, job, tmp_path / "cache", tmp_path, 60, said.append)
        assert isinstance(found, str) and "missing.whl" in found
        assert said == [f"fake: {found}"]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("raise SystemExit('CUDA is needed')", "CUDA is needed"),
        ("print('done')", "left no result"),
        ("import sys; open(sys.argv[2], 'w').write('[1]')", "left no result"),
        ("import sys; open(sys.argv[2], 'w').write('{\"warm_up\": []}')", "left no result"),
    ],
)
def test_a_script_that_fails_is_said(tmp_path: Path, job: Job, script: str, reason: str) -> None:
    """With the last it said; no figures come of it."""
    found = try_peer(scripted(tmp_path, script), job, tmp_path, tmp_path, 60, lambda text: None)
    assert isinstance(found, str) and reason in found


def test_a_script_that_hangs_ends_with_what_it_started(tmp_path: Path, job: Job) -> None:
    """Its children hold the pipe open: were they left, this would wait for them."""
    hangs = "import subprocess\nprint('started', flush=True)\nsubprocess.run(['sleep', '600'])"
    found = try_peer(scripted(tmp_path, hangs), job, tmp_path, tmp_path, 1.0, lambda text: None)
    assert isinstance(found, str) and "was ended after 1 s" in found and "started" in found


def test_an_old_result_is_not_taken_for_a_new_one(tmp_path: Path, job: Job) -> None:
    """A script that leaves nothing has no result, whatever lies there from before."""
    run(scripted(tmp_path, ECHO), Path(install(scripted(tmp_path, ECHO), tmp_path)), job, tmp_path, 60)
    assert isinstance(try_peer(scripted(tmp_path, ""), job, tmp_path, tmp_path, 60, lambda text: None), str)


def test_all_are_asked_the_prompts_that_ours_answered(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that fails stops nobody; one that keeps nothing is not warmed up."""
    ours = scripted(tmp_path, ECHO)
    monkeypatch.setattr("benchmarks.peers.OURS", ours)
    (tmp_path / "bad.py").write_text("raise SystemExit(1)")
    bad = Peer("bad", "", tmp_path / "bad.py")
    cold = Peer("cold", "", ours.script, warms_up=False)
    console = Console(quiet=True)
    found = dict(run_all([ours, bad, cold], job, tmp_path / "cache", tmp_path, 60, console))
    assert list(found) == ["fake", "bad", "cold"] and isinstance(found["bad"], str)
    assert isinstance(found["cold"], Result) and isinstance(found["fake"], Result)
    assert [each.prompt_token_ids for each in found["cold"].measured] == [[2], [3]]
    assert found["cold"].warm_up == [] and len(found["fake"].warm_up) == 1


def test_prompts_go_to_their_own_requests(job: Job) -> None:
    """In the order of the job, warm-up and measured apart."""
    answers = [Answered(0.1, [1], "", 1, 0, [number]) for number in range(3)]
    told = with_prompts(job, Result(answers[:1], answers[1:]))
    assert [one.prompt_token_ids for one in (*told.warm_up, *told.measured)] == [[0], [1], [2]]
    assert [one.messages for one in told.measured] == [one.messages for one in job.measured]


def test_the_table_compares_with_full_prefill() -> None:
    """Speed and answers are of the same run's full prefill; a failure has no figures."""

    def result(ttft_s: float, num_saved: int, *token_ids: list[int]) -> Result:
        return Result([], [Answered(ttft_s, ids, "", 100, num_saved) for ids in token_ids])

    full = result(2.0, 0, [1, 2], [3, 4])
    rows = compared({"full": full, "peer": result(0.5, 75, [1, 9], [3, 4]), "bad": "why"}).rows
    assert list(rows[1]) == ["peer", "0.500 s", "0.500 s", "4.0", "75.0%", "1 of 2", "2 of 2"]
    assert list(rows[2])[:2] == ["bad", "failed"] and len(rows[2]) == len(rows[0])
    assert list(compared({"peer": full}).rows[0])[3:] == ["–", "0.0%", "–", "–"]


def test_ours_is_always_asked_first() -> None:
    assert [peer.name for peer in chosen_peers(("semblend", "full"))] == ["ours", "semblend", "full"]
    with pytest.raises(SystemExit, match=r"unknown peer x: choose from ours, "):
        chosen_peers(("x",))


def test_every_peer_has_its_script() -> None:
    """Scripts run where this project is not installed: of it, only ours may import anything."""
    assert all(peer.script.is_file() for peer in PEERS.values())
    texts = [path.read_text() for path in peers.SCRIPTS.glob("*.py") if path.name != "ours.py"]
    assert not any("import benchmarks" in text or "from benchmarks" in text for text in texts)
    assert not any("cachecraft_rag" in text for text in texts)


def test_no_script_hides_the_package_that_its_peer_needs() -> None:
    """A script's folder comes before all packages when Python looks for a name."""
    for peer in PEERS.values():
        packages = {wanted.split("==")[0].replace("-", "_") for wanted in (*peer.requirements, *peer.bare)}
        assert not packages & {path.stem for path in peers.SCRIPTS.glob("*.py")}


def test_warm_up_shows_every_measured_passage_once_in_other_company() -> None:
    from benchmarks.engine_replay_parts.workload import Passage, ReplayRequest, Workload

    def request(tail: str, *names: str) -> ReplayRequest:
        return ReplayRequest("s", tuple(Passage(name, name, 1) for name in names), tail, 9, 5)

    measured = (request("x?", "a", "b", "c"), request("y?", "c", "d", "e"))
    warm_up = list(regrouped(Workload("w", (), (request("w?", "z"),), measured, ())))
    assert sorted(passage.name for each in warm_up for passage in each.passages) == list("abcde")
    assert [each.tail for each in warm_up] == ["w?", "w?"]
    assert not {each.passages for each in warm_up} & {each.passages for each in measured}


def test_a_workload_becomes_a_job() -> None:
    from benchmarks.engine_replay_parts.workload import Passage, ReplayRequest, Workload

    passages = (Passage("n", "text", 2),)
    parts = [(ReplayRequest("s", passages, tail, 9, 5),) for tail in ("warm?", "asked?", "later?")]
    job = first_job(Workload("w", (), *parts), "m", {"dtype": "float32"})
    assert job.measured[0].messages[1]["content"] == "text\n\nasked?"
    assert job.warm_up[0].documents == [{"name": "n", "text": "text"}] and job.measured[0].max_tokens == 5
