"""How much of the host tier each tenant may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cachecraft_rag.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Quotas:
    """Bytes that a tenant's records may hold, in whatever state they are.

    Attributes:
        by_tenant: of the tenants named here.
        default_bytes: of every other tenant; None for no limit.

    Raises:
        ConfigurationError: a quota is below 0.
    """

    by_tenant: Mapping[str, int] = field(default_factory=dict)
    default_bytes: int | None = None

    def __post_init__(self) -> None:
        for quota_bytes in (*self.by_tenant.values(), self.default_bytes or 0):
            if quota_bytes < 0:
                raise ConfigurationError(f"a tenant's quota is {quota_bytes!r} bytes: it must be 0 or more")

    def of(self, tenant: str) -> int | None:
        """The tenant's quota in bytes, None if it has none."""
        return self.by_tenant.get(tenant, self.default_bytes)


NO_QUOTAS = Quotas()
