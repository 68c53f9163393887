"""A switch that delays and loses frames, where the kernel has no netem: run as a process of a network namespace.

    python -m pdmesh_testing.slow_switch --delay 0.01 --loss 0.01 [--seed 0] DEVICE ...

Each frame leaves after the delay, at the device where its receiver's address was last seen, or at all others. Losses
are random for each frame.
"""

from __future__ import annotations

import argparse
import random
import select
import socket
import time
from collections import deque
from contextlib import suppress

_ETH_P_ALL = 3
_SOL_PACKET = 263
#: Frames come and go with what the kernel has not done yet (checksums, segments), for the receiving one to do.
_PACKET_VNET_HDR = 15
_HEADER_BYTES = 10
_MAX_FRAME_BYTES = 1 << 17
_FRAMES_A_TURN = 64
_QUEUE_BYTES = 16 << 20


class SlowSwitch:
    """Switch that forwards frames between devices, with a delay and losses."""

    def __init__(self, devices: list[str], delay_s: float, loss: float, rng: random.Random) -> None:
        self._delay_s = delay_s
        self._loss = loss
        self._rng = rng
        self._ports = [_port(device) for device in devices]
        # Last port of each hardware address.
        self._seen_at: dict[bytes, socket.socket] = {}
        # Waiting frames, in the order in which they leave.
        self._waiting: deque[tuple[float, bytes, list[socket.socket]]] = deque()

    def run(self) -> None:
        """Forward until the process ends."""
        while True:
            left_s = None if not self._waiting else max(0.0, self._waiting[0][0] - time.monotonic())
            for port in select.select(self._ports, [], [], left_s)[0]:
                self._take(port)
            while self._waiting and self._waiting[0][0] <= time.monotonic():
                _, frame, ports = self._waiting.popleft()
                for port in ports:
                    with suppress(OSError):
                        # A full queue loses the frame, as in any switch.
                        port.send(frame)

    def _take(self, port: socket.socket) -> None:
        for _ in range(_FRAMES_A_TURN):
            try:
                frame, (_, _, kind, _, _) = port.recvfrom(_MAX_FRAME_BYTES)
            except BlockingIOError:
                return
            if kind == socket.PACKET_OUTGOING:
                continue
            destination, source = frame[_HEADER_BYTES:][:6], frame[_HEADER_BYTES + 6 :][:6]
            self._seen_at[source] = port
            if self._rng.random() < self._loss:
                continue
            known = self._seen_at.get(destination)
            ports = [each for each in self._ports if each is not port] if known is None else [known]
            self._waiting.append((time.monotonic() + self._delay_s, frame, ports))


def _port(device: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        port.setsockopt(socket.SOL_SOCKET, option, _QUEUE_BYTES)
    port.bind((device, 0))
    port.setblocking(False)
    return port


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay", type=float, default=0.0, help="seconds")
    parser.add_argument("--loss", type=float, default=0.0, help="share of the frames")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("devices", nargs="+")
    options = parser.parse_args()
    SlowSwitch(options.devices, options.delay, options.loss, random.Random(options.seed)).run()


if __name__ == "__main__":
    main()
