"""The books of one request's pages on a member of a prefill group: who fills them, which are here, who was sent
them.

A page is (layer, block), in the request's own numbers. A chunk *begins* blocks that it fills here, in all layers; a
piece of another member *claims* pages before it is copied; a page that is here has an *audience*: so many members were
sent it by whoever computed it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import or_

from pdmesh.kv.outgoing import Blocks, marked, runs
from pdmesh.model import IndexRange, KvPart
from pdmesh.plans import MAX_GROUP_MEMBERS

#: Of the pages' audiences: those that are here.
_IS_HERE = marked(*range(1, MAX_GROUP_MEMBERS + 1))


class PageBooks:
    """Event loop only. Costs something for each run of pages, and nothing for each page of a long context."""

    def __init__(self, num_layers: int, num_blocks: int) -> None:
        self._num_layers = num_layers
        self._begun = bytearray(num_blocks)
        self._claimed = [bytearray(num_blocks) for _ in range(num_layers)]  # 1 + whom it is from
        self._audience = [bytearray(num_blocks) for _ in range(num_layers)]  # 0: not here yet
        self._borrowing: list[KvPart] = []
        self._after_borrowing: list[Callable[[], object]] = []

    # --- blocks that are computed here --------------------------------------------------------------------------------

    def begin(self, first_block: int, num_blocks: int, *, again: bool) -> bool:
        """A chunk is to fill them. False if another one was, here or elsewhere, which with ``again`` is fine."""
        blocks = slice(first_block, first_block + num_blocks)
        if any(part.blocks.common(IndexRange(blocks.start, blocks.stop)).size for part in self._borrowing):
            return False
        if not again and (any(self._begun[blocks]) or any(any(claimed[blocks]) for claimed in self._claimed)):
            return False
        self.reserve(first_block, num_blocks)
        return True

    def reserve(self, first_block: int, num_blocks: int) -> None:
        """Mark blocks as being computed here, so that no other member's copy is taken for them."""
        self._begun[first_block : first_block + num_blocks] = b"\1" * num_blocks

    def abandon(self, first_block: int, num_blocks: int) -> None:
        """Undo `reserve`."""
        self._begun[first_block : first_block + num_blocks] = bytes(num_blocks)

    # --- pages that come from others ----------------------------------------------------------------------------------

    def claim(self, part: KvPart, source: int) -> bool:
        """Claim pages that are about to be copied. False, and nothing is claimed, if all are here or on their way.

        Those that are on their way from another member already stay that one's.
        """
        claimed, pages = self._claimed[part.layers.start : part.layers.stop], slice(*part.blocks)
        begun = self._begun[pages]
        if all(all(map(or_, begun, layer[pages])) for layer in claimed):
            return False
        for layer in claimed:
            layer[pages] = layer[pages].replace(b"\0", bytes([source + 1]))
        return True

    def unclaim(self, part: KvPart, source: int) -> None:
        """Take back a claim of pages that were not copied from this member, so that they may come again."""
        pages = slice(*part.blocks)
        for layer in range(*part.layers):
            claimed, audience = self._claimed[layer][pages], self._audience[layer][pages]
            self._claimed[layer][pages] = bytes(
                owner if here or owner != source + 1 else 0 for owner, here in zip(claimed, audience, strict=True)
            )

    def missing(self, part: KvPart) -> list[KvPart]:
        """What of it is neither here nor on its way."""
        pages = slice(*part.blocks)
        missing: list[KvPart] = []
        for layer in range(*part.layers):
            here_or_coming = map(or_, self._claimed[layer][pages], self._audience[layer][pages])
            taken = bytes(map(or_, self._begun[pages], here_or_coming))
            for first, count in runs(taken.translate(marked(0))):
                blocks = IndexRange(part.blocks.start + first, part.blocks.start + first + count)
                missing.append(part._replace(blocks=blocks, layers=IndexRange(layer, layer + 1)))
        return [part] if sum(some.num_pages for some in missing) == part.num_pages else missing

    # --- loans, which are copied before it is known whether they were good --------------------------------------------

    def waits_for_read(self, part: KvPart, take: Callable[[], object]) -> bool:
        """Whether a window is being copied to some of them: ``take`` is called after that."""
        waits = any(all(span.size for span in other.common(part)) for other in self._borrowing)
        if waits:
            self._after_borrowing.append(take)  # pieces, of which there are as many as buffers
        return waits

    def begin_read(self, part: KvPart) -> None:
        """Note that a thread is about to copy a part; no chunk begins there meanwhile."""
        self._borrowing.append(part)

    def end_read(self, part: KvPart) -> None:
        """Note that the copy of a part has ended, and run what waited for that."""
        self._borrowing.remove(part)
        after, self._after_borrowing = self._after_borrowing, []
        for take in after:
            take()

    # --- pages that are here ------------------------------------------------------------------------------------------

    def set_audience(self, blocks: Blocks, num_members: int) -> None:
        """Mark pages as present, and as sent to the first ``num_members`` members."""
        for layer in range(blocks.layer, blocks.end_layer):
            self._audience[layer][blocks.first_block : blocks.end] = bytes([num_members]) * blocks.num_blocks

    def has(self, part: KvPart) -> bool:
        """Whether all of them are here."""
        pages = slice(*part.blocks)
        return all(all(audience[pages]) for audience in self._audience[part.layers.start : part.layers.stop])

    def not_sent_to(self, number: int, blocks: Blocks) -> Iterator[Blocks]:
        """Yield the ``blocks`` present here and not sent to member ``number``; the caller may mark them meanwhile."""
        wanted = marked(*range(1, number + 1))
        for layer in range(blocks.layer, blocks.end_layer):
            audience = self._audience[layer][blocks.first_block : blocks.end]
            for first, count in runs(audience.translate(wanted)):
                yield Blocks(blocks.chunk, layer, blocks.first_block + first, count)

    def taken_from(self, number: int) -> Iterator[Blocks]:
        """Yield the blocks present here that came from member ``number``."""
        theirs = marked(number + 1)
        for layer, (claimed, audience) in enumerate(zip(self._claimed, self._audience, strict=True)):
            for start, size in runs(claimed.translate(theirs)):
                for first, count in runs(audience[start : start + size].translate(_IS_HERE)):
                    yield Blocks(0, layer, start + first, count)

    def check_one_writer(self) -> None:
        """Check that no page computed here was taken from another member, which holds unless a member was lost."""
        for layer, claimed in enumerate(self._claimed):
            both = [block for block, taken in enumerate(claimed) if taken and self._begun[block]]
            assert not both, f"blocks {both} of layer {layer} are computed here and came from others"
