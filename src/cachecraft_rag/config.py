"""All settings, in one frozen dataclass; each default stands here once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

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
        num_profile_layers: layers on which attention is profiled at capture, evenly spaced.
        max_known_chunks: chunks remembered for matching by text in later prompts.
        self_test: prove exactness on the loaded model at its first start.
        default_tenant: tenant of requests that name none.

    Raises:
        ConfigurationError: a value breaks its rule.
    """

    strategy: str = "cachecraft"
    preset: str = "balanced"
    recompute_ratio: float | None = None
    granularity: int = 1
    min_chunk_tokens: int = 8
    max_variants_per_chunk: int = 2
    host_store_bytes: int | None = None
    num_profile_layers: int = 4
    max_known_chunks: int = 20_000
    self_test: bool = True
    default_tenant: str = "default"

    def __post_init__(self) -> None:
        if self.preset not in PRESET_ALPHAS:
            raise ConfigurationError(f"preset is {self.preset!r}: choose one of {', '.join(PRESET_ALPHAS)}")
        if self.recompute_ratio is not None:
            check_ratio(self.recompute_ratio, ConfigurationError)
        for name in ("granularity", "max_variants_per_chunk", "num_profile_layers", "max_known_chunks"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)!r}: it must be at least 1")
        if self.min_chunk_tokens < 1:
            raise ConfigurationError(f"min_chunk_tokens is {self.min_chunk_tokens!r}: at least 1")
        if self.host_store_bytes is not None and self.host_store_bytes < 0:
            raise ConfigurationError(
                f"host_store_bytes is {self.host_store_bytes!r}: use 0 to switch the store off"
            )
        if not self.default_tenant:
            raise ConfigurationError("default_tenant is empty: it names requests without a tenant")

    @property
    def alpha(self) -> float:
        return PRESET_ALPHAS[self.preset]

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> CacheCraftConfig:
        """Read `CACHECRAFT_<FIELD>` variables; unset ones keep their defaults.

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


_OTHER_VARIABLES = frozenset({"cache_dir"})


def check_ratio(value: float, error: type[Exception]) -> float:
    """Return `value` if it is a share in [0, 1]; raise `error` otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value <= 1.0:
        raise error(f"recompute_ratio is {value!r}: it is a share of tokens and must lie in [0, 1]")
    return float(value)


def _parse(variable: str, raw: str, type_name: str) -> object:
    try:
        if type_name == "bool":
            return {"1": True, "true": True, "0": False, "false": False}[raw.lower()]
        if type_name.startswith("int"):
            return int(raw)
        if type_name.startswith("float"):
            return float(raw)
    except (KeyError, ValueError) as error:
        raise ConfigurationError(f"{variable}={raw!r} is not a {type_name}") from error
    return raw
