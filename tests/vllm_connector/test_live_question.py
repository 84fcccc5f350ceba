"""Choosing by what the question attends to, against attention written out, on a model of noise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cachecraft_rag.chunks import Span
from cachecraft_rag.planner.live import LiveMethod
from cachecraft_rag.planner.selection import positions_of

PROBE_LAYERS = (3, 5)
FOCUS_ASKS_FROM = 28
"""The smallest budget of which the question's 7 tokens are at most a quarter."""


@pytest.mark.parametrize("knows_lead", [True, False], ids=["lead", "no lead"])
@pytest.mark.parametrize(
    "options",
    [
        {"num_heads": 4, "num_kv_heads": 4},
        {"num_heads": 6, "num_kv_heads": 2},
        {"num_heads": 4, "num_kv_heads": 1},
        {"window": 20},
        {"cap": 2.0},
    ],
    ids=["heads", "grouped", "one kv head", "window", "soft cap"],
)
def test_attention_of_the_question_equals_softmax(
    noise_model: Any, noise_layer: Any, options: dict[str, Any], knows_lead: bool
) -> None:
    """Over loaded and fresh keys and those of the text before them, summed over queries and layers."""
    model = noise_model(noise_layer(**options))
    lead = model.keys[:, : len(model.LEAD)] if knows_lead else None
    live = model.selection(LiveMethod.QUESTION, len(model.PROBE) + 3)
    choice = model.choose(live, probe_layers=PROBE_LAYERS, lead_keys=lead)
    model.assert_measured(model.attention_of_question(PROBE_LAYERS, lead, model.RUNS))
    assert choice.chosen == live.choose(model.measured[0], 3)


def test_text_before_the_chunks_may_be_computed_in_the_pass(noise_model: Any) -> None:
    """Its fresh keys take part as known ones do."""
    model = noise_model()
    runs = (model.LEAD, *model.RUNS)
    model.choose(model.selection(LiveMethod.QUESTION, 9), probe_layers=PROBE_LAYERS, runs=runs)
    model.assert_measured(model.attention_of_question(PROBE_LAYERS, None, runs))


@pytest.mark.parametrize("first_run", [Span(0, 6), Span(4, 6)], ids=["no local hit", "hit inside the lead"])
def test_text_before_the_chunks_counts_once(noise_model: Any, first_run: Span) -> None:
    """Without a local hit that ends at the first chunk, the pass computes keys that are known already."""
    model = noise_model()
    runs, lead = (first_run, *model.RUNS), model.keys[:, : len(model.LEAD)]
    live = model.selection(LiveMethod.QUESTION, 9)
    model.choose(live, probe_layers=PROBE_LAYERS, lead_keys=lead, runs=runs)
    model.assert_measured(model.attention_of_question(PROBE_LAYERS, lead, runs))


@pytest.mark.parametrize(
    ("method", "num_tokens"), [(LiveMethod.QUESTION, 12), (LiveMethod.FOCUS, FOCUS_ASKS_FROM)]
)
def test_the_probe_is_paid_from_the_budget(noise_model: Any, method: LiveMethod, num_tokens: int) -> None:
    """What is left is chosen; everything else was computed in the question's own pass."""
    model = noise_model()
    choice = model.choose(model.selection(method, num_tokens, need_at=[8]))
    assert model.passes == [(Span(20, 23), Span(46, 57))]
    assert sum(map(len, choice.chosen)) == num_tokens - len(model.PROBE)
    assert choice.remaining == choice.chosen
    assert choice.num_probe_tokens == len(model.PROBE)


def test_focus_counts_stored_need_as_well(noise_model: Any) -> None:
    """A token that holds all of the need is taken before the last of those the question looks at."""
    model = noise_model()
    by_question = model.choose(model.selection(LiveMethod.QUESTION, FOCUS_ASKS_FROM)).chosen
    looked_at = set(positions_of(by_question).tolist())
    other = next(p for p in positions_of(model.CANDIDATES).tolist() if p not in looked_at)
    choice = model.choose(model.selection(LiveMethod.FOCUS, FOCUS_ASKS_FROM, need_at=[other]))
    chosen = set(positions_of(choice.chosen).tolist())
    assert chosen - looked_at == {other}
    assert len(looked_at - chosen) == 1


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 12, FOCUS_ASKS_FROM - 1])
def test_focus_does_not_ask_where_that_costs_too_much_of_the_budget(
    noise_model: Any, num_tokens: int
) -> None:
    """The whole budget goes to the tokens of most stored need, and no pass is run to choose them."""
    model = noise_model()
    live = model.selection(LiveMethod.FOCUS, num_tokens, need_at=[9, 30])
    choice = model.choose(live)
    chosen = set(positions_of(choice.chosen).tolist())
    assert (model.passes, model.measured, choice.num_probe_tokens) == ([], [], 0)
    assert choice.chosen == live.choose(None, num_tokens)
    assert len(chosen) == num_tokens and len(chosen & {9, 30}) == min(2, num_tokens)
    assert set(positions_of(choice.remaining).tolist()) == chosen | set(positions_of(model.RUNS).tolist())


@pytest.mark.parametrize("spare", [-7, -1, 0])
def test_budget_that_the_probe_would_use_up_is_not_spent(noise_model: Any, spare: int) -> None:
    """Nothing is measured or chosen, and what has to be computed is still to be computed."""
    model = noise_model()
    choice = model.choose(model.selection(LiveMethod.QUESTION, len(model.PROBE) + spare))
    assert (choice.chosen, choice.remaining, choice.num_probe_tokens) == ((), model.RUNS, 0)
    assert (model.passes, model.measured) == ([], [])


def test_without_a_question_nothing_is_asked(noise_model: Any) -> None:
    """No token behind the context has a block in this step."""
    model = noise_model()
    choice = model.choose(model.selection(LiveMethod.QUESTION, 20), probe=Span(50, 50))
    assert (choice.chosen, choice.remaining, model.passes) == ((), model.RUNS, [])


def test_a_failed_measurement_falls_back_to_stored_need(noise_model: Any) -> None:
    """The pass was run and its KV stands; all ranks hear of the failure, and need decides."""
    model = noise_model()
    model.queries = torch.randn(model.num_layers, model.NUM_TOKENS, 9)  # 9 is no number of heads
    choice = model.choose(model.selection(LiveMethod.QUESTION, len(model.PROBE) + 2, need_at=[9, 30]))
    assert model.measured == [None]
    assert choice.chosen == (Span(9, 10), Span(30, 31))
    assert choice.num_probe_tokens == len(model.PROBE)


@pytest.mark.parametrize("method", LiveMethod)
def test_a_measurement_that_failed_on_another_rank_is_not_used(noise_model: Any, method: LiveMethod) -> None:
    """Ranks that chose by different scores would diverge."""
    model = noise_model()
    choice = model.choose(model.selection(method, FOCUS_ASKS_FROM, need_at=[9, 30]), others_failed=True)
    assert model.measured[0] is not None
    assert {9, 30} <= set(positions_of(choice.chosen).tolist())
