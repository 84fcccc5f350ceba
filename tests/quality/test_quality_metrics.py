"""Scores of answer texts, and the budget that is charged."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.quality import metrics

from cachecraft_rag.chunks import ChunkKey
from cachecraft_rag.events import ChunkDecision, ChunkReport, Reason, RequestDecision, ReuseReport


def report(*, reused: int, recomputed: int, question: int, preamble: int = 10) -> ReuseReport:
    num_tokens = reused + recomputed
    chunk = ChunkReport(
        ChunkKey("0" * 32),
        None,
        None,
        ChunkDecision.REPAIRED,
        Reason.OTHER_PREFIX,
        start=preamble,
        num_tokens=num_tokens,
        num_reused_tokens=reused,
        num_recomputed_tokens=recomputed,
    )
    return ReuseReport(
        "r",
        RequestDecision.REUSE,
        Reason.OTHER_PREFIX,
        num_prompt_tokens=preamble + num_tokens + question,
        # Tokens of vLLM's prefix cache are no repaired chunk tokens.
        num_reused_tokens=reused + preamble,
        num_recomputed_tokens=recomputed,
        chunks=(chunk,),
    )


def test_normalisation_is_that_of_squad() -> None:
    """Case, punctuation, articles and double spaces make no difference."""
    assert metrics.normalised("The  Denver Broncos, a team.") == "denver broncos team"


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("Denver Broncos", ["Broncos"], 2 / 3),
        ("the Broncos", ["Denver Broncos", "broncos!"], 1.0),
        ("no idea", ["Broncos"], 0.0),
        ("", ["Broncos"], 0.0),
        ("a b b", ["b b b"], 0.8),
    ],
)
def test_f1_counts_common_words_and_takes_the_best_answer(
    prediction: str, answers: list[str], expected: float
) -> None:
    """F1 is 2 |common| / (|prediction| + |answer|), with articles gone, best over the answers."""
    assert metrics.f1(prediction, answers) == pytest.approx(expected)


def test_f1_in_chinese_counts_characters() -> None:
    """Chinese has no spaces: two of three characters in common are an F1 of 2/3."""
    assert metrics.f1("北京市", ["北京人。"], "zh") == pytest.approx(2 / 3)


def test_exact_match_and_contains_differ_on_a_longer_answer() -> None:
    """A sentence around the answer contains it and does not match it."""
    assert metrics.exact_match("It was 308 points.", ["308"]) == 0.0
    assert metrics.contains("It was 308 points.", ["308"]) == 1.0
    assert metrics.exact_match("The 308", ["308"]) == 1.0
    assert metrics.contains("It was 30.", ["308"]) == 0.0


@pytest.fixture
def rouge_score() -> None:
    pytest.importorskip("rouge_score", reason="pip install -r requirements/quality.txt")


@pytest.mark.usefixtures("rouge_score")
def test_rouge_l_is_the_longest_common_subsequence() -> None:
    """LCS of 3 words in texts of 4 and 6 words: F1 = 2*3 / (4+6)."""
    assert metrics.rouge_l("police killed the gunman", ["the police have killed a gunman"]) == pytest.approx(
        0.6
    )


@pytest.mark.usefixtures("rouge_score")
def test_rouge_l_in_chinese_does_not_drop_the_text() -> None:
    """The package's own tokenizer would leave nothing of a Chinese text."""
    assert metrics.rouge_l("北京市", ["北京"], "zh") == pytest.approx(0.8)


def test_charge_is_the_share_of_loaded_chunk_tokens() -> None:
    """A selector with stored scores pays what it recomputes."""
    assert metrics.charged_ratio("epic", report(reused=90, recomputed=10, question=5), 18) == pytest.approx(
        0.1
    )


def test_cacheblend_pays_two_whole_layers() -> None:
    """(2 + (L - 2) s) / L: with 10 layers and 10 % that is 28 %."""
    charged = metrics.charged_ratio("cacheblend", report(reused=90, recomputed=10, question=5), 10)
    assert charged == pytest.approx(0.28)


def test_cacheblend_pays_nothing_where_its_budget_does_not_cover_the_measuring() -> None:
    """Then no layer is computed, and nothing chosen."""
    assert metrics.charged_ratio("cacheblend", report(reused=100, recomputed=0, question=5), 10) == 0.0


def test_the_question_s_pass_is_paid() -> None:
    """10 of 100 tokens and a pass over 5 are 15 %."""
    asked = replace(report(reused=90, recomputed=10, question=5), num_probe_tokens=5)
    assert metrics.charged_ratio("focus", asked, 18) == pytest.approx(0.15)


@pytest.mark.parametrize(("reused", "recomputed", "expected"), [(100, 0, 0.0), (0, 100, 1.0), (0, 0, 0.0)])
def test_what_was_not_asked_is_not_paid(reused: int, recomputed: int, expected: float) -> None:
    """At 0 % and at 100 % no pass of the question is needed."""
    charged = metrics.charged_ratio("focus", report(reused=reused, recomputed=recomputed, question=5), 18)
    assert charged == expected
