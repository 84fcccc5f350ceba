"""How close one answer is to another: by its text, and by the probabilities of its first token."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence

_SMALLEST_REST = 1e-9
"""Least probability of all tokens outside a top list together; rounding may leave it at 0."""
_CJK = "\u3040-\u30ff\u3400-\u9fff"
_WORD = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+")


def rouge_l_f1(answer: str, reference: str) -> float:
    """ROUGE-L F1 in [0, 1] (Lin 2004, eq. 2-4 with beta = 1): the longest common subsequence of words.

    Words are lower-cased; of Chinese and Japanese each character counts as one. Two answers without
    any word are equal.
    """
    left, right = _words(answer), _words(reference)
    if not left or not right:
        return float(left == right)
    return 2 * _common_length(left, right) / (len(left) + len(right))


def first_token_kl(full: Mapping[int, float], reuse: Mapping[int, float]) -> float:
    """Lower bound of KL(full || reuse) of one step, in nats, from two top lists of log-probabilities.

    Summed over the tokens of `full`, all others taken together as one. A token that is not in `reuse`
    is there at most as likely as the last of that list: leaving such tokens out was rejected, for two
    lists without a common token would then be equal. Infinite if a value is not a number.
    """
    if any(map(math.isnan, (*full.values(), *reuse.values()))):
        return math.inf
    cap = min(reuse.values())
    divergence = sum(math.exp(lp) * (lp - reuse.get(token, cap)) for token, lp in full.items())
    rest_full = _rest(full, full.keys())
    rest_reuse = _rest(reuse, full.keys() & reuse.keys())
    return max(0.0, divergence + rest_full * math.log(rest_full / rest_reuse))


def _rest(top: Mapping[int, float], tokens: Collection[int]) -> float:
    return max(_SMALLEST_REST, 1.0 - sum(math.exp(top[token]) for token in tokens))


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _common_length(left: Sequence[str], right: Sequence[str]) -> int:
    """Length of the longest common subsequence, row by row of the usual table."""
    row = [0] * (len(right) + 1)
    for word in left:
        diagonal = 0
        for index, other in enumerate(right, start=1):
            above = row[index]
            row[index] = diagonal + 1 if word == other else max(above, row[index - 1])
            diagonal = above
    return row[-1]
