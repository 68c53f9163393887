"""Copies of cached granules to another instance, where a request then continues its prompt from them.

A fetch belongs to no request. Under a key of its own it holds the granules at its source, and blocks for them at its
destination. The request that wanted it waits for it as for any instance that will cache its prefix, and so may others.
A fetch ends without effect when it is late. The same happens when either side is lost, silent or short of memory, or
when the destination is no longer used. The request then waits no longer.

No request wants the fetches that save the cache of an instance (`pdmesh.core.copies.cache_moves`), nor the *loads*,
which bring granules from an instance's offload tier back to its cache (`pdmesh.core.copies.tier_loads`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import inf
from typing import NamedTuple

from pdmesh.core.instances.allocations import Allocation, AllocationKind
from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.requests.copy import Copy
from pdmesh.core.requests.request import RequestState
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import Epoch, InstanceId, PrefixHash, PrefixHashes, RequestId, RequestKey, Then

#: Largest number of fetches from or to one instance at once: two are sent, and the next are ready.
MAX_AT_ONCE = 4


class Fetch(NamedTuple):
    """A copy under way, and the request that it serves, if there is one.

    `arrives_s` is the predicted completion, and `until_s` the deadline after which the copy is useless.
    """

    copy: Copy
    wanted_by: RequestKey | None
    arrives_s: float
    until_s: float

    @property
    def first_granule(self) -> PrefixHash:
        """The first granule that it brings."""
        return self.copy.chain[self.copy.plan.num_reused_granules]


class Fetches:
    """Fetches under way."""

    def __init__(self, mesh: MeshState) -> None:
        self._mesh = mesh
        self._all: dict[RequestKey, Fetch] = {}
        # Tokens of landed fetches.
        self.num_fetched_tokens = 0
        # Fetches by the first granule that each brings.
        self._coming: dict[PrefixHash, list[Fetch]] = {}
        # Number of fetches from or to each instance.
        self._num_of: dict[InstanceId, int] = {}
        # Number of fetches that ended, landed or not.
        self.num_ended = 0

    @property
    def next_deadline_s(self) -> float:
        """Earliest deadline; infinite if there is no fetch."""
        return min([fetch.until_s for fetch in self._all.values()], default=inf)

    def coming(self, state: RequestState) -> Iterator[Fetch]:
        """Yield the fetches that bring granules of a request's prompt."""
        coming = self._coming
        for granule in state.request.chain if coming else ():
            yield from coming.get(granule, ())

    def may_send(self, source: InstanceState) -> bool:
        """Whether another fetch from ``source`` may start."""
        return source.sends_cached and self.num_of(source.instance_id) < MAX_AT_ONCE

    def may_receive(self, destination: InstanceState) -> bool:
        """Whether another fetch to ``destination`` may start: it takes new work, lacks no blocks, has few fetches."""
        return destination.takes_new and not destination.low and self.num_of(destination.instance_id) < MAX_AT_ONCE

    def num_of(self, instance_id: InstanceId) -> int:
        """Return how many fetches are under way from or to an instance."""
        return self._num_of.get(instance_id, 0)

    def brings(self, destination: InstanceState, granule: PrefixHash) -> bool:
        """Whether a fetch is under way to ``destination`` whose first new granule is ``granule``."""
        coming = self._coming.get(granule, ())
        return any(fetch.copy.target_id == destination.instance_id for fetch in coming)

    # --- beginning ---

    def begin(
        self,
        chain: PrefixHashes,
        source: InstanceState,
        destination: InstanceState,
        *,
        tenant: str | None,
        share: int,
        arrives_s: float,
        until_s: float,
        wanted_by: RequestKey | None = None,
    ) -> None:
        """Begin to copy the granules of ``chain``, which the source has cached for a tenant with this share.

        If the source is the destination, it has the last granules in its offload tier, and loads them.
        """
        mesh, num_granules = self._mesh, len(chain)
        key = RequestId(f"fetch-{mesh.broker.new_capability():016x}"), Epoch(0)
        num_blocks = num_granules * source.kept.granule_blocks
        num_there = destination.kept.depth(chain, num_granules)
        copy = mesh.broker.open(
            key,
            (source.shard(num_blocks),),
            (destination.shard(num_blocks),),
            then=Then.KEEP,
            num_reused_granules=num_there,
            chain=chain,
        )
        fetch = self._all[key] = Fetch(copy, wanted_by, arrives_s, until_s)
        self._coming.setdefault(fetch.first_granule, []).append(fetch)
        for instance_id in {source.instance_id, destination.instance_id}:
            self._num_of[instance_id] = self.num_of(instance_id) + 1
        loads = source is destination
        sides = [(destination, num_there)] if loads else [(source, num_granules), (destination, num_there)]
        for instance, num_reused in sides:
            instance.take(
                key,
                Allocation(
                    AllocationKind.FETCH,
                    num_blocks,
                    transfer_id=copy.plan.transfer_id,
                    loads=loads,
                    tenant=tenant,
                    share=share,
                ),
                chain,
                num_reused,
            )
        num_loaded = num_granules - num_there if loads else 0
        mesh.expect_kv(destination, copy, wanted_by=wanted_by, num_loaded_granules=num_loaded)
        if not loads:
            mesh.grant(mesh.broker.offer(copy))

    # --- ends ---

    def landed(self, key: RequestKey) -> None:
        """Forget a landed fetch. Both sides free their blocks by themselves."""
        if (fetch := self._all.get(key)) is not None:
            self._forget(fetch)

    def count(self, allocation: Allocation) -> None:
        """Count the tokens of a landed fetch, also one that was ended as too late: they are cached all the same."""
        granules = allocation.granules
        num_tokens = (len(granules.chain) - granules.num_computed) * GRANULE_TOKENS
        if allocation.loads:
            self._mesh.sessions.num_loaded_tokens += num_tokens
        else:
            self.num_fetched_tokens += num_tokens

    def failed(self, key: RequestKey) -> bool:
        """End a fetch that failed on one side; return False if the key is not a fetch's."""
        fetch = self._all.get(key)
        if fetch is not None:
            self._end(fetch)
        return fetch is not None

    def end_useless(self, now_s: float) -> None:
        """End the fetches that are past their deadline, were withdrawn, or lost an allocation, and free the blocks.

        Also end a fetch if its source or destination is gone or has requests that lack blocks, if the source is silent
        or stops, or if the destination takes no new work. A source that sent all is not needed: its report may come
        before the destination's.
        """
        if self._all:
            for fetch in [fetch for fetch in self._all.values() if self._is_useless(fetch, now_s)]:
                self._end(fetch)

    def _is_useless(self, fetch: Fetch, now_s: float) -> bool:
        copy, instances = fetch.copy, self._mesh.instances
        source, destination = instances.get(copy.source_id), instances.get(copy.target_id)
        if not copy.was_sent_by(copy.source_id) and (
            source is None or copy.key not in source.allocations or not source.sends_cached or bool(source.low)
        ):
            return True
        return (
            destination is None
            or fetch.until_s <= now_s
            or copy.withdrawn
            or copy.key not in destination.allocations
            or not destination.takes_new
            or (fetch.wanted_by is not None and not destination.takes_prompts)
            or bool(destination.low)
        )

    def _end(self, fetch: Fetch) -> None:
        self._forget(fetch)
        copy = fetch.copy
        self._mesh.broker.withdraw(copy)
        self._mesh.free(copy.source_id, copy.key)
        self._mesh.free(copy.target_id, copy.key)
        if fetch.wanted_by is not None and (state := self._mesh.find(fetch.wanted_by)) is not None:
            state.await_until(-inf)

    def _forget(self, fetch: Fetch) -> None:
        del self._all[fetch.copy.key]
        self.num_ended += 1
        for instance_id in {fetch.copy.source_id, fetch.copy.target_id}:
            self._num_of[instance_id] -= 1
            if not self._num_of[instance_id]:
                del self._num_of[instance_id]
        coming = self._coming[fetch.first_granule]
        coming.remove(fetch)
        if not coming:
            del self._coming[fetch.first_granule]

    def check_integrity(self) -> None:
        """Raise AssertionError if the fetches are inconsistent."""
        listed = [fetch for fetches in self._coming.values() for fetch in fetches]
        assert len(listed) == len(self._all), f"{len(listed)} fetches by granule, {len(self._all)} by key"
        assert all(self._all.get(fetch.copy.key) is fetch for fetch in listed), "a fetch is listed that is over"
        sides = Counter([side for each in self._all.values() for side in {each.copy.source_id, each.copy.target_id}])
        assert sides == self._num_of, f"fetches by instance: {self._num_of}, not {sides}"
        for instance in self._mesh.instances.values():
            for key, allocation in instance.allocations.items():
                if allocation.kind is AllocationKind.FETCH:
                    assert self._mesh.find(key) is None, f"{key} is a fetch, and a request"
