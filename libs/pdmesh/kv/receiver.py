"""One request's KV on its way in: which pieces may land where, and when all of them have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pdmesh.kv.piece import PieceHeader, request_key
from pdmesh.model import Epoch, KvLayout, RequestId, num_blocks_for


class FirstToken(NamedTuple):
    """What a COMMIT brought."""

    token_id: int
    token_index: int


class KvReceiver:
    """The receiver's side of a transfer: its books. `pdmesh.kv.mover.KvMover` does the work.

    A (layer, block) is *claimed* when a piece for it has been accepted and *placed* when it has been copied in.
    """

    def __init__(
        self,
        request_id: RequestId,
        epoch: Epoch,
        *,
        capability: int,
        block_ids: Sequence[int],
        num_context_tokens: int,
        source_address: bytes,
        layout: KvLayout,
    ) -> None:
        num_blocks = num_blocks_for(num_context_tokens, layout.block_size)
        assert 0 < num_blocks <= len(block_ids), f"{num_context_tokens} tokens in {len(block_ids)} blocks"
        self.request_id = request_id
        self.epoch = epoch
        self.key = request_key(request_id)
        self.capability = capability
        self.source_address = source_address
        self.first_piece_s: float | None = None
        self.first_token: FirstToken | None = None
        self.num_bytes = 0
        self._block_ids = list(block_ids[:num_blocks])
        self._num_context_tokens = num_context_tokens
        self._layout = layout
        self._claimed = [bytearray(num_blocks) for _ in range(layout.num_layers)]
        self._num_unclaimed = self._num_unplaced = num_blocks * layout.num_layers

    def block_ids_of(self, header: PieceHeader) -> list[int]:
        return self._block_ids[header.first_block : header.first_block + header.num_blocks]

    def claim(self, header: PieceHeader, payload_bytes: int) -> str | None:
        """Accept a KV piece, or say why it must be dropped."""
        layout = self._layout
        if (
            header.layer >= layout.num_layers
            or header.num_blocks == 0
            or header.first_block + header.num_blocks > len(self._block_ids)
            or header.payload_bytes != header.num_blocks * layout.block_bytes
            or header.payload_bytes != payload_bytes
            or (header.head_start, header.num_heads) != (0, layout.num_kv_heads)
        ):
            return "range"
        blocks = slice(header.first_block, header.first_block + header.num_blocks)
        claimed = self._claimed[header.layer]
        if any(claimed[blocks]):
            return "duplicate"
        claimed[blocks] = b"\1" * header.num_blocks
        self._num_unclaimed -= header.num_blocks
        return None

    def place(self, header: PieceHeader) -> None:
        """A claimed piece has been copied into its blocks."""
        self._num_unplaced -= header.num_blocks
        self.num_bytes += header.payload_bytes

    def commit(self, header: PieceHeader) -> str | None:
        """Take the first token, or say why the transfer has failed. The sender sends it after all KV was taken."""
        if header.num_context_tokens != self._num_context_tokens:
            return f"the sender moved {header.num_context_tokens} tokens, {self._num_context_tokens} were expected"
        if self._num_unclaimed > 0:
            return f"{self._num_unclaimed} blocks are missing"
        self.first_token = FirstToken(header.token_id, header.token_index)
        return None

    @property
    def complete(self) -> bool:
        return self._num_unplaced == 0 and self.first_token is not None

    def check_integrity(self) -> None:
        num_claimed = sum(sum(layer) for layer in self._claimed)
        total = len(self._block_ids) * self._layout.num_layers
        assert num_claimed + self._num_unclaimed == total, f"{num_claimed} + {self._num_unclaimed} != {total}"
        assert self._num_unclaimed <= self._num_unplaced, (
            f"{self._num_unclaimed} unclaimed, {self._num_unplaced} unplaced"
        )
