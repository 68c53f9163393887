"""Laws of the page ledger, beside a plain model of it: one dictionary of pages, each with its state."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdmesh.kv.ledger import PageLedger, PageState
from pdmesh.kv.pages import Blocks
from pdmesh_testing.examples import examples

NUM_LAYERS, NUM_BLOCKS, NUM_SOURCES = 3, 8, 3
EMPTY, COMPUTING, WRITTEN, COPYING, READING, PRESENT, GONE = PageState

Page = tuple[int, int]  # (layer, block)


def pages_of(blocks: Blocks) -> list[Page]:
    return [
        (layer, block)
        for layer in range(blocks.layer, blocks.end_layer)
        for block in range(blocks.first_block, blocks.end)
    ]


def flat(parts: Iterable[Blocks]) -> list[Page]:
    return [page for blocks in parts for page in pages_of(blocks)]


@st.composite
def some_blocks(draw: st.DrawFn) -> Blocks:
    layer, first = draw(st.integers(0, NUM_LAYERS - 1)), draw(st.integers(0, NUM_BLOCKS - 1))
    return Blocks(
        0, layer, first, draw(st.integers(1, NUM_BLOCKS - first)), num_layers=draw(st.integers(1, NUM_LAYERS - layer))
    )


sources = st.integers(0, NUM_SOURCES - 1)


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = PageLedger(NUM_LAYERS, NUM_BLOCKS)
        self.pages = dict.fromkeys(pages_of(self.ledger.everything), EMPTY)
        self.sources: dict[Page, int] = {}
        self.sent_to: dict[Page, int] = {}
        self.here: list[int] = []  # layers told of
        self.ledger.on_here = self.here.extend

    def chunk(self, blocks: Blocks) -> list[Page]:
        return pages_of(blocks._replace(layer=0, num_layers=NUM_LAYERS))

    def change(self, pages: Iterable[Page], states: set[PageState], to: PageState) -> None:
        self.pages |= {page: to for page in pages if self.pages[page] in states}

    @rule(blocks=some_blocks(), again=st.booleans())
    def begin(self, blocks: Blocks, again: bool) -> None:
        pages = self.chunk(blocks)
        may = all(self.pages[page] is EMPTY or (again and self.pages[page] is not READING) for page in pages)
        assert self.ledger.begin(blocks.first_block, blocks.num_blocks, again=again) == may
        if may:
            self.change(pages, {EMPTY, COPYING}, COMPUTING)

    @rule(blocks=some_blocks())
    def reserve(self, blocks: Blocks) -> None:
        self.ledger.reserve(blocks.first_block, blocks.num_blocks)
        self.change(self.chunk(blocks), {EMPTY}, COMPUTING)

    @rule(blocks=some_blocks())
    def abandon(self, blocks: Blocks) -> None:
        self.ledger.abandon(blocks.first_block, blocks.num_blocks)
        self.change(self.chunk(blocks), {COMPUTING}, EMPTY)

    @rule(blocks=some_blocks())
    def write(self, blocks: Blocks) -> None:
        """Of what was begun, by its chunk."""
        if all(self.pages[page] in (COMPUTING, WRITTEN, PRESENT) for page in pages_of(blocks)):
            self.ledger.write(blocks)
            self.change(pages_of(blocks), {COMPUTING}, WRITTEN)
            assert set(self.here) == set(range(blocks.layer, blocks.end_layer))

    @rule(blocks=some_blocks(), source=sources, state=st.sampled_from([COPYING, READING]))
    def claim(self, blocks: Blocks, source: int, state: PageState) -> None:
        missing = [page for page in pages_of(blocks) if self.pages[page] is EMPTY]
        assert flat(self.ledger.missing(blocks)) == missing
        assert flat(self.ledger.claim(blocks, source, state)) == missing
        self.change(missing, {EMPTY}, state)
        self.sources |= dict.fromkeys(missing, source)

    @rule(blocks=some_blocks(), source=sources)
    def release(self, blocks: Blocks, source: int) -> None:
        self.ledger.release(blocks, source)
        theirs = [page for page in pages_of(blocks) if self.sources.get(page) == source]
        self.change(theirs, {COPYING, READING}, EMPTY)

    @rule(blocks=some_blocks())
    def discard(self, blocks: Blocks) -> None:
        self.ledger.discard(blocks)
        for page in pages_of(blocks):
            if self.pages[page] is EMPTY:
                self.sources.pop(page, None)
        self.change(pages_of(blocks), {EMPTY}, GONE)
        assert self.ledger.num_gone(blocks) == sum(self.pages[page] is GONE for page in pages_of(blocks))

    @rule(blocks=some_blocks(), num_members=st.integers(0, NUM_SOURCES))
    def place(self, blocks: Blocks, num_members: int) -> None:
        new = [page for page in pages_of(blocks) if self.pages[page] not in (PRESENT, GONE)]
        assert flat(self.ledger.place(blocks)) == new
        self.change(new, set(PageState), PRESENT)
        self.ledger.set_sent_to(blocks, num_members)
        self.sent_to |= dict.fromkeys(pages_of(blocks), num_members)
        assert set(self.here) == set(range(blocks.layer, blocks.end_layer))

    @rule(blocks=some_blocks(), number=sources)
    def ask(self, blocks: Blocks, number: int) -> None:
        ledger, pages = self.ledger, pages_of(blocks)
        present = {page for page, state in self.pages.items() if state is PRESENT}
        assert ledger.has(blocks) == (present >= set(pages))
        assert ledger.is_read(blocks) == any(self.pages[page] is READING for page in pages)
        assert flat(ledger.not_sent_to(number, blocks)) == [
            page for page in pages if page in present and 0 < self.sent_to[page] <= number
        ]
        assert set(flat(ledger.taken_from(number))) == {page for page in present if self.sources.get(page) == number}
        assert ledger.num_pages_of(number) == list(self.sources.values()).count(number)
        assert ledger.num_unclaimed(blocks) == sum(
            page not in self.sources and self.pages[page] is not GONE for page in pages
        )

    @rule()
    def grow(self) -> None:
        size = self.ledger.everything.num_blocks
        if size < NUM_BLOCKS + 2:
            self.ledger.grow(size + 1)
            self.pages |= {(layer, size): EMPTY for layer in range(NUM_LAYERS)}

    @invariant()
    def counts(self) -> None:
        self.here.clear()
        self.ledger.check_integrity()
        assert set(flat(self.ledger.present())) == {page for page, state in self.pages.items() if state is PRESENT}
        firsts: list[int] = []
        for layer in range(NUM_LAYERS):
            first = 0
            while self.pages.get((layer, first)) in (WRITTEN, PRESENT):
                first += 1
            assert self.ledger.has_first(layer, first)
            assert not self.ledger.has_first(layer, first + 1)
            firsts.append(first)
        assert self.ledger.num_complete_blocks == min(firsts)


LedgerMachine.TestCase.settings = settings(deadline=None, max_examples=examples(100))
test_page_ledger = LedgerMachine.TestCase


def test_a_page_that_is_discarded_after_its_copy_did_not_count_is_expected_of_nobody() -> None:
    """What hypothesis found: it was counted as gone, and as claimed too."""
    ledger = PageLedger(1, 1)
    ledger.claim(ledger.everything, source=0)
    ledger.release(ledger.everything, source=0)
    ledger.discard(ledger.everything)
    assert (ledger.num_unclaimed(ledger.everything), ledger.num_pages_of(0)) == (0, 0)
