"""Checks of whether an instance reaches its peers, on an operator's request (`pdmesh doctor --mesh`)."""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio
import anyio.abc

from pdmesh.build_info import version
from pdmesh.config import SecurityConfig
from pdmesh.errors import ConfigError, KvTransferError
from pdmesh.kv.probes import KvProbes, probe_key
from pdmesh.model import InstanceId
from pdmesh.wire.certificates import expires_at
from pdmesh.wire.dialing import split_address
from pdmesh.wire.endpoint import open_channel
from pdmesh.wire.messages import CheckPeers, PeerProblem, PeersChecked

#: Limit for a peer to take a probe and to send one: longer than connecting takes, shorter than the operator waits.
LIMIT_S = 2.5

#: Pause before a peer is tried again. A peer hangs up on unknown processes, and may learn only later about the check,
#: which names this instance.
RETRY_S = 0.5

#: Number of peers that are tried at once.
MAX_AT_ONCE = 64


class PeerChecks:
    """Runs the checks that `CheckPeers` requests, one at a time, and reports the results."""

    def __init__(
        self,
        tasks: anyio.abc.TaskGroup,
        instance_id: InstanceId,
        probes: KvProbes,
        security: SecurityConfig,
        say: Callable[[PeersChecked], None],
    ) -> None:
        self._tasks = tasks
        self._instance_id = instance_id
        self._probes = probes
        self._security = security
        self._say = say
        self._scope: anyio.CancelScope | None = None

    def begin(self, message: CheckPeers) -> None:
        """Check the message's peers and gateways in the background, and report the problems.

        A check that is still running is cut short, and reports the problems found so far.
        """
        if self._scope is not None:
            self._scope.cancel()
        self._scope = scope = anyio.CancelScope()
        self._tasks.start_soon(self._check, message, scope, time.time())

    async def _check(self, message: CheckPeers, scope: anyio.CancelScope, wall_time_s: float) -> None:
        problems: list[PeerProblem] = []
        limit = anyio.CapacityLimiter(MAX_AT_ONCE)
        with scope:
            async with anyio.create_task_group() as tasks:
                for peer_id, address in message.kv_peers:
                    tasks.start_soon(self._probe, message.check_id, peer_id, address, problems, limit)
                for gateway_id, token_address in message.gateways:
                    tasks.start_soon(self._dial, gateway_id, token_address, problems, limit)
                tasks.start_soon(self._listen, message, problems)
            self._say(
                PeersChecked(
                    check_id=message.check_id,
                    problems=tuple(problems),
                    wall_time_s=wall_time_s,
                    version=version(),
                    certificate_expires_at=await anyio.to_thread.run_sync(expires_at, self._security.tls_cert),
                )
            )

    async def _probe(
        self,
        check_id: int,
        peer_id: InstanceId,
        address: bytes,
        problems: list[PeerProblem],
        limit: anyio.CapacityLimiter,
    ) -> None:
        key = probe_key(check_id, self._instance_id, peer_id)
        async with limit:
            try:
                with anyio.fail_after(LIMIT_S):
                    try:
                        await self._probes.send(address, key)
                    except KvTransferError:
                        await anyio.sleep(RETRY_S)
                        await self._probes.send(address, key)
            except (KvTransferError, TimeoutError) as error:
                reason = str(error) or f"it received nothing for {LIMIT_S:g} s"
                problems.append(PeerProblem(kind="kv to", peer=peer_id, reason=reason))

    async def _listen(self, message: CheckPeers, problems: list[PeerProblem]) -> None:
        """Add a problem for each peer whose probe did not come."""
        own = self._instance_id
        peers = {probe_key(message.check_id, peer_id, own): peer_id for peer_id, _ in message.kv_peers}
        for key in await self._probes.wait(peers, LIMIT_S):
            problems.append(PeerProblem(kind="kv from", peer=peers[key], reason=f"nothing arrived for {LIMIT_S:g} s"))

    async def _dial(
        self, gateway_id: str, address: str, problems: list[PeerProblem], limit: anyio.CapacityLimiter
    ) -> None:
        """Connect to a gateway's token port as a token link does; add a problem with the reason if this fails."""
        async with limit:
            try:
                with anyio.move_on_after(LIMIT_S / 2):
                    async with open_channel(address, self._security) as channel:
                        await channel.channel_ready()
                        return
                with anyio.fail_after(LIMIT_S / 2):
                    host, port = split_address(address)
                    await (await anyio.connect_tcp(host, port)).aclose()
                reason = "it answers, but the two do not trust each other's certificates"
            except TimeoutError:
                reason = "no answer"
            except (OSError, ValueError, ConfigError) as error:
                reason = str(error)
            problems.append(PeerProblem(kind="tokens to", peer=gateway_id, reason=f"{address}: {reason}"))
