"""Room for generated tokens: an instance requests more blocks when room is low, and takes the granted ones.

Without a scheduler, the instance allocates from its own pool, for the oldest residents first. The next registration
reports all held blocks.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdmesh.core.commands import Hold
from pdmesh.core.events import KvLow
from pdmesh.kv.blocks import OutOfBlocks
from pdmesh.kv_layout import num_blocks_for
from pdmesh.plans import ResidentContext
from pdmesh.policy.on_demand import granted_blocks
from pdmesh.worker.context import InstanceContext
from pdmesh.worker.sequences import LocalRequest


class RoomGrowth:
    """Growth of the block tables of an instance's requests."""

    def __init__(self, context: InstanceContext) -> None:
        self._context = context
        self._is_alone = False

    def go_alone(self) -> None:
        """Allocate free blocks to residents without a scheduler, until `end_alone`."""
        self._is_alone = True
        self.blocks_freed()

    def end_alone(self) -> None:
        """Stop allocating without a scheduler, because the held blocks are about to be reported to one."""
        self._is_alone = False

    def blocks_freed(self) -> None:
        """Allocate to residents that are low, if there is no scheduler."""
        if self._is_alone:
            for request in self._context.sequences:
                if request.state.is_decoding and request.is_low:
                    self._grant(request)
            self._context.wake()

    def _grant(self, request: LocalRequest) -> None:
        """Allocate as many blocks as a scheduler would grant, or all free ones."""
        block_table = request.sequence.block_table
        most = num_blocks_for(request.max_kv_tokens - request.sequence.num_remote_tokens, request.block_size)
        wanted = granted_blocks(request.num_own_tokens, most, request.block_size) - len(block_table)
        new = self._context.tables.allocate_up_to(wanted)
        block_table.extend(new)
        request.state.grow(len(new))

    def grow(self, request: LocalRequest, command: Hold) -> None:
        """Take the blocks that the scheduler grants, unless the request has as many already.

        Drops the request if too few blocks are free, since then the scheduler's count is wrong.
        """
        num_elsewhere_blocks = request.sequence.num_remote_tokens // request.block_size
        num_blocks = command.num_blocks + command.num_elsewhere_blocks - num_elsewhere_blocks
        if num_blocks <= len(request.sequence.block_table):
            return
        try:
            self.extend(request, num_blocks)
        except OutOfBlocks as error:
            self._context.drop(request, str(error))
            return
        self._context.wake()

    def extend(self, request: LocalRequest, num_blocks: int) -> None:
        """Grow a request's table to at least ``num_blocks``. Raises OutOfBlocks if too few are free."""
        num_missing = max(0, num_blocks - len(request.sequence.block_table))
        request.sequence.block_table.extend(self._context.tables.allocate(num_missing))
        request.state.grow(num_missing)

    def tell(self, requests: Iterable[LocalRequest]) -> None:
        """Report to the scheduler each of ``requests`` that needs more blocks, or has more KV here than a range.

        Each such state is reported once. Without a scheduler, allocate free blocks to all low residents.
        """
        if self._is_alone:
            self.blocks_freed()
            return
        low = tuple(
            [
                ResidentContext(
                    request_id=request.request_id, epoch=request.epoch, num_tokens=len(request.sequence.token_ids)
                )
                for request in requests
                if request.is_news(self._context.range_tokens)
            ]
        )
        if low:
            self._context.report(KvLow(self._context.instance_id, low))
