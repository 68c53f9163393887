"""One frozen configuration tree, built once per process: TOML file < environment < flags.

Every setting has three names that follow from its field: ``[worker] kv_cache_bytes`` in the file,
``PDMESH_WORKER_KV_CACHE_BYTES`` in the environment, and, where a command offers it,
``--kv-cache-bytes``. No other module reads the environment.

`load_config` builds the tree, `environment_of` turns it back into the environment of a child process, and
`to_toml` and `to_dict` record it.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdmesh.errors import ConfigError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityConfig:
    """Who may talk to us. A bind wider than loopback without TLS and a key refuses to start.

    `trusted_network` overrides that.
    """

    api_keys_file: Path | None = None  # one key a line; the HTTP and gRPC edges ask for one of them
    api_key: str | None = None  # or a single key
    mesh_token: str = ""  # shared secret of our own services
    tls_cert: Path | None = None  # our certificate: turns TLS on, at the edges and between services
    tls_key: Path | None = None  # its key
    tls_ca: Path | None = None  # peers' certificates are checked against it (mutual TLS between services)
    trusted_network: bool = False  # the operator vouches for the network a wider bind is reachable from


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    host: str = LOOPBACK  # where HTTP and gRPC clients connect
    port: int = 8000  # HTTP; 0 takes a free port
    grpc_port: int = 0  # protobuf service for typed clients; 0 takes a free port
    token_host: str = LOOPBACK  # where workers stream tokens to
    token_port: int = 0  # 0 takes a free port
    token_address: str | None = None  # what workers dial; default: token_host:token_port
    max_body_bytes: int = 32 * 1024 * 1024  # of an HTTP request; more is a 413
    max_n: int = 128  # choices of one request (`n` times prompts)
    max_concurrent_requests: int = 4096  # under way at once; more is a 429
    max_queued_bytes: int = 512 * 1024 * 1024  # bodies and prompts held for requests under way
    body_timeout_s: float = 30.0  # a body that does not end
    request_timeout_s: float = 3600.0  # a whole request
    default_max_tokens: int | None = None  # for requests that do not say; None: up to the context length


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    host: str = LOOPBACK  # where it listens for gateways and workers
    port: int = 0  # 0 takes a free port
    metrics_port: int = 0  # Prometheus, on telemetry.metrics_host; 0 takes a free port
    bundle: str = "pdmesh"  # which policies decide
    profile: str | None = None  # how long steps take: a built-in name or a file; None: instances measure themselves
    chunk_tokens: int = 512  # static chunk size, tokens of prefill per step
    slo_ttft_s: float = 1.0  # a request that asks for no TTFT gets this...
    slo_ttft_stretch: float = 2.0  # ...and so many times the time its prompt takes alone
    slo_tpot_s: float = 0.05  # time budget of an adaptive step beside decodes
    prefill_step_s: float = 0.2  # time budget of an adaptive step without decodes: what an urgent request may wait
    long_prompt_tokens: int = 8192  # adaptive steps have at most one prompt as long as this
    local_prompt_tokens: int = 1024  # prompts up to this may be computed where they decode; 0: never
    plans_in_flight: int = 2  # per instance, so that the device never waits for a round trip
    max_queue_entries: int = 4096  # requests waiting; more is a 429
    max_queue_bytes: int = 512 * 1024 * 1024  # prompts held for requests that wait
    max_queue_s: float = 120.0  # a request that waited this long gets a 503
    lease_s: float = 5.0  # a silent instance or gateway is given up after this
    heartbeat_s: float = 1.0  # how often instances and gateways say that they live
    orphan_grace_s: float = 3.0  # after a restart: how long a request may wait to be claimed by an instance
    event_log: Path | None = None  # append-only record of all events, for replay
    max_records: int = 10_000  # finished requests remembered for `pdmesh requests show`


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    instance_id: str | None = None  # default: role and a random suffix
    served_model_name: str | None = None  # what clients call the model; default: its hub id or directory name
    dtype: str = "auto"  # auto: the checkpoint's; float32 | bfloat16
    device: str = "auto"  # auto: cuda if there is one, else cpu
    role: str | None = None  # prefill | decode | mixed; default: that of the service
    engine: str = "torch"  # torch | fake (a stand-in that takes no time, for tests and benchmarks)
    block_size: int = 16  # tokens
    kv_cache_bytes: int = 256 * 1024 * 1024  # of one instance
    max_model_len: int | None = None  # default: the checkpoint's
    max_num_seqs: int = 64  # requests an instance decodes at once
    num_threads: int = 0  # 0: a fair share of the machine's cores
    metrics_port: int = 0  # Prometheus, on telemetry.metrics_host; 0 takes a free port
    deterministic: bool = False  # results do not depend on batch and chunk shape


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    transport: str = "ucx"  # ucx | memory (one process, tests)
    num_backends: int = 8  # requests an instance receives at once
    max_payload_bytes: int = 1024 * 1024  # one piece
    num_send_buffers: int = 16  # of max_payload_bytes each
    num_receive_buffers: int = 16  # of max_payload_bytes each
    deadline_s: float = 120.0  # to land, once granted and wholly computed
    no_progress_s: float = 10.0  # one piece
    ucx_tls: str | None = None  # passed to UCX as it is; None leaves UCX's own choice (and UCX_TLS)
    ucx_net_devices: str = (
        "lo"  # network devices UCX may listen on; "all" or names for several hosts. UCX_NET_DEVICES wins
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    log_level: str = "info"  # debug, info, warning or error
    log_format: str = "auto"  # auto: console on a terminal, else json
    metrics_host: str = LOOPBACK  # where scheduler and workers serve Prometheus; the gateway does on its own port
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


PREFIX = "PDMESH_"

#: Names the TOML file; the only variable of ours that is no setting.
CONFIG_FILE_VARIABLE = "PDMESH_CONFIG"

#: OpenTelemetry's own names of `telemetry.otlp_endpoint`, taken where we are told nothing; the SDK reads all others.
_OTLP_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

#: Never shown or recorded.
SECRETS = frozenset({"security.api_key", "security.mesh_token"})

_PORT = (0, 65535)
_ANY_COUNT = (0, math.inf)
_COUNT = (1, math.inf)

#: Inclusive limits. A duration not named here must be above zero, a number not named here at least zero.
_RANGES: dict[str, tuple[float, float]] = {
    "gateway.port": _PORT,
    "gateway.grpc_port": _PORT,
    "gateway.token_port": _PORT,
    "gateway.max_body_bytes": _COUNT,
    "gateway.max_n": _COUNT,
    "gateway.max_concurrent_requests": _COUNT,
    "gateway.max_queued_bytes": _COUNT,
    "gateway.default_max_tokens": _COUNT,
    "scheduler.port": _PORT,
    "scheduler.metrics_port": _PORT,
    "scheduler.chunk_tokens": _COUNT,
    "scheduler.slo_ttft_stretch": (0.0, math.inf),
    "scheduler.long_prompt_tokens": _COUNT,
    "scheduler.plans_in_flight": _COUNT,
    "scheduler.max_queue_entries": _COUNT,
    "scheduler.max_queue_bytes": _COUNT,
    "worker.metrics_port": _PORT,
    "worker.block_size": (1, 4096),
    "worker.kv_cache_bytes": _COUNT,
    "worker.max_model_len": _COUNT,
    "worker.max_num_seqs": _COUNT,
    "worker.num_threads": (0, 4096),
    "transfer.num_backends": _COUNT,
    "transfer.max_payload_bytes": (4096, 1 << 30),
    "transfer.num_send_buffers": _COUNT,
    "transfer.num_receive_buffers": _COUNT,
}

_CHOICES: dict[str, tuple[str, ...]] = {
    "worker.role": ("prefill", "decode", "mixed"),
    "worker.dtype": ("auto", "float32", "bfloat16"),
    "worker.engine": ("torch", "fake"),
    "transfer.transport": ("ucx", "memory"),
    "telemetry.log_level": ("debug", "info", "warning", "error"),
    "telemetry.log_format": ("auto", "console", "json"),
}

_WANTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}


@dataclass(frozen=True, slots=True)
class _Setting:
    """One leaf of the tree."""

    name: str  # "gateway.port"
    type: type
    optional: bool
    default: object

    @property
    def variable(self) -> str:
        return PREFIX + self.name.replace(".", "_").upper()


def _settings(node: type = MeshConfig, prefix: str = "") -> Iterator[_Setting]:
    hints = typing.get_type_hints(node)
    for item in dataclasses.fields(node):
        name, hint = prefix + item.name, hints[item.name]
        if dataclasses.is_dataclass(hint):
            yield from _settings(typing.cast(type, hint), name + ".")
            continue
        optional = isinstance(hint, types.UnionType)
        plain = next(part for part in typing.get_args(hint) if part is not types.NoneType) if optional else hint
        yield _Setting(name, plain, optional, item.default)


def load_config(file: Path | None, environ: Mapping[str, str], flags: Mapping[str, object]) -> MeshConfig:
    """Build the tree from ``file`` (else the one `PDMESH_CONFIG` names), environment and flags, the last one winning.

    ``flags`` are dotted names (``gateway.port``) with a value or None for "not given". Variables without our prefix
    are left to those they belong to (HF_*, UCX_*, CUDA_*, OTEL_*). Raises ConfigError.
    """
    settings = {setting.name: setting for setting in _settings()}
    values: dict[str, object] = {}
    if file is None and environ.get(CONFIG_FILE_VARIABLE):
        file = Path(environ[CONFIG_FILE_VARIABLE])
    if file is not None:
        for name, value in _read_toml(file):
            values[name] = _checked(_lookup(settings, name, f"{name} in {file}"), value, f"{name} in {file}")

    for variable in _OTLP_VARIABLES:
        if environ.get(variable):
            values.setdefault("telemetry.otlp_endpoint", environ[variable])

    by_variable = {setting.variable: setting for setting in settings.values()}
    for variable, text in environ.items():
        if variable.startswith(PREFIX) and variable != CONFIG_FILE_VARIABLE:
            setting = _lookup(by_variable, variable, variable)
            values[setting.name] = _checked(setting, _parsed(setting, text), variable)

    for name, value in flags.items():
        if value is not None:
            setting = _lookup(settings, name, name)
            parsed = _parsed(setting, value) if isinstance(value, str) else value
            values[name] = _checked(setting, parsed, name)

    config = typing.cast(MeshConfig, _build(MeshConfig, values))
    if (config.security.tls_cert is None) != (config.security.tls_key is None):
        raise ConfigError("security.tls_cert and security.tls_key go together: set both or neither")
    return config


def to_dict(config: MeshConfig, *, secrets: bool = False) -> dict[str, Any]:
    """The tree as plain values. Secrets that are set show as ``***`` unless asked for."""

    def plain(name: str, value: object) -> object:
        if name in SECRETS and value and not secrets:
            return "***"
        return str(value) if isinstance(value, Path) else value

    tree: dict[str, Any] = {}
    for name, value in _leaves(config):
        section, _, key = name.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[key] = plain(name, value)
    return tree


def to_toml(config: MeshConfig) -> str:
    """The tree as a TOML file that `load_config` reads back; what is unset or secret is left out as a comment."""
    lines: list[str] = []
    for name, value in _flat(to_dict(config)):
        section, _, key = name.rpartition(".")
        if section and f"[{section}]" not in lines:
            lines += ["", f"[{section}]"]
        left_out = value is None or name in SECRETS
        lines.append(f"# {key} =" if left_out else f"{key} = {_toml_value(value)}")
    return "\n".join(lines).lstrip() + "\n"


def environment_of(config: MeshConfig) -> dict[str, str]:
    """The variables that make `load_config` build ``config`` again, secrets among them; defaults are left out."""
    defaults = {setting.name: setting for setting in _settings()}
    return {
        defaults[name].variable: _environment_value(value)
        for name, value in _leaves(config)
        if value != defaults[name].default
    }


def _read_toml(file: Path) -> Iterator[tuple[str, object]]:
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error
    return _flat(tree)


def _flat(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _lookup(known: Mapping[str, _Setting], name: str, where: str) -> _Setting:
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]}?" if close else "`pdmesh config show` lists all settings"
    raise ConfigError(f"unknown setting {where}: {hint}")


def _parsed(setting: _Setting, text: object) -> object:
    """A value from text, or the text itself where it cannot be one (`_checked` then says so)."""
    if not isinstance(text, str):
        return text
    if setting.optional and text == "":
        return None
    try:
        if setting.type is bool:
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.lower()]
        return setting.type(text)
    except (ValueError, KeyError):
        return text


def _checked(setting: _Setting, value: object, where: str) -> object:
    if value is None and setting.optional:
        return None
    if setting.type is Path and isinstance(value, str):
        value = Path(value)
    if setting.type is float and type(value) is int:
        value = float(value)
    if type(value) is not setting.type and not (setting.type is Path and isinstance(value, Path)):
        raise ConfigError(f"{where} is {_shown(setting, value)}: wanted {_wanted(setting)}")
    in_range = True
    if isinstance(value, int | float) and not isinstance(value, bool):
        low, high = _range(setting)
        in_range = low <= value <= high and math.isfinite(value)
    if not in_range or (setting.name in _CHOICES and value not in _CHOICES[setting.name]):
        raise ConfigError(f"{where} is {_shown(setting, value)}: wanted {_wanted(setting)}")
    return value


def _range(setting: _Setting) -> tuple[float, float]:
    if setting.name.endswith("_s"):
        return _RANGES.get(setting.name, (1e-3, math.inf))
    return _RANGES.get(setting.name, _ANY_COUNT)


def _shown(setting: _Setting, value: object) -> str:
    return "a secret of the wrong type" if setting.name in SECRETS else repr(value)


def _wanted(setting: _Setting) -> str:
    if setting.name in _CHOICES:
        return "one of " + ", ".join(_CHOICES[setting.name])
    wanted = _WANTED[setting.type]
    if setting.type in (int, float):
        low, high = _range(setting)
        wanted += f" of at least {low:g}" if math.isinf(high) else f" from {low:g} to {high:g}"
    return wanted


def _build(node: type, values: Mapping[str, object], prefix: str = "") -> object:
    hints = typing.get_type_hints(node)
    arguments: dict[str, object] = {}
    for item in dataclasses.fields(node):
        name, hint = prefix + item.name, hints[item.name]
        if dataclasses.is_dataclass(hint):
            arguments[item.name] = _build(typing.cast(type, hint), values, name + ".")
        elif name in values:
            arguments[item.name] = values[name]
    return node(**arguments)


def _leaves(node: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    for item in dataclasses.fields(typing.cast(Any, node)):
        value = getattr(node, item.name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, value


def _environment_value(value: object) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _toml_value(value: object) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'
    return str(value).lower() if isinstance(value, bool) else repr(value)
