"""What the gateway holds at once, and what it refuses when that is full."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import anyio

from pdmesh.errors import RequestRejected

#: So much of a body is nobody's burden: small requests come in however many large ones are on their way.
SMALL_BODY_BYTES = 64 * 1024

#: A body that has been on its way for longer gives way to others when there is no room for all.
UPLOAD_GRACE_S = 2.0


class Upload:
    """A body on its way: tell it of every part that has come, and read within its ``scope``."""

    def __init__(self, admission: RequestLimiter) -> None:
        self._admission = admission
        self.scope = anyio.CancelScope()
        self.began_s = anyio.current_time()
        self.num_bytes = 0
        self.was_given_up = False  # others needed the room

    @property
    def num_large_bytes(self) -> int:
        return max(0, self.num_bytes - SMALL_BODY_BYTES)

    def add(self, num_bytes: int) -> None:
        """Count what has come. Raises RequestRejected if there is no room for it."""
        self._admission.grow(self, num_bytes)


class RequestLimiter:
    """Counts requests under way and the bytes that are kept for them. Full means 429 with Retry-After.

    A body counts for what has come of it, not for what was announced. Large ones share half of all bytes. Where there
    is no room the oldest body on its way is given up, so that nobody can keep others out by sending slowly.
    """

    def __init__(self, *, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._uploads: dict[Upload, None] = {}  # oldest first
        self._num_large_bytes = 0  # of these
        self.num_requests = 0
        self.num_bytes = 0

    @contextmanager
    def upload(self) -> Generator[Upload]:
        """A body that is received within the block."""
        upload = Upload(self)
        self._uploads[upload] = None
        try:
            yield upload
        finally:
            self._end(upload)

    def grow(self, upload: Upload, num_bytes: int) -> None:
        """See `Upload.add`."""
        if upload not in self._uploads:
            return  # it has just been given up
        large_bytes = max(0, upload.num_bytes + num_bytes - SMALL_BODY_BYTES) - upload.num_large_bytes
        self._make_room(num_bytes, large_bytes, upload)
        upload.num_bytes += num_bytes
        self.num_bytes += num_bytes
        self._num_large_bytes += large_bytes

    def _make_room(self, num_bytes: int, num_large_bytes: int, upload: Upload | None = None) -> None:
        """Make room for so many bytes, so many of them of large bodies, by giving up the longest-running uploads
        (but not ``upload``). Raises RequestRejected if these are not enough.
        """
        excess = self.num_bytes + num_bytes - self._max_bytes
        large_excess = self._num_large_bytes + num_large_bytes - self._max_bytes // 2 if num_large_bytes else 0
        given_up: list[Upload] = []
        for other in self._uploads:
            if (excess <= 0 and large_excess <= 0) or anyio.current_time() < other.began_s + UPLOAD_GRACE_S:
                break
            if other is not upload and (excess > 0 or other.num_large_bytes):
                excess -= other.num_bytes
                large_excess -= other.num_large_bytes
                given_up.append(other)
        if excess > 0:
            raise _overloaded(f"requests under way take {self._max_bytes} bytes")
        if large_excess > 0:
            raise _overloaded("too many large requests are arriving")
        for other in given_up:
            other.was_given_up = True
            other.scope.cancel()
            self._end(other)

    def _end(self, upload: Upload) -> None:
        if upload in self._uploads:
            del self._uploads[upload]
            self.num_bytes -= upload.num_bytes
            self._num_large_bytes -= upload.num_large_bytes

    @contextmanager
    def hold(self, *, num_requests: int = 0, num_bytes: int = 0) -> Generator[None]:
        """Count within the block. Raises RequestRejected."""
        if self.num_requests + num_requests > self._max_requests:
            raise _overloaded(f"{self._max_requests} requests are under way")
        if num_bytes:
            self._make_room(num_bytes, 0)
        self.num_requests += num_requests
        self.num_bytes += num_bytes
        try:
            yield
        finally:
            self.num_requests -= num_requests
            self.num_bytes -= num_bytes


def _overloaded(what: str) -> RequestRejected:
    return RequestRejected(
        f"The server is overloaded: {what}. Try again later.",
        status=429,
        code="overloaded",
        retry_after_s=1,
    )
