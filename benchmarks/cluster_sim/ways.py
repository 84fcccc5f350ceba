"""What an engine has to compute and load for a request, by the way it reuses KV."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.cluster_sim.assumptions import Assumptions
from benchmarks.cluster_sim.caches import PrefixCache, TokenCache
from benchmarks.cluster_sim.workload import SimRequest


@dataclass(frozen=True, slots=True)
class Way:
    """How KV is reused.

    Attributes:
        budget: share of reused chunks that is computed again; None reuses no chunks.
        is_shared: whether engines share chunks through Redis, behind their own host memory.
    """

    name: str
    has_prefix_cache: bool = True
    budget: float | None = None
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """What one request costs. Tokens of chunks by the tier they come from; what the prefix cache holds
    counts there alone.

    Attributes:
        work: of all computed tokens, in tokens of an empty context.
    """

    num_tokens: int
    num_computed: int
    work: float
    load_s: float
    num_prefix_tokens: int = 0
    num_host_tokens: int = 0
    num_shared_tokens: int = 0
    num_exact_parts: int = 0


@dataclass(slots=True, eq=False)
class Caches:
    """One engine's caches; `shared` is the same object for all engines."""

    way: Way
    assumed: Assumptions
    prefix: PrefixCache
    host: TokenCache
    shared: TokenCache

    @classmethod
    def make(cls, way: Way, assumed: Assumptions, shared: TokenCache) -> Caches:
        prefix = PrefixCache(TokenCache(assumed.device_tokens))
        return cls(way, assumed, prefix, TokenCache(assumed.host_tokens), shared)

    def plan(self, request: SimRequest) -> Job:
        """Look the request up when it is scheduled first; what is there counts as used."""
        num_hit = self.prefix.num_hit(request.parts) if self.way.has_prefix_cache else 0
        # The last token is always computed.
        num_hit = min(num_hit, len(request.parts) - 1)
        position, num_prefix, num_host, num_shared = 0, 0, 0, 0
        num_computed, work, num_exact = 0.0, 0.0, len(request.parts)
        for index, part in enumerate(request.parts):
            size, share, cost = part.num_tokens, 1.0, 1.0
            if index < num_hit:
                num_prefix, share = num_prefix + size, 0.0
            elif part.is_chunk and self.way.budget is not None:
                in_host = self.host.use(part.number)
                in_shared = not in_host and self.way.is_shared and self.shared.use(part.number)
                if in_host or in_shared:
                    num_host += size if in_host else 0
                    num_shared += size if in_shared else 0
                    share, cost = self.way.budget, self.assumed.repair_overhead
                    num_exact = min(num_exact, index)
            num_computed += share * size
            context = (position + size / 2) / self.assumed.attention_balance_tokens
            work += share * size * cost * (1 + context)
            position += size
        load_s = self.assumed.kv_bytes_per_token * (
            num_host / self.assumed.host_bytes_per_s + num_shared / self.assumed.shared_bytes_per_s
        )
        return Job(
            position, max(1, round(num_computed)), work, load_s, num_prefix, num_host, num_shared, num_exact
        )

    def fill(self, request: SimRequest, job: Job) -> None:
        """Keep what was computed. KV behind an approximate part never enters the prefix cache."""
        if self.way.has_prefix_cache:
            self.prefix.put(request.parts[: job.num_exact_parts])
        for part in request.parts if self.way.budget is not None else ():
            if part.is_chunk:
                self.host.put(part.number, part.num_tokens)
                if self.way.is_shared:
                    self.shared.put(part.number, part.num_tokens)
