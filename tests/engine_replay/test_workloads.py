"""The workload makers: the same every time, lengths as asked for, popularity as fitted."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from benchmarks.engine_replay_parts.passages import PassagesShape, knowledge_base, make_requests
from benchmarks.engine_replay_parts.popularity import draw_distinct, fit_exponent, zipf_weights
from benchmarks.engine_replay_parts.ragpulse import RagpulseShape, filling_rows, workload_of
from benchmarks.engine_replay_parts.texts import TextFiller
from benchmarks.engine_replay_parts.workload import ReplayRequest, Workload

LENGTHS = {1: 60, 2: 30, **dict.fromkeys(range(10, 40), 50), 90: 5, 91: 7}
SHAPE = RagpulseShape(
    scale=0.5, first=4, max_output_tokens=16, num_warm_up=2, num_saturated=4, num_moderate=2
)


def count_words(text: str) -> int:
    """A tokenizer for which a word is one token, and a long word two."""
    return sum(1 + (len(word) > 6) for word in text.split())


def words(number: int) -> list[str]:
    dice = random.Random(1)
    return ["".join(dice.choices("abcdefgh", k=dice.randint(2, 9))) + str(index) for index in range(number)]


def row(time_s: float, passages: list[int], question: int = 90) -> dict[str, Any]:
    return {
        "t": time_s, "s": 0, "sys": [1, 2], "passages": passages, "history": [], "web": [],
        "user": [question], "in": 200, "out": 200,
    }  # fmt: skip


ROWS = [
    row(0.0, [10, 11]),
    row(1.0, [12, 13, 14]),
    row(2.0, [15]),
    row(3.0, [10, 16]),
    row(5.0, [11, 12, 11]),
    row(6.0, [13, 20], question=91),
    row(9.0, []),
    row(9.0, [20, 21]),
    row(11.0, [10, 22]),
    row(12.0, [20]),
]


def ragpulse() -> Workload:
    filler = TextFiller([" ".join(words(5000))], count_words)
    return workload_of(ROWS, LENGTHS, filler, count_words, SHAPE)


def all_requests(workload: Workload) -> list[ReplayRequest]:
    return [*workload.fill, *workload.warm_up, *workload.saturated, *workload.moderate]


def test_text_fills_the_asked_tokens_to_within_a_word_and_repeats_no_word() -> None:
    filler = TextFiller([" ".join(words(400))], count_words)
    sizes = (1, 2, 17, 64, 100)
    taken = [filler.take(size) for size in sizes]
    for text, size in zip(taken, sizes, strict=True):
        assert max(0, size - 2) < count_words(text) <= max(2, size)
    handed_out = [word for text in taken for word in text.split()]
    assert handed_out == words(400)[: len(handed_out)]


def test_text_that_is_not_there_is_refused_with_what_to_change() -> None:
    with pytest.raises(SystemExit, match="lower --scale"):
        TextFiller(["three small words"], count_words).take(50)


def test_trace_workload_is_the_same_every_time() -> None:
    assert ragpulse() == ragpulse()


def test_trace_workload_keeps_order_and_times_and_cuts_the_traffic_into_parts() -> None:
    workload = ragpulse()
    assert [len(part) for part in (workload.warm_up, workload.saturated, workload.moderate)] == [2, 4, 2]
    measured = [*workload.saturated, *workload.moderate]
    assert [request.time_s for request in measured] == [entry["t"] for entry in ROWS[4:]]
    names = [[passage.name for passage in request.passages] for request in measured]
    assert names == [["11", "12"], ["13", "20"], [], ["20", "21"], ["10", "22"], ["20"]]


def test_trace_lengths_are_scaled_and_answers_cut() -> None:
    for request in all_requests(ragpulse()):
        for passage in request.passages:
            assert 23 <= passage.num_tokens <= 25
            assert passage.num_tokens == count_words(passage.text)
        assert count_words(request.system) in range(42, 46)
        assert request.max_tokens in (1, 16)


def test_equal_ids_are_equal_texts_and_others_are_not() -> None:
    texts: dict[str, set[str]] = {}
    for request in all_requests(ragpulse()):
        for passage in request.passages:
            texts.setdefault(passage.name, set()).add(passage.text)
    assert all(len(found) == 1 for found in texts.values())
    assert len({text for found in texts.values() for text in found}) == len(texts)


def test_store_is_filled_with_what_earlier_requests_named_and_later_ones_need() -> None:
    filled = [passage for entry in filling_rows(ROWS[:4], ROWS[4:]) for passage in entry["passages"]]
    assert sorted(filled) == [10, 11, 12, 13]
    assert list(filling_rows([], ROWS)) == []


def test_most_popular_passages_come_first_when_reordered() -> None:
    request = ragpulse().saturated[1]
    assert [passage.name for passage in request.reordered().passages] == ["20", "13"]
    assert request.reordered().chunks() == request.chunks()[::-1]
    assert request.messages()[1]["content"].startswith(request.passages[0].text)


CORPUS = [
    {"doc_id": f"{title}{index}", "title": title, "text": " ".join(words(length))}
    for title, lengths in {"a": (50, 40, 90, 20), "b": (100, 30), "c": (95,)}.items()
    for index, length in enumerate(lengths)
]
QUERIES = [
    {"question": f"what of {row['doc_id']}", "chunk_ids": ["x", row["doc_id"]], "supporting": [1]}
    for row in CORPUS
]


def plain_count(text: str) -> int:
    return len(text.split())


def test_knowledge_base_joins_neighbours_of_an_article_and_keeps_their_questions() -> None:
    base = knowledge_base(CORPUS, QUERIES, plain_count, 100)
    assert [article.passage.rank for article in base] == list(range(len(base)))
    parts = {article.passage.name: article for article in base}
    assert {name: article.passage.num_tokens for name, article in parts.items()} == {
        "a-0": 90, "a-1": 110, "b-0": 130, "c-0": 95,
    }  # fmt: skip
    assert parts["a-1"].questions == ("what of a2", "what of a3")


def test_requests_have_distinct_passages_and_a_question_of_one_of_them() -> None:
    base = knowledge_base(CORPUS, QUERIES, plain_count, 100)
    shape = PassagesShape(num_passages=3, num_fill=4, num_warm_up=6, num_saturated=5, num_moderate=5)
    requests = list(make_requests(base, 0.7, plain_count, shape))
    assert requests == list(make_requests(base, 0.7, plain_count, shape))
    assert len(requests) == 20
    questions = {article.passage.name: article.questions for article in base}
    for request in requests:
        names = [passage.name for passage in request.passages]
        assert len(set(names)) == 3
        assert request.tail in [question for name in names for question in questions[name]]


@pytest.mark.parametrize("exponent", [0.4, 0.8, 1.3])
def test_exponent_of_drawn_requests_is_found_again(exponent: float) -> None:
    dice, num_items = random.Random(3), 300
    drawn = dice.choices(range(num_items), zipf_weights(num_items, exponent), k=60_000)
    counts = Counter(drawn)
    found = fit_exponent(counts[item] for item in range(num_items))
    assert found == pytest.approx(exponent, abs=0.03)


def test_even_popularity_has_exponent_nought() -> None:
    assert fit_exponent([7] * 50) == pytest.approx(0.0, abs=1e-3)


def test_popular_items_are_drawn_more_often_and_none_twice_in_a_request() -> None:
    dice, weights = random.Random(4), zipf_weights(40, 1.0)
    counts: Counter[int] = Counter()
    for _ in range(2000):
        drawn = draw_distinct(weights, 5, dice)
        assert len(set(drawn)) == 5
        counts.update(drawn)
    assert counts[0] > counts[5] > counts[20] > counts[39] > 0
    with pytest.raises(ValueError, match="6 of 5"):
        draw_distinct(zipf_weights(5, 1.0), 6, dice)
