"""The blocks of an instance's requests, and those that it keeps for requests to come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from pdmesh.core.events import CacheReported, InstanceEvent
from pdmesh.errors import PdmeshError
from pdmesh.instance.sequence_phases import SeqPhase
from pdmesh.kv.blocks import BlockPool
from pdmesh.kv.kept import KeptGranules
from pdmesh.kv.offload.tier import OffloadTier
from pdmesh.model import GRANULE_TOKENS, InstanceId, PrefixHash, PrefixHashes
from pdmesh.plans import Evictions
from pdmesh.prefixes import PrefixHasher
from pdmesh.wire.messages import pack_token_ids
from pdmesh.worker.sequences import Drawn, LocalRequest
from pdmesh.worker.windows import Windows

log = structlog.get_logger()


class StalePrefix(PdmeshError):
    """A request is to share KV that is not kept here: whoever said so thinks of another cache."""


class StaleOffload(PdmeshError):
    """A request is to load KV that the offload tier does not have, or lost."""


class BlockTables:
    """Makes block tables. What is kept goes by the scheduler's word; where that does not fit, it is told what is here.

    Event loop only.
    """

    def __init__(
        self,
        instance_id: InstanceId,
        pool: BlockPool,
        block_size: int,
        hasher: PrefixHasher,
        report: Callable[[InstanceEvent], None],
        windows: Windows,
        tier: OffloadTier | None = None,
    ) -> None:
        self.tier = tier
        self._windows = windows
        self.kept = KeptGranules(pool, block_size)
        self._block_size = block_size
        self._instance_id = instance_id
        self._pool = pool
        self._hasher = hasher
        self._report = report

    # --- blocks for requests ------------------------------------------------------------------------------------------

    def make_room(self, room: Evictions) -> None:
        """Evict what the scheduler names. Report to it which granules the tier cannot take."""
        kept, tier = self.kept, self.tier
        if tier is not None:
            tier.evict(room.evict)
            tier.touch(room.drop)
        lost = [granule for granule in room.offload if not self._offload(granule)]
        kept.drop((*room.drop, *room.offload))
        if lost:
            self._report(CacheReported(self._instance_id, lost=tuple(lost)))

    def _offload(self, granule: PrefixHash) -> bool:
        block_ids = self.kept.blocks_of(granule)
        return self.tier is not None and bool(block_ids) and self.tier.offload(granule, block_ids)

    def check_offloaded(self, granules: PrefixHashes) -> None:
        """Raise StaleOffload unless the tier has all of these; the scheduler is told which it lacks."""
        missing = [granule for granule in granules if self.tier is None or granule not in self.tier]
        if missing:
            self._report(CacheReported(self._instance_id, lost=tuple(missing)))
            raise StaleOffload(
                f"the offload tier lacks {len(missing)} of the {len(granules)} granules that are to be loaded"
            )

    def table(self, num_blocks: int, prefix: PrefixHashes = ()) -> list[int]:
        """Return a table of so many blocks, the first of which are those of a kept prefix.

        Raises StalePrefix if not all of that is here, OutOfBlocks if too few are free.
        """
        if (num_kept := self.kept.num_kept_of(prefix)) < len(prefix):
            self.kept.drop(prefix[num_kept:])  # without what lacks they are of no use
            raise StalePrefix(f"{num_kept} of the {len(prefix)} granules that it is to reuse are kept here")
        shared = self.kept.share(prefix)
        try:
            return shared + self.allocate(num_blocks - len(shared))
        except PdmeshError:
            self._pool.free(shared)
            raise

    def begin_windows(self, request: LocalRequest, num_coming_tokens: int) -> None:
        """Hold what a new request sees in layers with a window once it has what it shares, and what is to come.

        Raises StalePrefix if it shares blocks of which nothing is left there, OutOfFrames without room for others. What
        cannot be gone on from is given up then, so that the scheduler hears of it; but not for a copy of its first
        granules, since another request may go on from its end.
        """
        block_table = request.sequence.block_table
        num_tokens = max(request.num_shared_tokens, num_coming_tokens)
        num_shared = request.num_shared_tokens // request.block_size
        if not self._windows.is_seen(block_table, num_tokens, num_shared):
            num_granules = request.num_shared_tokens // GRANULE_TOKENS
            num_left = next(num for num in reversed(range(num_granules)) if self._can_go_on(block_table, num))
            if request.phase is not SeqPhase.COMPUTED:
                self.kept.drop(request.chain[num_left:num_granules])
            raise StalePrefix(f"layers with a window have what is seen from {num_left} of {num_granules} granules on")
        self._windows.begin(request.held, block_table, num_tokens)

    def _can_go_on(self, block_table: list[int], num_granules: int) -> bool:
        """Whether layers with a window have what a request sees that goes on behind so many granules."""
        num_tokens = num_granules * GRANULE_TOKENS
        return self._windows.is_seen(block_table, num_tokens, num_tokens // self._block_size)

    def allocate(self, num_blocks: int) -> list[int]:
        """Return blocks for one table. Raises OutOfBlocks if too few are free, even with nothing kept.

        What is given up for that unasked is told of.
        """
        if num_blocks > self._pool.num_free and self.kept.make_room(num_blocks):
            log.warning("kept KV is given up unasked: the scheduler thinks that there is room", num_blocks=num_blocks)
            self.report_kept()
        return self._pool.allocate(num_blocks)

    def give_back(self, request: LocalRequest) -> None:
        """Free the blocks of a request that is not taken after all."""
        self._pool.free(request.sequence.block_table)

    def allocate_up_to(self, num_blocks: int) -> list[int]:
        """Return so many blocks for one table, or what there is, for a worker whose scheduler is gone."""
        self.kept.make_room(num_blocks)
        return self._pool.allocate(min(num_blocks, self._pool.num_free))

    def take_out(self, block_ids: Sequence[int], on_free: Callable[[], None]) -> None:
        """Take blocks out of one table; ``on_free`` is called once they are free, or kept."""
        self._pool.free(block_ids, on_released=on_free)

    # --- blocks for others --------------------------------------------------------------------------------------------

    def keep_prompt(self, request: LocalRequest, num_tokens: int) -> None:
        """Keep the granules of a prompt whose first tokens have their KV here."""
        self.kept.keep(request.chain[: num_tokens // GRANULE_TOKENS], request.sequence.block_table)

    def keep_drawn(self, request: LocalRequest) -> Drawn:
        """Keep the granules behind a request's chain that are complete."""
        generation = request.generation
        is_spread = request.sequence.elsewhere is not None
        if not generation.prefix_root or not request.has_drawn or self.kept.is_off or is_spread:
            return Drawn()
        num_granules = (len(request.sequence.token_ids) - 1) // GRANULE_TOKENS  # the last token has no KV
        all_granules = generation.prefix[:num_granules]
        if num_granules > len(generation.prefix):
            first = len(generation.prefix)
            last = generation.prefix[-1] if generation.prefix else generation.prefix_root
            tokens = request.sequence.token_ids[first * GRANULE_TOKENS : num_granules * GRANULE_TOKENS]
            all_granules += self._hasher.granules(last, pack_token_ids(tokens))
        drawn = all_granules[len(request.chain) :]
        num_known = self.kept.num_kept_of(drawn)
        fresh = drawn[num_known:]  # up to one that is kept without what is before it, and about to be dropped
        num_staying = num_known + next((number for number, each in enumerate(fresh) if each in self.kept), len(fresh))
        if drawn:
            self.kept.keep(all_granules[: len(request.chain) + num_staying], request.sequence.block_table)
        return Drawn(drawn[:num_staying], num_known)

    def granules_of(self, request: LocalRequest) -> PrefixHashes:
        """Return the first granules of a request that are kept in its own blocks."""
        return request.chain[: self.kept.num_kept_in(request.sequence.block_table, request.chain)]

    def report_kept(self) -> None:
        """Tell the scheduler what is kept."""
        self._report(self.report())

    def report(self) -> CacheReported:
        """Return what is kept, for the scheduler."""
        return CacheReported(self._instance_id, self.kept.hashes)

    def check_integrity(self) -> None:
        """AssertionError names what does not balance."""
        self.kept.check_integrity()
        if self.tier is not None:
            self.tier.check_integrity()
