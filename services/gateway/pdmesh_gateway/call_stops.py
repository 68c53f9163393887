"""Stop strings in answers with calls of tools: they apply to text and reasoning, and not within calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdmesh_gateway.items import ItemParser, ItemWriter
from pdmesh_gateway.stop import StopFinder


class CallStops(StopFinder):
    """Finder of stop strings that reads the answer with its parser. Text that may become a call is held back."""

    def __init__(self, stops: Sequence[str], include_stop: bool, parser: Callable[[ItemWriter], ItemParser]) -> None:
        super().__init__(stops, include_stop)
        self._spans = _Spans()
        self._parser = parser(self._spans)

    def push(self, text: str, *, check: bool = True) -> tuple[str, str | None]:
        self._parser.push(text)
        return self._search(check=check)

    def flush(self, *, is_cut: bool = False, check: bool = True) -> tuple[str, str | None]:
        self._parser.end(is_cut=is_cut)
        shown, found = self._search(check=check)
        return shown if found is not None else shown + super().flush()[0], found

    def _search(self, *, check: bool) -> tuple[str, str | None]:
        """Search the new spans. Return the text to show and the stop string that was found, or None.

        No stop string reaches across a call.
        """
        shown = ""
        for piece, is_text in self._spans.take_spans():
            if is_text:
                more, found = super().push(piece, check=check)
                shown += more
                if found is not None:
                    return shown, found
            else:
                shown += super().flush()[0] + piece
        return shown, None


class _Spans(ItemWriter):
    """Spans of an answer in order: text and reasoning, or calls and markers."""

    def __init__(self) -> None:
        super().__init__()
        self._spans: list[tuple[str, bool]] = []

    def text(self, piece: str) -> None:
        self._spans.append((piece, True))

    def reasoning(self, piece: str) -> None:
        self._spans.append((piece, True))

    def begin_call(self, name: str) -> None:
        """Note nothing: markers and arguments cover a call's text."""

    def arguments(self, piece: str, drawn: str | None = None) -> None:
        self._spans.append((piece if drawn is None else drawn, False))

    def marker(self, drawn: str) -> None:
        self._spans.append((drawn, False))

    def take_spans(self) -> list[tuple[str, bool]]:
        spans, self._spans = self._spans, []
        return [span for span in spans if span[0]]
