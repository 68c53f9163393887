"""Decompression of request bodies piece by piece, within the caller's limit."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from pdmesh.errors import RequestRejected

#: Value of an ``Accept-Encoding`` header.
ACCEPTED = b"gzip, deflate"

#: Limit of the bytes that one step of decompression makes.
PIECE_BYTES = 64 * 1024

_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS


def inflater_of(content_encoding: str | None) -> Inflater | None:
    """Return the decompressor of a ``Content-Encoding``; None for plain bodies. Raises RequestRejected (415)."""
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
    """Decompressor of gzip, of one or several members, or of deflate, with zlib's header or without."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._inflate = zlib.decompressobj(_GZIP) if name != "deflate" else None
        # Whether the current member has begun.
        self._has_begun = False

    def pieces(self, part: bytes) -> Iterator[bytes]:
        """Yield the decompressed pieces of the body's next part. Raises RequestRejected if it is damaged."""
        piece = b""
        # After a full piece, zlib may have more output without any input.
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
                    raise self._damaged("has bytes after its end")
            if piece:
                yield piece

    def check_end(self) -> None:
        """Raise RequestRejected if the body ends too early."""
        if self._has_begun:
            raise self._damaged("ends too early")

    def _damaged(self, how: str) -> RequestRejected:
        return RequestRejected(
            f"The request body {how}: it does not match its Content-Encoding, {self._name}.", code="invalid_encoding"
        )


def _deflate_format(begin: bytes) -> int:
    """Return zlib's format of a deflated body: many clients omit zlib's header, whose method is 8."""
    return _ZLIB if begin[0] & 0x0F == 8 else _RAW
