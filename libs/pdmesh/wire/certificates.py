"""A service's certificate, key and authority, read again once their files have changed.

Open connections keep their certificates. If new files cannot be used (half of a new pair is written, or the two do not
match), this is logged. The previous certificates then stay in use.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from pdmesh.config import SecurityConfig
from pdmesh.errors import ConfigError
from pdmesh.late_logger import late_logger
from pdmesh.watched_file import WatchedFile


@dataclass(frozen=True, slots=True)
class Certificates:
    """Contents of the certificate files, in PEM."""

    certificate: bytes
    key: bytes
    authority: bytes | None


class CertificateFiles:
    """The files of ``security.tls_cert``, ``tls_key`` and ``tls_ca``. For any thread."""

    def __init__(self, security: SecurityConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError if none are configured, or one cannot be read."""
        if security.tls_cert is None or security.tls_key is None:
            raise ConfigError("no certificate is configured: set security.tls_cert and security.tls_key")
        self._certificate, self._key, self._authority = security.tls_cert, security.tls_key, security.tls_ca
        self._files = [
            WatchedFile(path, setting, clock)
            for path, setting in (
                (security.tls_cert, "security.tls_cert"),
                (security.tls_key, "security.tls_key"),
                (security.tls_ca, "security.tls_ca"),
            )
            if path is not None
        ]
        self._lock = threading.Lock()
        self.current = self._read()

    def renewed(self) -> Certificates | None:
        """Return the files' contents if they changed and are usable, and make them `current`; else None.

        Log unusable files. Within `LOOK_S` of the last look, return None.
        """
        with self._lock:
            if not any(file.has_changed() for file in self._files):
                return None
            try:
                certificates = self._read()
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(self._certificate, self._key)
                if certificates.authority is not None:
                    context.load_verify_locations(cadata=certificates.authority.decode())
            except (ConfigError, OSError, ValueError) as error:  # ssl.SSLError is an OSError
                late_logger().warning("cannot load new certificates; the previous ones stay in use", reason=str(error))
                return None
            if certificates == self.current:
                return None
            self.current = certificates
            late_logger().info("certificates reloaded", certificate=str(self._certificate))
            return certificates

    def _read(self) -> Certificates:
        authority = None if self._authority is None else _read(self._authority)
        return Certificates(_read(self._certificate), _read(self._key), authority)


def server_credentials(files: CertificateFiles, on_handshake: Callable[[], None]) -> grpc.ServerCredentials:
    """Return credentials that look for new certificates at each handshake.

    ``on_handshake`` is called first, on a thread of gRPC's.
    """
    configuration: Any = grpc.ssl_server_certificate_configuration

    def made(certificates: Certificates) -> Any:
        return configuration([(certificates.key, certificates.certificate)], certificates.authority)

    def fetch() -> Any:
        on_handshake()
        renewed = files.renewed()
        return None if renewed is None else made(renewed)

    dynamic: Any = grpc.dynamic_ssl_server_credentials
    credentials: grpc.ServerCredentials = dynamic(
        made(files.current), fetch, require_client_authentication=files.current.authority is not None
    )
    return credentials


def channel_credentials(certificates: Certificates) -> grpc.ChannelCredentials:
    """Return a client's credentials for the connections of one channel."""
    return grpc.ssl_channel_credentials(
        root_certificates=certificates.authority,
        private_key=certificates.key,
        certificate_chain=certificates.certificate,
    )


def keep_renewed(context: ssl.SSLContext, security: SecurityConfig) -> None:
    """Let a server's ``context`` look for new certificates at each handshake, and use them in later ones."""
    files = CertificateFiles(security)

    def look(_connection: object, _name: object, of: ssl.SSLContext) -> None:
        if files.renewed() is not None and security.tls_cert is not None:
            of.load_cert_chain(security.tls_cert, security.tls_key)

    context.sni_callback = look


def expires_at(path: Path | None) -> float | None:
    """Return when a certificate expires, in Unix time; None if there is none, or it cannot be read."""
    if path is None:
        return None
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc.timestamp()
    except (OSError, ValueError):
        return None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
