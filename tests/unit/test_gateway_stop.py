"""Stop strings: streamed in any pieces, the result is that of the whole text."""

from hypothesis import example, given
from hypothesis import strategies as st

from pdmesh_gateway.stop import StopFinder


def reference(text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    """Character by character: the first end of a stop string, the longest that ends there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3, unique=True),
    include_stop=st.booleans(),
)
@example(pieces=["a", "b"], stops=["ab", "b"], include_stop=False)
def test_pieces_give_what_the_whole_text_gives(pieces: list[str], stops: list[str], include_stop: bool) -> None:
    finder = StopFinder(stops, include_stop)
    shown = ""
    found: str | None = None
    for piece in pieces:
        delta, found = finder.push(piece)
        shown += delta
        if found is not None:
            break
    if found is None:
        shown += finder.flush()[0]
    assert (shown, found) == reference("".join(pieces), stops, include_stop)


@given(text=st.text(alphabet="abc", max_size=20), stop=st.text(alphabet="abc", min_size=1, max_size=4))
def test_only_what_may_become_a_stop_is_held_back(text: str, stop: str) -> None:
    finder = StopFinder([stop])
    shown, found = finder.push(text)
    if found is None:
        held = text[len(shown) :]
        assert len(held) < len(stop)
        assert stop.startswith(held)


def test_text_before_min_tokens_is_not_looked_at() -> None:
    finder = StopFinder(["ab"])
    assert finder.push("a", check=False) == ("a", None)
    assert finder.push("b") == ("b", None)
    assert finder.push("ab") == ("", "ab")
