"""What every KV transport must keep, whatever it is made of."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import anyio
import anyio.lowlevel
import pytest

from pdmesh.errors import KvTransferError
from pdmesh.transport.buffers import HEADER_BYTES, MAX_PIECES, MESSAGE_BYTES
from pdmesh.transport.kv_transport import KvTransport, ReceivedPiece
from pdmesh_testing.kv import SMALL_TRANSFER, TransportMaker, send_together

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["memory", pytest.param("ucx", marks=pytest.mark.ucx)])
def maker(request: pytest.FixtureRequest) -> TransportMaker:
    return TransportMaker(request.param)


async def send(
    transport: KvTransport, address: bytes, header: bytes, payload: bytes = b"", *, is_notice: bool = False
) -> None:
    async with transport.lend() as buffer:
        buffer.header[:] = header.ljust(HEADER_BYTES, b"\0")
        buffer.payload[: len(payload)] = payload
        await transport.send(address, buffer, len(payload), is_notice=is_notice)


async def take(pieces: AsyncIterator[ReceivedPiece]) -> tuple[bytes, bytes]:
    with anyio.fail_after(20):
        piece = await anext(pieces)
    assert await anyio.to_thread.run_sync(piece.load)
    got = bytes(piece.header).rstrip(b"\0"), bytes(piece.payload)
    piece.release()
    return got


@pytest.mark.parametrize("size", [0, 1, 127, 128, 1000, 4095, 4096])
async def test_a_piece_arrives_as_it_was_sent(maker: TransportMaker, size: int) -> None:
    payload = os.urandom(size)
    async with maker.open() as a, maker.open() as b, anyio.create_task_group() as tasks:
        tasks.start_soon(send, a, b.address, b"head", payload)
        assert await take(aiter(b.receive())) == (b"head", payload)


@pytest.mark.parametrize("sizes", [[0, 0], [1, 4096, 0, 127], [MESSAGE_BYTES // MAX_PIECES] * MAX_PIECES])
async def test_pieces_of_one_message_arrive_as_if_each_was_sent_alone(maker: TransportMaker, sizes: list[int]) -> None:
    """The buffer is used again once each of them was released, in any order, and another message once it is sent."""
    payloads = [os.urandom(size) for size in sizes]
    config = replace(SMALL_TRANSFER, max_payload_bytes=max(*sizes, 100), num_send_buffers=1)
    async with maker.open(config) as a, maker.open(config) as b, anyio.create_task_group() as tasks:
        pieces = aiter(b.receive())
        for turn in range(3):
            held: list[ReceivedPiece] = []
            tasks.start_soon(send_together, a, b.address, payloads)
            for number, payload in enumerate(payloads):
                with anyio.fail_after(20):
                    piece = await anext(pieces)
                assert piece.load()
                assert bytes(piece.header).rstrip(b"\0") == b"%d" % number
                assert bytes(piece.payload) == payload
                b.check_integrity()
                held.append(piece)
                if len(held) == 3:  # all receive buffers, where each piece takes one
                    held.pop(turn).release()
            for piece in held:
                piece.release()
                piece.release()
            b.check_integrity()
        tasks.start_soon(send, a, b.address, b"alone", b"payload")
        assert await take(pieces) == (b"alone", b"payload")


async def test_a_notice_arrives_in_its_turn(maker: TransportMaker) -> None:
    async with maker.open() as a, maker.open() as b, anyio.create_task_group() as tasks:

        async def send_all() -> None:
            for number in range(20):
                await send(a, b.address, b"%d" % number, bytes(0 if number % 2 else 4000), is_notice=number % 2 == 1)

        tasks.start_soon(send_all)
        pieces = aiter(b.receive())
        for number in range(20):
            assert await take(pieces) == (b"%d" % number, bytes(0 if number % 2 else 4000))
        b.check_integrity()


async def test_a_large_piece_arrives_as_it_was_sent(maker: TransportMaker) -> None:
    """Its payload may be read when its consumer loads it."""
    payload = os.urandom(3 << 20)
    config = replace(SMALL_TRANSFER, max_payload_bytes=4 << 20)
    async with maker.open(config) as a, maker.open(config) as b, anyio.create_task_group() as tasks:
        tasks.start_soon(send, a, b.address, b"head", payload)
        assert await take(aiter(b.receive())) == (b"head", payload)
        b.check_integrity()


async def test_pieces_sent_one_after_another_arrive_in_order(maker: TransportMaker) -> None:
    got: list[tuple[bytes, bytes]] = []
    async with maker.open() as a, maker.open() as b, anyio.create_task_group() as tasks:

        async def send_all() -> None:
            for number in range(100):
                await send(a, b.address, b"%d" % number, bytes(number * 40))

        tasks.start_soon(send_all)
        pieces = aiter(b.receive())
        for _ in range(100):
            got.append(await take(pieces))
    assert got == [(b"%d" % number, bytes(number * 40)) for number in range(100)]


async def test_many_senders_and_both_ways(maker: TransportMaker) -> None:
    async with contextlib.AsyncExitStack() as stack:
        transports = [await stack.enter_async_context(maker.open()) for _ in range(4)]
        got: list[tuple[bytes, bytes]] = []

        async def send_to_all(me: int) -> None:
            for number in range(10):
                for you, peer in enumerate(transports):
                    await send(transports[me], peer.address, b"%d %d %d" % (me, you, number), b"x" * number * 100)

        async def receive_all(you: int) -> None:
            pieces = aiter(transports[you].receive())
            for _ in range(40):
                header, payload = await take(pieces)
                assert header.split()[1] == b"%d" % you
                got.append((header, payload))

        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(send_to_all, number)
                tasks.start_soon(receive_all, number)
    assert sorted(got) == sorted(
        (b"%d %d %d" % (me, you, number), b"x" * number * 100)
        for me in range(4)
        for you in range(4)
        for number in range(10)
    )


async def test_senders_wait_while_the_consumer_holds_every_receive_buffer(maker: TransportMaker) -> None:
    async with maker.open() as a, maker.open() as b, anyio.create_task_group() as tasks:
        pieces = aiter(b.receive())
        ended: list[int] = []

        async def send_one(number: int) -> None:
            await send(a, b.address, b"%d" % number)
            ended.append(number)

        for number in range(SMALL_TRANSFER.num_receive_buffers):
            tasks.start_soon(send_one, number)
        held = [await anext(pieces) for _ in range(SMALL_TRANSFER.num_receive_buffers)]
        await until(lambda: len(ended) == len(held))
        tasks.start_soon(send_one, 99)
        # Once another peer's piece has made its way to `a` and back, 99 had its chance.
        async with maker.open() as c:
            await _ping(c, a)
        assert 99 not in ended
        b.check_integrity()
        held[0].release()
        assert await take(pieces) == (b"99", b"")
        for piece in held[1:]:
            piece.release()
            piece.release()  # a second release changes nothing
        b.check_integrity()


async def _ping(c: KvTransport, a: KvTransport) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send, c, a.address, b"ping")
        assert await take(aiter(a.receive())) == (b"ping", b"")


async def test_lend_waits_for_a_free_buffer(maker: TransportMaker) -> None:
    async with maker.open() as a, contextlib.AsyncExitStack() as stack:
        for _ in range(SMALL_TRANSFER.num_send_buffers):
            await stack.enter_async_context(a.lend())
        lent = anyio.Event()

        async def lend_one_more() -> None:
            async with a.lend():
                lent.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lend_one_more)
            await anyio.wait_all_tasks_blocked()
            assert not lent.is_set()
            a.check_integrity()
            await stack.aclose()
            await lent.wait()


async def test_a_peer_that_is_gone_is_an_error_and_others_go_on(maker: TransportMaker) -> None:
    config = replace(SMALL_TRANSFER, no_progress_s=0.2)
    async with maker.open(config) as a, maker.open() as c:
        async with maker.open() as b, anyio.create_task_group() as tasks:
            tasks.start_soon(send, a, b.address, b"before")
            assert await take(aiter(b.receive())) == (b"before", b"")
        with pytest.raises(KvTransferError):
            await send(a, b.address, b"after")
        await a.forget(b.address)
        await a.forget(b.address)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send, a, c.address, b"to another")
            assert await take(aiter(c.receive())) == (b"to another", b"")


@pytest.mark.parametrize("address", [b"", b"garbage", b"pdKV" + bytes(300), os.urandom(250)])
async def test_garbage_for_an_address_is_an_error(maker: TransportMaker, address: bytes) -> None:
    async with maker.open() as a:
        with pytest.raises(KvTransferError):
            await send(a, address, b"")


async def test_a_send_that_no_one_takes_ends_in_an_error_and_gives_its_buffer_back(maker: TransportMaker) -> None:
    config = replace(SMALL_TRANSFER, no_progress_s=0.1, num_send_buffers=1)
    async with maker.open(config) as a, maker.open() as b:
        pieces = aiter(b.receive())
        held = []
        async with anyio.create_task_group() as tasks:
            for _ in range(SMALL_TRANSFER.num_receive_buffers):
                tasks.start_soon(send, a, b.address, b"held")
                held.append(await anext(pieces))
        with pytest.raises(KvTransferError):
            await send(a, b.address, b"too much")
        a.check_integrity()
        for piece in held:
            piece.release()
        async with anyio.create_task_group() as tasks:  # the only buffer is there, the next endpoint works
            tasks.start_soon(send, a, b.address, b"again")
            while (await take(pieces))[0] != b"again":
                pass


async def test_a_cancelled_send_gives_its_buffer_back(maker: TransportMaker) -> None:
    config = replace(SMALL_TRANSFER, num_send_buffers=1)
    async with maker.open(config) as a, maker.open() as b:
        pieces = aiter(b.receive())
        held = []
        async with anyio.create_task_group() as tasks:
            for _ in range(SMALL_TRANSFER.num_receive_buffers):
                tasks.start_soon(send, a, b.address, b"held")
                held.append(await anext(pieces))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send, a, b.address, b"cancelled")
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        a.check_integrity()
        await a.forget(b.address)
        a.check_integrity()
        with anyio.fail_after(5):
            async with a.lend():
                pass
        for piece in held:
            piece.release()


async def test_to_forget_a_peer_ends_the_sends_to_it_and_no_others(maker: TransportMaker) -> None:
    config = replace(SMALL_TRANSFER, num_send_buffers=2)
    async with maker.open(config) as a, maker.open() as b, maker.open() as c:
        full = {transport: await fill(transport, a) for transport in (b, c)}
        errors: list[KvTransferError] = []

        async def send_one_more(to: KvTransport) -> None:
            try:
                await send(a, to.address, b"one more")
            except KvTransferError as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send_one_more, b)
            tasks.start_soon(send_one_more, c)
            await anyio.wait_all_tasks_blocked()
            await a.forget(b.address)
            await until(lambda: len(errors) == 1)
            a.check_integrity()
            async with a.lend():  # the buffer is back
                pass
            full[c][0].release()
            assert await take(aiter(c.receive())) == (b"one more", b"")
        assert len(errors) == 1
        for piece in full[b]:
            piece.release()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send, a, b.address, b"again")
            while (await take(aiter(b.receive())))[0] != b"again":
                pass


async def fill(transport: KvTransport, sender: KvTransport) -> list[ReceivedPiece]:
    """Hold every receive buffer of a transport."""
    pieces = aiter(transport.receive())
    held = []
    for _ in range(SMALL_TRANSFER.num_receive_buffers):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send, sender, transport.address, b"held")
            held.append(await anext(pieces))
    return held


async def test_leaving_with_pieces_queued_and_sends_under_way_is_clean(maker: TransportMaker) -> None:
    async with maker.open() as a, anyio.create_task_group() as tasks:
        async with maker.open() as b:

            async def send_until_gone(number: int) -> None:
                with contextlib.suppress(KvTransferError):
                    while True:
                        await send(a, b.address, b"%d" % number, bytes(4096))

            for number in range(3):
                tasks.start_soon(send_until_gone, number)
            await take(aiter(b.receive()))
        tasks.cancel_scope.cancel()


async def test_no_descriptor_is_left_over(maker: TransportMaker) -> None:
    async def use() -> None:
        async with maker.open() as a, maker.open() as b, anyio.create_task_group() as tasks:
            tasks.start_soon(send, a, b.address, b"one", bytes(4096))
            await take(aiter(b.receive()))

    await use()  # what UCX opens once per process
    gc.collect()
    before = num_descriptors()
    for _ in range(5):
        await use()
    gc.collect()
    assert num_descriptors() <= before


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def until(condition: object) -> None:
    """Let the others run until the condition holds; the test's time limit ends it otherwise."""
    assert callable(condition)
    while not condition():
        await anyio.lowlevel.checkpoint()


@pytest.fixture(autouse=True)
def _collect() -> Iterator[None]:
    yield
    gc.collect()  # what is left over warns now, in this test
