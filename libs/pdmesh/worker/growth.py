"""Room for what requests generate: an instance asks for more where little is left, and takes what is granted.

The pool is its own: while it has no scheduler, residents get what is free, the oldest first. What they took is told
with the next registration, like all that they hold.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdmesh.core.commands import Hold
from pdmesh.core.events import KvLow
from pdmesh.kv.blocks import OutOfBlocks
from pdmesh.model import num_blocks_for
from pdmesh.plans import ResidentContext
from pdmesh.policy.on_demand import granted_blocks
from pdmesh.worker.context import InstanceContext
from pdmesh.worker.sequences import LocalRequest


class RoomGrowth:
    """The blocks of an instance's requests as they grow."""

    def __init__(self, context: InstanceContext) -> None:
        self._context = context
        self._is_alone = False

    def go_alone(self) -> None:
        """Grant what is free, since nobody else does, until `end_alone`."""
        self._is_alone = True
        self.blocks_freed()

    def end_alone(self) -> None:
        """Take nothing more: a scheduler is about to be told what is held."""
        self._is_alone = False

    def blocks_freed(self) -> None:
        """Let residents have what they wait for, if there is nobody to grant it."""
        if self._is_alone:
            for request in self._context.sequences:
                if request.state.is_decoding and request.is_low:
                    self._grant(request)
            self._context.wake()

    def _grant(self, request: LocalRequest) -> None:
        """Let it have as much as a scheduler would grant, or what there is."""
        block_table = request.sequence.block_table
        most = num_blocks_for(request.max_kv_tokens - request.sequence.num_elsewhere_tokens, request.block_size)
        wanted = granted_blocks(request.num_own_tokens, most, request.block_size) - len(block_table)
        new = self._context.tables.allocate_up_to(wanted)
        block_table.extend(new)
        request.state.grow(len(new))

    def grow(self, request: LocalRequest, command: Hold) -> None:
        """Take what the scheduler grants."""
        num_elsewhere_blocks = request.sequence.num_elsewhere_tokens // request.block_size
        num_blocks = command.num_blocks + command.num_elsewhere_blocks - num_elsewhere_blocks
        if num_blocks <= len(request.sequence.block_table):
            return  # it was granted more already
        try:
            self.extend(request, num_blocks)
        except OutOfBlocks as error:  # the scheduler's count is wrong
            self._context.drop(request, str(error))
            return
        self._context.wake()

    def extend(self, request: LocalRequest, num_blocks: int) -> None:
        """Let it have at least ``num_blocks`` in all. Raises OutOfBlocks if they are not free."""
        num_missing = max(0, num_blocks - len(request.sequence.block_table))
        request.sequence.block_table.extend(self._context.tables.allocate(num_missing))
        request.state.grow(num_missing)

    def tell(self, requests: Iterable[LocalRequest]) -> None:
        """Ask for more room where there is little left; where nobody is there to ask, take it."""
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
