"""Laws of the configuration: precedence, round trips, and errors that name what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.cli.reference import with_tables
from pdmesh.config import GatewayConfig, MeshConfig, SecurityConfig, WorkerConfig
from pdmesh.config_sources import environment_of, load_config, to_dict, to_toml, variable_of
from pdmesh.errors import ConfigError
from pdmesh.policy.latency import PROFILES
from pdmesh.profiles import load_profile
from pdmesh.removed_settings import REMOVED
from pdmesh.settings import HANDED_DOWN, TOP_TEN, Setting, settings_of
from pdmesh_scheduler.main import core_config_of


def toml_file(folder: Path, text: str) -> Path:
    file = folder / "pdmesh.toml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("variable", "text"),
    [("PDMESH_SCHEDULER_PORT", "tcp://10.1.2.3:7000"), ("PDMESH_SCHEDULER_SERVICE_HOST", "10.1.2.3")],
)
def test_a_service_link_of_kubernetes_is_called_one(variable: str, text: str) -> None:
    with pytest.raises(ConfigError, match="enableServiceLinks: false"):
        load_config(None, {variable: text}, {})


def test_without_anything_it_is_the_default_tree() -> None:
    assert load_config(None, {}, {}) == MeshConfig()


def test_file_then_environment_then_flags(tmp_path: Path) -> None:
    file = toml_file(tmp_path, 'model = "file"\n[gateway]\nport = 1\ngrpc_port = 1\n[scheduler]\nport = 1\n')
    environ = {"PDMESH_GATEWAY_PORT": "2", "PDMESH_SCHEDULER_PORT": "2", "PDMESH_MODEL": "environment"}
    config = load_config(file, environ, {"gateway.port": 3, "gateway.grpc_port": None})
    assert (config.gateway.grpc_port, config.scheduler.port, config.gateway.port) == (1, 2, 3)
    assert config.model == "environment"


def test_the_environment_can_name_the_file(tmp_path: Path) -> None:
    file = toml_file(tmp_path, "[gateway]\nport = 7\n")
    assert load_config(None, {"PDMESH_CONFIG": str(file)}, {}).gateway.port == 7


def test_top_level_settings_have_plain_names() -> None:
    config = load_config(None, {"PDMESH_SCHEDULER_ADDRESS": "host:1", "PDMESH_READY_FD": "5"}, {})
    assert (config.scheduler_address, config.ready_fd) == ("host:1", 5)


def test_variables_of_others_are_not_ours() -> None:
    environ = {"HF_HOME": "x", "UCX_TLS": "tcp", "CUDA_VISIBLE_DEVICES": "0", "PDMESHX": "y"}
    assert load_config(None, environ, {}) == MeshConfig()


@pytest.mark.parametrize(
    ("environ", "endpoint"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"}, "http://a"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b"}, "http://b"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "PDMESH_TELEMETRY_OTLP_ENDPOINT": "http://c"}, "http://c"),
    ],
)
def test_opentelemetrys_endpoint_is_the_default_of_ours(environ: dict[str, str], endpoint: str) -> None:
    assert load_config(None, environ, {}).telemetry.otlp_endpoint == endpoint


@pytest.mark.parametrize(("text", "value"), [("1", True), ("true", True), ("YES", True), ("0", False), ("no", False)])
def test_switches_in_the_environment(text: str, value: bool) -> None:
    assert load_config(None, {"PDMESH_WORKER_DETERMINISTIC": text}, {}).worker.deterministic is value


def test_an_empty_variable_unsets_what_may_be_unset() -> None:
    config = load_config(None, {"PDMESH_GATEWAY_DEFAULT_MAX_TOKENS": ""}, {})
    assert config.gateway.default_max_tokens is None


SECONDS = "a duration in seconds of at least 0.001, such as 30s or 5m"


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4GiB", 4 << 30),
        ("10GB", 10**10),
        ("1.5 MiB", 3 << 19),
        ("64Ki", 65536),
        ("4096", 4096),
        ("1e9", 10**9),
        ("8.2MB", 8_200_000),
        ("4.7GiB", 5046586573),
    ],
)
def test_sizes_have_units_wherever_they_come_from(tmp_path: Path, text: str, num_bytes: int) -> None:
    file = toml_file(tmp_path, f'[worker]\nkv_cache_bytes = "{text}"\n')
    for config in (
        load_config(file, {}, {}),
        load_config(None, {"PDMESH_WORKER_KV_CACHE_BYTES": text}, {}),
        load_config(None, {}, {"worker.kv_cache_bytes": text}),
    ):
        assert config.worker.kv_cache_bytes == num_bytes


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30.0), ("5m", 300.0), ("1.5h", 5400.0), ("250ms", 0.25), ("7", 7.0)]
)
def test_durations_have_units_wherever_they_come_from(tmp_path: Path, text: str, seconds: float) -> None:
    file = toml_file(tmp_path, f'drain_s = "{text}"\n')
    for config in (
        load_config(file, {}, {}),
        load_config(None, {"PDMESH_DRAIN_S": text}, {}),
        load_config(None, {}, {"drain_s": text}),
    ):
        assert config.drain_s == seconds


def test_a_rate_is_no_duration() -> None:
    with pytest.raises(ConfigError, match="must be a number of at least 1"):
        load_config(None, {}, {"policy.link_bytes_per_s": "30s"})


@pytest.mark.parametrize("text", ["4 gigs", "GiB", "4G", "0.3", "-1", "1e999", "4GiBs"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be a size in bytes of at least 1, such as 4GiB or 10GB"):
        load_config(None, {"PDMESH_WORKER_KV_CACHE_BYTES": text}, {})


def test_a_flag_is_named_as_it_was_typed() -> None:
    with pytest.raises(ConfigError, match=r"^--port is 'x': must be a whole number"):
        load_config(None, {}, {"gateway.port": "x"}, {"gateway.port": "--port"})


@pytest.mark.parametrize(("variable", "text", "wanted"), [
    ("PDMESH_GATEWAY_PORT", "many", "PDMESH_GATEWAY_PORT is 'many': must be a whole number from 0 to 65535"),
    ("PDMESH_GATEWAY_PORT", "65536", "PDMESH_GATEWAY_PORT is '65536': must be a whole number from 0 to 65535"),
    ("PDMESH_GATEWAY_PORT", "1.5", "PDMESH_GATEWAY_PORT is '1.5': must be a whole number from 0 to 65535"),
    ("PDMESH_SCHEDULER_LEASE_S", "0", f"PDMESH_SCHEDULER_LEASE_S is '0': must be {SECONDS}"),
    ("PDMESH_SCHEDULER_LEASE_S", "nan", f"PDMESH_SCHEDULER_LEASE_S is 'nan': must be {SECONDS}"),
    ("PDMESH_SCHEDULER_LEASE_S", "inf", f"PDMESH_SCHEDULER_LEASE_S is 'inf': must be {SECONDS}"),
    ("PDMESH_POLICY_GROUP_SIZE", "65", "PDMESH_POLICY_GROUP_SIZE is '65': must be a whole number from 1 to 64"),
    (
        "PDMESH_POLICY_MAX_GROUP_MEMBERS",
        "65",
        "PDMESH_POLICY_MAX_GROUP_MEMBERS is '65': must be a whole number from 1 to 64",
    ),
    ("PDMESH_WORKER_DTYPE", "fp8", "PDMESH_WORKER_DTYPE is 'fp8': must be one of auto, float32, bfloat16, float16"),
    ("PDMESH_WORKER_DETERMINISTIC", "maybe", "PDMESH_WORKER_DETERMINISTIC is 'maybe': must be true or false"),
    ("PDMESH_GATEWAY_PROT", "1", "unknown setting PDMESH_GATEWAY_PROT: did you mean PDMESH_GATEWAY_PORT?"),
    ("PDMESH_XYZZY", "1", "unknown setting PDMESH_XYZZY: `pdmesh config show` lists all settings"),
    ("PDMESH_SECURITY_TLS_CERT", "a", "security.tls_cert and security.tls_key go together: set both or neither"),
])  # fmt: skip
def test_a_bad_variable_is_named_with_what_was_wanted(variable: str, text: str, wanted: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, {variable: text}, {})
    assert str(error.value) == wanted


@pytest.mark.parametrize(("text", "wanted"), [
    ("[gateway]\nprot = 1", "unknown setting gateway.prot in {file}: did you mean gateway.port?"),
    ("[gatway]\nport = 1", "unknown setting gatway.port in {file}: did you mean gateway.port?"),
    ("[gateway]\nport = '1'", "gateway.port in {file} is '1': must be a whole number from 0 to 65535"),
    ("[gateway]\nport = true", "gateway.port in {file} is True: must be a whole number from 0 to 65535"),
    ("[gateway]\nport = [1]", "gateway.port in {file} is [1]: must be a whole number from 0 to 65535"),
    ("gateway = 1", "unknown setting gateway in {file}: "),
    ("[worker]\ndeterministic = 1", "worker.deterministic in {file} is 1: must be true or false"),
    ("[security]\napi_key = ''", "security.api_key in {file} is empty: "),
    ("port = ", "{file} is not valid TOML: "),
])  # fmt: skip
def test_a_bad_file_is_named_with_what_was_wanted(tmp_path: Path, text: str, wanted: str) -> None:
    file = toml_file(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load_config(file, {}, {})
    assert str(error.value).startswith(wanted.format(file=file))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*: No such file"):
        load_config(tmp_path / "absent.toml", {}, {})


def test_secrets_are_not_shown_but_reach_children() -> None:
    config = MeshConfig(security=SecurityConfig(api_key="sk-1", mesh_token="t0k"))
    assert "sk-1" not in to_toml(config) + str(to_dict(config))
    assert "t0k" not in to_toml(config) + str(to_dict(config))
    assert load_config(None, environment_of(config), {}) == config
    with pytest.raises(ConfigError) as error:
        load_config(None, {}, {"security.api_key": 12345})
    assert "12345" not in str(error.value)


def test_an_empty_key_protects_nothing_and_is_refused() -> None:
    """In a command line it is a variable of a script that is not set; in the environment, as compose has it, none."""
    with pytest.raises(ConfigError, match=r"^security\.api_key is empty: give a secret, or leave"):
        load_config(None, {}, {"security.api_key": ""})
    assert load_config(None, {"PDMESH_SECURITY_API_KEY": ""}, {}).security.api_key is None
    assert load_config(None, {}, {"security.api_key": "k"}).security.api_key == "k"


texts = st.text(st.characters(exclude_categories=["Cs", "Cc"], include_characters='\n\t"\\'), min_size=1)


@given(
    model=st.none() | texts,
    key_file=st.none() | texts.map(Path),
    port=st.integers(0, 65535),
    timeout_s=st.floats(0.001, 1e6),
    deterministic=st.booleans(),
)
def test_every_tree_survives_environment_and_file(
    tmp_path_factory: pytest.TempPathFactory,
    model: str | None,
    key_file: Path | None,
    port: int,
    timeout_s: float,
    deterministic: bool,
) -> None:
    config = MeshConfig(
        model=model,
        security=SecurityConfig(api_keys_file=key_file),
        gateway=GatewayConfig(port=port, request_timeout_s=timeout_s),
        worker=WorkerConfig(deterministic=deterministic),
    )
    assert load_config(None, environment_of(config), {}) == config
    file = toml_file(tmp_path_factory.getbasetemp(), to_toml(config))
    assert load_config(file, {}, {}) == config


def test_only_what_differs_from_the_default_goes_to_children() -> None:
    config = replace(MeshConfig(), model="m", gateway=GatewayConfig(port=1))
    assert environment_of(config) == {"PDMESH_MODEL": "m", "PDMESH_GATEWAY_PORT": "1"}


def test_every_default_is_a_value_that_may_be_given() -> None:
    for setting in settings_of(MeshConfig):
        assert setting.value(setting.default, setting.name) == setting.default


def test_there_are_few_settings_and_ten_of_them_come_first() -> None:
    """Before one is added: can it be a constant, or follow from another?"""
    marks = [setting.marks for setting in settings_of(MeshConfig)]
    assert sum(HANDED_DOWN not in each for each in marks) <= 121
    assert sum(TOP_TEN in each for each in marks) == 10


@pytest.mark.parametrize("name", sorted(REMOVED))
def test_a_setting_of_an_earlier_version_is_refused_wherever_it_is_given(tmp_path: Path, name: str) -> None:
    section, _, key = name.rpartition(".")
    file = toml_file(tmp_path, f"[{section}]\n{key} = 1\n")
    given: tuple[tuple[str, Callable[[], MeshConfig]], ...] = (
        (f"{name} in {file}", lambda: load_config(file, {}, {})),
        (variable_of(name), lambda: load_config(None, {variable_of(name): "1"}, {})),
        (name, lambda: load_config(None, {}, {name: "1"})),
    )
    for where, load in given:
        if name == "worker.kv_cache_host_share" and where == variable_of(name):
            continue  # `pdmesh up` hands it down
        with pytest.raises(ConfigError) as error:
            load()
        assert str(error.value).startswith(f"{where} is no longer a setting: ")


def test_no_removed_setting_has_the_name_of_one_that_users_give() -> None:
    assert not {setting.name for setting in settings_of(MeshConfig) if HANDED_DOWN not in setting.marks} & set(REMOVED)


def test_what_is_handed_down_comes_by_the_environment_alone(tmp_path: Path) -> None:
    assert load_config(None, {"PDMESH_READY_FD": "5"}, {}).ready_fd == 5
    assert "ready_fd" not in to_toml(MeshConfig(ready_fd=5)) + str(to_dict(MeshConfig(ready_fd=5)))
    with pytest.raises(ConfigError, match="unknown setting ready_fd"):
        load_config(toml_file(tmp_path, "ready_fd = 5"), {}, {})
    with pytest.raises(ConfigError, match="unknown setting ready_fd"):
        load_config(None, {}, {"ready_fd": 5})


def test_limits_follow_from_the_settings_that_are_left() -> None:
    given = {"scheduler.lease_s": "10", "transfer.no_progress_s": "5", "gateway.max_body_bytes": "1GiB"}
    config = load_config(None, {}, given)
    assert (config.scheduler.gateway_lease_s, config.scheduler.heartbeat_s) == (60.0, 2.0)
    transfer = config.transfer
    assert (transfer.deadline_s, transfer.network_no_progress_s, transfer.group_no_progress_s) == (60.0, 1.0, 15.0)
    assert config.gateway.max_queued_bytes == 16 << 30


def test_the_page_is_made_from_the_types() -> None:
    page = (Path(__file__).parents[2] / "docs/configuration.md").read_text()
    assert with_tables(page) == page, "run `make docs`"


@given(data=st.data())
def test_every_knob_of_the_policies_reaches_the_core(data: st.DataObject) -> None:
    """Each is set to another value than its default in a file's terms, and found in the core's configuration."""
    settings = [setting for setting in settings_of(MeshConfig) if setting.name.startswith("policy.")]
    setting = data.draw(st.sampled_from(settings))
    value = _another_value(setting)
    core = core_config_of(load_config(None, {}, {setting.name: value}), None)
    assert getattr(core.policy, setting.name.removeprefix("policy.")) == value


def _another_value(setting: Setting) -> str | float:
    default = 0.5 if setting.default is None else setting.default
    if setting.choices:
        return next(choice for choice in setting.choices if choice != default)
    assert isinstance(default, int | float)
    value = {bool: not default, float: default / 2, int: default + 1}[setting.type]
    low, high = setting.limits
    if (low is not None and value < low) or (high is not None and value > high):
        return default * 1.5 if isinstance(default, float) else int(default * 1.5)
    return value


def test_profiles_reach_the_core_too() -> None:
    config = load_config(None, {}, {"scheduler.profile": "h100-llama3-8b"})
    assert core_config_of(config, load_profile("h100-llama3-8b")).policy.latency == PROFILES["h100-llama3-8b"]


@pytest.mark.parametrize("text", [" 8001", "8001\r", "8_001", "08001"])
def test_a_number_in_the_environment_is_written_as_python_writes_it(text: str) -> None:
    assert load_config(None, {"PDMESH_GATEWAY_PORT": text}, {}).gateway.port == 8001


@pytest.mark.parametrize("text", ["8e3", "8001.0", "null", ""])
def test_a_port_that_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"PDMESH_GATEWAY_PORT is .*whole number"):
        load_config(None, {"PDMESH_GATEWAY_PORT": text}, {})


def test_null_is_no_way_to_leave_a_number_out() -> None:
    with pytest.raises(ConfigError, match="PDMESH_GATEWAY_DEFAULT_MAX_TOKENS is 'null'"):
        load_config(None, {"PDMESH_GATEWAY_DEFAULT_MAX_TOKENS": "null"}, {})
