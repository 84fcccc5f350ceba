"""Moving keys to another position.

A rotary embedding with a fixed table maps a key at position p to m * R(p) k, where R(p) turns each
pair of features by an angle and m is the table's scale (1, or YaRN's attention factor). A key
stored as computed at position p_old is moved by one turn with R(p_new) R(p_old)^-1, made from the
model's own table, so scaled ropes and rounded tables need no special case.

The alternative, storing keys without rotation, rounds them twice and loses a property worth
having: here a move by zero is the identity bit for bit, so exact reuse is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class RotaryTable:
    """A layer's rotary embedding.

    Attributes:
        cos_sin: (max_positions, rotary_dim), cosines then sines, in the model's dtype.
        is_neox_style: pairs are (i, i + rotary_dim / 2); otherwise (2i, 2i + 1).
    """

    cos_sin: torch.Tensor
    is_neox_style: bool

    @property
    def rotary_dim(self) -> int:
        return self.cos_sin.shape[-1]

    @property
    def num_positions(self) -> int:
        return self.cos_sin.shape[0]


def turn_between(table: RotaryTable, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The move of n keys from positions `old` to positions `new`, both int64 (n,).

    With (c, s) a table row of scale m, R(new) R(old)^-1 has cosine (c_n c_o + s_n s_o) / m^2 and
    sine (s_n c_o - c_n s_o) / m^2, where m^2 = c_o^2 + s_o^2 also takes up the table's rounding.

    Returns:
        float32 (n, rotary_dim), cosines then sines: a rotary table with one row per key.
    """
    cos_old, sin_old = table.cos_sin[old].float().chunk(2, dim=-1)
    cos_new, sin_new = table.cos_sin[new].float().chunk(2, dim=-1)
    scale = cos_old.square() + sin_old.square()
    cos = (cos_new * cos_old + sin_new * sin_old) / scale
    sin = (sin_new * cos_old - cos_new * sin_old) / scale
    return torch.cat([cos, sin], dim=-1)


def move_keys(table: RotaryTable, keys: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Keys (n, num_kv_heads, head_size) at their new positions; float32 inside, same dtype out.

    The reference in plain torch. Loads use `compat.rotate_keys`, which does the same in one fifth of
    the time with vLLM's own kernel.
    """
    dim = table.rotary_dim
    cos, sin = turn.unsqueeze(1).chunk(2, dim=-1)
    rotated = keys[..., :dim].float()
    if table.is_neox_style:
        first, second = rotated.chunk(2, dim=-1)
    else:
        first, second = rotated[..., ::2], rotated[..., 1::2]
    moved = keys.clone()
    out = (
        (moved[..., : dim // 2], moved[..., dim // 2 : dim])
        if table.is_neox_style
        else (moved[..., :dim:2], moved[..., 1:dim:2])
    )
    out[0].copy_(first * cos - second * sin)
    out[1].copy_(second * cos + first * sin)
    return moved
