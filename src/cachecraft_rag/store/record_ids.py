"""Names of records."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

_TENANT_BITS: Final = 40
"""A tenant has room for 10^12 records, and 63-bit ids for 8 million tenants."""


class RecordIds:
    """Ids that are never given twice, and grow within a tenant.

    Each tenant is counted apart: ids stand in reports, where they must not tell one tenant how much
    others store.
    """

    def __init__(self) -> None:
        self._counts: dict[str, Iterator[int]] = {}

    def next(self, tenant: str) -> int:
        if tenant not in self._counts:
            self._counts[tenant] = itertools.count(len(self._counts) << _TENANT_BITS)
        return next(self._counts[tenant])
