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
"""Most query tokens whose scores are held at once."""
_CPU_BLOCK_BYTES = 1 << 20
"""Scores of one block on a CPU: what fits its cache is measured in half the time of what does not."""
_DEVICE_BLOCK_BYTES = 64 << 20
"""The same on a device, where starting a kernel costs more."""


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
    num_keys = inputs.keys.shape[0]
    num_before = num_keys - inputs.queries.shape[0]
    # One product with the membership of keys: a sum for each range would be one small call for each.
    ranges = [*bounds, (num_before, num_keys)]
    members = torch.zeros(num_keys, len(ranges), device=inputs.keys.device)
    for place, (first, last) in enumerate(ranges):
        members[first:last, place] = 1.0
    inter, intra = [], []
    for start, weights in _blocks(inputs):
        masses = weights @ members[: weights.shape[1]]
        inter.append(masses[:, :-1])
        intra.append(masses[:, -1] - weights[:, num_before + start :].diagonal())
    return torch.cat(inter).cpu(), torch.cat(intra).cpu()


def _blocks(inputs: LayerInputs) -> Iterator[tuple[int, torch.Tensor]]:
    """(first query, softmax weights (B, S') averaged over heads), block by block; keys behind S' are
    masked for the whole block. The queries' own keys are the last ones.

    Products are in the model's dtype, as in its own attention, and the softmax in float32.
    """
    layer, num_tokens, num_keys = inputs.layer, inputs.queries.shape[0], inputs.keys.shape[0]
    num_before, group = num_keys - num_tokens, layer.num_heads // layer.num_kv_heads
    queries = inputs.queries.view(num_tokens, layer.num_kv_heads, group, layer.head_size)
    queries = (queries * layer.scale).permute(1, 2, 0, 3)  # (H, g, T, D)
    keys = inputs.keys.permute(1, 2, 0)  # (H, D, S); a copy of it would make products slower
    size = _block_tokens(group, num_keys, inputs.keys.device)
    for start in range(0, num_tokens, size):
        stop = min(start + size, num_tokens)
        end = num_before + stop  # keys after the block's last query are masked for all of it
        first_masked, hidden = _hidden(inputs, num_before + start, end)
        weights = torch.zeros(stop - start, end, device=inputs.keys.device)
        for head in range(layer.num_kv_heads):
            query = queries[head, :, start:stop].flatten(0, 1)  # (g * B, D)
            scores = torch.matmul(query, keys[head, :, :end]).float().view(group, stop - start, end)
            if layer.logits_soft_cap:
                scores = layer.logits_soft_cap * torch.tanh(scores / layer.logits_soft_cap)
            scores[:, :, first_masked:].masked_fill_(hidden, float("-inf"))
            weights += scores.softmax(-1).sum(0)
        yield start, weights / layer.num_heads


def _block_tokens(group: int, num_keys: int, device: torch.device) -> int:
    block_bytes = _CPU_BLOCK_BYTES if device.type == "cpu" else _DEVICE_BLOCK_BYTES
    return max(8, min(BLOCK, block_bytes // (4 * group * num_keys)))


def _hidden(inputs: LayerInputs, first: int, end: int) -> tuple[int, torch.Tensor]:
    """The queries of keys [first, end) do not see all keys: from which key on to look, and which of
    those are hidden, (end - first, end - that key). Without a window all keys before them are seen."""
    window = inputs.layer.sliding_window
    start = first if window is None else 0
    own = inputs.key_positions[first:end].unsqueeze(1)
    others = inputs.key_positions[start:end].unsqueeze(0)
    hidden = others > own
    if window is not None:
        hidden |= others <= own - window
    return start, hidden
