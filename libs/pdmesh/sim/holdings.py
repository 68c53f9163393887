"""The blocks that a modelled instance holds, by request."""

from __future__ import annotations

from collections.abc import Callable

from pdmesh.core.events import Event, KvReleased
from pdmesh.model import NO_TRANSFER, InstanceId, RequestKey, TransferId


class Holdings:
    """The core promises only what is free: nothing here has to be refused."""

    def __init__(self, instance_id: InstanceId, num_blocks: int, report: Callable[[Event], None]) -> None:
        self._instance_id = instance_id
        self._num_free_blocks = num_blocks
        self._report = report
        self._blocks: dict[RequestKey, int] = {}
        self._received_by: dict[RequestKey, TransferId] = {}

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._blocks

    def num_blocks(self, key: RequestKey) -> int:
        return self._blocks[key]

    def hold(self, key: RequestKey, num_blocks: int, transfer_id: TransferId = NO_TRANSFER) -> None:
        """``transfer_id`` is of the transfer that brings what they are for."""
        assert key not in self._blocks, f"{self._instance_id} holds {key} already"
        self._blocks[key] = num_blocks
        self._received_by[key] = transfer_id
        self._take(num_blocks, key)

    def grow(self, key: RequestKey, num_blocks: int) -> bool:
        """Grow to ``num_blocks``. False if the request ended meanwhile, or has as many."""
        num_more = num_blocks - self._blocks.get(key, num_blocks)
        if num_more <= 0:
            return False
        self._blocks[key] += num_more
        self._take(num_more, key)
        return True

    def release(self, key: RequestKey) -> None:
        self._num_free_blocks += self._blocks.pop(key)
        self._report(KvReleased(self._instance_id, *key, self._received_by.pop(key)))

    def _take(self, num_blocks: int, key: RequestKey) -> None:
        self._num_free_blocks -= num_blocks
        assert self._num_free_blocks >= 0, f"{self._instance_id}: no room for {key}"
