"""All settings, in one frozen dataclass; each default stands here once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType

from cachecraft_rag.chunks import SHARED_TENANT
from cachecraft_rag.errors import ConfigurationError

ENV_PREFIX = "CACHECRAFT_"

PRESET_ALPHAS: Mapping[str, float] = MappingProxyType(
    {"fast": 0.1, "balanced": 0.3, "faithful": 0.6, "strict": 2.0}
)
"""alpha of Cache-Craft eq. 12, CFO = alpha * CCI * (1 - beta'), by intent.

The paper's advice to lower alpha for precision is inverted: by its own formula a larger alpha
recomputes more. CCI lies in [0.5, 1), so with no overlap the presets recompute about 5-10, 15-30,
30-60 and 100 % of a chunk.
"""

PRESET_SHARES: Mapping[str, float] = MappingProxyType(
    {"fast": 0.05, "balanced": 0.15, "faithful": 0.3, "strict": 1.0}
)
"""Share of the reused tokens that `focus` recomputes behind a prefix with no overlap, by intent."""

EVICTION_POLICIES = ("gdsf", "hybrid", "lfu", "lru", "cachecraft")
COLD_CODECS = ("raw", "zstd", "int8", "fp8")
MIN_COLD_BYTES = 1024**2

REUSE_MODES = ("auto", "off", "exact")
"""Besides these, the name of a strategy is a reuse mode too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCraftConfig:
    """Settings of one engine. Read-only; use `dataclasses.replace` to vary one.

    Attributes:
        strategy: what `reuse="auto"` plans with; a name from `cachecraft_rag.planner.strategies`.
        preset: `fast`, `balanced`, `faithful` or `strict`: how much is recomputed.
        recompute_ratio: share of each reused chunk to recompute, in [0, 1]; overrides `preset`.
        granularity: tokens are selected in runs of this many.
        min_chunk_tokens: shorter chunks are computed: moving them costs more than it saves.
        max_variants_per_chunk: stored KV variants of one text, each behind another prefix.
        host_store_bytes: bytes of host memory for chunk KV over all ranks; None takes a quarter of
            the memory that is free when the engine starts; 0 switches the store off.
        tenant_quotas: bytes of it that a tenant's chunk KV may take, by tenant; 0 keeps one out.
        default_tenant_quota_bytes: the same for every tenant not named there; None for no limit.
        disk_store_bytes: bytes of disk for chunk KV, kept over restarts; 0 switches the disk tier off.
        disk_store_dir: its folder; None takes one in the cache folder. Engines may share it.
        redis_url: a Redis that engines share chunk KV through, `redis://`, `rediss://`, `unix://` or
            `redis+cluster://`; None for none.
        redis_store_bytes: bytes of it for chunk KV.
        cold_codec: how KV is kept on disk and in Redis: `raw`, `zstd` (exact), `int8` or `fp8` (not).
        cold_wait_s: longest that a request waits for KV from disk or Redis before it is computed.
        eviction_policy: what leaves host memory first when it is full, a name of docs/policies.md.
        has_admission: a chunk asked for once pushes out only chunks that were asked for once.
        record_ttl_s: seconds after which stored KV is not used any more; None for no limit.
        num_profile_layers: layers on which attention is profiled at capture, evenly spaced; 0 measures
            none, and strategies that go by it then repair as if KV fitted nowhere.
        max_known_chunks: chunks remembered for matching by text in later prompts.
        precision_critical: answer every request by full compute.
        max_altered_share: of the chunks passed that reach a prompt, the share a template may have altered.
        max_output_tokens_for_reuse: an answer that may get longer is computed in full.
        max_complexity: estimate in [0, 1] above which a question is answered in full; 1.0 switches it off.
        max_missing_share: share of chunk tokens that may be missing from the store.
        max_overhead_share: share of the prompt that reuse may compute ahead of the model's own forward.
        feedback_share: share of reused requests that is asked again in idle time; 0 switches feedback off.
        idle_warming: compute popular chunks that are not stored while nobody asks, as far as there is room;
            with host memory as the only tier. See docs/warming.md.
        quality_target: ROUGE-L F1 against full compute that the budget is steered to.
        quality_threshold: mean of it over the last samples below which requests are computed in full.
        max_first_token_kl: nats above which a sample is looked into for a chunk that is to blame.
        self_test: prove exactness on the loaded model at its first start.
        audit_log: file that says which document versions stood behind each answer, and what was
            replaced, invalidated or purged; None for none. See docs/store.md.
        default_tenant: tenant of requests that name none.

    Raises:
        ConfigurationError: a value breaks its rule.
    """

    strategy: str = "focus"
    preset: str = "balanced"
    recompute_ratio: float | None = None
    granularity: int = 1
    min_chunk_tokens: int = 8
    max_variants_per_chunk: int = 2
    host_store_bytes: int | None = None
    # Left out of the hash only: a mapping has none, and engines are shared by equal configurations.
    tenant_quotas: Mapping[str, int] = field(default_factory=dict, hash=False)
    default_tenant_quota_bytes: int | None = None
    disk_store_bytes: int = 0
    disk_store_dir: str | None = None
    redis_url: str | None = None
    redis_store_bytes: int = 1024**3
    cold_codec: str = "raw"
    cold_wait_s: float = 0.05
    eviction_policy: str = "gdsf"
    has_admission: bool = True
    record_ttl_s: float | None = None
    num_profile_layers: int = 4
    max_known_chunks: int = 20_000
    precision_critical: bool = False
    max_altered_share: float = 0.5
    max_output_tokens_for_reuse: int = 8000
    max_complexity: float = 1.0
    max_missing_share: float = 0.5
    max_overhead_share: float = 0.8
    feedback_share: float = 0.02
    idle_warming: bool = False
    quality_target: float = 0.9
    quality_threshold: float = 0.35
    max_first_token_kl: float = 0.25
    self_test: bool = True
    audit_log: str | None = None
    default_tenant: str = "default"

    def __post_init__(self) -> None:
        if self.preset not in PRESET_ALPHAS:
            raise ConfigurationError(f"preset is {self.preset!r}: choose one of {', '.join(PRESET_ALPHAS)}")
        if self.recompute_ratio is not None:
            check_ratio(self.recompute_ratio, ConfigurationError)
        for name in _SHARES:
            _check_share(name, getattr(self, name))
        if not self.max_first_token_kl > 0:
            raise ConfigurationError(f"max_first_token_kl is {self.max_first_token_kl!r}: above 0")
        if self.max_output_tokens_for_reuse < 0:
            raise ConfigurationError(
                f"max_output_tokens_for_reuse is {self.max_output_tokens_for_reuse!r}: at least 0"
            )
        for name in ("granularity", "max_variants_per_chunk", "max_known_chunks"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)!r}: it must be at least 1")
        if self.num_profile_layers < 0:
            raise ConfigurationError(f"num_profile_layers is {self.num_profile_layers!r}: 0 measures none")
        if self.min_chunk_tokens < 1:
            raise ConfigurationError(f"min_chunk_tokens is {self.min_chunk_tokens!r}: at least 1")
        if self.host_store_bytes is not None and self.host_store_bytes < 0:
            raise ConfigurationError(
                f"host_store_bytes is {self.host_store_bytes!r}: use 0 to switch the store off"
            )
        self._check_store()
        if not self.default_tenant:
            raise ConfigurationError("default_tenant is empty: it names requests without a tenant")
        if self.default_tenant == SHARED_TENANT:
            raise ConfigurationError(f"default_tenant is {SHARED_TENANT!r}, which only `warm` writes to")
        if self.audit_log == "":
            raise ConfigurationError("audit_log is empty: give the path of a file, or None for none")

    def _check_store(self) -> None:
        self._check_quotas()
        if self.eviction_policy not in EVICTION_POLICIES:
            raise ConfigurationError(
                f"eviction_policy is {self.eviction_policy!r}: choose one of {', '.join(EVICTION_POLICIES)}"
            )
        if self.record_ttl_s is not None and not self.record_ttl_s > 0:
            raise ConfigurationError(f"record_ttl_s is {self.record_ttl_s!r}: seconds above 0, or None")
        if self.idle_warming and self.has_cold_tiers:
            raise ConfigurationError(
                "idle_warming is on with a disk or Redis tier: what leaves host memory is read from there, "
                "which costs less than computing it; switch one of them off"
            )
        for name in ("disk_store_bytes", "redis_store_bytes"):
            if 0 != getattr(self, name) < MIN_COLD_BYTES:
                raise ConfigurationError(
                    f"{name} is {getattr(self, name)!r}: at least {MIN_COLD_BYTES}, or 0 for none"
                )
        if self.cold_codec not in COLD_CODECS:
            raise ConfigurationError(
                f"cold_codec is {self.cold_codec!r}: choose one of {', '.join(COLD_CODECS)}"
            )
        if not 0 <= self.cold_wait_s <= 1:
            raise ConfigurationError(f"cold_wait_s is {self.cold_wait_s!r}: seconds, within [0, 1]")
        if self.redis_url is not None and "://" not in self.redis_url:
            # Not shown: it may hold a password.
            raise ConfigurationError("redis_url is no URL: write redis://host:6379/0")

    def _check_quotas(self) -> None:
        if not isinstance(self.tenant_quotas, Mapping):
            raise ConfigurationError(f"tenant_quotas is {self.tenant_quotas!r}: a mapping, tenant to bytes")
        # A copy: the caller's mapping may change.
        object.__setattr__(self, "tenant_quotas", dict(self.tenant_quotas))
        for tenant, quota_bytes in self.tenant_quotas.items():
            if not isinstance(tenant, str) or not tenant:
                raise ConfigurationError(f"tenant_quotas names {tenant!r}: a tenant is a non-empty string")
            _check_bytes(f"tenant_quotas[{tenant!r}]", quota_bytes)
        if self.default_tenant_quota_bytes is not None:
            _check_bytes("default_tenant_quota_bytes", self.default_tenant_quota_bytes)

    @property
    def has_cold_tiers(self) -> bool:
        """Whether KV outlives an engine, on disk or in Redis."""
        return bool(self.disk_store_bytes or self.redis_url)

    @property
    def alpha(self) -> float:
        return PRESET_ALPHAS[self.preset]

    @property
    def share(self) -> float:
        return PRESET_SHARES[self.preset]

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> CacheCraftConfig:
        """Read `CACHECRAFT_<FIELD>` variables; unset ones keep their defaults. A mapping is written as
        JSON: `CACHECRAFT_TENANT_QUOTAS={"a": 1000000}`.

        Raises:
            ConfigurationError: a variable with the prefix names no setting, or does not parse.
        """
        environ = os.environ if environ is None else environ
        types = {field.name: str(field.type) for field in fields(cls)}
        values: dict[str, object] = {}
        for variable, raw in environ.items():
            if not variable.startswith(ENV_PREFIX):
                continue
            name = variable.removeprefix(ENV_PREFIX).lower()
            if name not in types:
                if name in _OTHER_VARIABLES:
                    continue
                raise ConfigurationError(f"{variable} names no setting: known are {', '.join(sorted(types))}")
            values[name] = _parse(variable, raw, types[name])
        return cls(**values)  # type: ignore[arg-type]


_SHARES = (
    "max_altered_share",
    "max_complexity",
    "max_missing_share",
    "max_overhead_share",
    "feedback_share",
    "quality_target",
    "quality_threshold",
)
_OTHER_VARIABLES = frozenset({"cache_dir"})


def check_ratio(value: float, error: type[Exception]) -> float:
    """Return `value` if it is a share in [0, 1]; raise `error` otherwise."""
    if not _is_share(value):
        raise error(f"recompute_ratio is {value!r}: it is a share of tokens and must lie in [0, 1]")
    return float(value)


def _is_share(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and 0.0 <= value <= 1.0


def _check_share(name: str, value: float) -> None:
    if not _is_share(value):
        raise ConfigurationError(f"{name} is {value!r}: it is a share and must lie in [0, 1]")


def _check_bytes(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigurationError(f"{name} is {value!r}: a whole number of bytes, 0 or more")


def _parse(variable: str, raw: str, type_name: str) -> object:
    try:
        if type_name == "bool":
            return {"1": True, "true": True, "0": False, "false": False}[raw.lower()]
        if type_name.startswith("int"):
            return int(raw)
        if type_name.startswith("float"):
            return float(raw)
        if type_name.startswith("Mapping"):
            return json.loads(raw)
    except (KeyError, ValueError) as error:
        raise ConfigurationError(f"{variable}={raw!r} is not a {type_name}") from error
    return raw
