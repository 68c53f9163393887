"""Pieces of KV that come damaged or late, inside the processes of a mesh, and what became of each damaged one.

`install` is called in every process, by a ``sitecustomize`` that `write_sitecustomize` makes. While the file ``on`` is
in its folder, some pieces that are read come late, and some with a bit of their payload turned. Each process appends a
line to a file of its own for each of these: ``damaged`` when it is done, then ``refused`` (its checksum is wrong, as
the receiver says), ``unread`` (nobody wanted it: nothing was copied) or ``TAKEN``, which must not be. So what a process
saw that was killed later counts too.
"""

from __future__ import annotations

import ctypes
import functools
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdmesh.kv.piece import PieceHeader
    from pdmesh.transport.kv_transport import ReceivedPiece

DAMAGED, REFUSED, UNREAD, TAKEN, LATE = "damaged", "refused", "unread", "TAKEN", "late"

#: Shares of the pieces.
DAMAGED_SHARE, LATE_SHARE = 0.05, 0.05


def write_sitecustomize(folder: Path) -> None:
    """Make ``folder``, once on PYTHONPATH, do `install` in every Python process."""
    lines = ("import sys", f"sys.path.append({str(Path(__file__).parents[2])!r})", f"from {__name__} import install")
    (folder / "sitecustomize.py").write_text("\n".join((*lines, f"install({str(folder)!r})", "")))


def install(name: str) -> None:
    from pdmesh.transport import reading

    folder, rng = Path(name), random.Random(os.getpid())
    waiting: set[int] = set()  # where the payloads of damaged pieces lie that nobody has looked at yet
    read_memory = reading.read_memory

    def tell(what: str) -> None:
        with (folder / f"{os.getpid()}.pieces").open("a") as file:
            file.write(what + "\n")

    def read_badly(pid: int, address: int, num_bytes: int, out_address: int) -> None:
        from pdmesh.transport.prefix import HEAD_BYTES, find_piece

        watch_reader()
        read_memory(pid, address, num_bytes, out_address)
        for payload in [payload for payload in waiting if out_address <= payload < out_address + num_bytes]:
            waiting.discard(payload)
            tell(UNREAD)
        message = memoryview((ctypes.c_ubyte * num_bytes).from_address(out_address))
        found, pieces = find_piece(message), []
        while found is not None:
            pieces += [found] if found.payload_bytes else []
            found = find_piece(message, found.end)
        if not pieces or not (folder / "on").exists():
            return
        drawn = rng.random()
        if drawn < DAMAGED_SHARE:
            piece = rng.choice(pieces)
            payload = out_address + piece.start + HEAD_BYTES
            at = payload + rng.randrange(piece.payload_bytes)
            ctypes.c_ubyte.from_address(at).value ^= 1 << rng.randrange(8)
            waiting.add(payload)
            tell(DAMAGED)
        elif drawn < DAMAGED_SHARE + LATE_SHARE:
            tell(LATE)
            time.sleep(rng.uniform(0, 0.1))

    @functools.cache
    def watch_reader() -> None:
        # Not before there is something to read: services that take no pieces do not import it.
        from pdmesh.kv import peer_reads
        from pdmesh.kv.intake import PageIntake

        peer_reads.__dict__["read_memory"] = read_memory  # what says where KV lies is no piece
        copy = PageIntake._copy

        def copy_and_tell(
            self: PageIntake, header: PieceHeader, piece: ReceivedPiece, fetch: Callable[[], str | None]
        ) -> str | None:
            fault = copy(self, header, piece, fetch)
            where = ctypes.addressof(ctypes.c_char.from_buffer(piece.payload)) if len(piece.payload) else 0
            if where in waiting:
                waiting.discard(where)
                tell(REFUSED if fault == "checksum" else TAKEN)
            return fault

        PageIntake._copy = copy_and_tell  # type: ignore[method-assign]

    reading.read_memory = read_badly


def counted(folder: Path) -> Counter[str]:
    """What all processes told so far. Pieces that are damaged and none of the rest lie in a buffer yet."""
    return Counter(line for file in folder.glob("*.pieces") for line in file.read_text().splitlines())
