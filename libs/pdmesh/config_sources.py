"""Sources of the configuration, and its forms for other processes: TOML file < environment < flags.

Every setting has three names that follow from its field: ``[worker] kv_cache_bytes`` in the file,
``PDMESH_WORKER_KV_CACHE_BYTES`` in the environment, and, where a command offers it, ``--kv-cache-bytes``. No other
module reads the environment.

`load_config` builds the tree, `environment_of` turns it back into the environment of a child process, and `to_toml` and
`to_dict` record it.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pdmesh.config import MeshConfig
from pdmesh.errors import ConfigError
from pdmesh.removed_settings import REMOVED
from pdmesh.settings import CLIENT_KEY_VARIABLE, HANDED_DOWN, Setting, converted, settings_of, values_of

PREFIX = "PDMESH_"

#: Variable that names the TOML file.
CONFIG_FILE_VARIABLE = "PDMESH_CONFIG"

#: Variables of the compose files, which are no settings but may be in the same environment or ``.env``.
COMPOSE_VARIABLES = frozenset(
    {
        "PDMESH_PORT",
        "PDMESH_GRPC_PORT",
        "PDMESH_OPERATOR_PORT",
        "PDMESH_MODELS",
        "PDMESH_TORCH",
        "PDMESH_GPU_IMAGE",
        "PDMESH_PREFILL_GPU",
        "PDMESH_DECODE_GPU",
        "PDMESH_MIXED_GPU",
    }
)

_NO_SETTINGS = frozenset({CONFIG_FILE_VARIABLE, CLIENT_KEY_VARIABLE, *COMPOSE_VARIABLES})

#: OpenTelemetry's own names of `telemetry.otlp_endpoint`, read unless ours is set. The SDK reads all others.
_OTLP_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def load_config(
    file: Path | None,
    environ: Mapping[str, str],
    flags: Mapping[str, object],
    typed: Mapping[str, str] = MappingProxyType({}),
) -> MeshConfig:
    """Build the tree from ``file`` (else the one `PDMESH_CONFIG` names), environment and flags; later ones override.

    ``flags`` are dotted names (``gateway.port``) with a value or None for "not given". ``typed`` has the options that
    were typed for them (``--port``), for messages. Variables without our prefix belong to others (HF_*, UCX_*, CUDA_*,
    OTEL_*) and are ignored. Raise ConfigError for an unknown setting, a wrong value, or a contradiction.
    """
    settings = {setting.name: setting for setting in settings_of(MeshConfig)}
    given = {name: setting for name, setting in settings.items() if HANDED_DOWN not in setting.marks}
    values: dict[str, object] = {}
    if file is None and environ.get(CONFIG_FILE_VARIABLE):
        file = Path(environ[CONFIG_FILE_VARIABLE])
    if file is not None:
        for name, value in _read_toml(file):
            where = f"{name} in {file}"
            values[name] = _lookup(given, REMOVED, name, where).value(value, where)

    for variable in _OTLP_VARIABLES:
        if environ.get(variable):
            values.setdefault("telemetry.otlp_endpoint", environ[variable])

    by_variable = {variable_of(name): setting for name, setting in settings.items()}
    removed = {variable_of(name): advice for name, advice in REMOVED.items()}
    for variable, text in environ.items():
        if variable.startswith(PREFIX) and variable not in _NO_SETTINGS:
            _check_no_service_link(variable, text)
            setting = _lookup(by_variable, removed, variable, variable)
            is_unset = text == "" and setting.optional
            values[setting.name] = None if is_unset else setting.value(text, variable, is_text=True)

    for name, value in flags.items():
        if value is not None:
            where = typed.get(name, name)
            values[name] = _lookup(given, REMOVED, name, where).value(value, where, is_text=True)

    config = converted(_nested(values), MeshConfig)
    if (config.security.tls_cert is None) != (config.security.tls_key is None):
        raise ConfigError("security.tls_cert and security.tls_key go together: set both or neither")
    return config


def to_dict(config: MeshConfig, *, secrets: bool = False) -> dict[str, Any]:
    """Return the tree as plain values. Secrets that are set show as ``***`` unless ``secrets`` is True."""

    tree: dict[str, Any] = {}
    for setting, value in _given(config):
        section, _, key = setting.name.rpartition(".")
        shown = "***" if setting.secret and value and not secrets else value
        (tree.setdefault(section, {}) if section else tree)[key] = str(shown) if isinstance(shown, Path) else shown
    return tree


def to_toml(config: MeshConfig) -> str:
    """Return the tree as a TOML file that `load_config` reads back. Unset settings and secrets become comments."""
    lines: list[str] = []
    for setting, value in _given(config):
        section, _, key = setting.name.rpartition(".")
        if section and f"[{section}]" not in lines:
            lines += ["", f"[{section}]"]
        left_out = value is None or setting.secret
        lines.append(f"# {key} =" if left_out else f"{key} = {_toml_value(value)}")
    return "\n".join(lines).lstrip() + "\n"


def _given(config: MeshConfig) -> Iterator[tuple[Setting, object]]:
    """Return the settings that users give, with their values."""
    return (each for each in values_of(config) if HANDED_DOWN not in each[0].marks)


def environment_of(config: MeshConfig) -> dict[str, str]:
    """Return the environment for which `load_config` builds ``config`` again, with secrets and without defaults."""
    return {
        variable_of(setting.name): _environment_value(value)
        for setting, value in values_of(config)
        if value != setting.default
    }


def variable_of(name: str) -> str:
    """Return the environment variable of the setting ``name``."""
    return PREFIX + name.replace(".", "_").upper()


def _nested(values: Mapping[str, object]) -> dict[str, Any]:
    """Return values by dotted names as a tree of dictionaries."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[key] = value
    return tree


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


def _check_no_service_link(variable: str, text: str) -> None:
    """Raise ConfigError for a variable that Kubernetes sets for a Service whose name begins like ours."""
    if text.startswith(("tcp://", "udp://")) or variable.endswith(("_SERVICE_HOST", "_SERVICE_PORT")):
        raise ConfigError(
            f"{variable} = {text} is not a setting but a service link of Kubernetes, made for a Service whose name "
            "begins with pdmesh: set enableServiceLinks: false in the pod's spec, or name the Service otherwise"
        )


def _lookup(known: Mapping[str, Setting], removed: Mapping[str, str], name: str, where: str) -> Setting:
    if name in known:
        return known[name]
    if name in removed:
        raise ConfigError(f"{where} is no longer a setting: {removed[name]}")
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]}?" if close else "`pdmesh config show` lists all settings"
    raise ConfigError(f"unknown setting {where}: {hint}")


def _environment_value(value: object) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _toml_value(value: object) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'
    if isinstance(value, Path):
        return _toml_value(str(value))
    return str(value).lower() if isinstance(value, bool) else repr(value)
