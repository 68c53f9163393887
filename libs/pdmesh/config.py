"""One frozen configuration tree, built once per process: TOML file < environment < flags.

Every setting has three names that follow from its field: ``[worker] kv_cache_bytes`` in the file,
``PDMESH_WORKER_KV_CACHE_BYTES`` in the environment, and, where a command offers it,
``--kv-cache-bytes``. No other module reads the environment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityConfig:
    """Who may talk to us. A bind wider than loopback without TLS and a key refuses to start.

    `trusted_network` overrides that.
    """

    api_keys_file: Path | None = None  # one key a line; the HTTP and gRPC edges ask for one of them
    api_key: str | None = None  # or a single key
    mesh_token: str = ""  # shared secret of our own services
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None  # peers' certificates are checked against it (mutual TLS between services)
    trusted_network: bool = False  # the operator vouches for the network a wider bind is reachable from


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    host: str = LOOPBACK
    port: int = 8000
    grpc_port: int = 0  # protobuf service for typed clients; 0 takes a free port
    token_host: str = LOOPBACK  # where workers stream tokens to
    token_port: int = 0
    token_address: str | None = None  # what workers dial; default: token_host:token_port
    max_body_bytes: int = 32 * 1024 * 1024
    max_n: int = 128
    max_concurrent_requests: int = 4096
    max_queued_bytes: int = 512 * 1024 * 1024  # bodies and prompts held for requests under way
    body_timeout_s: float = 30.0  # a body that does not end
    request_timeout_s: float = 3600.0
    default_max_tokens: int | None = None  # for requests that do not say; None: up to the context length


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    host: str = LOOPBACK
    port: int = 0
    metrics_port: int = 0
    bundle: str = "fcfs"
    chunk_tokens: int = 512  # static chunk size, tokens of prefill per step
    plans_in_flight: int = 2
    max_queue_entries: int = 4096
    max_queue_s: float = 120.0
    lease_s: float = 5.0
    heartbeat_s: float = 1.0
    orphan_grace_s: float = 3.0  # after a restart: how long a request may wait to be claimed by an instance
    event_log: Path | None = None
    max_records: int = 10_000  # finished requests remembered for `pdmesh requests show`


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    instance_id: str | None = None  # default: role and a random suffix
    served_model_name: str | None = None
    dtype: str = "auto"  # auto: the checkpoint's; float32 | bfloat16
    device: str = "auto"  # auto: cuda if there is one, else cpu
    engine: str = "torch"  # torch | fake (a stand-in that takes no time, for tests and benchmarks)
    block_size: int = 16
    kv_cache_bytes: int = 256 * 1024 * 1024
    max_model_len: int | None = None  # default: the checkpoint's
    max_num_seqs: int = 64
    num_threads: int = 0  # 0: a fair share of the machine's cores
    metrics_port: int = 0
    deterministic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    transport: str = "ucx"  # ucx | memory (one process, tests)
    num_backends: int = 8  # requests an instance receives at once
    max_payload_bytes: int = 1024 * 1024
    num_send_buffers: int = 16
    num_receive_buffers: int = 16
    deadline_s: float = 120.0  # a whole transfer, from its grant
    no_progress_s: float = 10.0  # one piece
    ucx_tls: str | None = None  # passed to UCX as it is; None leaves UCX's own choice (and UCX_TLS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    log_level: str = "info"
    log_format: str = "auto"  # auto: console on a terminal, else json
    otlp_endpoint: str | None = None  # default: OTEL_EXPORTER_OTLP_ENDPOINT; none: no spans


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshConfig:
    """The whole tree. `model` is a directory or a hub id; None is the built-in demo model."""

    model: str | None = None
    scheduler_address: str = ""  # host:port that workers and gateways dial
    ready_fd: int | None = None  # an inherited pipe: one JSON line is written to it when the service can serve
    security: SecurityConfig = field(default_factory=SecurityConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
