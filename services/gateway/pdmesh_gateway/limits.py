"""Limits of the requests and bytes that the gateway holds at once."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import anyio

from pdmesh.errors import RequestRejected

#: Size up to which a body is not limited as a large one, so that small requests arrive however many large ones do.
SMALL_BODY_BYTES = 64 * 1024

#: Minimum age of an arriving body that may be cancelled to make room for others.
UPLOAD_GRACE_S = 2.0


class Upload:
    """An arriving body.

    `add` counts each part; receive it within ``scope``, which is cancelled if others need the room.

    ``was_given_up`` is set in this case.
    """

    def __init__(self, admission: RequestLimiter) -> None:
        self._admission = admission
        self.scope = anyio.CancelScope()
        self.began_s = anyio.current_time()
        self.num_bytes = 0
        self.was_given_up = False

    @property
    def num_large_bytes(self) -> int:
        return max(0, self.num_bytes - SMALL_BODY_BYTES)

    def add(self, num_bytes: int) -> None:
        """Count an arrived part; cancel the longest-running other uploads if it needs their room.

        Raise RequestRejected if there is still no room. Ignored if this upload was cancelled.
        """
        self._admission.grow(self, num_bytes)


class RequestLimiter:
    """Limiter of running requests and of the bytes held for them. The error at a limit is 429 with Retry-After.

    A body counts by the bytes that have arrived, not by the announced length. Large bodies share half of all bytes. If
    there is no room, the oldest arriving bodies are cancelled, so that no client can block others by sending slowly.
    """

    def __init__(self, *, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        #: Arriving bodies, oldest first, and the sum of their large bytes.
        self._uploads: dict[Upload, None] = {}
        self._num_large_bytes = 0
        self.num_requests = 0
        self.num_bytes = 0

    @contextmanager
    def upload(self) -> Generator[Upload]:
        """Yield an arriving body, whose bytes count until the block ends or the body is cancelled."""
        upload = Upload(self)
        self._uploads[upload] = None
        try:
            yield upload
        finally:
            self._end(upload)

    def grow(self, upload: Upload, num_bytes: int) -> None:
        """Count ``num_bytes`` more of an upload: see `Upload.add`. An upload that was cancelled is ignored."""
        if upload not in self._uploads:
            # The upload has just been cancelled.
            return
        large_bytes = max(0, upload.num_bytes + num_bytes - SMALL_BODY_BYTES) - upload.num_large_bytes
        self._make_room(num_bytes, large_bytes, upload)
        upload.num_bytes += num_bytes
        self.num_bytes += num_bytes
        self._num_large_bytes += large_bytes

    def _make_room(self, num_bytes: int, num_large_bytes: int, upload: Upload | None = None) -> None:
        """Make room for ``num_bytes``, including ``num_large_bytes`` of large bodies.

        Cancels the longest-running uploads except ``upload``. Raises RequestRejected if this is not enough.
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
        """Count requests and bytes within the block. Raises RequestRejected at a limit.

        At the limit of bytes, cancels the longest-running uploads if this makes enough room.
        """
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
