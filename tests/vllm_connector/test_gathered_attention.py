"""Attention over gathered keys is the attention of one query at a time."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.vllm_connector.gathered_attention import QUERY_BLOCK, GatheredRequest

HEAD_SIZE = 8
SCALE = 0.3
NO_BLOCKS = torch.zeros(0, dtype=torch.int64)


def one_by_one(queries, keys, values, positions):
    """(n, num_heads, head_size): each query over the keys up to its own, by the definition."""
    group = queries.shape[1] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    rows = []
    for query, position in zip(queries, positions.tolist(), strict=True):
        seen, content = keys[:, : position + 1], values[:, : position + 1]
        weights = torch.softmax(SCALE * torch.einsum("hd,hsd->hs", query, seen), -1)
        rows.append(torch.einsum("hs,hsd->hd", weights, content))
    return torch.stack(rows)


@given(
    positions=st.sets(st.integers(0, 700), min_size=1, max_size=2 * QUERY_BLOCK + 3),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    first_row=st.integers(0, 5),
)
def test_each_query_sees_the_keys_up_to_its_own(positions, num_kv_heads, group, first_row):
    dice = torch.Generator().manual_seed(len(positions))
    own = torch.tensor(sorted(positions))
    keys, values = torch.randn(2, num_kv_heads, 704, HEAD_SIZE, generator=dice)
    num_rows = first_row + len(own) + 2
    queries = torch.randn(num_rows, num_kv_heads * group, HEAD_SIZE, generator=dice)
    output = torch.full_like(queries, math.inf)
    request = GatheredRequest(first_row, own, NO_BLOCKS)

    request.attend(queries, keys, values, SCALE, output)

    rows = slice(first_row, first_row + len(own))
    torch.testing.assert_close(output[rows], one_by_one(queries[rows], keys, values, own))
    others = torch.cat([output[: rows.start], output[rows.stop :]])
    assert others.isinf().all(), "rows of other requests were written"


def test_keys_behind_a_query_do_not_matter():
    own = torch.tensor([3, 40, 41])
    queries = torch.randn(3, 2, HEAD_SIZE)
    keys, values = torch.randn(2, 1, 64, HEAD_SIZE)
    request = GatheredRequest(0, own, NO_BLOCKS)
    first, second = torch.empty_like(queries), torch.empty_like(queries)
    request.attend(queries, keys, values, SCALE, first)
    keys[:, 42:], values[:, 42:] = 7.0, -7.0
    request.attend(queries, keys, values, SCALE, second)
    assert torch.equal(first, second)
