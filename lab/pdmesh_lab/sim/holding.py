"""What requests hold of an instance, without the time that anything takes: blocks, those shared, those quarantined."""

from __future__ import annotations

from collections.abc import Callable

from pdmesh.core.commands import AdmitPrefill, FetchKept, Hold, PlaceDecode, SendKept
from pdmesh.core.events import InstanceEvent, KvReleased, LoadReported, OffloadedLost, RequestDropped
from pdmesh.model import InstanceProfile, PrefixHashes, RequestKey, TransferId
from pdmesh_lab.sim.held import Held
from pdmesh_lab.sim.kept import SimulatedKept
from pdmesh_lab.sim.residents import Residents
from pdmesh_lab.sim.surroundings import Surroundings

_TakesBlocks = AdmitPrefill | PlaceDecode | FetchKept | SendKept
_MakesRoom = AdmitPrefill | PlaceDecode | FetchKept | Hold


class Holding:
    """The requests that an instance holds; ``report`` takes what it tells the scheduler, in order."""

    def __init__(
        self, profile: InstanceProfile, *, report: Callable[[InstanceEvent], None], surroundings: Surroundings
    ) -> None:
        self.profile = profile
        self.instance_id = profile.instance_id
        self.admits = True  # False: it is stopping
        self.held: dict[RequestKey, Held] = {}
        self.residents = Residents(profile.kv_layout.block_size, surroundings.stood)
        self.copies_run = False  # whatever is freed now is still touched, and quarantined until `end_copies`
        self.quarantined: dict[RequestKey, Held] = {}
        self.kept = SimulatedKept(profile.kv_layout.block_size, profile.num_offload_granules)
        self._num_own_blocks = 0  # that requests have alone, those that are quarantined among them
        self._report = report
        self._surroundings = surroundings

    def _take(self, held: Held, command: _TakesBlocks, num_reused: int) -> bool:
        """Give a request its blocks, of which it shares some. False if it is refused, and has been told so."""
        if not isinstance(command, SendKept):
            self._make_room(command)
        if not self.admits:
            self._report(RequestDropped(self.instance_id, *held.key, "the instance is stopping"))
            self._report(KvReleased(self.instance_id, *held.key, held.received_by))
            return False
        if lost := self.kept.lost_of(held, num_reused):
            self._report(OffloadedLost(self.instance_id, lost))
            self._report(RequestDropped(self.instance_id, *held.key, "the tier lacks what is to be loaded"))
            self._report(KvReleased(self.instance_id, *held.key, held.received_by))
            return False
        assert held.key not in self.held, f"{self.instance_id} holds {held.key} already"
        self.held[held.key] = held
        self._take_blocks(held, held.num_blocks - self.kept.share(held, num_reused))
        return True

    def _make_room(self, command: _MakesRoom) -> None:
        if lost := self.kept.make_room(command.room):
            self._report(OffloadedLost(self.instance_id, lost))

    def _take_blocks(self, held: Held, num_blocks: int) -> None:
        self._num_own_blocks += num_blocks
        assert self.num_free_blocks >= 0, f"{self.instance_id}: no room for {held.key}"

    @property
    def num_free_blocks(self) -> int:
        return self.profile.num_blocks - self._num_own_blocks - self.kept.num_blocks

    def _grow(self, held: Held, command: Hold) -> bool:
        """Let a request hold so many blocks in all. False if it has as many."""
        num_more = command.num_blocks - held.num_blocks
        num_more += command.num_elsewhere_blocks - self._num_elsewhere_blocks(held)
        if num_more <= 0:
            return False
        held.num_blocks += num_more
        self._take_blocks(held, num_more)
        return True

    def _num_elsewhere_blocks(self, held: Held) -> int:
        """Return the blocks of a context that others hold."""
        return len(held.members) * self.profile.max_kv_tokens // self.profile.kv_layout.block_size

    def _free(self, key: RequestKey, transfer_id: TransferId) -> None:
        """Let go of a request: now, or before the next step if steps may be computing it."""
        held = self.held.get(key)
        if held is None:
            if key not in self.quarantined:
                self._report(KvReleased(self.instance_id, *key, transfer_id))
            return
        self._surroundings.forgets(held)
        held.leaving = None
        if key in self.residents:
            held.is_decoding, held.is_freed = False, True
            self.residents.free(key)
            self._surroundings.stirs()
        else:
            self.release(held)

    def release(self, held: Held) -> None:
        """Give a request's blocks back: at once, or when the copies that touch them have ended."""
        del self.held[held.key]
        if self.copies_run:
            self.quarantined[held.key] = held
        else:
            self._given_back(held)

    def _let_go(self, held: Held) -> None:
        """Release a request that may decode."""
        if held.key in self.residents:
            self.residents.end(held.key)
        self.release(held)

    def end_copies(self) -> None:
        """End every copy, so that quarantined blocks are free."""
        self.copies_run = False
        for held in self.quarantined.values():
            self._given_back(held)
        self.quarantined.clear()

    def _given_back(self, held: Held) -> None:
        drew = held.length.drawn if held.length is not None and held.has_ended else ()
        drawn, num_known = self.kept.drawn(drew)
        self._num_own_blocks -= held.num_blocks - self.kept.end(held, drawn)
        self._report(KvReleased(self.instance_id, *held.key, held.received_by, drawn, num_known))

    def report_load(self) -> None:
        num_quarantined = sum([self.kept.num_own_blocks(held) for held in self.quarantined.values()])
        num_kept = self.kept.num_idle_blocks
        num_held = self.profile.num_blocks - self.num_free_blocks - num_kept - num_quarantined
        num_decoding = sum([held.is_decoding for held in self.held.values()])
        self._report(
            LoadReported(
                self.instance_id,
                self.num_free_blocks,
                num_held,
                num_quarantined,
                num_decoding,
                num_kept,
                len(self.kept.offloaded),
            )
        )

    def lose_offloaded(self, granules: PrefixHashes) -> None:
        """The tier loses granules by itself."""
        self.kept.lose(granules)
        self._report(OffloadedLost(self.instance_id, granules))

    def drop(self, held: Held, reason: str) -> None:
        """Give a request up that cannot go on here."""
        self._report(RequestDropped(self.instance_id, *held.key, reason))
        self._surroundings.forgets(held)
        self._let_go(held)

    def _keep(self, held: Held, num_granules: int) -> None:
        """So many granules of a request have KV here: it stays for others."""
        self._num_own_blocks -= self.kept.computed(held, num_granules)
