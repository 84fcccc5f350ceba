"""Settings that need more than a range check."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from cachecraft_rag.chunks import SHARED_TENANT
from cachecraft_rag.config import CacheCraftConfig
from cachecraft_rag.errors import ConfigurationError


def test_quotas_are_a_copy() -> None:
    """A configuration does not change with the mapping that it was made of."""
    quotas = {"a": 1}
    config = CacheCraftConfig(tenant_quotas=quotas)
    quotas["a"] = 2
    assert config.tenant_quotas == {"a": 1}


def test_configurations_with_quotas_can_be_compared_and_kept() -> None:
    """Engines are shared by equal configurations, and frameworks copy and pickle them."""
    one, other = (CacheCraftConfig(tenant_quotas={"a": quota}) for quota in (1, 2))
    assert len({one, other, CacheCraftConfig(tenant_quotas={"a": 1})}) == 2
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one != other


@pytest.mark.parametrize(
    "settings",
    [
        {"tenant_quotas": {"a": -1}},
        {"tenant_quotas": {"a": 1.5}},
        {"tenant_quotas": {"a": True}},
        {"tenant_quotas": {"": 1}},
        {"tenant_quotas": [("a", 1)]},
        {"default_tenant_quota_bytes": -1},
        {"default_tenant": SHARED_TENANT},
        {"audit_log": ""},
    ],
    ids=str,
)
def test_senseless_settings_are_refused(settings: dict[str, Any]) -> None:
    """With the name of the setting."""
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        CacheCraftConfig(**settings)


def test_quotas_are_read_from_the_environment() -> None:
    """As JSON, like nothing else."""
    variables = {"CACHECRAFT_TENANT_QUOTAS": '{"a": 1000}', "CACHECRAFT_DEFAULT_TENANT_QUOTA_BYTES": "5"}
    config = CacheCraftConfig.from_env(variables)
    assert (config.tenant_quotas, config.default_tenant_quota_bytes) == ({"a": 1000}, 5)
    for wrong in ("a=1000", "[1]"):
        with pytest.raises(ConfigurationError, match=r"(?i)tenant_quotas"):
            CacheCraftConfig.from_env({"CACHECRAFT_TENANT_QUOTAS": wrong})


@pytest.mark.parametrize(
    ("settings", "outlives"),
    [({}, False), ({"disk_store_bytes": 1 << 20}, True), ({"redis_url": "redis://h"}, True)],
)
def test_kv_outlives_an_engine_in_cold_tiers_only(settings: dict[str, Any], outlives: bool) -> None:
    assert CacheCraftConfig(**settings).has_cold_tiers is outlives


def test_attention_need_not_be_profiled() -> None:
    """0 switches the profile off; fewer layers there are none."""
    assert CacheCraftConfig(num_profile_layers=0).num_profile_layers == 0
    with pytest.raises(ConfigurationError, match="num_profile_layers is -1"):
        CacheCraftConfig(num_profile_layers=-1)
