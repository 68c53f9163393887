"""The settings of a process: one frozen tree, which `pdmesh.config_sources` builds once.

A setting's type has its limits and its meaning (`pdmesh.settings`). The tables of ``docs/configuration.md`` are made
from these types.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

from msgspec import Meta

from pdmesh.cluster_config import KubernetesConfig, StandbyConfig, SupervisorConfig
from pdmesh.model import Role
from pdmesh.policy.config import PolicyConfig
from pdmesh.ranges import Amount, AnyCount, Count, Duration, Port
from pdmesh.settings import HANDED_DOWN, SECRET, TOP_TEN, one_of

LOOPBACK = "127.0.0.1"

#: Default of `WorkerConfig.kv_cache_bytes` for the stand-in engine, and on a host that does not report free memory.
HOST_KV_CACHE_BYTES = 256 * 1024 * 1024

#: Number of tokens in a KV block if no setting says otherwise and no layer has states.
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityConfig:
    """Credentials and networks. A bind wider than loopback without TLS and a key refuses to start.

    `trusted_network` overrides that.
    """

    api_keys_file: Annotated[
        Path | None,
        TOP_TEN,
        "API keys that clients may use: [keys.NAME] tables with limits (.toml), or one key on each line",
    ] = None
    api_key: Annotated[str | None, SECRET, "a single API key, instead of a file"] = None
    mesh_token: Annotated[str, SECRET, "secret that the mesh's own services share"] = ""
    operator_token: Annotated[
        str,
        SECRET,
        "token that commands must send to change a running mesh; without any token only this host may change it, and "
        "nobody where the scheduler listens on other addresses",
    ] = ""
    operators_file: Annotated[
        Path | None,
        "more operator tokens that the scheduler accepts: [operators.NAME] tables with scopes (.toml); an empty file "
        "allows nobody",
    ] = None
    tls_cert: Annotated[Path | None, "certificate of this service; turns TLS on, for clients and between services"] = (
        None
    )
    tls_key: Annotated[Path | None, "private key of tls_cert"] = None
    tls_ca: Annotated[Path | None, "authority that checks peers' certificates (mutual TLS between services)"] = None
    tls_roles: Annotated[
        bool,
        "refuse services whose certificate does not name their role (`pdmesh tls dev-ca --role`); without this, a "
        "certificate that names no role may be any service's",
    ] = False
    tls_server_name: Annotated[
        str | None,
        "name that peers' certificates carry, where it is not the address by which they are reached: services without "
        "lasting addresses can share a certificate",
    ] = None
    trusted_network: Annotated[
        bool,
        "allow listening beyond loopback without TLS and keys, because the network is trusted. Of KV's network says "
        "`transfer.trusted_network`",
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Addresses that clients connect to, and limits of what they may ask for."""

    host: Annotated[str, TOP_TEN, "address that HTTP and gRPC clients connect to"] = LOOPBACK
    port: Annotated[Port, TOP_TEN, "HTTP; 0 takes a free port"] = 8000
    grpc_port: Annotated[Port, "protobuf service for typed clients; 0 takes a free port"] = 0
    token_host: Annotated[str, "address that workers stream tokens to"] = LOOPBACK
    token_port: Annotated[Port, "0 takes a free port"] = 0
    token_address: Annotated[
        str | None,
        "address that workers connect to; default: token_host:token_port. For a wildcard it is the address by which "
        "this host reaches the scheduler",
    ] = None
    max_body_bytes: Annotated[Count, "largest body of an HTTP request; a larger one gets a 413"] = 32 * 1024 * 1024
    allowed_hosts: Annotated[
        str,
        "host names that clients without keys may use, besides IP addresses and the server's own name; * allows all",
    ] = ""
    cors_origins: Annotated[str, "origins whose pages may use this server from a browser, comma-separated"] = ""
    trust_request_templates: Annotated[
        bool, "render chat templates that come with requests, in separate processes with limits"
    ] = False
    model_aliases: Annotated[
        str, "further names that clients may call the model by, comma-separated; a * at the end stands for any rest"
    ] = ""
    force_include_usage: Annotated[
        bool, "tell usage so far in every chunk of a chat's or a completion's stream, asked for or not"
    ] = False
    return_tokens_as_token_ids: Annotated[
        bool, "name tokens in log-probabilities by their ids where a request does not say"
    ] = False
    root_path: Annotated[
        str, "a path such as /llm under which a proxy shows this gateway, where the proxy leaves it in requests"
    ] = ""
    kept_responses_bytes: Annotated[
        int,
        Meta(ge=0, le=1 << 40),
        "memory for responses that `previous_response_id` can name, for an hour; 0 keeps none",
    ] = 64 * 1024 * 1024
    tool_format: Annotated[
        str,
        one_of("", "hermes", "llama", "mistral", "mistral_list", "qwen_coder"),
        "how the model writes tool calls; empty: found from its chat template and vocabulary",
    ] = ""
    max_concurrent_requests: Annotated[Count, "most requests under way at once; more get a 429"] = 4096
    request_timeout_s: Annotated[
        Duration, "longest time that a request may wait for its next token; then it ends with a 504, or that event"
    ] = 3600.0
    embeddings: Annotated[
        str,
        one_of("auto", "on", "matryoshka", "off"),
        "whether `/v1/embeddings` takes the last token's hidden state: if the checkpoint says so, always, "
        "always and cut to whatever `dimensions` a request asks for, or never",
    ] = "auto"
    default_max_tokens: Annotated[
        Count | None, "output limit of requests that set none; if not set, the context length"
    ] = None
    prefix_reuse: Annotated[
        str,
        one_of("tenant", "all", "off"),
        "who shares the KV of prompts that begin alike: requests of one API key, all requests, or none. "
        "`cache_salt` in a request sets it apart from others in any case",
    ] = "tenant"
    linger_s: Annotated[
        float,
        Meta(ge=0, le=3600),
        "time that a stopping gateway still accepts connections while /ready fails, so that load balancers notice. "
        "Gateways of one `pdmesh up` share their port and need none",
    ] = 0.0
    listen_fd: Annotated[AnyCount | None, HANDED_DOWN, "socket that the gateways of one `pdmesh up` share"] = None
    ui: Annotated[bool, "serve the live page at /ui, without API keys only to this machine, and a chat at /chat"] = True

    # Constants.
    max_body_values: int = 2_000_000  # largest number of values in the JSON of a request; more get a 413
    max_messages: int = 8192  # largest number of messages of a conversation
    max_n: int = 128  # largest number of choices of a prompt (`n`)
    max_queued_bytes: int = 0  # limit of bodies and prompts under way; 0: 512 MiB, or 16 of the largest bodies
    body_timeout_s: float = 30.0  # deadline of a request's body
    sse_keep_alive_s: float = 10.0  # interval of comments on a stream that waits for a token; 0: none
    no_instance_grace_s: float = 5.0  # wait of a new request for a usable instance; then a 503

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_queued_bytes", self.max_queued_bytes or max(512 << 20, 16 * self.max_body_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The scheduler's address, and limits of what may wait there."""

    host: Annotated[str, "address that gateways and workers connect to"] = LOOPBACK
    port: Annotated[Port, "0 takes a free port"] = 0
    metrics_port: Annotated[Port, "Prometheus, on telemetry.metrics_host; 0 takes a free port"] = 0
    bundle: Annotated[str, "policy bundle; see [policies](policies.md)"] = "pdmesh"
    batching: Annotated[
        str,
        one_of("", "mb", "eb", "ebplus"),
        "batching mode of instances that prefill and decode: prompts beside decodes (`mb`), in phases of their own "
        "(`eb`), or whichever is faster (`ebplus`); empty: the bundle's own",
    ] = ""
    profile: Annotated[
        str | None,
        "latency model of an instance: a built-in name or a file of `pdmesh profile`; if not set, measured at start",
    ] = None
    max_queue_entries: Annotated[Count, "most waiting requests; more get a 429"] = 4096
    max_queue_s: Annotated[
        Duration, "longest wait of a request before it gets a 503; a session's turn may be set aside four times as long"
    ] = 120.0
    refuses_early: Annotated[
        bool, "refuse a request on arrival with a 429 if it is predicted to miss its target or to wait too long"
    ] = True
    kv_reservation: Annotated[
        str,
        one_of("on_demand", "full"),
        "KV for output tokens: granted as requests grow (some restart if none is left), or reserved from the start",
    ] = "on_demand"
    lease_s: Annotated[
        Duration,
        "silence after which an instance counts as lost; a gateway does after six times as long, and heartbeats come "
        "five times as often",
    ] = 5.0
    suspect_s: Annotated[
        Duration,
        "silence after which nothing new is placed on an instance; a live one sends a heartbeat three times as often",
    ] = 0.6
    orphan_grace_s: Annotated[
        Duration,
        "after a restart of the scheduler: time for an instance to claim a request before the request restarts",
    ] = 3.0
    operations_file: Annotated[
        Path | None, "file that keeps what operators set (policy, drains, roles) across restarts; `pdmesh up` sets one"
    ] = None
    resize_command: Annotated[
        str | None,
        "what `pdmesh pool resize` prints where no actuator is connected: the command that changes the pools, with "
        "{prefill}, {decode} and {mixed} for their sizes",
    ] = None
    event_log: Annotated[Path | None, "append-only log of all events, for `pdmesh replay`"] = None

    # Constants.
    plans_in_flight: int = 2  # step plans sent ahead to each instance; two hide the round trip
    max_queue_bytes: int = 512 * 1024 * 1024  # limit of prompts of waiting requests
    gateway_lease_s: float = 0.0  # silence after which a gateway is lost; 0: 6 x ``lease_s``
    heartbeat_s: float = 0.0  # longest interval of heartbeats; 0: ``lease_s`` / 5
    recent_decisions: int = 20_000  # decisions kept for `pdmesh pool advise`, at most ten minutes, 1 KB each
    event_log_max_bytes: int = 1 << 30  # limit of a log; a request takes about 1.5 KB
    event_log_keep: int = 3  # number of logs kept from earlier runs, as ``event_log``.1 (the newest) and so on
    max_records: int = 10_000  # number of finished requests kept for `pdmesh requests show`

    def __post_init__(self) -> None:
        object.__setattr__(self, "gateway_lease_s", self.gateway_lease_s or 6 * self.lease_s)
        object.__setattr__(self, "heartbeat_s", self.heartbeat_s or self.lease_s / 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """What an instance runs."""

    instance_id: Annotated[str | None, "name of the instance; default: its role and a random suffix"] = None
    served_model_name: Annotated[
        str | None, TOP_TEN, "model name that clients use; default: its hub id or directory name"
    ] = None
    dtype: Annotated[
        str,
        one_of("auto", "float32", "bfloat16", "float16"),
        TOP_TEN,
        "data type of weights and KV; auto: the checkpoint's, or float16 on a CPU for a quantised model whose "
        "activations fit",
    ] = "auto"
    load_format: Annotated[
        str,
        one_of("auto", "dummy"),
        "auto: the checkpoint's weights; dummy: random weights with the shapes of its config.json, for benchmarks",
    ] = "auto"
    lora: Annotated[
        Path | None, "directory of a LoRA adapter (PEFT's), merged into the weights when they are loaded"
    ] = None
    device: Annotated[str, TOP_TEN, "cpu or cuda; auto: cuda if there is one"] = "auto"
    cpu_level: Annotated[
        str,
        one_of("auto", "amx", "avx512_bf16", "avx512", "avx2", "baseline", "neon"),
        "highest level of compiled CPU kernels to use; auto: the processor's best. All but `amx` and `avx512_bf16` "
        "give the same bits",
    ] = "auto"
    role: Annotated[
        Annotated[str, one_of("prefill", "decode", "mixed")] | None, "role of the instance; default: the service's"
    ] = None
    engine: Annotated[
        str, one_of("torch", "fake"), "torch, or fake: a stand-in without a model (of `pdmesh-testing`)"
    ] = "torch"
    fake_latency: Annotated[
        str | None,
        "step times of the fake engine: a profile, or terms in seconds (`a_s=0.004,decode_s=1e-4`)",
    ] = None
    block_size: Annotated[
        Annotated[int, Meta(ge=1, le=4096)] | None, "tokens in a KV block; default: 16, or 128 if layers have states"
    ] = None
    kv_cache_bytes: Annotated[
        Count | None,
        TOP_TEN,
        "KV cache of an instance; if not set, kv_cache_share of a device, or a quarter of what a host has free: more "
        "than two instances of one `pdmesh up` share what two would get. Pages of a host are taken at first use",
    ] = None
    kv_cache_share: Annotated[
        float, Meta(ge=0.01, le=0.99), "share of a device's memory, free after the weights, for the KV cache"
    ] = 0.85
    kv_cache_host_share: Annotated[
        float,
        Meta(gt=0.0, le=0.9),
        HANDED_DOWN,
        "share of the host's or container's memory, free after the weights, for the KV cache without a device",
    ] = 0.25
    kv_offload_host_bytes: Annotated[
        int,
        Meta(ge=0, le=1 << 46),
        "host memory of an instance for KV that its cache has no room for, and that requests to come may reuse; pinned "
        "where there is a device. 0: none",
    ] = 0
    kv_offload_disk_bytes: Annotated[
        int,
        Meta(ge=0, le=1 << 50),
        "space in kv_offload_dir for what that has no room for; encrypted, and gone with the process. 0: none",
    ] = 0
    kv_offload_dir: Annotated[Path | None, "directory on a disk for kv_offload_disk_bytes"] = None
    free_behind_windows: Annotated[
        bool,
        "free KV that layers with a window no longer see. KV is kept on a device, with an offload tier and where "
        "contexts are spread. Where it is freed, no groups compute long prompts. All instances of a mesh must have the "
        "same",
    ] = True
    max_model_len: Annotated[Count | None, TOP_TEN, "context length; default: the checkpoint's"] = None
    speculation: Annotated[
        str,
        one_of("off", "ngram"),
        "ngram: guess tokens by what followed the same few in the prompt or the answer, and verify them in one step. "
        "Answers stay the same; those that quote come faster. On CPU only",
    ] = "off"
    max_kv_tokens_per_instance: Annotated[
        int,
        Meta(ge=0, le=1 << 31),
        "most tokens of a context that an instance holds while the request decodes; a longer one is spread over "
        "several instances, also as it grows, and they read it at the same time. A multiple of block_size; on CPUs "
        "alone. 0: no limit",
    ] = 0
    max_num_seqs: Annotated[Count, "most requests that an instance decodes at once"] = 64
    cached_states_share: Annotated[
        float, Meta(ge=0, le=0.9), "most of the KV cache, beside requests' own states, for states that are cached"
    ] = 0.4
    tensor_parallel_size: Annotated[
        int,
        Meta(ge=1, le=64),
        TOP_TEN,
        "processes (ranks) that compute each step of an instance together; each has a part of the model",
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        Meta(ge=1, le=64),
        "stages of an instance, each with a part of the layers and tensor_parallel_size ranks of its own: a step "
        "enters as the one before leaves the first",
    ] = 1
    num_threads: Annotated[
        int,
        Meta(ge=0, le=4096),
        "threads of the engine, in each rank; 0: a fair share of the machine's cores",
    ] = 0
    lend_cores: Annotated[
        bool,
        "compute with the idle cores of other workers of one `pdmesh up`, and lend them the own ones while idle. On "
        "CPUs, where compiled kernels do all of the work in instances of one rank: bits stay the same",
    ] = True
    cores_file: Annotated[Path | None, HANDED_DOWN, "table of idle workers for lend_cores"] = None
    metrics_port: Annotated[Port, "Prometheus, on telemetry.metrics_host; 0 takes a free port"] = 0
    deterministic: Annotated[bool, "make results independent of batch and chunk shape, bit for bit; on CPUs alone"] = (
        False
    )

    # Constants.
    num_speculative_tokens: int = 4  # largest number of tokens guessed in a step
    prompt_lookup_min: int = 2  # shortest n-gram to look up, in tokens
    prompt_lookup_max: int = 4  # longest n-gram to look up, in tokens
    prefill_attention: str = "auto"  # FlashInfer kernels for chunks: auto, fa2 or fa3


class InstanceDegrees(NamedTuple):
    """Division of an instance: ``tensor`` ranks compute each layer, and each of ``stages`` some of the layers."""

    tensor: int = 1
    stages: int = 1

    @property
    def num_ranks(self) -> int:
        """Number of processes that compute."""
        return self.tensor * self.stages

    @property
    def num_processes(self) -> int:
        """Number of processes in all. With several stages, the leader is one more process, which computes nothing."""
        return self.num_ranks + (self.stages > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """The instances of one pool, where they are not like all."""

    tensor_parallel_size: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | None,
        "ranks of each instance of this pool; if not set, worker.tensor_parallel_size",
    ] = None
    pipeline_parallel_size: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | None,
        "stages of each instance of this pool; if not set, worker.pipeline_parallel_size",
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """How KV moves between instances."""

    max_payload_bytes: Annotated[
        int, Meta(ge=4096, le=1 << 30), "largest piece of KV in one message; at least a page"
    ] = 1024 * 1024
    no_progress_s: Annotated[
        Duration,
        "longest time that one piece of KV may take between instances of one host. A fifth of this time holds between "
        "hosts, three times as much within a prefill group, and twelve times as much for all KV of a request",
    ] = 10.0
    peer_reads: Annotated[
        bool,
        "let instances on one host copy KV from each other's caches, if both can and both have this set; "
        "otherwise KV travels in pieces",
    ] = True
    ucx_tls: Annotated[
        str | None,
        "UCX's transports, as in UCX_TLS; must include a network transport; if not set, UCX chooses (or UCX_TLS)",
    ] = None
    ucx_net_devices: Annotated[
        str,
        "network devices that UCX listens on for KV between hosts: names or 'all'; needs `transfer.trusted_network`. "
        "If not set, UCX listens nowhere and KV stays inside this host. UCX_NET_DEVICES overrides it",
    ] = ""
    trusted_network: Annotated[
        bool,
        "say that only hosts of the mesh reach the network devices that KV is sent over: UCX knows neither TLS nor "
        "keys, and a stranger's bytes at its port end an instance",
    ] = False
    encrypt: Annotated[
        bool,
        "encrypt the KV that this instance sends (AES-256-GCM, with keys made of `security.mesh_token`). Others take "
        "it whether they have this set or not. What peers on one host copy from its cache is not sent",
    ] = False

    # Constants.
    num_backends: int = 8  # largest number of transfers received at once
    device_payload_bytes: int = 8 * 1024 * 1024  # largest piece in a device's memory, where a copy costs more
    message_bytes: int = 2 * 1024 * 1024  # largest message to another host; pieces travel together
    num_send_buffers: int = 16  # buffers of one piece each, or of one message if KV may leave the host
    num_receive_buffers: int = 16
    deadline_s: float = -1.0  # time for a request's KV to land; -1: 12 x ``no_progress_s``
    network_no_progress_s: float = 0.0  # time for a piece between hosts; 0: ``no_progress_s`` / 5
    group_no_progress_s: float = 0.0  # wait for KV within a prefill group; 0: 3 x ``no_progress_s``

    def __post_init__(self) -> None:
        if self.deadline_s < 0:
            object.__setattr__(self, "deadline_s", 12 * self.no_progress_s)
        object.__setattr__(self, "network_no_progress_s", self.network_no_progress_s or self.no_progress_s / 5)
        object.__setattr__(self, "group_no_progress_s", self.group_no_progress_s or 3 * self.no_progress_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """Logs, metrics and spans."""

    log_level: Annotated[str, one_of("debug", "info", "warning", "error"), "lowest level that is logged"] = "info"
    log_format: Annotated[
        str, one_of("auto", "console", "json"), "format of log lines; auto: console on a terminal, else json"
    ] = "auto"
    metrics_host: Annotated[
        str, "address where scheduler and workers serve Prometheus; the gateway serves it on its own port"
    ] = LOOPBACK
    otlp_endpoint: Annotated[
        str | None, "collector of spans; default: OTEL_EXPORTER_OTLP_ENDPOINT; if neither is set, no spans"
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshConfig:
    """The whole tree."""

    model: Annotated[
        str | None,
        TOP_TEN,
        "directory, hub id or GGUF file of the model, or a name such as smollm2; if not set, the demo model",
    ] = None
    scheduler_address: Annotated[
        str,
        "host:port of the scheduler, for workers and gateways; of several schedulers, one of which leads: all of them, "
        "comma-separated. `pdmesh up` sets it",
    ] = ""
    drain_s: Annotated[
        Amount | None,
        "time that requests have to finish once a service is told to stop, before they end with an error. "
        "Not set: no limit",
    ] = 30.0
    ready_fd: Annotated[AnyCount | None, HANDED_DOWN, "pipe that gets one JSON line when the service can serve"] = None
    security: SecurityConfig = field(default_factory=SecurityConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    standby: StandbyConfig = field(default_factory=StandbyConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    prefill: PoolConfig = field(default_factory=PoolConfig)
    decode: PoolConfig = field(default_factory=PoolConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)

    def degrees_of(self, role: Role) -> InstanceDegrees:
        """Return the ranks and stages of a pool's instances: the pool's own settings, else the worker's."""
        pool = {Role.PREFILL: self.prefill, Role.DECODE: self.decode}.get(role, PoolConfig())
        return InstanceDegrees(
            pool.tensor_parallel_size or self.worker.tensor_parallel_size,
            pool.pipeline_parallel_size or self.worker.pipeline_parallel_size,
        )
