"""The instances of a mesh, their cached prefixes, the links between them, and sums over all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Protocol

from pdmesh.core.instances.allocations import Allocation
from pdmesh.core.instances.cache_index import CacheIndex
from pdmesh.core.instances.id_pool import IdPool
from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.instances.link_rates import MeasuredLinks
from pdmesh.core.instances.revisions import weights_for_new
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import InstanceId, Request, RequestKey


class FromInstance(Protocol):
    """An event of one instance."""

    @property
    def instance_id(self) -> InstanceId: ...


class Roster:
    """Instances by id and by number. The mesh state adds requests to it."""

    def __init__(self) -> None:
        self.instances: dict[InstanceId, InstanceState] = {}
        self.by_number: dict[int, InstanceState] = {}
        self.numbers = IdPool()
        self.cache_index = CacheIndex()
        self.links = MeasuredLinks()
        #: Silent instances.
        self.suspected: dict[InstanceId, None] = {}
        #: Instances that changed since the last look at them.
        self.changed: dict[InstanceId, None] = {}
        #: Instances with residents that wait for the end of a prefill phase.
        self.in_prefill_phase: dict[InstanceId, InstanceState] = {}
        #: Whether an instance has joined that holds at most a range of a context.
        self.spreads_contexts = False
        #: Numbers of instances by arithmetic class, by KV group and by weights identity.
        self.arithmetic_classes, self.kv_groups = Counter[str](), Counter[str]()
        self.weights = Counter[str]()
        self._kinds: list[InstanceState] | None = None
        #: Numbers of events that changed nothing, by kind.
        self.ignored = Counter[str]()

    def allocation_of(self, instance_id: InstanceId, key: RequestKey) -> Allocation | None:
        """Return what a request holds on an instance; None if it holds nothing there."""
        instance = self.instances.get(instance_id)
        return None if instance is None else instance.allocations.get(key)

    def instance_of(self, event: FromInstance) -> InstanceState | None:
        """Return the instance that reports an event; None, counted as ignored, if it is not known."""
        instance = self.instances.get(event.instance_id)
        if instance is None:
            self.ignore(type(event).__name__)
        return instance

    def ignore(self, what: str) -> None:
        """Count an event from outside that does not fit the mesh state. The event changes nothing."""
        self.ignored[what] += 1

    def add_instance(self, instance: InstanceState) -> None:
        """Add an instance. Its number comes from `numbers`, or is the number of its predecessor."""
        self.instances[instance.instance_id] = self.by_number[instance.number] = instance
        self.spreads_contexts |= instance.max_kv_tokens > 0
        self.links.joined(instance.profile)
        self.arithmetic_classes[instance.arithmetic_class] += 1
        self.kv_groups[instance.kv_group] += 1
        self.weights[instance.weights] += 1
        self.regroup()

    def remove_instance(self, instance_id: InstanceId) -> InstanceState | None:
        """Remove an instance and return it; None if there is none. It keeps its number."""
        self.in_prefill_phase.pop(instance_id, None)
        self.suspected.pop(instance_id, None)
        self.links.left(instance_id)
        self.regroup()
        instance = self.instances.pop(instance_id, None)
        if instance is not None:
            instance.kept.clear()
            del self.by_number[instance.number]
            self.arithmetic_classes -= Counter((instance.arithmetic_class,))
            self.kv_groups -= Counter((instance.kv_group,))
            self.weights -= Counter((instance.weights,))
        return instance

    @property
    def spans_classes(self) -> bool:
        """Whether instances of several arithmetic classes exchange KV."""
        return len(self.arithmetic_classes) > len(self.kv_groups)

    @property
    def new_weights(self) -> str | None:
        """The weights identity that new requests are placed on; None without instances, or if no identity can serve.

        If all instances have one identity, the property is this identity even while none of them can serve.
        """
        if len(self.weights) < 2:
            return next(iter(self.weights), None)
        return weights_for_new(self.instances.values())

    def slow_from(
        self, source: InstanceState, num_blocks: int, among: Collection[InstanceId] | None = None
    ) -> Set[InstanceId]:
        """Return the instances, of all or of ``among``, that ``num_blocks`` of KV reach much later than others."""
        if not self.links.are_uneven:
            return frozenset()
        num_bytes = num_blocks * source.profile.kv_layout.bytes_per_block
        return self.links.slow_from(source.instance_id, num_bytes, self.instances if among is None else among)

    def suspect(self, instance: InstanceState, suspected: bool) -> None:
        """Note that an instance has fallen silent, or reports again."""
        instance.set_suspected(suspected)
        if suspected:
            self.suspected[instance.instance_id] = None
        else:
            self.suspected.pop(instance.instance_id, None)

    # --- sums and representatives ---

    def regroup(self) -> None:
        """Note that an instance came or went, or has another role."""
        self._kinds = None

    @property
    def kinds(self) -> Sequence[InstanceState]:
        """Representative instances, one per kind. A request that fits none of them can never be placed.

        Each instance that contexts are spread over represents itself, because their number counts.
        """
        if self._kinds is None:
            kinds = {
                (instance.kind, instance.number if instance.max_kv_tokens else 0): instance
                for instance in self.instances.values()
            }
            self._kinds = list(kinds.values())
        return self._kinds

    def depths(self, request: Request) -> Mapping[int, int]:
        """Return the number of cached granules of a prompt, by the number of each instance that has some."""
        if not request.prefix or not len(self.cache_index):
            return {}
        chain = request.chain
        return self.cache_index.depths(chain, len(chain))

    def reusable_depths(self, request: Request) -> Mapping[int, int]:
        """Return how many granules of a prompt it can reuse on each instance, by number; only instances with some."""
        if not request.prefix or not len(self.cache_index):
            return {}
        chain = request.chain
        return self.cache_index.reusable_depths(chain, len(chain))

    def num_cached_elsewhere(self, request: Request, instance: InstanceState) -> int:
        """Return how many tokens of a prompt an instance other than ``instance`` has cached, at most."""
        depths = self.reusable_depths(request)
        return GRANULE_TOKENS * max([depths[number] for number in depths if number != instance.number], default=0)
