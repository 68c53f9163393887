"""BlockTables for what requests generate: an instance asks for more where little is left, and takes what is granted."""

from __future__ import annotations

from collections.abc import Iterable

from pdmesh.core.commands import GrowKv
from pdmesh.core.events import KvLow
from pdmesh.kv.blocks import OutOfBlocks
from pdmesh.plans import ResidentContext
from pdmesh.worker.context import InstanceContext
from pdmesh.worker.sequences import Hold


class RoomGrowth:
    """The blocks of an instance's requests as they grow."""

    def __init__(self, context: InstanceContext) -> None:
        self._context = context

    def grow(self, command: GrowKv) -> None:
        """Take what the scheduler grants."""
        self._context.tables.drop(command.drop)
        hold = self._context.sequences.get(command.request_id, command.epoch)
        if hold is None or command.num_blocks <= len(hold.sequence.block_table):
            return  # it ended meanwhile, or was granted more already
        try:
            self.extend(hold, command.num_blocks)
        except OutOfBlocks as error:  # the scheduler's books are wrong
            self._context.endings.drop(hold, str(error))
            return
        self._context.wake()

    def extend(self, hold: Hold, num_blocks: int) -> None:
        """Let it have at least ``num_blocks`` in all. Raises OutOfBlocks if they are not free."""
        num_missing = max(0, num_blocks - len(hold.sequence.block_table))
        hold.sequence.block_table.extend(self._context.tables.allocate(num_missing))

    def tell(self, holds: Iterable[Hold]) -> None:
        """Ask for more room where there is little left."""
        low = tuple(
            [
                ResidentContext(request_id=hold.request_id, epoch=hold.epoch, num_tokens=len(hold.sequence.token_ids))
                for hold in holds
                if hold.growth_is_news()
            ]
        )
        if low:
            self._context.report(KvLow(self._context.instance_id, low))
