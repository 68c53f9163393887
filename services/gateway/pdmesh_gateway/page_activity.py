"""What the mesh does now, for whoever watches the page: one stream from the scheduler, shared by all watchers.

The scheduler is asked for its activity only while somebody watches. A frame is encoded once; a watcher that reads too
slowly misses frames, and holds up neither the others nor the mesh.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from pdmesh.errors import RequestRejected
from pdmesh.wire.messages import Activity, GoneInstance, InstanceStatus, in_order
from pdmesh_gateway.gateway_metrics import RecentLatencies

#: Pages that may watch at once. Each costs an encoded frame's bytes a few times a second.
MAX_WATCHERS = 32

#: Frames that wait for one watcher; what comes when they are full is lost to it.
MAX_FRAMES_AHEAD = 8


class ActivityHub:
    """Hands the scheduler's frames to those who watch."""

    def __init__(self, model: str, latencies: RecentLatencies, ask: Callable[[], None]) -> None:
        """``ask`` asks the scheduler for a frame; it never blocks. It is called for the first watcher alone: whoever
        takes a frame from the scheduler asks for the next one while somebody watches.
        """
        self._model = model
        self._latencies = latencies
        self._ask = ask
        self._watchers: dict[MemoryObjectSendStream[bytes], None] = {}

    @property
    def is_watched(self) -> bool:
        """Whether anybody wants frames."""
        return bool(self._watchers)

    def publish(self, activity: Activity) -> None:
        """A frame of the scheduler's."""
        state = activity.state
        shown: list[InstanceStatus | GoneInstance] = [*state.instances, *state.gone]
        fields = {
            **msgspec.to_builtins(msgspec.structs.replace(state, instances=(), gone=(), events=())),
            "instances": [
                _instance(each) if isinstance(each, InstanceStatus) else _gone(each) for each in in_order(shown)
            ],
            "at": state.at,
            "events": state.events,
            "unready_reason": None if state.ready else state.reason,
            "now_s": activity.now_s,
            "model": self._model,
            "requests": activity.requests,
            "steps": activity.steps,
            "moves": activity.moves,
            "marks": activity.marks,
            **self._latencies.percentiles(),
            **self._latencies.take_new(),
        }
        frame = b"data: " + msgspec.json.encode(fields) + b"\n\n"
        for watcher in tuple(self._watchers):
            with suppress(anyio.WouldBlock, anyio.BrokenResourceError):  # it goes on with a frame that it can take
                watcher.send_nowait(frame)

    @asynccontextmanager
    async def frames(self) -> AsyncGenerator[MemoryObjectReceiveStream[bytes]]:
        """Frames as server-sent events, from now on. Raises RequestRejected (429) if too many watch."""
        if len(self._watchers) >= MAX_WATCHERS:
            raise RequestRejected(
                f"{MAX_WATCHERS} pages are already watching this gateway. Close one, or use another gateway.",
                status=429,
                code="too_many_watchers",
                retry_after_s=10,
            )
        send, receive = anyio.create_memory_object_stream[bytes](MAX_FRAMES_AHEAD)
        with send, receive:
            self._watchers[send] = None
            if len(self._watchers) == 1:
                self._latencies.take_new()  # from before anybody watched
                self._ask()
            try:
                yield receive
            finally:
                del self._watchers[send]


def _instance(status: InstanceStatus) -> dict[str, Any]:
    """Return an instance's status in the page's words."""
    state = "serving" if status.state == "up" else status.state
    # msgspec leaves out what has its default
    plain = {name: getattr(status, name) for name in status.__struct_fields__}
    return {**plain, "id": status.instance_id, "state": state}


def _gone(gone: GoneInstance) -> dict[str, Any]:
    """Return an instance that is not there as a row beside the others."""
    nothing = (name for name in InstanceStatus.__struct_fields__ if name.startswith("num_"))
    plain = {name: getattr(gone, name) for name in gone.__struct_fields__}
    return {**dict.fromkeys(nothing, 0), **plain, "id": gone.instance_id, "gone": True}
