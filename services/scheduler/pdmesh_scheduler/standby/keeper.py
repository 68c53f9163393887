"""A scheduler's hold on the lease: waits until it may lead, renews while it leads, and raises when that is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import anyio
import structlog

from pdmesh.errors import ServiceSuperseded
from pdmesh_scheduler.standby.leadership import Candidate, LeaseWrite
from pdmesh_scheduler.standby.lease_store import LeaseStore, StoreUnavailable

log = structlog.get_logger()

#: Seconds for the last write of a leader that leaves in good order.
RELEASE_LIMIT_S = 2.0


class LeaseLost(ServiceSuperseded):
    """The lease could not be renewed in time, or another scheduler has it."""


def clock() -> float:
    """Return seconds that also pass while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseRequest(NamedTuple):
    """Another scheduler's request for the lease.

    `address` is where that scheduler serves. The gateway reaches that scheduler, and not the leader.
    """

    address: str
    gateway_id: str


class LeaseKeeper:
    """Task that acts for a `Candidate` on a store.

    Call `acquire`, `keep` and `release` once each, in this order.
    """

    def __init__(
        self,
        store: LeaseStore,
        candidate: Candidate,
        lease_s: float,
        *,
        clock: Callable[[], float] = clock,
        wall_time: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._candidate = candidate
        self._limit_s = lease_s / 2  # limit of one call of the store
        self._clock = clock
        self._wall_time = wall_time
        self._wanted = anyio.Event()  # set when there is something to write
        self._kept = anyio.Event()  # set, and replaced, after each try
        self._complaint = ""
        self._is_asking = False
        self._given_to = ""

    @property
    def leads(self) -> bool:
        """Whether this scheduler may give commands now."""
        return self._candidate.leads(self._clock())

    @property
    def term(self) -> int:
        """Term of the leader that was seen last."""
        return self._candidate.term

    @property
    def leader(self) -> str:
        """Address of the leader; empty if there is none, or if its renewal is late."""
        return self._candidate.leader(self._clock())

    @property
    def state(self) -> str:
        """Operators' desired state, as kept beside the lease."""
        return self._candidate.state

    def ask(self, leader: str, gateway_id: str) -> None:
        """Ask the ``leader`` for the lease because this gateway does not reach it; ignored unless the address leads."""
        if leader and leader == self.leader:
            self._candidate.ask(gateway_id, self._clock())

    async def asked(self) -> LeaseRequest:
        """Wait until another scheduler asks for the lease."""
        while (record := self._candidate.request) is None:
            await self._kept.wait()
        return LeaseRequest(record.asked_by, record.asked_for)

    def refuse(self) -> None:
        """Keep the lease that another scheduler asks for."""
        self._candidate.refuse()

    def give(self, address: str) -> None:
        """Stop leading, and let only the scheduler at this address lead. `keep` then raises LeaseLost."""
        self._given_to = address
        self._wanted.set()

    async def acquire(self) -> None:
        """Wait until this scheduler leads."""
        said = None
        while not self.leads:
            await self._look()
            if not self.leads:
                if (leader := self.leader) != said:
                    said = leader
                    log.info("standing by", leader=leader or "unknown")
                await anyio.sleep(self._candidate.next_s(self._clock()) - self._clock())
        log.info("leading", term=self.term)

    async def keep(self) -> None:
        """Renew the lease until that fails. Raises LeaseLost as soon as this scheduler must not lead any more."""
        async with anyio.create_task_group() as tasks:

            async def renew() -> None:
                await self._renew()
                tasks.cancel_scope.cancel()

            tasks.start_soon(renew)
            while (left_s := self._candidate.until_s - self._clock()) > 0:  # noqa: ASYNC110  # renewed meanwhile
                await anyio.sleep(left_s)
            tasks.cancel_scope.cancel()
        if self._given_to:
            raise LeaseLost(f"a gateway can reach only {self._given_to}, which leads now")
        if self._candidate.successor:
            raise LeaseLost(f"{self._candidate.successor} leads now")
        why = "the store has not answered yet" if self._is_asking else "this process was paused"
        raise LeaseLost(f"the lease could not be renewed in time: {self._complaint or why}")

    async def save(self, state: str) -> bool:
        """Keep operators' desired state beside the lease. Return whether the store has it."""
        self._candidate.state = state
        self._wanted.set()
        with anyio.move_on_after(2 * self._limit_s):
            while self.leads and not self._candidate.is_kept:
                await self._kept.wait()
        return self._candidate.is_kept

    async def release(self) -> None:
        """Let another scheduler lead at once. This one must have stopped giving commands."""
        if (attempt := self._candidate.release(self._given_to)) is not None:
            with anyio.move_on_after(RELEASE_LIMIT_S, shield=True), suppress(StoreUnavailable, TimeoutError):
                await self._write(attempt)

    async def _renew(self) -> None:
        """Renew the lease until it is given to another scheduler."""
        while not self._given_to:
            self._wanted = wanted = anyio.Event()
            await self._look()
            self._kept.set()
            self._kept = anyio.Event()
            with anyio.move_on_after(max(0.0, self._candidate.next_s(self._clock()) - self._clock())):
                await wanted.wait()
        await self.release()

    async def _look(self) -> None:
        """Write to the store if a write is due. Read first unless this scheduler leads and knows the record.

        Log why the store cannot be asked, once for each reason.
        """
        self._is_asking = True
        try:
            with anyio.fail_after(self._limit_s):
                attempt = self._candidate.attempt(self._clock(), int(self._wall_time()))
                if attempt is None or not self.leads:
                    stored = await self._store.read()
                    self._candidate.observed(stored.record, stored.version, self._clock())
                    attempt = self._candidate.attempt(self._clock(), int(self._wall_time()))
            if attempt is not None:
                await self._write(attempt)
            self._complaint = ""
        except (StoreUnavailable, TimeoutError) as error:
            complaint = str(error) or f"the store does not answer within {self._limit_s:g} s"
            if complaint != self._complaint:
                log.error("cannot read the lease; trying again", reason=complaint)
            self._complaint = complaint
        self._is_asking = False

    async def _write(self, attempt: LeaseWrite) -> None:
        self._candidate.sent(attempt, self._clock())
        with anyio.fail_after(self._limit_s):
            version = await self._store.swap(attempt.record, attempt.version)
        if version is not None:
            self._candidate.written(attempt, version, self._clock())
