"""Choosing by how far loaded values are from fresh ones, where the deviating tokens are planted."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cachecraft_rag.chunks import Span
from cachecraft_rag.planner.live import LiveMethod, LiveSelection
from cachecraft_rag.planner.selection import positions_of

SMALL, LARGE = 12, 31
"""Positions in the first and the second candidate whose loaded values are off by .5 and by 2."""
NUM_CANDIDATE_TOKENS = 14 + 17


@pytest.fixture
def plant(noise_model: Any) -> Any:
    def make(num_layers: int = 6) -> Any:
        model = noise_model(num_layers=num_layers)
        model.loaded_values[1, SMALL] += 0.5
        model.loaded_values[1, LARGE] -= 2.0
        model.loaded_values[1, 40] += 9.0  # in a chunk that is no candidate
        model.loaded_values[2:] += 1.0  # on layers that are not compared
        return model

    return make


def by_deviation(model: Any, num_tokens: int) -> LiveSelection:
    live: LiveSelection = model.selection(LiveMethod.DEVIATION, num_tokens)
    return live


def budget_for(num_chosen: int) -> int:
    """Tokens that cost what two of six layers of all candidates and four of the chosen cost."""
    return math.ceil((2 * NUM_CANDIDATE_TOKENS + 4 * num_chosen) / 6)


@pytest.mark.parametrize(("num_chosen", "expected"), [(1, [LARGE]), (2, [SMALL, LARGE])])
def test_the_tokens_whose_values_moved_are_found(plant: Any, num_chosen: int, expected: list[int]) -> None:
    """The largest distance first, with what is left once the early layers are paid for."""
    model = plant()
    choice = model.choose(by_deviation(model, budget_for(num_chosen)))
    assert positions_of(choice.chosen).tolist() == expected
    assert choice.num_probe_tokens == 0


def test_only_early_layers_are_computed_of_all_candidates(plant: Any) -> None:
    """The pass ends before the third layer, so what must be computed in full is still to be computed."""
    model = plant()
    choice = model.choose(by_deviation(model, budget_for(2)))
    assert model.passes == [(Span(6, 40), Span(46, 50))]
    assert model.num_layers_run == 2
    assert choice.remaining == (Span(12, 13), Span(20, 23), Span(31, 32), Span(46, 50))


def test_squared_distances_are_summed_over_heads_and_channels(plant: Any) -> None:
    """Of .5 and 2 in 16 channels."""
    model = plant()
    model.choose(by_deviation(model, budget_for(2)))
    expected = np.zeros(NUM_CANDIDATE_TOKENS)
    expected[[SMALL - 6, 14 + LARGE - 23]] = 16 * 0.5**2, 16 * 2.0**2
    model.assert_measured(expected)


def test_candidates_left_out_do_not_shift_the_rows(plant: Any) -> None:
    """A chunk whose load failed is no candidate any more; rows of the other are found by position."""
    model = plant()
    first, second = model.CANDIDATES
    live = by_deviation(model, 20).without([first])
    choice = model.choose(live, runs=(first, *model.RUNS))
    expected = np.zeros(len(second))
    expected[LARGE - second.start] = 16 * 2.0**2
    model.assert_measured(expected)
    assert any(span.start <= LARGE < span.end for span in choice.chosen)
    assert all(span.start >= second.start for span in choice.chosen)


def test_a_failed_measurement_falls_back_to_stored_need(plant: Any) -> None:
    """The early pass was in vain, and need decides."""
    model = plant()
    model.loaded_values = model.loaded_values[..., :3]
    choice = model.choose(model.selection(LiveMethod.DEVIATION, budget_for(1), need_at=[9]))
    assert model.measured == [None]
    assert choice.chosen == (Span(9, 10),)


@pytest.mark.parametrize(
    ("num_layers", "num_tokens"),
    [(6, 0), (6, 1), (6, 10), (4, 15), (31, 2), (2, 31), (2, 100)],
    ids=["none", "least", "short", "short by half a token", "just covered", "two layers", "two, rich"],
)
def test_budget_that_the_early_layers_would_use_up_is_not_spent(
    plant: Any, num_layers: int, num_tokens: int
) -> None:
    """Nothing is computed, measured or chosen, as with the question's pass; nor if all layers are early."""
    model = plant(num_layers)
    choice = model.choose(model.selection(LiveMethod.DEVIATION, num_tokens, need_at=[9]))
    assert (choice.chosen, choice.remaining, choice.num_probe_tokens) == ((), model.RUNS, 0)
    assert (model.passes, model.measured) == ([], [])


@pytest.mark.parametrize(("num_layers", "num_tokens"), [(6, 11), (4, 16), (3, 21), (31, 3)])
def test_smallest_budget_beyond_the_early_layers_buys_a_token(
    plant: Any, num_layers: int, num_tokens: int
) -> None:
    """However few layers are left for it."""
    model = plant(num_layers)
    assert model.choose(by_deviation(model, num_tokens)).chosen == (Span(LARGE, LARGE + 1),)
