"""A check of the whole mesh: every instance is asked which of its peers it reaches, all at the same time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import anyio
import anyio.to_thread

from pdmesh.build_info import version
from pdmesh.config import SecurityConfig
from pdmesh.model import GatewayId, InstanceId, InstanceProfile
from pdmesh.wire.certificates import expires_at
from pdmesh.wire.messages import AdminError, CheckPeers, InstanceChecked, MeshChecked, PeersChecked, WorkerDown
from pdmesh_scheduler.peer_streams import Peers

#: Seconds for the instances to answer: longer than their own tries, shorter than the caller's wait.
LIMIT_S = 4.0

BUSY = "the mesh is being checked already: ask again in a few seconds"

#: Ids and data addresses of the instances with which one exchanges KV.
KvPeers = tuple[tuple[InstanceId, bytes], ...]


@dataclass(slots=True)
class MeshCheck:
    """Questioner of all instances, one check at a time.

    `profiles` and `token_addresses` are kept up to date by the streams of instances and gateways. `_check_id` is 0
    while no check runs.
    """

    workers: Peers[InstanceId, WorkerDown]
    security: SecurityConfig
    profiles: dict[InstanceId, InstanceProfile] = field(default_factory=dict[InstanceId, InstanceProfile])
    token_addresses: dict[GatewayId, str] = field(default_factory=dict[GatewayId, str])
    wall_clock: Callable[[], float] = time.time
    _ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _check_id: int = 0
    _answers: dict[InstanceId, tuple[PeersChecked, float]] = field(
        default_factory=dict[InstanceId, tuple[PeersChecked, float]]
    )
    _changed: anyio.Event = field(default_factory=anyio.Event)

    async def run(self) -> MeshChecked | AdminError:
        """Ask all connected instances and return their answers after `LIMIT_S` at most.

        An instance without an answer is returned with None. Return an AdminError if another check runs.
        """
        if self._check_id:
            return AdminError(message=BUSY)
        asked_at = self.wall_clock()
        profiles = self._connected()
        gateways = tuple([(name, address) for name, address in self.token_addresses.items() if address])
        kv_peers = {
            instance_id: tuple(
                (peer_id, peer.data_address)
                for peer_id, peer in profiles.items()
                if peer_id != instance_id and peer.kv_layout == profile.kv_layout
            )
            for instance_id, profile in profiles.items()
        }
        await self._ask(kv_peers, gateways)
        # Read the answers before the next await: another check replaces them.
        checked = tuple(self._checked(profile, asked_at) for profile in profiles.values())
        return MeshChecked(
            version=version(),
            certificate_expires_at=await anyio.to_thread.run_sync(expires_at, self.security.tls_cert),
            instances=checked,
            gateways=gateways,
        )

    async def why_unreached(self, scheduler: str) -> str:
        """Return a text that names the connected instances that do not reach the scheduler at this address; empty if
        none.

        Ask each instance, and name also each one without an answer within `LIMIT_S`. Return `BUSY` if another check
        runs.
        """
        if self._check_id:
            return BUSY
        instance_ids = self._connected()
        await self._ask(dict.fromkeys(instance_ids, ()), ((GatewayId(scheduler), scheduler),))
        reached = {instance_id for instance_id, (answer, _) in self._answers.items() if not answer.problems}
        away = sorted(instance_ids.keys() - reached)
        return f"{', '.join(away)} do not reach it" if away else ""

    def _connected(self) -> dict[InstanceId, InstanceProfile]:
        return {name: profile for name, profile in self.profiles.items() if self.workers.get(name) is not None}

    async def _ask(self, kv_peers: Mapping[InstanceId, KvPeers], gateways: tuple[tuple[GatewayId, str], ...]) -> None:
        """Ask each instance to try its KV peers and all gateways, and wait for the answers until `LIMIT_S`."""
        self._check_id = next(self._ids)
        self._answers.clear()
        try:
            for instance_id, peers in kv_peers.items():
                self.workers.post(instance_id, CheckPeers(check_id=self._check_id, kv_peers=peers, gateways=gateways))
            with anyio.move_on_after(LIMIT_S):
                while not kv_peers.keys() <= self._answers.keys():
                    await self._changed.wait()
        finally:
            self._check_id = 0

    def answered(self, instance_id: InstanceId, answer: PeersChecked) -> None:
        """Store an instance's answer; ignore an answer to an earlier check."""
        if answer.check_id == self._check_id:
            self._answers[instance_id] = answer, self.wall_clock()
            self._changed.set()
            self._changed = anyio.Event()

    def _checked(self, profile: InstanceProfile, asked_at: float) -> InstanceChecked:
        answer, _ = self._answers.get(profile.instance_id, (None, 0.0))
        offset_s = 0.0 if answer is None else answer.wall_time_s - asked_at
        return InstanceChecked(
            instance_id=profile.instance_id,
            host=profile.host or profile.instance_id,
            checked=answer,
            clock_offset_s=offset_s,
        )
