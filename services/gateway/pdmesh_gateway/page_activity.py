"""Activity of the mesh for the web page: one stream from the scheduler, shared by all watchers.

The scheduler is asked for its activity only while a page watches. A frame is encoded once. A watcher that reads too
slowly misses frames, and delays neither the other watchers nor the mesh.
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

#: Limit of pages that watch at once. Each costs an encoded frame's bytes a few times a second.
MAX_WATCHERS = 32

#: Limit of the frames that wait for one watcher. The watcher misses the frames beyond.
MAX_FRAMES_AHEAD = 8


class ActivityHub:
    """Distributor of the scheduler's frames to the watchers."""

    def __init__(self, model: str, latencies: RecentLatencies, ask: Callable[[], None]) -> None:
        """``ask`` requests a frame from the scheduler and never blocks.

        The hub calls ``ask`` for the first watcher only. The caller of `publish` requests the next frame while
        `is_watched`.
        """
        self._model = model
        self._latencies = latencies
        self._ask = ask
        self._watchers: dict[MemoryObjectSendStream[bytes], None] = {}

    @property
    def is_watched(self) -> bool:
        """Whether any page watches."""
        return bool(self._watchers)

    def publish(self, activity: Activity) -> None:
        """Encode a frame of the scheduler, and send it to each watcher that has room."""
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
            # A slow watcher continues with a later frame.
            with suppress(anyio.WouldBlock, anyio.BrokenResourceError):
                watcher.send_nowait(frame)

    @asynccontextmanager
    async def frames(self) -> AsyncGenerator[MemoryObjectReceiveStream[bytes]]:
        """Yield a stream of frames, encoded as server-sent events. Raises RequestRejected (429) at `MAX_WATCHERS`."""
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
                # Discards values from before this watcher.
                self._latencies.take_new()
                self._ask()
            try:
                yield receive
            finally:
                del self._watchers[send]


def _instance(status: InstanceStatus) -> dict[str, Any]:
    """Return an instance's status in the page's words."""
    state = "serving" if status.state == "up" else status.state
    # msgspec would omit fields that have their defaults.
    plain = {name: getattr(status, name) for name in status.__struct_fields__}
    return {**plain, "id": status.instance_id, "state": state}


def _gone(gone: GoneInstance) -> dict[str, Any]:
    """Return a missing instance as a row like the others, with zero counts."""
    nothing = (name for name in InstanceStatus.__struct_fields__ if name.startswith("num_"))
    plain = {name: getattr(gone, name) for name in gone.__struct_fields__}
    return {**dict.fromkeys(nothing, 0), **plain, "id": gone.instance_id, "gone": True}
