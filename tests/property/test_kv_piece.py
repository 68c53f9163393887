"""Laws of the piece header and of data addresses: what is packed is read back; anything else is a typed error."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.errors import KvTransferError, ProtocolError
from pdmesh.kv.piece import PieceHeader, PieceKind, pack_header, request_key, unpack_header
from pdmesh.kv_layout import IndexRange, KvPart
from pdmesh.model import Epoch, RequestId
from pdmesh.transport.address import WorkerAddress, pack_address, unpack_address
from pdmesh.transport.buffers import HEADER_BYTES
from pdmesh.transport.seal import CHECK_BYTES, SEAL_BYTES, MeshKey

KEY = MeshKey("the mesh's")
ENCRYPTING = MeshKey("the mesh's", encrypts=True)
COPY_BYTES = 160

keys = st.sampled_from([KEY, ENCRYPTING])

u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))


OTHERS = {
    "kind",
    "request_key",
    "epoch",
    "capability",
    "check",
    "source",
    "destination",
    "num_members",
    "has_token",
    "part",
}


def spans(numbers: st.SearchStrategy[int]) -> st.SearchStrategy[IndexRange]:
    return st.builds(IndexRange, numbers, numbers)


headers = st.builds(
    PieceHeader,
    kind=st.sampled_from(PieceKind),
    request_key=st.text().map(lambda text: request_key(RequestId(text.encode(errors="replace").decode()))),
    epoch=u32.map(Epoch),
    capability=u64,
    check=st.binary(min_size=CHECK_BYTES, max_size=CHECK_BYTES),
    source=u16,
    destination=u16,
    num_members=u16,
    has_token=st.booleans(),
    part=st.builds(KvPart, spans(u32), spans(u16), spans(u16)),
    **{name: u32 for name in PieceHeader._fields if name not in OTHERS},
)


def packed(header: PieceHeader, key: MeshKey = KEY) -> bytearray:
    data = bytearray(HEADER_BYTES)
    pack_header(header, memoryview(data), key)
    return data


@given(headers, keys, keys)
def test_a_header_is_read_back_by_every_key_of_the_mesh(header: PieceHeader, key: MeshKey, other: MeshKey) -> None:
    assert unpack_header(bytes(packed(header, key)), other) == header


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_garbage_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack_header(data, KEY)


@given(headers, st.integers(0, COPY_BYTES - 1), st.integers(0, COPY_BYTES - 1), st.integers(1, 255), keys)
def test_a_byte_changed_in_one_copy_is_harmless_and_in_both_is_noticed(
    header: PieceHeader, position: int, other: int, change: int, key: MeshKey
) -> None:
    first, second, both = packed(header, key), packed(header, key), packed(header, key)
    for data in (first, both):
        data[position] ^= change
    for data in (second, both):
        data[COPY_BYTES + other] ^= change
    assert unpack_header(bytes(first), KEY) == unpack_header(bytes(second), KEY) == header
    with pytest.raises(ProtocolError):
        unpack_header(bytes(both), KEY)


@given(headers, st.text(), keys)
def test_a_header_sealed_with_another_token_is_refused(header: PieceHeader, token: str, key: MeshKey) -> None:
    with pytest.raises(ProtocolError):
        unpack_header(bytes(packed(header, key)), MeshKey(token + "?"))


@given(st.binary(max_size=1000))
def test_a_checksum_needs_the_key(payload: bytes) -> None:
    """An unkeyed checksum, as it was, is one that anybody can make."""
    view = memoryview(payload)
    check = KEY.close_payload(view)
    assert check == MeshKey("the mesh's").close_payload(view)
    assert check != MeshKey("").close_payload(view)
    assert xxhash.xxh3_64_intdigest(view).to_bytes(8, "little") not in check


@given(st.binary(max_size=200), keys, keys)
def test_a_payload_is_read_back_by_every_key_of_the_mesh(payload: bytes, key: MeshKey, other: MeshKey) -> None:
    sent = bytearray(payload)
    check = key.close_payload(memoryview(sent))
    assert other.opens_payload(memoryview(sent), check)
    assert sent == payload


@given(st.binary(min_size=1, max_size=200), keys, st.data())
def test_a_damaged_payload_or_check_is_noticed(payload: bytes, key: MeshKey, data: st.DataObject) -> None:
    sent = bytearray(payload)
    check = bytearray(key.close_payload(memoryview(sent)))
    damaged = data.draw(st.sampled_from([sent, check]))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    assert not KEY.opens_payload(memoryview(sent), bytes(check))


@given(st.binary(min_size=1, max_size=200), st.text())
def test_what_is_encrypted_opens_with_no_other_token(payload: bytes, token: str) -> None:
    sent = bytearray(payload)
    check = ENCRYPTING.close_payload(memoryview(sent))
    assert not MeshKey(token + "?").opens_payload(memoryview(sent), check)


@given(st.binary(min_size=16, max_size=200), headers)
def test_nothing_that_is_encrypted_can_be_read_or_recognised(payload: bytes, header: PieceHeader) -> None:
    """The same payload and header look different each time."""
    sent, again = bytearray(payload), bytearray(payload)
    assert ENCRYPTING.close_payload(memoryview(sent)) != ENCRYPTING.close_payload(memoryview(again))
    assert len({bytes(sent), bytes(again), payload}) == 3
    plain = KEY.open(packed(header)[:COPY_BYTES])
    assert plain is not None
    first, second = packed(header, ENCRYPTING), packed(header, ENCRYPTING)
    assert first != second
    sealed = first[: 2 * COPY_BYTES]  # what is behind is zeros
    assert not any(plain[i : i + 8] in sealed for i in range(0, len(plain) - 8) if plain[i : i + 8] != bytes(8))


@given(headers, st.integers(0, 2 * COPY_BYTES - 1))
def test_a_header_cut_short_is_noticed(header: PieceHeader, length: int) -> None:
    with pytest.raises(ProtocolError):
        unpack_header(bytes(packed(header)[:length]), KEY)


def test_an_unknown_kind_is_refused() -> None:
    header = PieceHeader(kind=PieceKind.ABORT, request_key=bytes(16), epoch=Epoch(0), capability=0)
    header = header._replace(kind=max(PieceKind) + 1)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match=f"kind {max(PieceKind) + 1}"):
        unpack_header(bytes(packed(header)), KEY)


def test_the_bytes_on_the_wire_do_not_change() -> None:
    """A peer of the same version reads them; a change needs a new magic."""
    header = PieceHeader(
        kind=PieceKind.KV,
        request_key=bytes(range(16)),
        epoch=Epoch(1),
        capability=2,
        weights=17,
        chunk=3,
        source=14,
        destination=15,
        num_members=16,
        part=KvPart(IndexRange(4, 5), IndexRange(6, 16), IndexRange(9, 10)),
        payload_bytes=7,
        check=bytes(range(100, 140)),
        num_context_tokens=11,
        has_token=True,
        token_id=12,
        token_index=13,
    )
    assert packed(header)[: COPY_BYTES - SEAL_BYTES].hex() == (
        "70644b390101100001000000000102030405060708090a0b0c0d0e0f020000000000000011000000"
        "0e000f00030000000400000005000000060010000900"
        f"0a0007000000{bytes(range(100, 140)).hex()}0b0000000c0000000d000000"
    )


UINT32, UINT64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
ADDRESSES = st.builds(
    WorkerAddress,
    host_id=st.binary(min_size=8, max_size=8),
    max_payload_bytes=UINT32,
    pid=UINT32,
    local_name=st.binary(min_size=16, max_size=16),
    memory_address=UINT64,
    buffer_stride=UINT64,
    num_buffers=UINT32,
    worker=st.binary(max_size=1000),
)


@given(ADDRESSES)
def test_an_address_is_read_back(address: WorkerAddress) -> None:
    assert unpack_address(pack_address(address)) == address


@given(st.binary(max_size=300))
def test_garbage_is_no_address(data: bytes) -> None:
    with pytest.raises(KvTransferError):
        unpack_address(data)


@given(ADDRESSES, st.data())
def test_a_changed_byte_of_an_address_is_noticed(facts: WorkerAddress, data: st.DataObject) -> None:
    address = bytearray(pack_address(facts))
    address[data.draw(st.integers(0, len(address) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(KvTransferError):
        unpack_address(bytes(address))
