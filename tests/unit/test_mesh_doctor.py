"""What `pdmesh doctor --mesh` makes of what instances found."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pdmesh.cli.mesh_doctor import findings, print_findings
from pdmesh.cli.tls import make_certificates
from pdmesh.model import InstanceId
from pdmesh.wire.certificates import expires_at
from pdmesh.wire.messages import InstanceChecked, MeshChecked, PeerProblem, PeersChecked

NOW = 1.8e9
DAY_S = 86400.0


def mesh(
    checked: PeersChecked | None, *, clock_offset_s: float = 0.0, certificate_expires_at: float | None = None
) -> MeshChecked:
    row = InstanceChecked(instance_id=InstanceId("decode-0"), host="h1", checked=checked, clock_offset_s=clock_offset_s)
    return MeshChecked(version="1", certificate_expires_at=certificate_expires_at, instances=(row,), gateways=())


def checked(*problems: PeerProblem, version: str = "1", expires: float | None = None) -> PeersChecked:
    return PeersChecked(check_id=1, problems=problems, wall_time_s=NOW, version=version, certificate_expires_at=expires)


def test_a_mesh_without_problems_has_no_findings() -> None:
    assert list(findings(mesh(checked(expires=NOW + 30 * DAY_S)), NOW)) == []


@pytest.mark.parametrize(
    ("answer", "problem", "advice"),
    [
        (mesh(None), "did not answer", "log"),
        (mesh(checked(version="2")), "version 2, the scheduler has 1", "same version"),
        (mesh(checked(), clock_offset_s=-3.0), "-3.0 s off", "NTP"),
        (mesh(checked(expires=NOW + 2 * DAY_S)), "ends in 2.0 days", "read them again"),
        (mesh(checked(), certificate_expires_at=NOW - DAY_S), "ended 1.0 days ago", "replace"),
        (mesh(checked(PeerProblem(kind="kv to", peer="p", reason="no"))), "kv to p: no", "UCX_TCP_PORT_RANGE"),
        (mesh(checked(PeerProblem(kind="kv from", peer="p", reason="no"))), "kv from p: no", "mesh_token"),
        (mesh(checked(PeerProblem(kind="tokens to", peer="g", reason="no"))), "tokens to g: no", "token_address"),
        (mesh(checked(PeerProblem(kind="tokens to", peer="g", reason="no trust"))), "no trust", "authority"),
    ],
)
def test_each_problem_has_a_sentence_of_what_to_do(answer: MeshChecked, problem: str, advice: str) -> None:
    (found,) = findings(answer, NOW)
    assert problem in found.problem
    assert advice in found.advice


def test_problems_with_one_remedy_stand_above_it_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    problems = [
        PeerProblem(kind=f"kv {way}", peer="decode-1", reason="nothing arrived for 2 s") for way in ("to", "from")
    ]
    answer = mesh(checked(*problems, version="2"))
    print_findings(answer, list(findings(answer, NOW)))
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "1 instances, 0 KV paths, 0 token paths: 3 problems"
    assert max(map(len, lines)) <= 60
    assert lines[:3] == [
        "decode-0 on h1: kv to decode-1: nothing arrived for 2 s",
        "decode-0 on h1: kv from decode-1: nothing arrived for 2 s",
        "  → let the two hosts reach each other on UCX's ports",
    ]
    assert lines[-2:] == [
        "decode-0 on h1: version 2, the scheduler has 1",
        "  → install the same version of pdmesh everywhere",
    ]


@pytest.mark.parametrize("days", [1, 300, 20_000])
def test_when_a_certificate_ends_is_read_from_it(tmp_path: Path, days: int) -> None:
    """Beyond 2049 in the other of the two forms."""
    make_certificates(tmp_path, hosts=["localhost"], days=days)
    said = subprocess.run(
        ["openssl", "x509", "-enddate", "-noout", "-in", "mesh.pem"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
    ).stdout
    ends = datetime.strptime(said.strip().removeprefix("notAfter="), "%b %d %H:%M:%S %Y GMT").replace(tzinfo=UTC)
    assert expires_at(tmp_path / "mesh.pem") == ends.timestamp()


@pytest.mark.parametrize(
    "content", [b"", b"nonsense", b"-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"]
)
def test_what_is_no_certificate_has_no_end(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file.pem").write_bytes(content)
    assert expires_at(tmp_path / "file.pem") is None
    assert expires_at(tmp_path / "none.pem") is None
    assert expires_at(None) is None
