"""What the gateway holds at once, and what it refuses when that is full."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from pdmesh.errors import RequestRejected


class Admission:
    """Counts requests under way and the bytes that are kept for them. Full means 429 with Retry-After."""

    def __init__(self, *, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self.num_requests = 0
        self.num_bytes = 0

    @contextmanager
    def hold(self, *, num_requests: int = 0, num_bytes: int = 0) -> Generator[None]:
        """Count within the block. Raises RequestRejected."""
        if self.num_requests + num_requests > self._max_requests:
            raise _overloaded(f"{self._max_requests} requests are under way")
        if self.num_bytes + num_bytes > self._max_bytes:
            raise _overloaded(f"requests under way hold {self._max_bytes} bytes")
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
        type="rate_limit_error",
        code="overloaded",
        retry_after_s=1,
    )
