"""Passage-heavy traffic: ten passages of about 400 tokens a question, popularity by Zipf's law."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from benchmarks.engine_replay_parts.popularity import draw_distinct, fit_exponent, zipf_weights
from benchmarks.engine_replay_parts.texts import CountTokens, reader
from benchmarks.engine_replay_parts.workload import Passage, ReplayRequest, Workload
from benchmarks.replay.traces import rows_of

SEED = 6
SYSTEM = "Answer from the passages in a few words."


@dataclass(frozen=True, slots=True)
class PassagesShape:
    """How much of it: passages a request, their tokens, answers, and requests by part.

    `num_warm_up` are more requests than vLLM's own KV cache holds; `num_fill` before them fill a chunk store.
    """

    num_passages: int = 10
    passage_tokens: int = 400
    max_tokens: int = 12
    num_fill: int = 8
    num_warm_up: int = 12
    num_saturated: int = 36
    num_moderate: int = 14

    @property
    def num_requests(self) -> int:
        return self.num_fill + self.num_warm_up + self.num_saturated + self.num_moderate


@dataclass(frozen=True, slots=True)
class Article:
    """A passage of the knowledge base and the questions that it answers."""

    passage: Passage
    questions: tuple[str, ...]


def passages_workload(folder: Path, count_tokens: CountTokens, shape: PassagesShape) -> Workload:
    """XQuAD's English paragraphs as the knowledge base, the trace's popularity over it."""
    data = reader(folder)
    exponent = fit_exponent(document_counts(folder).values())
    corpus, queries = data.rows("xquad_en.corpus.jsonl"), data.rows("xquad_en.queries.jsonl")
    base = knowledge_base(corpus, queries, count_tokens, shape.passage_tokens)
    requests = list(make_requests(base, exponent, count_tokens, shape))
    lengths = [article.passage.num_tokens for article in base]
    facts = {
        "num_base_passages": len(base),
        "mean_passage_tokens": sum(lengths) / len(lengths),
        "zipf_exponent": exponent,
        "passages_per_request": shape.num_passages,
    }
    rest = iter(requests)
    lengths_of_parts = (shape.num_fill, shape.num_warm_up, shape.num_saturated, shape.num_moderate)
    return Workload("passages", *(tuple(islice(rest, length)) for length in lengths_of_parts), facts)


def document_counts(folder: Path) -> Counter[int]:
    """How many requests of the RAGPulse trace name each passage."""
    rows = rows_of(folder, "trace_ragpulse")
    return Counter(passage for row in rows for passage in dict.fromkeys(row["passages"]))


def knowledge_base(
    corpus: Sequence[dict[str, Any]],
    queries: Sequence[dict[str, Any]],
    count_tokens: CountTokens,
    passage_tokens: int,
) -> list[Article]:
    """Neighbouring paragraphs of an article joined to about `passage_tokens` each, in a fixed random order.

    The order is the rank of popularity, 0 first.
    """
    asked: dict[str, list[str]] = {}
    for query in queries:
        asked.setdefault(query["chunk_ids"][query["supporting"][0]], []).append(query["question"])
    joined = [
        (f"{title}-{index}", group)
        for title, rows in groupby(corpus, key=lambda row: row["title"])
        for index, group in enumerate(_joined(list(rows), count_tokens, passage_tokens))
    ]
    random.Random(SEED).shuffle(joined)
    found = []
    for rank, (name, group) in enumerate(joined):
        text = "\n".join(row["text"].strip() for row in group)
        questions = tuple(question for row in group for question in asked.get(row["doc_id"], ()))
        found.append(Article(Passage(name, text, count_tokens(text), rank), questions))
    return found


def make_requests(
    base: Sequence[Article], exponent: float, count_tokens: CountTokens, shape: PassagesShape
) -> Iterator[ReplayRequest]:
    """Passages drawn by popularity, and a question that one of them answers."""
    dice, weights = random.Random(SEED), zipf_weights(len(base), exponent)
    for _ in range(shape.num_requests):
        articles = [base[index] for index in draw_distinct(weights, shape.num_passages, dice)]
        passages = tuple(article.passage for article in articles)
        question = dice.choice([question for article in articles for question in article.questions])
        num_tokens = sum(passage.num_tokens for passage in passages)
        num_tokens += count_tokens(SYSTEM) + count_tokens(question)
        yield ReplayRequest(SYSTEM, passages, question, num_tokens, shape.max_tokens)


def _joined(
    rows: Sequence[dict[str, Any]], count_tokens: CountTokens, passage_tokens: int
) -> list[list[dict[str, Any]]]:
    """Groups of neighbours: a paragraph begins a new one where that comes nearer to `passage_tokens`.

    A last group of less than half of it joins the one before.
    """
    groups: list[list[dict[str, Any]]] = []
    sizes: list[int] = []
    for row in rows:
        num_tokens = count_tokens(row["text"])
        if groups and abs(sizes[-1] + num_tokens - passage_tokens) < abs(sizes[-1] - passage_tokens):
            groups[-1].append(row)
            sizes[-1] += num_tokens
        else:
            groups.append([row])
            sizes.append(num_tokens)
    if len(groups) > 1 and 2 * sizes[-1] < passage_tokens:
        last = groups.pop()
        groups[-1].extend(last)
    return groups
