"""Meshes of equal instances, and the core of a study, which lets every request wait."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from pdmesh.core.config import CoreConfig, KvReservation
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.kv_layout import GRANULE_TOKENS, KvLayout
from pdmesh.model import InstanceId, InstanceProfile, Role
from pdmesh.policy.bundle import Bundle
from pdmesh.policy.bundles import make_bundle
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LatencyModel

#: Larger than any study's queue, and finite so that a result stays plain JSON.
_NO_LIMIT = 10**15


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """Numbers and properties of a mesh's instances, all of one device class.

    `num_kv_tokens` is the room of one instance, and `num_offload_tokens` the room of its tier, read at
    `load_bytes_per_s`. A decode instance holds at most `max_kv_tokens` of a context; 0: all. Instances of each role are
    dealt out to `num_hosts`; 0: each is its own host. Instances that compute prompts have `prefill_stages`, the others
    `decode_stages`. With `joins_groups`, instances of one stage can compute a prompt together, as live ones can. If
    layers have states, each instance caches `num_cached_states`.
    """

    num_prefill: int
    num_decode: int
    num_mixed: int
    kv_layout: KvLayout
    num_kv_tokens: int
    max_num_seqs: int = 256
    num_transfer_backends: int = 4
    max_kv_tokens: int = 0
    num_offload_tokens: int = 0
    load_bytes_per_s: float = 10e9
    num_hosts: int = 0
    prefill_stages: int = 1
    decode_stages: int = 1
    joins_groups: bool = False
    num_cached_states: int = 0

    def instances(self, model: LatencyModel) -> list[tuple[InstanceProfile, LatencyModel]]:
        pools = ((Role.PREFILL, self.num_prefill), (Role.DECODE, self.num_decode), (Role.MIXED, self.num_mixed))
        return [(self._profile(role, index), model) for role, number in pools for index in range(number)]

    def _profile(self, role: Role, index: int) -> InstanceProfile:
        num_stages = self.prefill_stages if role.can_prefill else self.decode_stages
        return InstanceProfile(
            instance_id=InstanceId(f"{role}-{index:03d}"),
            role=role,
            model="simulated",
            kv_layout=self.kv_layout,
            num_blocks=self.num_kv_tokens // self.kv_layout.block_size,
            # A spread context may be longer than one instance's room.
            max_model_len=max(self.num_kv_tokens, self.max_kv_tokens * (self.num_decode + self.num_mixed)),
            max_kv_tokens=self.max_kv_tokens,
            max_num_seqs=self.max_num_seqs,
            num_transfer_backends=self.num_transfer_backends,
            data_address=b"",
            joins_groups=self.joins_groups and num_stages == 1 and not self.num_cached_states,
            num_stages=num_stages,
            num_offload_granules=self.num_offload_tokens // GRANULE_TOKENS,
            load_bytes_per_s=self.load_bytes_per_s,
            num_cached_states=self.num_cached_states,
            host=host_name(index % self.num_hosts) if self.num_hosts else "",
        )


def host_name(index: int) -> str:
    """Return the name of the host with this index."""
    return f"host-{index}"


def study_core(
    bundle: str,
    policy: PolicyConfig,
    seed: int,
    *,
    refuses_early: bool = False,
    kv_reservation: KvReservation = KvReservation.FULL,
    adapt: Callable[[Bundle], Bundle] = lambda bundle: bundle,
) -> SchedulerCore:
    """Return a core whose queue has no limits, so that overload shows as waiting, unless it ``refuses_early``.

    ``adapt`` changes the bundle, until the core builds another one. Raises ConfigError for an unknown bundle.
    """
    config = CoreConfig(
        max_queue_entries=_NO_LIMIT,
        max_queue_tokens=_NO_LIMIT,
        max_queue_s=float(_NO_LIMIT),
        refuses_early=refuses_early,
        kv_reservation=kv_reservation,
        policy=policy,
    )
    return SchedulerCore(config, adapt(make_bundle(bundle, policy)), random.Random(seed))
