"""Certificates that every peer should refuse."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_expired(folder: Path) -> None:
    """Write ``expired.pem`` and ``expired.key``, signed by the authority in ``folder`` (`make_certificates`)."""
    (folder / "index.txt").touch()
    (folder / "serial").write_text("01")
    (folder / "ca.cnf").write_text(
        "[ca]\ndefault_ca = here\n[here]\ndatabase = index.txt\nserial = serial\nnew_certs_dir = .\n"
        "default_md = sha256\npolicy = any\ncopy_extensions = copy\n[any]\ncommonName = supplied\n"
    )
    request = "openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=pdmesh"
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    sign = "openssl ca -batch -notext -config ca.cnf -cert ca.pem -keyfile ca.key -in expired.csr -out expired.pem"
    for command in (
        [*request.split(), "-addext", names, "-keyout", "expired.key", "-out", "expired.csr"],
        [*sign.split(), "-startdate", "20200101000000Z", "-enddate", "20200201000000Z"],
    ):
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=30)
