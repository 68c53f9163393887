"""States behind cached granules. The scheduler decides which states a prompt keeps, and which are evicted."""

from __future__ import annotations

from collections.abc import Iterable

from pdmesh.kv.cached_granules import CachedGranules
from pdmesh.kv.frames import WindowFrames
from pdmesh.kv_layout import blocks_of_granule
from pdmesh.model import PrefixHash, PrefixHashes
from pdmesh.worker.sequences import LocalRequest


class StateCache:
    """Cached states of an instance. Does nothing for models without states. Event loop only.

    A state is in the frame of its granule's last block.
    """

    def __init__(self, kept: CachedGranules, frames: WindowFrames | None, block_size: int) -> None:
        self._kept = kept
        self._frames = frames if frames is not None and frames.has_states and not kept.is_off else None
        self._granule_blocks = blocks_of_granule(block_size)

    @property
    def is_off(self) -> bool:
        """Whether no states are cached."""
        return self._frames is None

    @property
    def hashes(self) -> PrefixHashes:
        """The granules with a cached state."""
        frames = self._frames
        if frames is None:
            return ()
        return tuple(granule for granule in self._kept.hashes if frames.is_cached(self._block_of(granule)))

    def want(self, request: LocalRequest, numbers: Iterable[int]) -> None:
        """Let a new prompt write the states behind the granules with these numbers, from 1 on."""
        if self._frames is not None:
            places = (number * self._granule_blocks - 1 for number in numbers)
            request.held.wanted = frozenset(places)

    def evict(self, granules: Iterable[PrefixHash]) -> None:
        """Evict the states of granules whose KV stays cached. Requests that continue from them keep the frames."""
        if self._frames is not None:
            self._frames.uncache([self._block_of(granule) for granule in granules if granule in self._kept])

    def computed(self, request: LocalRequest, num_granules: int) -> None:
        """Cache the wanted states behind the first granules of a prompt, whose KV is cached in the request's blocks."""
        request.num_cached_granules = max(request.num_cached_granules, num_granules)
        if self._frames is None:
            return
        table = request.sequence.block_table
        for place in request.held.wanted & request.held.places:
            number = (place + 1) // self._granule_blocks
            if number <= num_granules and self._block_of(request.chain[number - 1]) == table[place]:
                self._frames.cache(table[place])

    def ended(self, request: LocalRequest, drawn: PrefixHashes) -> PrefixHashes:
        """Cache the state behind the last granule of a request that ends, and wanted states; return the new ones.

        The cached granules ``drawn`` follow the chain. A granule that another request computed first has other blocks:
        they get the state.
        """
        frames, held, table = self._frames, request.held, request.sequence.block_table
        if frames is None:
            return ()
        chain = (*request.chain[: request.num_cached_granules], *drawn)
        places = {len(chain) * self._granule_blocks - 1} | held.wanted
        new: list[PrefixHash] = []
        for place in sorted(places & held.places):
            number = (place + 1) // self._granule_blocks
            if number > len(chain) or chain[number - 1] not in self._kept:
                continue
            own, block_id = table[place], self._block_of(chain[number - 1])
            if frames.is_cached(block_id):
                continue
            if own != block_id:
                if not frames.hand_on(own, block_id):
                    continue
                held.places.discard(place)
            frames.cache(block_id)
            new.append(chain[number - 1])
        return tuple(new)

    def _block_of(self, granule: PrefixHash) -> int:
        return self._kept.blocks_of(granule)[-1]
