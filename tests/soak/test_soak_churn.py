"""The events of a soak: the same for the same seed, and as many of each kind as the mix says."""

from __future__ import annotations

from collections import Counter

import pytest
from benchmarks.soak_parts.churn import TENANTS, Abort, Action, Churn, Event, Mix

MIX = Mix(num_documents=40, num_chunks=(2, 4), check_every=10)


def events(seed: int = 1, num_questions: int = 1_000, mix: Mix = MIX) -> list[Event]:
    return list(Churn(mix, seed).events(num_questions))


def test_same_seed_gives_the_same_events() -> None:
    assert events(seed=3) == events(seed=3)
    assert events(seed=3) != events(seed=4)


def test_every_part_of_a_run_has_as_many_changes() -> None:
    halves = events()[: len(events()) // 2], events()[len(events()) // 2 :]
    first, second = (Counter(event.action for event in half) for half in halves)
    assert first == second
    assert first[Action.REPLACE] == 500 // MIX.replace_every
    assert first[Action.PURGE] == 1


def test_purges_take_turns() -> None:
    purged = [event.tenant for event in events(num_questions=2_000) if event.action is Action.PURGE]
    assert Counter(purged) == {tenant: 2 for tenant in TENANTS}


def test_popular_documents_are_asked_for_most() -> None:
    asked = Counter(version.document for event in events() for version in event.versions)
    assert asked[0] > asked[5] > asked[39] > 0


def test_question_names_each_document_once() -> None:
    small = Mix(num_documents=3, num_chunks=(2, 5), check_every=10)
    for event in events(mix=small):
        documents = [version.document for version in event.versions]
        assert len(set(documents)) == len(documents) <= 3


def test_questions_follow_updates_and_some_lag_behind() -> None:
    """A question names the newest version, but for those that are one behind on purpose."""
    newest: dict[tuple[str, int], int] = {}
    num_behind = 0
    for event in events(num_questions=3_000):
        if event.action is Action.REPLACE:
            (version,) = event.versions
            assert version.number == newest.get((event.tenant, version.document), 0) + 1
            newest[event.tenant, version.document] = version.number
        elif event.action is Action.ASK:
            behind = [newest.get((event.tenant, v.document), 0) - v.number for v in event.versions]
            assert set(behind) <= {0, 1}
            num_behind += any(behind)
            if any(behind):
                assert event.number % MIX.lag_every == MIX.lag_every - 1
    assert num_behind > 0


def test_aborted_questions_are_not_checked() -> None:
    asked = [event for event in events() if event.action is Action.ASK]
    assert {event.abort for event in asked} == set(Abort)
    assert sum(event.abort is not Abort.NONE for event in asked) == 1_000 // MIX.abort_every
    assert not any(event.is_checked for event in asked if event.abort is not Abort.NONE)


@pytest.mark.parametrize("check_every", [1, 7])
def test_checks_come_at_their_interval(check_every: int) -> None:
    mix = Mix(num_documents=5, num_chunks=(1, 2), check_every=check_every, abort_every=10_000)
    checked = [event.number for event in events(num_questions=70, mix=mix) if event.is_checked]
    assert checked == list(range(0, 70, check_every))
