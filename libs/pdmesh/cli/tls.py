"""`pdmesh tls dev-ca`: an authority for development, and a certificate of it for all services and clients."""

from __future__ import annotations

import ipaddress
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Argument, Option

from pdmesh.cli.command_group import Commands
from pdmesh.errors import ConfigError

if TYPE_CHECKING:
    from pdmesh.wire.roles import ServiceRole

app = Commands("tls", "Create certificates for development.")

#: Names by which services of one machine reach each other.
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")

_TIMEOUT_S = 30
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@app.command("dev-ca", example="pdmesh tls dev-ca ./tls")
def dev_ca(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="Folder; created if it does not exist.")] = Path("tls"),
    host: Annotated[
        list[str] | None, Option(help="Host name or IP address of a service, besides localhost; repeatable.")
    ] = None,
    days: Annotated[int, Option(min=1, max=825, help="Days that the certificates are valid.")] = 30,
    role: Annotated[
        Literal["worker", "gateway"] | None,
        Option(help="Role that the certificate is for; it cannot be used for any other."),
    ] = None,
) -> None:
    """Create a certificate authority in FOLDER, unless there is one, and a certificate for this mesh.

    For development only: any process that can read FOLDER can pose as any service.
    """
    from pdmesh.wire.roles import ServiceRole

    named = None if role is None else ServiceRole(role)
    make_certificates(folder, hosts=(*LOCAL_HOSTS, *(host or ())), days=days, role=named)
    name = role or "mesh"
    for setting, file in (("CERT", f"{name}.pem"), ("KEY", f"{name}.key"), ("CA", "ca.pem")):
        typer.echo(f"export PDMESH_SECURITY_TLS_{setting}={(folder / file).resolve()}")


def make_certificates(folder: Path, *, hosts: Sequence[str], days: int, role: ServiceRole | None = None) -> None:
    """Write ``ca.pem`` and ``ca.key``, unless they exist, and ``mesh.pem`` and ``mesh.key`` for ``hosts``.

    With a ``role``, the role names the last two files, and the certificate names the role. The certificate serves both
    ends, because services check each other's. Raise ConfigError if a file cannot be read or written.
    """
    try:
        if not folder.exists():
            folder.mkdir(mode=0o700, parents=True)
            (folder / ".gitignore").write_text("*\n")  # no commit may have the keys
    except OSError as error:
        raise ConfigError(f"cannot make {folder}: {error.strerror}") from error
    authority = [folder / "ca.pem", folder / "ca.key"]
    if not all(file.exists() for file in authority):
        _openssl(
            *(*_KEY, "-days", str(days), "-subj", "/CN=pdmesh development CA"),
            *("-addext", "basicConstraints=critical,CA:TRUE,pathlen:0"),
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
            *("-out", str(authority[0]), "-keyout", str(authority[1])),
        )
    names = ",".join(f"{'IP' if _is_address(host) else 'DNS'}:{host}" for host in hosts)
    names += "" if role is None else f",URI:{role.uri}"
    _openssl(
        *(*_KEY, "-days", str(days), "-subj", "/CN=pdmesh"),
        *("-CA", str(authority[0]), "-CAkey", str(authority[1])),
        *("-addext", "basicConstraints=critical,CA:FALSE", "-addext", f"subjectAltName={names}"),
        *("-addext", "extendedKeyUsage=serverAuth,clientAuth"),
        *("-out", str(folder / f"{role or 'mesh'}.pem"), "-keyout", str(folder / f"{role or 'mesh'}.key")),
    )


def _openssl(*options: str) -> None:
    try:
        subprocess.run(
            ["openssl", "req", "-x509", *options], check=True, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except FileNotFoundError as error:
        raise ConfigError("openssl is not installed: install it, or use certificates of your own") from error
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip().splitlines()[-1:] or [f"exit code {error.returncode}"]
        raise ConfigError(f"openssl cannot make the certificate (3.0 or later is needed): {reason[0]}") from error


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
