"""The ledger of a request's pages on one member: a claim is its owner's, and whoever gives one up takes no other's."""

from __future__ import annotations

from pdmesh.kv.outgoing import Blocks
from pdmesh.kv.pages import PageBooks
from pdmesh.model import IndexRange, KvPart


def part(first: int, end: int) -> KvPart:
    return KvPart(IndexRange(first, end), IndexRange(0, 1), IndexRange(0, 1))


def test_a_claim_that_is_given_up_leaves_those_of_others() -> None:
    books = PageBooks(num_layers=1, num_blocks=8)
    assert books.claim(part(0, 4), source=1)
    assert books.claim(part(2, 6), source=2)
    books.unclaim(part(2, 6), source=2)
    assert books.missing(part(0, 8)) == [part(4, 8)], "1 has four on their way"
    books.unclaim(part(0, 4), source=1)
    assert books.missing(part(0, 8)) == [part(0, 8)]


def test_what_is_here_is_not_given_up() -> None:
    books = PageBooks(num_layers=1, num_blocks=8)
    assert books.claim(part(0, 4), source=1)
    books.set_audience(Blocks(0, 0, 0, 2), 2)
    books.unclaim(part(0, 4), source=1)
    assert books.missing(part(0, 4)) == [part(2, 4)]
    assert books.has(part(0, 2))
    assert list(books.taken_from(1)) == [Blocks(0, 0, 0, 2)]


def test_what_is_all_on_its_way_is_claimed_by_nobody_else() -> None:
    books = PageBooks(num_layers=1, num_blocks=8)
    assert books.claim(part(0, 4), source=1)
    assert not books.claim(part(1, 3), source=2)
    books.unclaim(part(1, 3), source=2)
    assert books.missing(part(0, 4)) == []
