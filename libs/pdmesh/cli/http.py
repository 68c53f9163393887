"""How the commands reach the gateway of a mesh."""

from __future__ import annotations

import ssl
from pathlib import Path

import anyio
import httpx

from pdmesh.cli.state import StateFolder
from pdmesh.config import MeshConfig, SecurityConfig
from pdmesh.errors import PdmeshError

_CONNECT_TIMEOUT_S = 5.0
_FIRST_DELAY_S = 0.02
_MAX_DELAY_S = 0.5


def base_url(http_address: str, security: SecurityConfig) -> str:
    """The gateway's URL as seen from this machine; a wildcard bind is dialled on loopback."""
    host, _, port = http_address.rpartition(":")
    host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "::": "[::1]"}.get(host, host)
    return f"{'https' if security.tls_cert else 'http'}://{host}:{port}"


def trust(security: SecurityConfig) -> ssl.SSLContext | bool:
    """What to check the gateway's certificate against: the configured authority, else the certificate itself."""
    if security.tls_cert is None:
        return True
    context = ssl.create_default_context(cafile=str(security.tls_ca or security.tls_cert))
    context.check_hostname = False  # dialled by loopback address, trusted by its file
    return context


def api_key(security: SecurityConfig) -> str | None:
    """A key that the gateway takes, if it asks for one."""
    if security.api_key is not None:
        return security.api_key
    if security.api_keys_file is None or security.api_keys_file.suffix == ".toml":  # which holds hashes only
        return None
    return next(iter(Path(security.api_keys_file).read_text(encoding="utf-8").split()), None)


async def is_live(url: str, security: SecurityConfig) -> bool:
    """Whether the service at ``url`` answers its ``/live`` with 200; the caller sets the deadline."""
    verify = trust(security) if security.tls_cert is not None else False  # nothing to verify
    try:
        async with httpx.AsyncClient(base_url=url, verify=verify, timeout=None, trust_env=False) as client:
            return (await client.get("/live")).status_code == 200
    except httpx.TransportError:
        return False


async def wait_until_ready(url: str, security: SecurityConfig) -> None:
    """Ask ``/ready`` until it says 200; the caller sets the deadline."""
    delay_s = _FIRST_DELAY_S
    async with httpx.AsyncClient(base_url=url, verify=trust(security), timeout=5.0, trust_env=False) as client:
        while True:
            try:
                if (await client.get("/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass  # not there yet, or being restarted
            await anyio.sleep(delay_s)
            delay_s = min(2 * delay_s, _MAX_DELAY_S)


def gateway_client(config: MeshConfig, state: StateFolder, url: str | None, *, read_timeout_s: float) -> httpx.Client:
    """A client of the gateway at ``url``, else of the mesh on this machine. Raises PdmeshError if there is none."""
    if url is None:
        record = state.read()
        if record is None or not record.http_address:
            raise PdmeshError(f"no mesh named {state.name!r} is running: start one with `pdmesh up`, or give --url")
        url = base_url(record.http_address, config.security)
    key = api_key(config.security)
    return httpx.Client(
        base_url=url,
        headers={} if key is None else {"Authorization": f"Bearer {key}"},
        verify=trust(config.security),
        timeout=httpx.Timeout(read_timeout_s, connect=_CONNECT_TIMEOUT_S),
    )
