"""The blocks of an instance's requests, and its cached blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from pdmesh.core.events import CacheReported, InstanceEvent
from pdmesh.errors import PdmeshError
from pdmesh.instance.sequence_phases import SeqPhase
from pdmesh.kv.blocks import BlockPool
from pdmesh.kv.cached_granules import CachedGranules
from pdmesh.kv.offload.tier import OffloadTier
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import InstanceId, PrefixHash, PrefixHashes
from pdmesh.plans import Evictions
from pdmesh.prefixes import PrefixHasher
from pdmesh.wire.messages import pack_token_ids
from pdmesh.worker.sequences import Drawn, LocalRequest
from pdmesh.worker.state_cache import StateCache
from pdmesh.worker.windows import Windows

log = structlog.get_logger()


class StalePrefix(PdmeshError):
    """A command reuses KV that is not cached here, so the scheduler's view of the cache is outdated.

    ``num_unseen_tokens`` of the reused tokens are cached, but their states or their KV in layers with a window are not.
    """

    def __init__(self, reason: str, num_unseen_tokens: int = 0) -> None:
        super().__init__(reason)
        self.num_unseen_tokens = num_unseen_tokens


class StaleOffload(PdmeshError):
    """A command loads KV that the offload tier lacks."""


class BlockTables:
    """Block tables and the prefix cache of an instance. Event loop only.

    The scheduler decides which granules are cached. Where its view does not fit, the actual contents are reported.
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
        self.kept = CachedGranules(pool, block_size)
        self.states = StateCache(self.kept, windows.frames, block_size)
        if windows.frames is not None:
            windows.frames.on_lost = self._lost_states
        self._block_size = block_size
        self._instance_id = instance_id
        self._pool = pool
        self._hasher = hasher
        self._report = report

    # --- blocks for requests ------------------------------------------------------------------------------------------

    def make_room(self, room: Evictions) -> None:
        """Evict the granules that the scheduler names; report granules that the offload tier should take but cannot."""
        kept, tier = self.kept, self.tier
        if tier is not None:
            tier.evict(room.evict)
            tier.touch(room.drop)
        lost = [granule for granule in room.offload if not self._offload(granule)]
        kept.drop((*room.drop, *room.offload))
        self.states.evict(room.states)
        if lost:
            self._report(CacheReported(self._instance_id, lost=tuple(lost)))

    def _offload(self, granule: PrefixHash) -> bool:
        block_ids = self.kept.blocks_of(granule)
        return self.tier is not None and bool(block_ids) and self.tier.offload(granule, block_ids)

    def check_offloaded(self, granules: PrefixHashes) -> None:
        """Raise StaleOffload unless the tier has all of these; report the missing ones to the scheduler."""
        missing = [granule for granule in granules if self.tier is None or granule not in self.tier]
        if missing:
            self._report(CacheReported(self._instance_id, lost=tuple(missing)))
            raise StaleOffload(f"the offload tier lacks {len(missing)} of the {len(granules)} cached blocks to load")

    def table(self, num_blocks: int, prefix: PrefixHashes = ()) -> list[int]:
        """Return a table of ``num_blocks`` that begins with the shared blocks of a cached prefix.

        Raises OutOfBlocks if too few are free. Raises StalePrefix if a granule of the prefix is missing; later granules
        are useless without it and are evicted.
        """
        if (num_cached := self.kept.num_cached_of(prefix)) < len(prefix):
            self.kept.drop(prefix[num_cached:])
            raise StalePrefix(f"only {num_cached} of the {len(prefix)} blocks to reuse are cached here")
        shared = self.kept.share(prefix)
        try:
            return shared + self.allocate(num_blocks - len(shared))
        except PdmeshError:
            self._pool.free(shared)
            raise

    def begin_windows(self, request: LocalRequest, num_coming_tokens: int) -> None:
        """Hold the frames that the next token of a new request sees, in layers with a window.

        The next token follows the shared tokens or the coming tokens, whichever are more. Raises OutOfFrames if there
        is no room. Raises StalePrefix if shared blocks have lost frames that the next token sees. StalePrefix also
        evicts the granules after the last resumable one, so that the scheduler learns of the loss. The source of a copy
        of granules evicts nothing, since another request may continue from the end of the copy. Without states nothing
        is evicted either, because the report of the cache names them.
        """
        block_table = request.sequence.block_table
        num_tokens = max(request.num_shared_tokens, num_coming_tokens)
        num_shared = request.num_shared_tokens // request.block_size
        if not self._windows.is_seen(block_table, num_tokens, num_shared):
            num_granules = request.num_shared_tokens // GRANULE_TOKENS
            num_left = next(num for num in reversed(range(num_granules)) if self._can_go_on(block_table, num))
            if request.phase is not SeqPhase.COMPUTED and self.states.is_off:
                self.kept.drop(request.chain[num_left:num_granules])
            reason = f"layers with a window have KV for {num_left} of {num_granules} cached blocks only"
            raise StalePrefix(reason, (num_granules - num_left) * GRANULE_TOKENS)
        self._windows.begin(request.held, block_table, num_tokens)

    def _can_go_on(self, block_table: list[int], num_granules: int) -> bool:
        """Whether layers with a window have all frames for a request that continues after ``num_granules``."""
        num_tokens = num_granules * GRANULE_TOKENS
        return self._windows.is_seen(block_table, num_tokens, num_tokens // self._block_size)

    def allocate(self, num_blocks: int) -> list[int]:
        """Return blocks for one table. Raise OutOfBlocks if too few are free even with an empty cache.

        If cached blocks must be evicted without the scheduler's command, the new contents are reported, with a warning.
        """
        if num_blocks > self._pool.num_free and self.kept.make_room(num_blocks):
            log.warning("evicted cached KV without a command; the scheduler expected room", num_blocks=num_blocks)
            self.report_cached()
        return self._pool.allocate(num_blocks)

    def give_back(self, request: LocalRequest) -> None:
        """Free the blocks of a request that is refused after all."""
        self._pool.free(request.sequence.block_table)

    def allocate_up_to(self, num_blocks: int) -> list[int]:
        """Return at most ``num_blocks`` for one table, evicting if needed, for a worker without a scheduler."""
        self.kept.make_room(num_blocks)
        return self._pool.allocate(min(num_blocks, self._pool.num_free))

    def take_out(self, block_ids: Sequence[int], on_free: Callable[[], None]) -> None:
        """Remove blocks from one table; call ``on_free`` once they are free or only cached."""
        self._pool.free(block_ids, on_released=on_free)

    # --- blocks for others --------------------------------------------------------------------------------------------

    def keep_prompt(self, request: LocalRequest, num_tokens: int) -> None:
        """Cache the granules of a prompt's first ``num_tokens``, whose KV is here."""
        self.kept.keep(request.chain[: num_tokens // GRANULE_TOKENS], request.sequence.block_table)
        self.states.computed(request, num_tokens // GRANULE_TOKENS)

    def keep_end(self, request: LocalRequest) -> Drawn:
        """Cache what a request leaves: drawn granules, and states."""
        drawn = self._keep_drawn(request)
        return drawn._replace(states=self.states.ended(request, drawn.granules))

    def _keep_drawn(self, request: LocalRequest) -> Drawn:
        """Cache the complete granules after a request's chain, and return them.

        Returns none with the cache off, and for requests without hashes, with remote KV, or that have not drawn
        here. A granule that is cached without its predecessor is about to be evicted, so it ends the cached granules.
        """
        generation = request.generation
        is_spread = request.sequence.elsewhere is not None
        if not generation.prefix_root or not request.has_drawn or self.kept.is_off or is_spread:
            return Drawn()
        # The last token has no KV.
        num_granules = (len(request.sequence.token_ids) - 1) // GRANULE_TOKENS
        all_granules = generation.prefix[:num_granules]
        if num_granules > len(generation.prefix):
            first = len(generation.prefix)
            last = generation.prefix[-1] if generation.prefix else generation.prefix_root
            tokens = request.sequence.token_ids[first * GRANULE_TOKENS : num_granules * GRANULE_TOKENS]
            all_granules += self._hasher.granules(last, pack_token_ids(tokens))
        drawn = all_granules[len(request.chain) :]
        num_known = self.kept.num_cached_of(drawn)
        fresh = drawn[num_known:]
        num_staying = num_known + next((number for number, each in enumerate(fresh) if each in self.kept), len(fresh))
        if drawn:
            self.kept.keep(all_granules[: len(request.chain) + num_staying], request.sequence.block_table)
        return Drawn(drawn[:num_staying], num_known)

    def granules_of(self, request: LocalRequest) -> PrefixHashes:
        """Return the first granules of a request that are cached in the request's own blocks."""
        return request.chain[: self.kept.num_cached_in(request.sequence.block_table, request.chain)]

    def num_stateless_tokens(self, request: LocalRequest) -> int:
        """Return how many cached tokens behind its reused ones a prompt computes again, for want of a state."""
        if self.states.is_off:
            return 0
        return self.kept.num_cached_of(request.chain) * GRANULE_TOKENS - request.num_reused_tokens

    def report_cached(self) -> None:
        """Report the cached granules to the scheduler."""
        self._report(self.report())

    def report(self) -> CacheReported:
        """Return the report of all cached granules."""
        return CacheReported(self._instance_id, self.kept.hashes, states=self.states.hashes)

    def _lost_states(self) -> None:
        log.warning("evicted cached states without a command; the scheduler expected room")
        self.report_cached()

    def check_integrity(self) -> None:
        """Raise AssertionError if the counts of blocks and granules contradict each other."""
        self.kept.check_integrity()
        if self.tier is not None:
            self.tier.check_integrity()
