"""Compressed bodies come to the same, whatever their length."""

from __future__ import annotations

import zlib

import pytest

from pdmesh_gateway.http.encodings import PIECE_BYTES, inflater_of


@pytest.mark.parametrize(
    ("encoding", "wbits"), [("gzip", 16 + zlib.MAX_WBITS), ("deflate", zlib.MAX_WBITS), ("deflate", -zlib.MAX_WBITS)]
)
def test_a_body_that_ends_near_a_piece_is_whole(encoding: str, wbits: int) -> None:
    for length in range(PIECE_BYTES - 2, PIECE_BYTES + 300):
        data = b"a" * length
        deflate = zlib.compressobj(wbits=wbits)
        inflater = inflater_of(encoding)
        assert inflater is not None
        pieces = list(inflater.pieces(deflate.compress(data) + deflate.flush()))
        inflater.check_end()
        assert b"".join(pieces) == data
        assert max(map(len, pieces)) <= PIECE_BYTES
