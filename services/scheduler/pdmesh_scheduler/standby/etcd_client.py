"""An HTTP client of etcd that reloads its authority and certificates when their files change."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import httpx
import structlog

from pdmesh.cluster_config import StandbyConfig
from pdmesh.errors import ConfigError
from pdmesh.watched_file import WatchedFile

log = structlog.get_logger()


class EtcdClient:
    """HTTP client of etcd's members. Reconnects with the new certificates when one of their files has changed.

    Use it as an async context manager.
    """

    def __init__(self, config: StandbyConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Raise ConfigError if the certificates cannot be used."""
        self._config = config
        self._client = self._open()
        self._files = [
            WatchedFile(path, setting, clock)
            for path, setting in (
                (config.etcd_ca, "standby.etcd_ca"),
                (config.etcd_cert, "standby.etcd_cert"),
                (config.etcd_key, "standby.etcd_key"),
            )
            if path is not None
        ]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def post(self, url: str, json: Mapping[str, Any]) -> httpx.Response:
        """Post a question, after reloading changed certificates. Raises httpx.HTTPError."""
        await self._renew()
        return await self._client.post(url, json=json)

    async def _renew(self) -> None:
        if not [file for file in self._files if file.has_changed()]:
            return
        try:
            renewed = self._open()
        except ConfigError as error:  # perhaps one file of the pair is new
            log.warning("cannot load new certificates; the previous ones stay in use", reason=str(error))
            return
        before, self._client = self._client, renewed
        await before.aclose()

    def _open(self) -> httpx.AsyncClient:
        config = self._config
        if (config.etcd_cert is None) != (config.etcd_key is None):
            raise ConfigError("standby.etcd_cert and standby.etcd_key go together: set both or neither")
        try:
            trusts = ssl.create_default_context(cafile=config.etcd_ca)
            if config.etcd_cert is not None:
                trusts.load_cert_chain(config.etcd_cert, config.etcd_key)
        except OSError as error:
            raise ConfigError(f"standby.etcd_ca, etcd_cert or etcd_key cannot be read: {error}") from error
        return httpx.AsyncClient(verify=trusts, trust_env=False, timeout=config.lease_s)


def refusal_of(error: Exception) -> str:
    """Return why a member could not be asked, and for TLS errors also what to do."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    match cause:
        case ssl.SSLCertVerificationError():
            return (
                f"its certificate is not accepted ({cause.verify_message}): standby.etcd_ca must hold the authority "
                "that signed it, and standby.etcd_endpoints the name that it is for"
            )
        case ssl.SSLError(reason=str(reason)) if "ALERT" not in reason:
            return f"TLS failed ({reason}): use http:// if etcd serves without TLS"
        case None if not isinstance(error, (httpx.ReadError, httpx.RemoteProtocolError)):
            return str(error) or type(error).__name__
        case _:  # an alert, which may be lost when the connection breaks
            return (
                "it closed the connection: it may need https://, or a standby.etcd_cert of the authority that it "
                "trusts for clients, which has not expired"
            )
