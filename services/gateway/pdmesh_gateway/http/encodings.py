"""Decompressing request bodies piece by piece, within the caller's bound."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from pdmesh.errors import RequestRejected

#: Of an ``Accept-Encoding`` header.
ACCEPTED = b"gzip, deflate"

#: Bytes that one step of decompression makes at most.
PIECE_BYTES = 64 * 1024

_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS


def inflater_of(content_encoding: str | None) -> Inflater | None:
    """Return what decompresses bodies of a ``Content-Encoding``; None for plain ones. Raises RequestRejected (415)."""
    name = (content_encoding or "").strip().lower()
    if name in ("", "identity"):
        return None
    if name in ("gzip", "x-gzip", "deflate"):
        return Inflater(name)
    raise RequestRejected(
        f"Content-Encoding {name[:60]!r} is not supported: send the body as it is, or with gzip or deflate.",
        status=415,
        code="unsupported_content_encoding",
    )


class Inflater:
    """gzip, of one or several members, or deflate, with zlib's header or without."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._inflate = zlib.decompressobj(_GZIP) if name != "deflate" else None
        self._has_begun = False  # the current member

    def pieces(self, part: bytes) -> Iterator[bytes]:
        """Yield what the next part of a body stands for. Raises RequestRejected."""
        piece = b""
        # Behind a full piece, zlib may have more to give without any input.
        while part or (len(piece) == PIECE_BYTES and self._inflate is not None):
            if self._inflate is None:
                self._inflate = zlib.decompressobj(_GZIP if self._name != "deflate" else _deflate_format(part))
            self._has_begun = True
            try:
                piece = self._inflate.decompress(part, PIECE_BYTES)
            except zlib.error:
                raise self._damaged("is damaged") from None
            part = self._inflate.unconsumed_tail
            if self._inflate.eof:
                part = self._inflate.unused_data
                self._inflate, self._has_begun = None, False
                if part and self._name == "deflate":
                    raise self._damaged("has bytes behind its end")
            if piece:
                yield piece

    def check_end(self) -> None:
        """Raise RequestRejected if the body ends too early."""
        if self._has_begun:
            raise self._damaged("ends too early")

    def _damaged(self, how: str) -> RequestRejected:
        return RequestRejected(
            f"The request body {how}: it is not what its Content-Encoding, {self._name}, says.", code="invalid_encoding"
        )


def _deflate_format(begin: bytes) -> int:
    """Return the format of a deflated body: many clients leave zlib's header out, whose method is 8."""
    return _ZLIB if begin[0] & 0x0F == 8 else _RAW
