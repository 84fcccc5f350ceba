"""Moving keys to another position, against a rotary embedding written out by hand."""

from __future__ import annotations

import pytest
import torch

from cachecraft_rag.vllm_connector.rotary import RotaryTable, move_keys, turn_between

HEAD_SIZE = 16
NUM_KV_HEADS = 2
NUM_POSITIONS = 4096
STYLES = pytest.mark.parametrize("is_neox_style", [True, False], ids=["neox", "interleaved"])


def make_table(
    is_neox_style: bool,
    *,
    rotary_dim: int = HEAD_SIZE,
    scale: float = 1.0,
    stretch: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> RotaryTable:
    """A table as vLLM lays it out; `scale` is YaRN's attention factor, `stretch` linear scaling."""
    frequencies = 10_000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = torch.arange(NUM_POSITIONS, dtype=torch.float64)[:, None] / stretch * frequencies
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1) * scale
    return RotaryTable(cos_sin.to(dtype), is_neox_style)


def rotated(table: RotaryTable, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """What the model computes: keys (n, heads, head size) turned pair by pair, in float64."""
    half = table.rotary_dim // 2
    result = keys.double().clone()
    for pair in range(half):
        first, second = (pair, pair + half) if table.is_neox_style else (2 * pair, 2 * pair + 1)
        cos = table.cos_sin[positions, pair].double()[:, None]
        sin = table.cos_sin[positions, half + pair].double()[:, None]
        x, y = keys[..., first].double(), keys[..., second].double()
        result[..., first] = x * cos - y * sin
        result[..., second] = y * cos + x * sin
    return result


def random_keys(count: int = 64) -> torch.Tensor:
    return torch.randn(count, NUM_KV_HEADS, HEAD_SIZE, generator=torch.Generator().manual_seed(3))


def assert_moves_like_the_model(table: RotaryTable, old: torch.Tensor, new: torch.Tensor) -> None:
    """Keys rotated at `old` and moved equal keys rotated at `new`."""
    keys = random_keys(len(old))
    moved = move_keys(table, rotated(table, keys, old).float(), turn_between(table, old, new))
    torch.testing.assert_close(moved.double(), rotated(table, keys, new), atol=1e-4, rtol=1e-4)


@STYLES
@pytest.mark.parametrize("shift", [1, 977, -500])
@pytest.mark.parametrize("rotary_dim", [HEAD_SIZE, HEAD_SIZE // 2, HEAD_SIZE // 4])
def test_moved_keys_are_keys_of_the_new_position(is_neox_style: bool, rotary_dim: int, shift: int) -> None:
    """Moving gives what the model would have computed there, also where only some dims turn."""
    old = torch.arange(500, 564)
    assert_moves_like_the_model(make_table(is_neox_style, rotary_dim=rotary_dim), old, old + shift)


@STYLES
@pytest.mark.parametrize(("scale", "stretch"), [(1.2, 1.0), (1.0, 4.0), (0.8, 8.0)])
def test_scaled_tables_need_no_special_case(is_neox_style: bool, scale: float, stretch: float) -> None:
    """YaRN's attention factor stays as it was, neither lost nor applied twice."""
    old = torch.arange(64)
    assert_moves_like_the_model(make_table(is_neox_style, scale=scale, stretch=stretch), old, old + 1234)


@STYLES
def test_each_key_moves_by_its_own_distance(is_neox_style: bool) -> None:
    """One call moves the keys of several chunks to unrelated places."""
    permutation = torch.randperm(NUM_POSITIONS, generator=torch.Generator().manual_seed(5))
    assert_moves_like_the_model(make_table(is_neox_style), permutation[:64], permutation[64:128])


@STYLES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scale", [1.0, 1.27])
def test_move_by_zero_changes_no_bit(is_neox_style: bool, dtype: torch.dtype, scale: float) -> None:
    """Exact reuse is exact: a key that stays where it was comes back bit for bit."""
    table = make_table(is_neox_style, scale=scale, dtype=dtype)
    keys, positions = random_keys().to(dtype), torch.arange(100, 164)
    moved = move_keys(table, keys, turn_between(table, positions, positions))
    assert moved.dtype is dtype
    assert torch.equal(moved.view(torch.uint8), keys.view(torch.uint8))


@STYLES
def test_move_and_back_stays_within_rounding_of_bfloat16(is_neox_style: bool) -> None:
    """A table rounded to bfloat16 turns by its own angles, so there and back is the same place."""
    table = make_table(is_neox_style, dtype=torch.bfloat16)
    keys, old = random_keys(), torch.arange(64)
    there = move_keys(table, keys, turn_between(table, old, old + 700))
    back = move_keys(table, there, turn_between(table, old + 700, old))
    torch.testing.assert_close(back, keys, atol=0.02, rtol=0.02)


@STYLES
def test_dims_beyond_the_rotary_ones_are_untouched(is_neox_style: bool) -> None:
    """With partial rotary dims the rest of a key has no position."""
    table = make_table(is_neox_style, rotary_dim=HEAD_SIZE // 2)
    keys, old = random_keys(), torch.arange(64)
    moved = move_keys(table, keys, turn_between(table, old, old + 9))
    assert torch.equal(moved[..., HEAD_SIZE // 2 :], keys[..., HEAD_SIZE // 2 :])
    assert not torch.equal(moved[..., : HEAD_SIZE // 2], keys[..., : HEAD_SIZE // 2])


@pytest.mark.engine
@STYLES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotary_dim", [HEAD_SIZE, HEAD_SIZE // 2])
def test_vllms_kernel_moves_like_the_reference(
    is_neox_style: bool, dtype: torch.dtype, rotary_dim: int
) -> None:
    """Loads use vLLM's kernel: it agrees with plain torch, and leaves keys that stay bit for bit."""
    from cachecraft_rag.vllm_connector.compat import rotate_keys

    table = make_table(is_neox_style, rotary_dim=rotary_dim, dtype=dtype)
    keys, old = random_keys().to(dtype), torch.arange(64)
    turn = turn_between(table, old, old + 321)
    torch.testing.assert_close(rotate_keys(table, keys, turn), move_keys(table, keys, turn))
    assert torch.equal(rotate_keys(table, keys, turn_between(table, old, old)), keys)
