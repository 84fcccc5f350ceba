"""Block sums of attention weights, against softmax written out over the whole matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from cachecraft_rag.chunks import AttentionProfile
from cachecraft_rag.vllm_connector.compat import KVLayer
from cachecraft_rag.vllm_connector.profile import BLOCK, LayerInputs, measure_profile
from cachecraft_rag.vllm_connector.rotary import RotaryTable

HEAD_SIZE = 8
Bounds = Sequence[tuple[int, int]]


def make_layer(
    num_heads: int = 6, num_kv_heads: int = 2, window: int | None = None, soft_cap: float = 0.0
) -> KVLayer:
    return KVLayer(
        name="layer",
        attention=None,
        rotary=RotaryTable(torch.ones(1, HEAD_SIZE), True),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=HEAD_SIZE,
        scale=1 / math.sqrt(HEAD_SIZE),
        sliding_window=window,
        logits_soft_cap=soft_cap,
    )


def make_inputs(layer: KVLayer, num_before: int, num_tokens: int, gap: int = 0, seed: int = 0) -> LayerInputs:
    """Random queries and keys, wide enough for sharp weights; `gap` positions before the chunk are
    not among the keys."""
    random = torch.Generator().manual_seed(seed)
    num_keys = num_before + num_tokens
    positions = torch.arange(num_keys)
    positions[num_before:] += gap
    return LayerInputs(
        layer,
        3 * torch.randn(num_tokens, layer.num_heads, HEAD_SIZE, generator=random),
        torch.randn(num_keys, layer.num_kv_heads, HEAD_SIZE, generator=random),
        positions,
    )


def reference_weights(inputs: LayerInputs) -> torch.Tensor:
    """(T, S) softmax weights averaged over heads, one query and one head at a time, in float64."""
    layer, num_tokens = inputs.layer, inputs.queries.shape[0]
    num_before = inputs.keys.shape[0] - num_tokens
    weights = torch.zeros(num_tokens, inputs.keys.shape[0], dtype=torch.float64)
    group = layer.num_heads // layer.num_kv_heads
    for token in range(num_tokens):
        position = int(inputs.key_positions[num_before + token])
        distance = position - inputs.key_positions
        seen = (distance >= 0) & (distance < (layer.sliding_window or math.inf))
        for head in range(layer.num_heads):
            scores = inputs.keys[:, head // group].double() @ inputs.queries[token, head].double()
            scores = scores * layer.scale
            if layer.logits_soft_cap:
                scores = layer.logits_soft_cap * torch.tanh(scores / layer.logits_soft_cap)
            weights[token] += scores.masked_fill(~seen, -math.inf).softmax(0) / layer.num_heads
    return weights


def reference_profile(inputs: Sequence[LayerInputs], bounds: Bounds) -> AttentionProfile:
    weights = torch.stack([reference_weights(layer_inputs) for layer_inputs in inputs]).mean(0)
    num_tokens = weights.shape[0]
    num_before = weights.shape[1] - num_tokens
    inter = [weights[:, first:last].sum() for first, last in bounds]
    intra = sum(weights[k, num_before + j] for k in range(num_tokens) for j in range(k))
    mean = sum(float(x) / num_tokens / (b - a) for x, (a, b) in zip(inter, bounds, strict=True))
    columns = [weights[:, first:last].sum(1) for first, last in bounds]
    scores = torch.stack(columns).sum(0).numpy() if bounds else np.zeros(num_tokens)
    return AttentionProfile(mean, float(intra) / num_tokens**2, tuple(map(float, inter)), scores)


def assert_same_profile(found: AttentionProfile, expected: AttentionProfile) -> None:
    for name in ("inter_mean", "intra_mean", "inter_by_prefix", "token_scores"):
        np.testing.assert_allclose(
            getattr(found, name), getattr(expected, name), rtol=1e-3, atol=1e-6, err_msg=name
        )
    assert found.token_scores.dtype == np.float32


def assert_matches_reference(inputs: Sequence[LayerInputs], bounds: Bounds) -> None:
    found = measure_profile(inputs, bounds, range(len(bounds)), len(bounds))
    assert_same_profile(found, reference_profile(inputs, bounds))


@pytest.mark.parametrize(
    "layer",
    [
        make_layer(num_heads=2, num_kv_heads=2),
        make_layer(num_heads=6, num_kv_heads=2),
        make_layer(num_heads=4, num_kv_heads=1),
        make_layer(window=24),
        make_layer(soft_cap=2.0),
        make_layer(window=30, soft_cap=1.5),
    ],
    ids=["heads", "grouped", "one kv head", "window", "soft cap", "window and cap"],
)
def test_sums_equal_full_softmax(layer: KVLayer) -> None:
    """Lead text of 9 tokens takes part in the softmax and in no sum; two chunks follow it."""
    assert_matches_reference([make_inputs(layer, num_before=40, num_tokens=21)], [(9, 25), (25, 40)])


@pytest.mark.parametrize("num_tokens", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 7])
def test_blocks_of_queries_leave_no_seam(num_tokens: int) -> None:
    """A chunk longer than one block gives the sums of the whole matrix."""
    assert_matches_reference([make_inputs(make_layer(2, 1), 30, num_tokens)], [(4, 12), (12, 30)])


@pytest.mark.parametrize("window", [None, 900])
def test_blocks_that_many_keys_make_small_leave_no_seam(window: int | None) -> None:
    """Behind a long prompt fewer queries are taken at a time."""
    inputs = make_inputs(make_layer(8, 1, window=window), num_before=1_500, num_tokens=60)
    assert_matches_reference([inputs], [(0, 700), (700, 1_500)])


def test_layers_are_averaged() -> None:
    """Every profiled layer counts alike, with its own window and cap."""
    layers = [make_layer(), make_layer(window=16), make_layer(soft_cap=1.0)]
    inputs = [make_inputs(layer, 32, 18, seed=seed) for seed, layer in enumerate(layers)]
    assert_matches_reference(inputs, [(0, 20), (20, 32)])


def test_windows_count_positions_and_not_keys() -> None:
    """Keys that this worker never saw still make others fall out of the window."""
    layer = make_layer(window=20)
    inputs = make_inputs(layer, num_before=24, num_tokens=12, gap=10)
    dense = make_inputs(layer, num_before=24, num_tokens=12, gap=0)
    assert_matches_reference([inputs], [(0, 12), (12, 24)])
    far = measure_profile([inputs], [(0, 24)], [0], 1).inter_mean
    near = measure_profile([dense], [(0, 24)], [0], 1).inter_mean
    assert far < near


def test_a_first_chunk_has_nothing_before_it() -> None:
    """Without chunks before it a chunk has no inter-attention, and its own part is measured."""
    inputs = make_inputs(make_layer(), num_before=5, num_tokens=16)
    profile = measure_profile([inputs], [], [], 0)
    assert profile.inter_mean == 0.0
    assert profile.inter_by_prefix == ()
    assert profile.token_scores.tolist() == [0.0] * 16
    assert_same_profile(profile, reference_profile([inputs], []))
    assert profile.intra_mean > 0.0


def test_unseen_chunks_of_the_prefix_get_no_attention() -> None:
    """Sums go to the places of the chunks whose keys were there; the others stay zero."""
    inputs = make_inputs(make_layer(), num_before=20, num_tokens=10)
    bounds = [(0, 8), (8, 20)]
    profile = measure_profile([inputs], bounds, [1, 3], 4)
    expected = reference_profile([inputs], bounds).inter_by_prefix
    np.testing.assert_allclose(profile.inter_by_prefix, (0.0, expected[0], 0.0, expected[1]), rtol=1e-3)


def test_weights_of_a_token_add_up_to_one() -> None:
    """Everything a token attends to, itself included, is one: nothing is counted twice or lost."""
    inputs = make_inputs(make_layer(), num_before=20, num_tokens=1)
    profile = measure_profile([inputs], [(0, 20)], [0], 1)
    own_weight = float(reference_weights(inputs)[0, 20])
    assert profile.token_scores[0] + own_weight == pytest.approx(1.0, abs=1e-5)
    assert profile.intra_mean == pytest.approx(0.0, abs=1e-6)
