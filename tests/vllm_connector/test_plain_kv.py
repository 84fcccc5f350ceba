"""The layout in which vLLM's CPU backend keeps KV, read back from what its own writer wrote."""

from types import SimpleNamespace

import pytest
import torch

from cachecraft_rag.vllm_connector import compat

pytest.importorskip("vllm", reason="needs vLLM's writer")

HEADS, HEAD_SIZE, BLOCK = 3, 64, 32


def made_layer(dtype, isa="vec", writer=None):
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()

    def write(layer, key, value, cache, slots):
        slabs = cache.view(len(cache), HEADS, 2 * BLOCK, HEAD_SIZE)
        ops.cpu_attn_reshape_and_cache(key, value, *slabs.chunk(2, dim=2), slots, isa)

    impl = SimpleNamespace(do_kv_cache_update=writer or write)
    cache = torch.zeros(5, HEADS, BLOCK, 2 * HEAD_SIZE, dtype=dtype)
    attention = SimpleNamespace(impl=impl, kv_cache=cache)
    return compat.KVLayer("layer", attention, None, HEADS, HEADS, HEAD_SIZE, 1.0, None, 0.0)  # type: ignore[arg-type]


def test_what_was_written_is_read():
    layer = made_layer(torch.float32)
    assert compat.has_plain_kv(layer, BLOCK)
    key, value = torch.randn(2, 2 * BLOCK, HEADS, HEAD_SIZE)
    blocks = torch.tensor([4, 1])
    slots = (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
    layer.write(key, value, slots)
    keys, values = compat.read_kv(layer, blocks)
    assert torch.equal(keys, key.transpose(0, 1))
    assert torch.equal(values, value.transpose(0, 1))


def test_another_layout_is_noticed():
    def token_by_token(layer, key, value, cache, slots):
        rows = torch.cat([key, value], -1).transpose(0, 1)
        cache[slots[0] // BLOCK] = rows.view(cache.shape[1:])

    assert not compat.has_plain_kv(made_layer(torch.float32, writer=token_by_token), BLOCK)


def test_another_block_size_is_left_to_the_backend():
    assert not compat.has_plain_kv(made_layer(torch.float32), 2 * BLOCK)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_other_dtypes_are_left_to_the_backend(dtype):
    assert not compat.has_plain_kv(made_layer(dtype), BLOCK)


def test_the_check_draws_nothing_from_the_random_generator():
    state = torch.get_rng_state()
    compat.has_plain_kv(made_layer(torch.float32), BLOCK)
    assert torch.equal(state, torch.get_rng_state())
