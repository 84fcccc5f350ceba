"""The host store against a model of plain lists that recomputes everything from scratch."""

from __future__ import annotations

import dataclasses
import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, invariant, multiple, rule

from cachecraft_rag.chunks import ChunkKey, DocumentRef, RecordMeta
from cachecraft_rag.errors import StoreError
from cachecraft_rag.store import HostChunkStore, Refusal
from cachecraft_rag.store.policies import POLICIES
from cachecraft_rag.store.quotas import Quotas

BUDGET_BYTES = 20
QUOTAS = Quotas({"a": 13})
MAX_VARIANTS = 2

tenants = st.sampled_from(["a", "a", "a", "b"])
keys = st.sampled_from([ChunkKey("k1"), ChunkKey("k1"), ChunkKey("k2"), ChunkKey("k3")])
doc_ids = st.sampled_from(["d1", "d2"])
versions = st.sampled_from([None, "v1", "v2"])
documents = st.builds(DocumentRef, doc_ids, versions)
owners = st.sampled_from(["r1", "r2"])
drafts = st.builds(
    RecordMeta,
    record_id=st.just(-1),
    key=keys,
    tenant=tenants,
    num_tokens=st.just(4),
    start=st.just(0),
    size_bytes=st.integers(1, 5) | st.integers(1, BUDGET_BYTES + 1),
    prefix_hash=st.sampled_from(["p1", "p2", "p3"]),
    prefix_is_exact=st.booleans(),
    document=st.none() | documents,
)


@dataclasses.dataclass(eq=False)
class Held:
    """A record the model knows; `indexed` and `ready` are its whole state."""

    meta: RecordMeta
    ready: bool = False
    indexed: bool = True
    owners: list[str] = dataclasses.field(default_factory=list)


class Model:
    """The rules of the store as sentences over lists, without sums or indexes.

    `held` is ordered by last use, `committed` by commit; `references` are (tenant, document, version,
    key), and `changes` counts what happened to (tenant, document) and to (tenant, None).
    """

    def __init__(self) -> None:
        self.held: list[Held] = []
        self.committed: list[int] = []
        self.pin_order: list[tuple[str, int]] = []
        self.freed: list[int] = []
        self.references: set[tuple[str, str, str | None, ChunkKey]] = set()
        self.current: dict[tuple[str, str], str | None] = {}
        self.changes: dict[tuple[str, str | None], int] = {}

    def get(self, record_id: int) -> Held | None:
        return next((h for h in self.held if h.meta.record_id == record_id), None)

    def used_bytes(self) -> int:
        return sum(h.meta.size_bytes for h in self.held)

    def evictable(self) -> list[Held]:
        return [h for h in self.held if h.ready and h.indexed and not h.owners]

    def excess(self, meta: RecordMeta, among: list[Held]) -> int:
        """Bytes by which these records and `meta` together are over the tenant's quota."""
        quota = QUOTAS.of(meta.tenant)
        own = sum(h.meta.size_bytes for h in among if h.meta.tenant == meta.tenant)
        return 0 if quota is None else own + meta.size_bytes - quota

    def found(self, tenant: str, key: ChunkKey) -> list[int]:
        ready = [h for h in self.siblings(tenant, key) if h.ready]
        order = self.committed.index
        return sorted((h.meta.record_id for h in ready), key=order, reverse=True)

    def siblings(self, tenant: str, key: ChunkKey) -> list[Held]:
        return [h for h in self.held if h.indexed and (h.meta.tenant, h.meta.key) == (tenant, key)]

    def use(self, held: Held) -> None:
        self.held.remove(held)
        self.held.append(held)

    def stamp(self, meta: RecordMeta) -> tuple[int, ...]:
        """What must not have changed between plan and insert: purges, changes of the document, and drops of
        the chunk."""
        doc_id = meta.document.doc_id if meta.document else None
        return tuple(self.changes.get((meta.tenant, name), 0) for name in (None, doc_id, f"key {meta.key}"))

    def bump(self, tenant: str, doc_id: str | None) -> None:
        self.changes[tenant, doc_id] = self.changes.get((tenant, doc_id), 0) + 1

    def is_current(self, tenant: str, document: DocumentRef) -> bool:
        current = self.current.get((tenant, document.doc_id))
        return current is None or document.version in (None, current)

    def is_fresh(self, meta: RecordMeta, stamp: tuple[int, ...]) -> bool:
        if stamp != self.stamp(meta):
            return False
        return meta.document is None or self.is_current(meta.tenant, meta.document)

    def refusal(self, meta: RecordMeta, stamp: tuple[int, ...]) -> Refusal | None:
        if not self.is_fresh(meta, stamp):
            return Refusal.STALE_DOCUMENT
        if meta.size_bytes > BUDGET_BYTES:
            return Refusal.TOO_LARGE
        if self.excess(meta, []) > 0:
            return Refusal.OVER_QUOTA
        for other in self.siblings(meta.tenant, meta.key):
            same = other.meta.prefix_hash == meta.prefix_hash
            if same and (other.meta.prefix_is_exact or not meta.prefix_is_exact):
                return Refusal.DUPLICATE
        if self.is_crowded(meta) and not self.victims(meta):
            return Refusal.VARIANT_LIMIT
        if self.excess(meta, [h for h in self.held if h not in self.evictable()]) > 0:
            return Refusal.OVER_QUOTA
        fixed = self.used_bytes() - sum(h.meta.size_bytes for h in self.evictable())
        return Refusal.NO_ROOM if fixed + meta.size_bytes > BUDGET_BYTES else None

    def is_crowded(self, meta: RecordMeta) -> bool:
        prefixes = {h.meta.prefix_hash for h in self.siblings(meta.tenant, meta.key)}
        return meta.prefix_hash not in prefixes and len(prefixes) == MAX_VARIANTS

    def victims(self, meta: RecordMeta) -> list[Held]:
        siblings = self.siblings(meta.tenant, meta.key)
        prefixes = [h.meta.prefix_hash for h in siblings]
        return sorted(
            (
                h
                for h in siblings
                if meta.prefix_is_exact
                and h in self.evictable()
                and not h.meta.prefix_is_exact
                and prefixes.count(h.meta.prefix_hash) == 1
            ),
            key=lambda h: self.committed.index(h.meta.record_id),
        )

    def accept(self, meta: RecordMeta) -> None:
        if self.is_crowded(meta):
            self.drop(self.victims(meta)[0])
        while self.excess(meta, self.held) > 0:
            self.drop(next(h for h in self.evictable() if h.meta.tenant == meta.tenant))
        while self.used_bytes() + meta.size_bytes > BUDGET_BYTES:
            self.drop(self.evictable()[0])
        self.held.append(Held(meta))
        if meta.document:
            self.register(meta.tenant, meta.key, meta.document)

    def drop(self, held: Held) -> bool:
        """Out of the index; freed unless it is still being filled or read."""
        held.indexed = False
        if held.ready and not held.owners:
            self.free(held)
        return held.ready

    def free(self, held: Held) -> None:
        self.held.remove(held)
        self.freed.append(held.meta.record_id)

    def register(self, tenant: str, key: ChunkKey, document: DocumentRef) -> None:
        if self.is_current(tenant, document):
            version = document.version or self.current.get((tenant, document.doc_id))
            self.references.add((tenant, document.doc_id, version, key))

    def set_references(self, tenant: str, references: set[tuple[str, str, str | None, ChunkKey]]) -> int:
        """Keys of the tenant that had a reference and have none now lose their records."""
        named = {key for t, _, _, key in self.references if t == tenant}
        self.references = references
        lost = named - {key for t, _, _, key in references if t == tenant}
        return sum([self.drop(h) for key in sorted(lost) for h in self.siblings(tenant, key)])


class HostStoreMachine(RuleBasedStateMachine):
    """Runs every call on the store and on the model, and compares what they answer and hold."""

    plans = Bundle("plans")

    def __init__(self) -> None:
        super().__init__()
        self.store = HostChunkStore(
            BUDGET_BYTES, MAX_VARIANTS, policy=POLICIES["lru"], has_admission=False, quotas=QUOTAS
        )
        self.model = Model()
        self.stamps: dict[int, tuple[int, ...]] = {}
        self.accepted: list[int] = []
        self.drained: list[int] = []
        self.generations: dict[tuple[str, str | None], int] = {}

    @rule(target=plans, draft=drafts)
    def plan(self, draft: RecordMeta) -> RecordMeta:
        return self.plan_of(draft)

    def plan_of(self, draft: RecordMeta) -> RecordMeta:
        doc_id = draft.document.doc_id if draft.document else None
        meta = dataclasses.replace(
            draft,
            record_id=self.store.next_record_id(draft.tenant),
            generation=self.store.generation(draft.tenant, doc_id, draft.key),
        )
        self.stamps[meta.record_id] = self.model.stamp(meta)
        return meta

    @rule(target=plans, draft=drafts)
    def plan_and_reserve(self, draft: RecordMeta) -> RecordMeta:
        meta = self.plan_of(draft)
        self.reserve_of(meta)
        return meta

    @rule(target=plans, batch=st.lists(drafts, min_size=1, max_size=4))
    def store_some(self, batch: list[RecordMeta]) -> MultipleResults[RecordMeta]:
        metas = [self.plan_of(draft) for draft in batch]
        for meta in metas:
            self.reserve_of(meta)
        for meta in metas:
            self.commit_of(meta)
        return multiple(*metas)

    @rule(meta=plans)
    def reserve(self, meta: RecordMeta) -> None:
        self.reserve_of(meta)

    def reserve_of(self, meta: RecordMeta) -> None:
        if meta.record_id in self.accepted:
            return
        expected = self.model.refusal(meta, self.stamps[meta.record_id])
        reservation = self.store.reserve(meta)
        assert reservation.accepted == (expected is None)
        assert reservation.reason == (expected or "")
        if expected is None:
            self.accepted.append(meta.record_id)
            self.model.accept(meta)

    @rule(meta=plans)
    def commit(self, meta: RecordMeta) -> None:
        self.commit_of(meta)

    def commit_of(self, meta: RecordMeta) -> None:
        held = self.model.get(meta.record_id)
        answer = self.store.commit(meta.record_id, None)
        if held is None or held.ready:
            assert answer == (held is not None and held.indexed)
            return
        fresh = self.model.is_fresh(meta, self.stamps[meta.record_id])
        assert answer == (held.indexed and fresh)
        if not answer:
            self.model.free(held)
            return
        for other in self.model.siblings(meta.tenant, meta.key):
            if other is not held and other.meta.prefix_hash == meta.prefix_hash:
                self.model.drop(other)
        held.ready = True
        self.model.committed.append(meta.record_id)
        self.model.use(held)

    @rule(meta=plans)
    def abandon(self, meta: RecordMeta) -> None:
        self.store.abandon(meta.record_id)
        held = self.model.get(meta.record_id)
        if held and not held.ready:
            self.model.free(held)

    @rule(meta=plans)
    def discard(self, meta: RecordMeta) -> None:
        self.store.discard(meta.record_id)
        held = self.model.get(meta.record_id)
        if held and held.ready and held.indexed:
            self.model.drop(held)

    @rule(meta=plans, owner=owners)
    def pin(self, meta: RecordMeta, owner: str) -> None:
        held = self.model.get(meta.record_id)
        try:
            self.store.pin(meta.record_id, owner)
        except StoreError:
            assert not (held and held.ready and held.indexed)
            return
        assert held and held.ready and held.indexed
        if owner not in held.owners:
            held.owners.append(owner)
            self.model.pin_order.append((owner, meta.record_id))

    @rule(owner=owners)
    def unpin(self, owner: str) -> None:
        self.store.unpin(owner)
        pins = self.model.pin_order
        self.model.pin_order = [pin for pin in pins if pin[0] != owner]
        for _, record_id in [pin for pin in pins if pin[0] == owner]:
            held = self.model.get(record_id)
            assert held is not None
            held.owners.remove(owner)
            if held.indexed:
                self.model.use(held)
            elif not held.owners:
                self.model.free(held)

    @rule(tenant=tenants, key=keys, document=documents)
    def register(self, tenant: str, key: ChunkKey, document: DocumentRef) -> None:
        self.store.register(tenant, key, document)
        self.model.register(tenant, key, document)

    @rule(tenant=tenants, doc_id=doc_ids, version=versions, new_keys=st.lists(keys))
    def replace(self, tenant: str, doc_id: str, version: str | None, new_keys: list[ChunkKey]) -> None:
        model = self.model
        model.bump(tenant, doc_id)
        model.current[tenant, doc_id] = version
        others = {r for r in model.references if r[:2] != (tenant, doc_id)}
        expected = model.set_references(tenant, others | {(tenant, doc_id, version, k) for k in new_keys})
        assert self.store.replace(tenant, doc_id, version, new_keys) == expected

    @rule(tenant=tenants, doc_id=doc_ids, version=versions)
    def invalidate(self, tenant: str, doc_id: str, version: str | None) -> None:
        model = self.model
        model.bump(tenant, doc_id)
        if version is None:
            model.current.pop((tenant, doc_id), None)
        gone = {r for r in model.references if r[:2] == (tenant, doc_id) and version in (None, r[2])}
        expected = model.set_references(tenant, model.references - gone)
        assert self.store.invalidate(tenant, doc_id, version) == expected

    @rule(tenant=tenants, dropped=st.lists(keys, max_size=2))
    def invalidate_chunks(self, tenant: str, dropped: list[ChunkKey]) -> None:
        model = self.model
        for key in set(dropped):
            model.bump(tenant, f"key {key}")
        gone = [h for key in sorted(set(dropped)) for h in model.siblings(tenant, key)]
        assert self.store.invalidate_chunks(tenant, dropped) == sum([model.drop(held) for held in gone])

    @rule(tenant=tenants)
    def purge(self, tenant: str) -> None:
        model = self.model
        model.bump(tenant, None)
        model.current = {where: v for where, v in model.current.items() if where[0] != tenant}
        model.references = {r for r in model.references if r[0] != tenant}
        dropped = [h for h in model.held if h.indexed and h.meta.tenant == tenant]
        assert self.store.purge(tenant) == sum([model.drop(held) for held in dropped])

    @rule()
    def drain(self) -> None:
        drained = self.store.drain_freed()
        assert sorted(drained) == sorted(self.model.freed)
        self.model.freed.clear()
        self.drained.extend(drained)

    @invariant()
    def books_are_sound(self) -> None:
        assert self.store.check() == []

    @invariant()
    def quotas_hold(self) -> None:
        shares = self.store.stats().tenants
        assert "a" not in shares or shares["a"].num_bytes <= QUOTAS.by_tenant["a"]

    @invariant()
    def the_same_records_are_found(self) -> None:
        for tenant, key in itertools.product("ab", ["k1", "k2", "k3"]):
            found = [meta.record_id for meta in self.store.variants(tenant, ChunkKey(key))]
            assert found == self.model.found(tenant, ChunkKey(key))

    @invariant()
    def the_same_bytes_are_held(self) -> None:
        stats = self.store.stats()
        assert stats.num_bytes == self.model.used_bytes() <= BUDGET_BYTES
        assert stats.num_pinned == sum(bool(held.owners) for held in self.model.held)

    @invariant()
    def documents_agree(self) -> None:
        for tenant, doc_id, version in itertools.product("ab", ["d1", "d2"], [None, "v1", "v2"]):
            ref = DocumentRef(doc_id, version)
            assert self.store.is_current(tenant, ref) == self.model.is_current(tenant, ref)

    @invariant()
    def generations_never_go_down(self) -> None:
        for tenant, doc_id in itertools.product("ab", ["d1", "d2", None]):
            generation = self.store.generation(tenant, doc_id)
            assert generation >= self.generations.get((tenant, doc_id), 0)
            self.generations[tenant, doc_id] = generation

    def teardown(self) -> None:
        """When every request is over and every tenant purged, all that came in was freed once."""
        for record_id in self.accepted:
            self.store.abandon(record_id)
        for name in ("r1", "r2"):
            self.store.unpin(name)
        for name in ("a", "b"):
            self.store.purge(name)
        self.drained.extend(self.store.drain_freed())
        assert sorted(self.drained) == sorted(self.accepted)
        assert self.store.stats().num_bytes == 0
        assert self.store.check() == []


HostStoreMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50)
TestHostStoreMachine = HostStoreMachine.TestCase
