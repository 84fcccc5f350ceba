"""What a chunk's tokens attended to: exact block sums of softmax weights, without an N x N matrix.

For a chunk C_i this gives, per query token t_k and chunk C_j before it, sum_{l in C_j} a_{k,l}
(the inner sum of Cache-Craft eq. 3), from which follow inter (eq. 3), intra (eq. 4), a and b
(eq. 9-10) and the token scores of eq. 14. Weights are averaged over heads and profiled layers.

Departures: text that is no chunk (system prompt, attention sink) takes part in the softmax but in
no sum, because its mass would make every overlap look perfect; keys that this worker never saw
(held by vLLM's own prefix cache) cannot take part. Eq. 4 counts earlier tokens only, so the
diagonal is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from cachecraft_rag.chunks import AttentionProfile
from cachecraft_rag.vllm_connector.compat import KVLayer

BLOCK = 128
"""Query tokens per block: bounds the scores held at once to heads x 128 x keys float32 values."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerInputs:
    """One profiled layer's view of a chunk.

    Attributes:
        queries: (T, num_heads, head_size), rotated.
        keys: (S, num_kv_heads, head_size), rotated to their positions in this prompt: what stands
            before the chunk, then the chunk's own T keys.
        key_positions: int64 (S,).
    """

    layer: KVLayer
    queries: torch.Tensor
    keys: torch.Tensor
    key_positions: torch.Tensor


def measure_profile(
    inputs: Sequence[LayerInputs],
    bounds: Sequence[tuple[int, int]],
    prefix_index: Sequence[int],
    num_prefix_chunks: int,
) -> AttentionProfile:
    """Profile of one chunk.

    Args:
        inputs: one item per profiled layer, all with the same key positions.
        bounds: key ranges [first, last) of the chunks before it.
        prefix_index: for each range, its place among the `num_prefix_chunks` chunks of the prefix.
    """
    per_layer = [_block_sums(layer_inputs, bounds) for layer_inputs in inputs]
    inter = torch.stack([sums[0] for sums in per_layer]).mean(0)
    intra = torch.stack([sums[1] for sums in per_layer]).mean(0)
    num_tokens = inter.shape[0]
    per_chunk = inter.sum(0)
    lengths = torch.tensor([last - first for first, last in bounds], dtype=per_chunk.dtype)
    by_prefix = [0.0] * num_prefix_chunks
    for place, value in zip(prefix_index, per_chunk.tolist(), strict=True):
        by_prefix[place] = value
    return AttentionProfile(
        inter_mean=float((per_chunk / lengths).sum() / num_tokens) if len(bounds) else 0.0,
        intra_mean=float(intra.sum() / num_tokens**2),
        inter_by_prefix=tuple(by_prefix),
        token_scores=inter.sum(1).numpy().astype("float32"),
    )


def attention_received(inputs: LayerInputs) -> torch.Tensor:
    """float32 (S,) on the CPU: the attention that each key gets from all queries together, averaged
    over heads."""
    received = torch.zeros(inputs.keys.shape[0], device=inputs.keys.device)
    for _, weights in _blocks(inputs):
        received[: weights.shape[1]] += weights.sum(0)
    return received.cpu()


def _block_sums(inputs: LayerInputs, bounds: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(T, len(bounds)) mass on each chunk before, and (T,) mass on earlier own tokens; on the CPU."""
    num_before = inputs.keys.shape[0] - inputs.queries.shape[0]
    inter, intra = [], []
    for start, weights in _blocks(inputs):
        masses = [weights[:, first:last].sum(1) for first, last in bounds]
        inter.append(torch.stack(masses, 1) if masses else weights.new_zeros(len(weights), 0))
        diagonal = weights[:, num_before + start :].diagonal()
        intra.append(weights[:, num_before:].sum(1) - diagonal)
    return torch.cat(inter).cpu(), torch.cat(intra).cpu()


def _blocks(inputs: LayerInputs) -> Iterator[tuple[int, torch.Tensor]]:
    """(first query, softmax weights (B, S') averaged over heads), block by block; keys behind S' are
    masked for the whole block. The queries' own keys are the last ones."""
    layer, num_tokens = inputs.layer, inputs.queries.shape[0]
    num_before = inputs.keys.shape[0] - num_tokens
    keys = inputs.keys.transpose(0, 1)  # (H, S, D)
    grouped = inputs.queries.view(num_tokens, layer.num_kv_heads, -1, layer.head_size)
    for start in range(0, num_tokens, BLOCK):
        stop = min(start + BLOCK, num_tokens)
        end = num_before + stop  # keys after the block's last query are masked for all of it
        query = grouped[start:stop].permute(1, 2, 0, 3).flatten(1, 2)  # (H, g * B, D)
        scores = torch.matmul(query, keys[:, :end].transpose(1, 2)).float() * layer.scale
        scores = scores.view(layer.num_heads, stop - start, end)
        if layer.logits_soft_cap:
            scores = layer.logits_soft_cap * torch.tanh(scores / layer.logits_soft_cap)
        own = inputs.key_positions[num_before + start : end].unsqueeze(1)
        seen = inputs.key_positions[:end].unsqueeze(0) <= own
        if layer.sliding_window is not None:
            seen &= inputs.key_positions[:end].unsqueeze(0) > own - layer.sliding_window
        yield start, scores.masked_fill_(~seen, float("-inf")).softmax(-1).mean(0)
