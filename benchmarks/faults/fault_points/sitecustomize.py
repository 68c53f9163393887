"""Named points of a move at which a process of a mesh ends or stops itself; found by Python on PYTHONPATH.

`move_faults.py` starts a mesh with this folder on its path and MOVE_FAULTS_FOLDER set. A worker whose file
``INSTANCE.armed`` there names a point sends itself the signal that stands behind it when it comes to that point, and
renames the file to ``INSTANCE.hit``. Each token that a worker sends to a gateway is a line of ``INSTANCE.PID.tokens``,
with the kind of the transfer that brought its KV. Nothing of the product knows of this: methods are wrapped as their
modules are imported.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(os.environ.get("MOVE_FAULTS_FOLDER", ""))

_num_at: dict[str, int] = {}


def own_file(suffix: str) -> Path:
    """Return a file of this worker; a forked process learns its instance's name after modules are imported."""
    return FOLDER / f"{os.environ.get('PDMESH_WORKER_INSTANCE_ID', '')}.{suffix}"


def at(point: str) -> None:
    """The process has come to a point; "" is none."""
    if not point:
        return
    armed = own_file("armed")
    try:
        wanted, number, which = armed.read_text().split()
    except (OSError, ValueError):
        return
    if wanted != point.replace(" ", "_"):
        return
    _num_at[point] = _num_at.get(point, 0) + 1
    if _num_at[point] < int(which):
        return
    _num_at.clear()
    armed.rename(own_file("hit"))
    os.kill(os.getpid(), int(number))


def around(
    cls: Any, name: str, first: str = "", then: str = "", counts: Callable[..., bool] = lambda *args, **kwargs: True
) -> None:
    """Let the method come to ``first`` when it begins and to ``then`` when it has ended, if a call ``counts``."""
    inner = getattr(cls, name)

    def points(args: Any, kwargs: Any) -> tuple[str, str]:
        return (first, then) if counts(*args, **kwargs) else ("", "")

    @functools.wraps(inner)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        begins, ends = points(args, kwargs)
        at(begins)
        result = inner(*args, **kwargs)
        at(ends)
        return result

    @functools.wraps(inner)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        begins, ends = points(args, kwargs)
        at(begins)
        result = await inner(*args, **kwargs)
        at(ends)
        return result

    setattr(cls, name, awaited if inspect.iscoroutinefunction(inner) else wrapped)


# --- where the points are ---


def _worker_moves(module: ModuleType) -> None:
    around(module.MovingDecodes, "begin", "source: granted")
    around(module.MovingDecodes, "send_rest", then="source: stands still")


def _worker_copies(module: ModuleType) -> None:
    def of_move(_: Any, request: Any, *others: Any) -> bool:
        return request.state.move is not None

    around(module.LeavingCopies, "sent", "source: heard that it landed", "source: told that it landed", of_move)


def _worker_arrivals(module: ModuleType) -> None:
    def of_move(_: Any, request: Any, command: Any) -> bool:
        return bool(command.transfer.is_move)

    around(module.Arrivals, "expect", "target: asked", "target: reserved", of_move)
    around(module.Arrivals, "_take_transcript", then="target: has it")


def _kv_peer_reads(module: ModuleType) -> None:
    around(module.PeerReadWriter, "send", then="source: pages go over")


def _kv_outgoing(module: ModuleType) -> None:
    def commits(_: Any, address: bytes, header: Any, **more: Any) -> bool:
        return bool(header.kind.name == "COMMIT")

    around(module.PieceWriter, "send", then="source: pages go over")
    around(module.PieceWriter, "tell", "source: about to commit", "source: committed", commits)


def _kv_copy_in(module: ModuleType) -> None:
    cls = module.CopyIn
    place = cls.place

    @functools.wraps(place)
    def placing(self: Any, header: Any, blocks: Any) -> None:
        place(self, header, blocks)
        if self._num_context_tokens is None:  # of a move
            at("target: pages come")

    cls.place = placing
    around(cls, "_end_move", "target: a commit comes")


def _kv_context(module: ModuleType) -> None:
    def lands(_: Any, kind: Any, transfer: Any, address: bytes, **more: Any) -> bool:
        return kind.name == "LANDED" and bool(getattr(transfer, "transcript", b""))

    around(module.KvContext, "tell", "target: about to acknowledge", "target: acknowledged", lands)


def _worker_replies(module: ModuleType) -> None:
    inner = module.ToGateways.send
    begun: set[tuple[str, int]] = set()
    log = functools.cache(lambda name: os.open(name, os.O_CREAT | os.O_WRONLY | os.O_APPEND))

    @functools.wraps(inner)
    def sending(self: Any, request: Any, message: Any) -> None:
        if getattr(message, "token_id", None) is not None:
            incoming = request.state.incoming
            came_by = "NOTHING" if incoming is None else "MOVE" if incoming.is_move else "HAND_OVER"
            drawn = (message.request_id, message.epoch, message.index, message.token_id, came_by)
            os.write(log(own_file(f"{os.getpid()}.tokens")), f"{' '.join(map(str, drawn))}\n".encode())
            key = (message.request_id, request.state.received_by)
            if came_by == "MOVE" and key not in begun:
                begun.add(key)
                inner(self, request, message)
                at("target: goes on")
                return
        inner(self, request, message)

    module.ToGateways.send = sending


_WRAPPERS: dict[str, Callable[[ModuleType], None]] = {
    "pdmesh.worker.moves": _worker_moves,
    "pdmesh.worker.leaving_kv": _worker_copies,
    "pdmesh.worker.arrivals": _worker_arrivals,
    "pdmesh.kv.peer_reads": _kv_peer_reads,
    "pdmesh.kv.outgoing": _kv_outgoing,
    "pdmesh.kv.copy_in": _kv_copy_in,
    "pdmesh.kv.context": _kv_context,
    "pdmesh.worker.replies": _worker_replies,
}


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any, wrap: Callable[[ModuleType], None]) -> None:
        self._inner = inner
        self._wrap = wrap

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._inner.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        self._wrap(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        wrap = _WRAPPERS.pop(name, None)
        if wrap is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, wrap)
        return spec


if os.environ.get("MOVE_FAULTS_FOLDER"):
    sys.meta_path.insert(0, _Finder())
