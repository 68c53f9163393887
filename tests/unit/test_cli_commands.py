"""The command line as its users meet it: real processes, stand-in services."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer import Context
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from pdmesh import __version__
from pdmesh.cli.app import app
from pdmesh.cli.operator_commands import pool_app
from pdmesh.cli.process_id import ProcessId, wait_for_end
from pdmesh.config import MeshConfig
from pdmesh.config_sources import COMPOSE_VARIABLES, variable_of
from pdmesh.policy.bundles import BATCHINGS, BUNDLE_NAMES
from pdmesh.profiles import load_profile
from pdmesh.settings import settings_of
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.command import pdmesh_here
from pdmesh_testing.processes import is_running, write_stand_in_packages

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Machine:
    """An environment of its own for ``pdmesh``: state, cache and stand-in services."""

    folder: Path
    environ: dict[str, str]

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pdmesh.cli", *arguments],
            env=self.environ | variables,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )

    def run_here(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """The same in the test's own process, of what starts no other."""
        return pdmesh_here(*arguments, environ=self.environ | variables)

    def record(self, name: str = "default") -> dict[str, object]:
        loaded = json.loads((self.folder / "state/pdmesh" / name / "mesh.json").read_text())
        assert isinstance(loaded, dict)
        return loaded

    def pids(self, name: str = "default") -> list[int]:
        record = json.loads(json.dumps(self.record(name)))
        return [record["supervisor"]["pid"], *(service["process"]["pid"] for service in record["services"])]

    def services(self) -> dict[str, int]:
        record = json.loads(json.dumps(self.record()))
        return {service["name"]: service["process"]["pid"] for service in record["services"]}

    def events(self) -> list[str]:
        return (self.folder / "events").read_text().splitlines()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    write_stand_in_packages(tmp_path, tmp_path / "events")
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PYTHONPATH": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PDMESH_GATEWAY_PORT": "0",
    }
    machine = Machine(tmp_path, environ)
    yield machine
    for name in [folder.name for folder in (tmp_path / "state/pdmesh").glob("*")]:
        machine.run("down", "--now", "--name", name)


def test_help_loads_neither_torch_nor_grpc() -> None:
    program = (
        "import sys; sys.argv = ['pdmesh', '--help']; from pdmesh.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'grpc', 'httpx', 'opentelemetry'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_a_question_to_a_mesh_loads_no_library_that_takes_long(machine: Machine) -> None:
    """`pdmesh status` took 0.6 s of CPU time, most of it imports."""
    program = (
        "import sys; sys.argv = ['pdmesh', 'status']; from pdmesh.cli import main\n"
        "code = main(); slow = {'rich', 'structlog', 'pydantic', 'httpx', 'numpy', 'huggingface_hub', 'jinja2'}\n"
        "slow |= {'pdmesh.core.events', 'pdmesh.core.scheduler', 'pdmesh.engine'}\n"
        "print(code, sorted(slow & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=machine.environ, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.stdout == "1 []\n", done.stderr


@pytest.mark.parametrize("typed", ["simulate", "plan", "replay", "pool advise"])
def test_without_the_laboratory_its_commands_say_what_to_install(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, typed: str
) -> None:
    for commands in (app, pool_app):
        monkeypatch.delattr(commands, "all_infos")  # cached
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    done = machine.run_here(*typed.split())
    assert done.returncode == 2
    assert f"pdmesh: `pdmesh {typed}` is not installed: run `pip install 'pdmesh[lab]'`" in done.stderr
    assert not any(line.split()[:1] == typed.split()[-1:] for line in machine.run_here("--help").stdout.splitlines())


def commands_of(group: object, *names: str) -> Iterator[tuple[str, ...]]:
    """All that can be typed, as it is typed."""
    if isinstance(group, TyperGroup):
        for name in group.list_commands(Context(group)):
            yield from commands_of(group.get_command(Context(group), name), *names, name)
    else:
        yield names[:1] if names == ("ops", "list") else names


def help_of(*names: str, columns: int) -> str:
    shown = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, [*names, "--help"], terminal_width=columns)
    assert shown.exit_code == 0, shown.output
    return shown.output


@pytest.mark.parametrize("columns", [80, 100])
def test_the_help_of_each_command_has_an_example_that_can_be_typed_and_cuts_no_name(columns: int) -> None:
    commands = list(commands_of(get_command(app)))
    assert len(commands) > 30
    for names in commands:
        text = help_of(*names, *(["list"] if names == ("ops",) else []), columns=columns)
        assert not [line for line in text.splitlines() if len(line) > columns], names
        assert "…" not in text
        assert "<bool>" not in text
        example = re.search(r"Example: (pdmesh .*)", text)
        assert example is not None, names
        assert example[1].startswith(f"pdmesh {' '.join(names)}"), names


def test_help_has_panels_whole_names_and_defaults() -> None:
    text = help_of("up", columns=80)
    titles = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["Arguments:", "Model:", "Pools:", "Policy:", "Network:", "Output:", "Options:"]
    assert "--pipeline-parallel-size N\n" in text
    assert "PDMESH_SECURITY_API_KEY" in text
    assert "-d, --detach      Run" in text, "a switch takes no value"
    assert "[default: 127.0.0.1]" in " ".join(text.split())
    assert "PDMESH_API_KEY]" in help_of("chat", columns=80)


def test_words_of_other_tools_are_commands_that_help_shows() -> None:
    text = help_of(columns=80)
    for shown in ("  up, serve ", "  down, stop ", "  status, ps ", "  models, ls ", "  run ", "  logs "):
        assert shown in text
    assert "Also called serve." in help_of("serve", columns=80)


@pytest.mark.parametrize(
    ("arguments", "variables", "sentence"),
    [
        (["up", "--port", "99999"], {}, "--port is '99999': must be a whole number from 0 to 65535"),
        (["up", "--port", "x"], {}, "--port is 'x': must be a whole number from 0 to 65535"),
        (["up", "--kv-cache-bytes", "4 gigs"], {}, "--kv-cache-bytes is '4 gigs': must be a size in bytes of at least"),
        (
            ["up", "--set", "drain_s=soon"],
            {},
            "drain_s is 'soon': must be a duration in seconds of at least 0, such as",
        ),
        (["up", "--mixed", "x"], {}, "--mixed is 'x': must be a whole number of at least 0"),
        (["up", "--gateways", "65"], {}, "--gateways is '65': must be a whole number from 1 to 64"),
        (["down", "--drain", "5x"], {}, "--drain is '5x': must be a duration such as 30s or 5m of at least 0"),
        (["status", "-o", "yaml"], {}, "--output is 'yaml': must be one of table, json"),
        (["statsu"], {}, "no command is called 'statsu': did you mean status?"),
        (["pull", "llama"], {}, "no command is called 'pull': did you mean up?; see `pdmesh --help`"),
        (["pool", "pull"], {}, "no command is called 'pull'; see `pdmesh pool --help`"),
        (["zebra"], {}, "no command is called 'zebra'; see `pdmesh --help`"),
        (["drain"], {}, "missing argument 'INSTANCE'; see `pdmesh drain --help`"),
        (["role", "x"], {}, "missing argument 'ROLE'. Choose from: prefill, decode, mixed; see `pdmesh role --help`"),
        (["role", "x", "y"], {}, "ROLE is 'y': must be one of prefill, decode, mixed"),
        (["up", "--nope"], {}, "no such option"),
        (["up", "--set", "worker.dtyp=float32"], {}, "unknown setting worker.dtyp: did you mean worker.dtype?"),
        (["up", "--set", "worker.dtype"], {}, "--set 'worker.dtype': must be NAME=VALUE"),
        (["up", "--prefill", "0"], {}, "no instance could prefill"),
        (
            ["up", "--set", "scheduler.bundle=fcfs"],
            {"PDMESH_SCHEDULER_BATCHING": "eb"},
            "scheduler.batching is eb: no instance",
        ),
        (
            ["up"],
            {"PDMESH_POLICY_GROUP_IMPROVEMENT": "1"},
            "PDMESH_POLICY_GROUP_IMPROVEMENT is '1': must be a number from 0 to 0.9",
        ),
        (
            ["up"],
            {"PDMESH_POLICY_EB_THRESHOLD": "0.5"},
            "PDMESH_POLICY_EB_THRESHOLD is no longer a setting",
        ),
        (["policy", "set", "mb", "--threshold", "0.3"], {}, "--threshold applies to `eb` only"),
        (["up", "--name", "../x"], {}, "--name is '../x'"),
        (["up", "--model", "./nowhere"], {}, "model './nowhere': there is no such file or directory"),
        (["up", "./nowhere"], {}, "model './nowhere': there is no such file or directory"),
        (["serve", "./nowhere"], {}, "model './nowhere': there is no such file or directory"),
        (
            ["up", "./nowhere", "--model", "./there"],
            {},
            "two models are given, './nowhere' and --model './there': give one",
        ),
        (["config", "show"], {"PDMESH_GATEWAY_PROT": "1"}, "unknown setting PDMESH_GATEWAY_PROT"),
        (["scheduler", "--config", "absent.toml"], {}, "cannot read the configuration file absent.toml"),
    ],
)
def test_a_wrong_configuration_is_one_sentence_and_code_2(
    machine: Machine, arguments: list[str], variables: dict[str, str], sentence: str
) -> None:
    done = machine.run_here(*arguments, **variables)
    assert done.returncode == 2
    assert done.stderr.startswith(f"pdmesh: {sentence}")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_profile_is_measured_and_refused_for_another_model(machine: Machine) -> None:
    small = write_checkpoint(machine.folder / "small", max_position_embeddings=2048)
    large = write_checkpoint(machine.folder / "large", num_layers=3)
    file = machine.folder / "small.json"
    done = machine.run("profile", "--model", str(small), "--seconds", "2", "--file", str(file), "--prefill", "2")
    assert done.returncode == 0, done.stderr
    assert "not used for the fit" in done.stdout
    assert load_profile(str(file)).subject.model == "small"
    refused = machine.run("up", "--model", str(large), "--profile", str(file))
    assert refused.returncode == 2
    assert "large" in refused.stderr
    assert "small" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    started = machine.run("up", "--model", str(small), "--profile", str(file), "--detach")
    assert started.returncode == 0, started.stderr


def test_a_malformed_profile_stops_the_start(machine: Machine) -> None:
    file = machine.folder / "broken.json"
    file.write_text("{}")
    done = machine.run("up", "--profile", str(file))
    assert done.returncode == 2
    assert done.stderr.startswith(f"pdmesh: {file} is not a latency profile")


def test_a_record_that_cannot_be_written_ends_nothing(machine: Machine) -> None:
    """As on a full disk: the supervisor goes on, starts what died again, and writes its record once it can."""
    assert machine.run("up", "--detach").returncode == 0
    supervisor, *_ = machine.pids()
    (victim,) = [pid for name, pid in machine.services().items() if name == "decode-0"]
    in_the_way = machine.folder / "state/pdmesh/default/mesh.json.part"
    in_the_way.mkdir()
    os.kill(victim, signal.SIGKILL)
    log = machine.folder / "state/pdmesh/default/supervisor.log"
    wait_until(lambda: "decode-0 serves again" in log.read_text())
    assert log.read_text().count("cannot write") == 1
    assert is_running(supervisor)
    in_the_way.rmdir()
    wait_until(lambda: machine.services()["decode-0"] != victim)


def test_what_compose_takes_does_not_break_the_command(machine: Machine) -> None:
    done = machine.run_here("config", "show", PDMESH_PORT="9000", PDMESH_MODELS="/models")
    assert done.returncode == 0, done.stderr


def test_every_variable_of_the_compose_files_is_a_setting_or_known_to_be_none() -> None:
    folder = Path(__file__).parents[2] / "deploy/compose"
    taken = {name for file in folder.glob("*.yaml") for name in re.findall(r"\$\{(PDMESH_\w+)", file.read_text())}
    settings = {variable_of(setting.name) for setting in settings_of(MeshConfig)}
    assert taken - settings <= COMPOSE_VARIABLES
    assert not COMPOSE_VARIABLES & settings


def test_the_version(machine: Machine) -> None:
    done = machine.run("--version")
    assert done.returncode == 0
    assert re.fullmatch(rf"{re.escape(__version__)} \(CPU kernels: .+; core: Python\)\n", done.stdout)


def test_the_shell_completes(machine: Machine) -> None:
    environ = {"_PDMESH_COMPLETE": "complete_bash", "COMP_WORDS": "pdmesh requ", "COMP_CWORD": "1"}
    command = Path(sys.executable).with_name("pdmesh")
    done = subprocess.run(
        [str(command)], env=machine.environ | environ, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.stdout == "requests\n"


def test_config_show_tells_what_is_in_force(machine: Machine) -> None:
    done = machine.run("config", "show", "-o", "json", "--set", "policy.chunk_tokens=64", PDMESH_WORKER_DTYPE="float32")
    tree = json.loads(done.stdout)
    assert (tree["policy"]["chunk_tokens"], tree["worker"]["dtype"]) == (64, "float32")


@pytest.mark.parametrize("command", [["status"], ["chat", "-m", "Hi"], ["requests", "show", "x"]])
def test_without_a_mesh_the_others_say_so(machine: Machine, command: list[str]) -> None:
    done = machine.run_here(*command)
    assert done.returncode == 1
    assert done.stderr.startswith("pdmesh: no mesh named 'default' is running: start one with `pdmesh up`")


def test_down_without_a_mesh_is_no_error(machine: Machine) -> None:
    done = machine.run_here("down")
    assert (done.returncode, done.stdout) == (0, "pdmesh: mesh 'default' is not running\n")


def test_up_detached_then_down(machine: Machine) -> None:
    up = machine.run("up", "--detach", "--prefill", "2", "--decode", "1", "--name", "one")
    assert up.returncode == 0, up.stderr + up.stdout
    assert "ready in" in up.stdout
    assert "curl -sN http://127.0.0.1:" in up.stdout
    assert '"temperature": 0, ' in up.stdout, "the answer to the printed command is not drawn by chance"
    pids = machine.pids("one")
    assert len(pids) == 6
    assert all(map(is_running, pids))
    record_file = machine.folder / "state/pdmesh/one/mesh.json"
    assert record_file.stat().st_mode & 0o777 == 0o600
    events = machine.events()
    assert events[0] == "scheduler starting"
    assert sorted(events[1:]) == [f"{name} starting" for name in ("decode-0", "gateway", "prefill-0", "prefill-1")]

    again = machine.run("up", "--detach", "--name", "one")
    assert again.returncode == 2
    assert again.stderr.startswith("pdmesh: a mesh named 'one' is running")
    port = json.loads(record_file.read_text())["http_address"].rpartition(":")[2]
    beside = machine.run("up", "--name", "two", "--port", port)
    assert beside.returncode == 2
    assert f"mesh 'one' serves pdmesh-demo on port {port}: give this mesh another --port" in beside.stderr

    down = machine.run("down", "--name", "one")
    assert down.returncode == 0, down.stderr
    assert not any(map(is_running, pids))
    assert not record_file.exists()
    assert machine.events()[-1] == "scheduler stopped"


def test_what_a_detached_mesh_says_is_shown_and_logged(machine: Machine) -> None:
    earlier = machine.folder / "state/pdmesh/default/decode-7.log"
    earlier.parent.mkdir(parents=True)
    earlier.touch()
    up = machine.run("up", "--detach")
    assert not earlier.exists(), "an earlier mesh of the name had such an instance"
    assert earlier.with_name("decode-7.log.1").exists()
    first, *_ = up.stdout.splitlines()
    assert first.startswith("pdmesh: starting 1 prefill + 1 decode for the built-in demo model")
    assert up.stderr == ""
    shown = machine.run_here("logs", "supervisor", "-o", "json")
    events = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [event["event"][:8] for event in events] == ["starting", "ready in"]
    assert all(event["timestamp"].endswith("Z") for event in events)


def test_run_wants_the_model_that_is_asked_for(machine: Machine) -> None:
    assert machine.run("up", "--detach").returncode == 0
    other = machine.run_here("run", "smollm2", "Hi")
    assert other.returncode == 2
    told = "pdmesh: mesh 'default' serves pdmesh-demo: stop it with `pdmesh stop`, or give another --name and --port\n"
    assert other.stderr == told


def test_run_starts_a_mesh_that_stays(machine: Machine) -> None:
    """Its input has ended already, as Ctrl-D ends the conversation."""
    asked = machine.run("run", "--name", "kept", "--set", "drain_s=1s")
    assert asked.returncode == 0, asked.stderr
    assert "ready in" in asked.stderr, "answers alone are on standard output"
    assert "Ctrl-D exits" in asked.stdout
    assert all(map(is_running, machine.pids("kept")))


def test_policies_are_listed_without_a_mesh(machine: Machine) -> None:
    listed = machine.run_here("policy", "list", "-o", "json")
    assert listed.returncode == 0, listed.stderr
    known = json.loads(listed.stdout)
    assert set(known["bundles"]) == set(BUNDLE_NAMES)
    assert set(known["batchings"]) == set(BATCHINGS)
    assert known["bundle"] == ""
    table = machine.run_here("policy", "ls", COLUMNS="200").stdout
    assert "fcfs                       first come, first served\n" in table


def test_models_are_listed_with_their_size_on_disk(machine: Machine) -> None:
    file = machine.folder / "cache/pdmesh/models/SmolLM2-135M-Instruct.Q4_1.gguf"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"x" * 1000)
    found = {model["name"]: model for model in json.loads(machine.run_here("ls", "-o", "json").stdout)}
    assert found["smollm2"]["num_bytes"] == 1000
    assert "downloaded at first use" in found["gemma3-270m"]["about"]


def test_two_meshes_side_by_side(machine: Machine) -> None:
    for name in ("one", "two"):
        assert machine.run("up", "--detach", "--mixed", "1", "--name", name).returncode == 0
    one, two = machine.pids("one"), machine.pids("two")
    assert machine.run("down", "--name", "one").returncode == 0
    assert not any(map(is_running, one))
    assert all(map(is_running, two))


def test_up_detached_reports_a_service_that_cannot_start(machine: Machine) -> None:
    done = machine.run("up", "--detach", STAND_IN_decode="config-error")
    assert done.returncode == 2
    assert "pdmesh: decode-0: model 'nowhere' is no directory" in done.stderr
    assert not (machine.folder / "state/pdmesh/default/mesh.json").exists()


def test_a_mesh_whose_supervisor_was_killed_does_not_count(machine: Machine) -> None:
    assert machine.run("up", "--detach").returncode == 0
    record = json.loads(json.dumps(machine.record()))
    supervisor, *services = [
        ProcessId(**record["supervisor"]),
        *(ProcessId(**s["process"]) for s in record["services"]),
    ]
    os.kill(supervisor.pid, signal.SIGKILL)
    assert all(wait_for_end(process, TIMEOUT_S) for process in (supervisor, *services))
    assert machine.run("status").returncode == 1
    assert machine.run("up", "--detach").returncode == 0


def test_ctrl_c_drains_a_mesh_in_front_of_us(machine: Machine) -> None:
    command = [sys.executable, "-u", "-m", "pdmesh.cli", "up"]
    with subprocess.Popen(command, env=machine.environ, stdout=subprocess.PIPE, text=True) as up:
        assert up.stdout is not None
        for line in up.stdout:
            if "stop  Ctrl-C" in line:
                break
        pids = machine.pids()
        up.send_signal(signal.SIGINT)
        rest = up.stdout.read()
    assert up.returncode == 0
    assert rest.split("\n")[-3:] == ["pdmesh: draining; press Ctrl-C again to kill", "pdmesh: stopped", ""]
    assert not any(map(is_running, pids))
