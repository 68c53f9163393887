"""Frames of models whose layers have states: for requests, and for states that are cached.

A frame may be as large as the KV of thousands of tokens. So its number follows the requests, not the blocks.
"""

from __future__ import annotations

from typing import NamedTuple

from pdmesh.kv_layout import GRANULE_TOKENS, KvLayout, num_blocks_for

#: Largest share of the cache for frames of requests. Fewer requests than `worker.max_num_seqs` decode beyond it.
_MOST_FOR_REQUESTS = 0.5


class CacheSize(NamedTuple):
    """Numbers of blocks and of frames of a KV cache; 0 frames: no layer frees KV."""

    num_blocks: int
    num_frames: int


class StateRoom(NamedTuple):
    """Number of requests that can decode at once, as far as their states have room, and of states that are cached."""

    num_seats: int
    num_cached: int


def num_steps_under_way(num_stages: int) -> int:
    """Return the most steps at once: with several stages, one in each of them, and one that waits."""
    return num_stages + 1 if num_stages > 1 else 1


def num_held_frames(layout: KvLayout, max_num_seqs: int, num_stages: int = 1) -> int:
    """Return the most frames that requests hold at once while ``max_num_seqs`` decode.

    A request holds the state behind its last granule, and the states behind the blocks after it. Half as many requests
    are computed, sent or received meanwhile, and each step of two prompts holds twice as many.
    """
    num_requests = 3 * max_num_seqs // 2 + 1 + 2 * num_steps_under_way(num_stages)
    return num_requests * (num_blocks_for(GRANULE_TOKENS, layout.block_size) + 1)


def state_room(
    layout: KvLayout, size: CacheSize, max_num_seqs: int, cached_share: float, num_stages: int = 1
) -> StateRoom:
    """Return what the frames of a cache have room for: ``max_num_seqs`` seats at most, and 1 at least."""
    if not layout.has_states:
        return StateRoom(max_num_seqs, 0)
    num_cached = _num_cached(layout, size.num_blocks, cached_share)
    if size.num_frames >= size.num_blocks:
        return StateRoom(max_num_seqs, num_cached)
    num_held = size.num_frames - num_cached
    return StateRoom(_num_seats(layout, num_held, max_num_seqs, num_stages), num_cached)


def divided(
    layout: KvLayout, num_bytes: int, *, max_num_seqs: int, most_blocks: int, cached_share: float, num_stages: int = 1
) -> CacheSize:
    """Divide ``num_bytes`` of a cache into frames and blocks, at most ``most_blocks``.

    Requests take at most half of the cache for their frames. Cached states take ``cached_share`` of the rest, or less
    if each granule then has a state. The result has 0 blocks if there is no room for one.
    """
    frame_bytes = layout.bytes_per_frame
    kv_bytes = layout.bytes_per_block - frame_bytes
    seats = _num_seats(layout, int(num_bytes * _MOST_FOR_REQUESTS) // frame_bytes, max_num_seqs, num_stages)
    num_held = min(num_held_frames(layout, seats, num_stages), max(1, num_bytes // layout.bytes_per_block - 2))
    rest = max(0, num_bytes - (num_held + 1) * frame_bytes)
    num_blocks = most_blocks
    if kv_bytes:
        granule_blocks = num_blocks_for(GRANULE_TOKENS, layout.block_size)
        with_all = rest // (granule_blocks * kv_bytes + frame_bytes) * granule_blocks
        by_share = max(0, min(int(rest * (1 - cached_share)), rest - frame_bytes)) // kv_bytes
        num_blocks = min(most_blocks, max(with_all, by_share))
    return CacheSize(num_blocks, num_held + _num_cached(layout, num_blocks, cached_share))


def _num_cached(layout: KvLayout, num_blocks: int, cached_share: float) -> int:
    """Return the number of cached states beside ``num_blocks`` blocks: one for each granule, or as the share says.

    At least one: without any, the scheduler would take KV alone for reusable.
    """
    num_granules = num_blocks * layout.block_size // GRANULE_TOKENS
    kv_bytes = num_blocks * (layout.bytes_per_block - layout.bytes_per_frame)
    if not kv_bytes:
        return num_granules
    num_cached = int(kv_bytes * cached_share / (1 - cached_share)) // layout.bytes_per_frame
    return min(num_granules, max(1, num_cached))


def _num_seats(layout: KvLayout, num_frames: int, max_num_seqs: int, num_stages: int) -> int:
    possible = range(max_num_seqs, 1, -1)
    fitting = (number for number in possible if num_held_frames(layout, number, num_stages) <= num_frames)
    return next(fitting, 1)
