"""Access of commands to the gateway of a mesh."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import anyio
from anyio.abc import ByteStream

from pdmesh.cli.state_folder import StateFolder
from pdmesh.config import MeshConfig, SecurityConfig
from pdmesh.errors import PdmeshError
from pdmesh.host import is_loopback
from pdmesh.settings import CLIENT_KEY_VARIABLE

if TYPE_CHECKING:  # slow to import, and not needed by a supervisor
    import httpx

_CONNECT_TIMEOUT_S = 5.0
_MAX_STATUS_LINE = 1024
_FIRST_DELAY_S = 0.02
_MAX_DELAY_S = 0.5


def base_url(http_address: str, security: SecurityConfig) -> str:
    """Return the gateway's URL as seen from this machine; a wildcard bind is dialled on loopback."""
    host, _, port = http_address.rpartition(":")
    host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "::": "[::1]"}.get(host, host)
    return f"{'https' if security.tls_cert else 'http'}://{host}:{port}"


def trust(security: SecurityConfig) -> ssl.SSLContext | bool:
    """Return httpx's ``verify`` for the gateway: True without configured TLS, which means the default authorities.

    With TLS, return a context that trusts the configured authority, else the configured certificate itself. That
    context does not compare host names.
    """
    if security.tls_cert is None:
        return True
    context = ssl.create_default_context(cafile=str(security.tls_ca or security.tls_cert))
    context.check_hostname = False  # dialled by loopback address, trusted by its file
    return context


async def is_live(url: str, security: SecurityConfig) -> bool:
    """Return whether the service at ``url`` answers its ``/live`` with 200. The caller sets the deadline."""
    return await _answers(url, "/live", security)


async def wait_until_ready(url: str, security: SecurityConfig) -> None:
    """Ask ``/ready`` until it answers 200. The caller sets the deadline."""
    delay_s = _FIRST_DELAY_S
    while True:
        with anyio.move_on_after(_CONNECT_TIMEOUT_S):
            if await _answers(url, "/ready", security):
                return
        await anyio.sleep(delay_s)
        delay_s = min(2 * delay_s, _MAX_DELAY_S)


async def _answers(url: str, path: str, security: SecurityConfig) -> bool:
    """Return whether the service answers a GET with 200."""
    address = urlsplit(url)
    host, port = str(address.hostname), int(address.port or 0)
    request = f"GET {path} HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n\r\n"
    answer = b""
    try:
        stream: ByteStream = (
            await anyio.connect_tcp(host, port, ssl_context=context, tls_standard_compatible=False)
            if isinstance(context := trust(security), ssl.SSLContext)
            else await anyio.connect_tcp(host, port)
        )
        async with stream:
            await stream.send(request.encode())
            while b"\n" not in answer and len(answer) < _MAX_STATUS_LINE:
                answer += await stream.receive()
    except (OSError, anyio.BrokenResourceError, anyio.EndOfStream):
        return False  # not there yet, or restarting
    return answer.split(maxsplit=2)[1:2] == [b"200"]


@dataclass(frozen=True, slots=True)
class Target:
    """The gateway that a command talks to, and the key that it shows.

    Without a `url`, the mesh on this machine is used. `given_key` is from a flag or the environment, for this command
    only.
    """

    config: MeshConfig
    state: StateFolder
    url: str | None = None
    given_key: str | None = None

    @property
    def key(self) -> str | None:
        """The given key, else the first key in the mesh's settings; None if there is none.

        A TOML file counts as none, because it has only hashes of keys. Raise PdmeshError if a file of keys cannot be
        read.
        """
        security = self.config.security
        if self.given_key is not None or security.api_key is not None:
            return self.given_key or security.api_key
        if security.api_keys_file is None or security.api_keys_file.suffix == ".toml":
            return None
        try:
            return next(iter(security.api_keys_file.read_text(encoding="utf-8").split()), None)
        except (OSError, UnicodeError) as error:
            raise PdmeshError(f"cannot read security.api_keys_file {security.api_keys_file}: {error}") from error

    def client(self, *, read_timeout_s: float) -> httpx.Client:
        """Return an HTTP client for the gateway. Raises PdmeshError if no URL is given and no mesh serves here."""
        import httpx

        url, security = self.url, self.config.security
        if url is None:
            record = self.state.read()
            if record is None or not record.http_address:
                name = self.state.name
                raise PdmeshError(f"no mesh named {name!r} is running: start one with `pdmesh up`, or give --url")
            security = record.security(security)
            url = base_url(record.http_address, security)
        return httpx.Client(
            base_url=url,
            headers={}
            if self.key is None
            else {b"Authorization": f"Bearer {self.key}".encode("utf-8", "surrogateescape")},
            verify=trust(security),
            timeout=httpx.Timeout(read_timeout_s, connect=_CONNECT_TIMEOUT_S),
            trust_env=not is_loopback(httpx.URL(url).host),  # a proxy does not reach this machine
        )


def refusal(response: httpx.Response) -> str:
    """Return why a gateway refused, in its own words if it has any, with a remedy for known reasons."""
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"the gateway answered {response.status_code} {response.reason_phrase}"
    match response.status_code:
        case 401:
            return f"{message} Set {CLIENT_KEY_VARIABLE} to a key of this mesh (`pdmesh keys new NAME` makes one)."
        case 403 if "authorization" in response.request.headers:
            return (
                f"{message} The key in {CLIENT_KEY_VARIABLE}, --api-key or security.api_key is not allowed to do this."
            )
        case _:
            return message
