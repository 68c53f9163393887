"""API keys of the HTTP and gRPC edges."""

from __future__ import annotations

import hashlib
import hmac

from pdmesh.config import SecurityConfig
from pdmesh.errors import ConfigError, RequestRejected


class ApiKeys:
    """The keys one of which a client must show; none means that everybody may enter."""

    def __init__(self, keys: frozenset[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    @classmethod
    def load(cls, security: SecurityConfig) -> ApiKeys:
        """Keys from the file, one a line (``#`` begins a comment), and the single one. Raises ConfigError."""
        keys = {security.api_key} if security.api_key else set[str]()
        if security.api_keys_file is not None:
            try:
                lines = security.api_keys_file.read_text(encoding="utf-8").splitlines()
            except (OSError, ValueError) as error:
                raise ConfigError(f"security.api_keys_file: cannot read {security.api_keys_file}: {error}") from error
            from_file = {line.strip() for line in lines if line.strip() and not line.strip().startswith("#")}
            if not from_file:
                raise ConfigError(f"security.api_keys_file: {security.api_keys_file} holds no key")
            keys |= from_file
        return cls(frozenset(keys))

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, authorization: str | None) -> None:
        """Check an ``Authorization`` header. Raises RequestRejected (401). Takes the same time for every key."""
        if not self._digests:
            return
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorized("You didn't provide an API key: send it as `Authorization: Bearer KEY`.")
        given = _digest(key.strip())
        if not sum(hmac.compare_digest(given, digest) for digest in self._digests):
            raise _unauthorized("Incorrect API key provided.")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _unauthorized(message: str) -> RequestRejected:
    return RequestRejected(message, status=401, code="invalid_api_key")
