"""Settings around a mesh: standby schedulers, Kubernetes, and the supervisor of `pdmesh up`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from pdmesh.ranges import Duration, Port
from pdmesh.settings import one_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbyConfig:
    """Several schedulers: one leads, the others stand by."""

    store: Annotated[
        str,
        one_of("", "file", "etcd", "kubernetes"),
        "where schedulers agree which one of them leads: a file of one host, etcd, or a Lease of Kubernetes. Empty: "
        "there is one scheduler. It keeps what operators set, too, instead of `scheduler.operations_file`",
    ] = ""
    name: Annotated[str, "name of the lease: its key in etcd, or the Lease in Kubernetes"] = "pdmesh"
    file: Annotated[Path | None, "the file, for `store = file`"] = None
    lease_s: Annotated[
        float,
        Meta(ge=0.5, le=300),
        "time without a renewal after which a standby takes over; its leader stops a quarter of it before",
    ] = 3.0
    address: Annotated[
        str | None,
        "host:port by which workers and gateways reach this scheduler. Default: scheduler.host and its port",
    ] = None
    etcd_endpoints: Annotated[str, "addresses of etcd's members, comma-separated"] = "http://127.0.0.1:2379"
    etcd_ca: Annotated[Path | None, "authority that etcd's certificates are checked against"] = None
    etcd_cert: Annotated[Path | None, "certificate to show to etcd"] = None
    etcd_key: Annotated[Path | None, "private key of etcd_cert"] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesConfig:
    """The API server of Kubernetes, for the lease of a standby and for `pdmesh actuator`."""

    release: Annotated[
        str, "name of the chart's release: its StatefulSets are NAME-prefill, NAME-decode and NAME-mixed"
    ] = "mesh"
    api: Annotated[str, "URL of the API server"] = "https://kubernetes.default.svc"
    account: Annotated[Path, "folder with token, ca.crt and namespace of the service account"] = Path(
        "/var/run/secrets/kubernetes.io/serviceaccount"
    )
    metrics_port: Annotated[
        Port, "of `pdmesh actuator`: Prometheus, on telemetry.metrics_host; 0 takes a free port"
    ] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorConfig:
    """How `pdmesh up` looks after its services."""

    start_timeout_s: Annotated[
        Duration, "longest time for a service to start; a large checkpoint on a slow disk takes minutes"
    ] = 900.0

    # Constants.
    hang_s: float = 60.0  # silence after which a service is killed and started again
    log_max_bytes: int = 64 << 20  # largest log of a service; a larger one becomes NAME.log.1
    log_keep: int = 2  # number of renamed logs kept for each service
