"""The eviction queue against a model that scans everything, and greedy-dual by its first definition."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachecraft_rag.errors import StoreError
from cachecraft_rag.store.eviction import EvictionQueue
from cachecraft_rag.store.policies import POLICIES, Policy, Score, Use, gdsf, lfu, lru, with_ttl

ids = st.integers(0, 7)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("use"), ids, st.integers(1, 9), st.sampled_from([0.0, 0.3, 1.0])),
        st.tuples(st.just("pin"), ids),
        st.tuples(st.just("unpin"), ids),
        st.tuples(st.just("forget"), ids),
        st.tuples(st.just("evict")),
        st.tuples(st.just("wait"), st.integers(1, 5)),
    ),
    max_size=60,
)


class Model:
    """A dictionary of scores; every question is answered by going over all of it."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.scores: dict[int, Score] = {}
        self.floor = 0.0
        self.age = 0.0

    def use(self, record_id: int, now_s: float, size: int, cfo: float) -> None:
        self.age += 1 / max(1, len(self.scores))
        use = Use(self.age, now_s, size, 2.0 * size + 1, cfo)
        self.scores[record_id] = self.policy(self.scores.get(record_id), use, self.floor)

    def order(self) -> list[int]:
        return sorted(self.scores, key=lambda record_id: (self.scores[record_id].priority, record_id))

    def expire(self, now_s: float) -> list[int]:
        due = [(s.expires_s, record_id) for record_id, s in self.scores.items() if s.expires_s <= now_s]
        return [record_id for _, record_id in sorted(due)]


def queue_of(policy: Policy, *uses: int) -> EvictionQueue:
    queue = EvictionQueue(policy)
    for record_id in uses:
        use(queue, record_id)
    return queue


def use(queue: EvictionQueue, record_id: int) -> None:
    queue.use(record_id, now_s=0.0, size_bytes=1, cost=1.0)


def order_of(queue: EvictionQueue) -> list[int]:
    return queue.victims(len(queue), lambda record_id: 1)


def assert_agree(queue: EvictionQueue, model: Model) -> None:
    assert len(queue) == len(model.scores)
    assert order_of(queue) == model.order()
    assert queue.victim() == next(iter(model.order()), None)
    assert all(record_id in queue for record_id in model.scores)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=40, deadline=None)
@given(operations)
def test_the_queue_does_what_a_full_scan_would(name: str, steps: list[tuple[object, ...]]) -> None:
    """Pinned records come back with their score, expired ones go, and all others keep their order."""
    policy = with_ttl(POLICIES[name], 12.0)
    queue, model = EvictionQueue(policy), Model(policy)
    pinned: dict[int, Score] = {}
    now_s = 0.0
    for step in steps:
        match step:
            case ("use", int(record_id), int(size), float(cfo)) if record_id not in pinned:
                queue.use(record_id, now_s=now_s, size_bytes=size, cost=2.0 * size + 1, cfo=cfo)
                model.use(record_id, now_s, size, cfo)
            case ("pin", int(record_id)) if record_id in model.scores:
                pinned[record_id] = model.scores.pop(record_id)
                assert queue.remove(record_id) == pinned[record_id]
            case ("unpin", int(record_id)) if record_id in pinned:
                queue.restore(record_id, pinned[record_id])
                model.scores[record_id] = pinned.pop(record_id)
            case ("forget", int(record_id)) if record_id not in pinned:
                assert queue.remove(record_id) == model.scores.pop(record_id, None)
            case ("evict",) if model.scores:
                victim = model.order()[0]
                queue.evict(victim)
                model.floor = max(model.floor, model.scores.pop(victim).priority)
            case ("wait", int(seconds)):
                now_s += seconds
                due = model.expire(now_s)
                assert queue.pop_expired(now_s) == due
                for record_id in due:
                    del model.scores[record_id]
        assert_agree(queue, model)


@pytest.mark.parametrize("policy", [lfu, gdsf])
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(ids, st.integers(1, 5)), max_size=60), st.integers(1, 4))
def test_the_floor_stands_for_the_ageing_of_all_others(
    policy: Policy, uses: list[tuple[int, int]], capacity: int
) -> None:
    """Greedy-dual as it was defined takes the victim's value from all that stay; the victims are the same."""
    queue = EvictionQueue(policy)
    values: dict[int, tuple[int, int]] = {}  # id -> (aged value, uses)
    costs: dict[int, int] = {}
    for record_id, cost in uses:
        # A record's cost does not change between uses, nor its size.
        cost = 1 if policy is lfu else costs.setdefault(record_id, cost)
        if record_id not in values and len(values) == capacity:
            victim = min(values, key=lambda other: (values[other][0], other))
            assert queue.victim() == victim
            queue.evict(victim)
            lost = values.pop(victim)[0]
            values = {other: (value - lost, n) for other, (value, n) in values.items()}
        queue.use(record_id, now_s=0.0, size_bytes=1, cost=cost)
        count = values.get(record_id, (0, 0))[1] + 1
        values[record_id] = (count * cost, count)


def test_of_equal_scores_the_lower_id_goes_first() -> None:
    """The same requests give the same victims."""
    assert order_of(queue_of(lfu, 5, 3, 4)) == [3, 4, 5]


def test_victims_are_as_many_as_are_needed_and_stay() -> None:
    """Looking at the victims of a large newcomer evicts none of them."""
    queue = queue_of(lru, 1, 2, 3)
    sizes = {1: 10, 2: 10, 3: 10}
    assert queue.victims(0, sizes.__getitem__) == []
    assert queue.victims(10, sizes.__getitem__) == [1]
    assert queue.victims(11, sizes.__getitem__) == [1, 2]
    assert queue.victims(99, sizes.__getitem__) == [1, 2, 3]
    assert order_of(queue) == [1, 2, 3]


def test_an_expired_record_that_was_pinned_goes_when_it_is_back() -> None:
    """A pin outlasts the time to live, and nothing forgets that it ran out."""
    queue = queue_of(with_ttl(lru, 10.0), 1)
    score = queue.remove(1)
    assert queue.pop_expired(10.0) == []
    assert score is not None
    queue.restore(1, score)
    assert queue.pop_expired(math.nextafter(10.0, 0.0)) == []
    assert queue.pop_expired(10.0) == [1]
    assert queue.victim() is None


def test_evicting_what_is_not_there_is_a_fault_of_the_books() -> None:
    """A pinned record has left the queue, so nobody can evict it by mistake."""
    queue = queue_of(lru, 1)
    queue.remove(1)
    with pytest.raises(StoreError, match="record 1"):
        queue.evict(1)


def test_a_use_that_is_refused_changes_nothing() -> None:
    """Neither the record's score nor the age of the others."""
    queue, twin = queue_of(lru, 1, 2), queue_of(lru, 1, 2)
    with pytest.raises(StoreError):
        queue.use(1, now_s=0.0, size_bytes=0, cost=1.0)
    use(queue, 3)
    use(twin, 3)
    assert [queue.remove(record_id) for record_id in (1, 2, 3)] == [
        twin.remove(record_id) for record_id in (1, 2, 3)
    ]
