"""Errors, by the reaction that a caller can choose.

::

    PdmeshError
    ├── ConfigError            fix the configuration; a process that meets it at start exits with code 2
    ├── ServiceSuperseded      this process must end, though nothing in it failed; start it again
    ├── RequestRejected        the client must change or repeat its request (carries status, code, retry-after)
    ├── InstanceUnavailable    try another instance, or the same one later
    ├── KvTransferError        the KV did not arrive; it can be recomputed from the transcript
    └── ProtocolError          a peer broke the contract: a bug or a version mismatch; drop that peer's stream

``assert`` is for our own invariants only.
"""

from __future__ import annotations


class PdmeshError(Exception):
    """Base of every error that pdmesh raises on purpose."""


class ConfigError(PdmeshError):
    """A setting, a checkpoint or a file named by a setting is wrong. The message names it and says what to do."""


class ServiceSuperseded(PdmeshError):
    """A service must end, though nothing in it failed: another one has taken over. The message says what to do."""


class RequestRejected(PdmeshError):
    """Rejection of a request, in the shape of an OpenAI error.

    ``retry_after_s`` is set if the same request may succeed later (429, 503). For ``reject_ttl_s`` similar requests
    would be rejected, too.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        reject_ttl_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.reject_ttl_s = reject_ttl_s

    @property
    def type(self) -> str:
        """Type of the error in OpenAI's words, which follows from the status."""
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"


class InstanceUnavailable(PdmeshError):
    """A peer process cannot be reached or is going away."""


class KvTransferError(PdmeshError):
    """A KV transfer failed or ran out of time; the request can be prefilled again."""


class ProtocolError(PdmeshError):
    """A frame or piece breaks the wire contract."""


class OutboxFull(PdmeshError):
    """A peer reads slower than we write and its bounded outbox is full."""


def leaves(error: BaseException) -> list[BaseException]:
    """Return the errors in a nested exception group; any other error alone."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for nested in error.exceptions for leaf in leaves(nested)]
