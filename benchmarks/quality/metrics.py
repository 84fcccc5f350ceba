"""How good an answer's text is, against acceptable answers; and what a request's repair cost."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from cachecraft_rag.events import ReuseReport

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation + "，。！？、；：“”‘’（）《》【】—…·")  # noqa: RUF001
_NUM_FULL_LAYERS = 2
"""Layers on which CacheBlend computes every token, to see whose keys and values deviate."""


def normalised(text: str) -> str:
    """SQuAD's normalisation: lower case, no punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(prediction: str, answers: Sequence[str], language: str = "en") -> float:
    """F1 over words (over characters in Chinese), best over the answers, in [0, 1]."""
    units = _characters if language == "zh" else str.split
    return _best(lambda answer: _f1(units(normalised(prediction)), units(normalised(answer))), answers)


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    return _best(lambda answer: float(normalised(prediction) == normalised(answer)), answers)


def contains(prediction: str, answers: Sequence[str]) -> float:
    """Whether an answer occurs in the prediction, both normalised."""
    return _best(
        lambda answer: float(bool(normalised(answer)) and normalised(answer) in normalised(prediction)),
        answers,
    )


def rouge_l(prediction: str, answers: Sequence[str], language: str = "en") -> float:
    """ROUGE-L F1 of the package `rouge-score`, without stemming, best over the answers."""
    scorer = _rouge_scorer(language)
    return _best(lambda answer: float(scorer.score(answer, prediction)["rougeL"].fmeasure), answers)


def charged_ratio(strategy: str, report: ReuseReport, num_layers: int) -> float:
    """The budget really spent: fresh query-key-value rows over all layers, as a share of those that the
    loaded chunk tokens would need (methods.md, fair-comparison rules).

    CacheBlend pays all tokens on its first two layers, where the budget allows it to measure at all.
    Strategies that ask the question pay the tokens of that pass on all layers.
    """
    loaded = sum(chunk.num_reused_tokens + chunk.num_recomputed_tokens for chunk in report.chunks)
    recomputed = sum(chunk.num_recomputed_tokens for chunk in report.chunks)
    if loaded == 0:
        return 0.0
    share = recomputed / loaded
    if strategy == "cacheblend" and share:
        return (_NUM_FULL_LAYERS + (num_layers - _NUM_FULL_LAYERS) * share) / num_layers
    return share + report.num_probe_tokens / loaded


def _best(score: Callable[[str], float], answers: Sequence[str]) -> float:
    return max(map(score, answers), default=0.0)


def _f1(prediction: Sequence[str], answer: Sequence[str]) -> float:
    if not prediction or not answer:
        return float(prediction == answer)
    common = (Counter(prediction) & Counter(answer)).total()
    return 2 * common / (len(prediction) + len(answer))


def _characters(text: str) -> list[str]:
    return [character for character in text if not character.isspace()]


class _CharacterTokenizer:
    """`rouge-score`'s own tokenizer drops all that is not Latin."""

    def tokenize(self, text: str) -> list[str]:
        return _characters(normalised(text))


@cache
def _rouge_scorer(language: str) -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], tokenizer=_CharacterTokenizer() if language == "zh" else None)
