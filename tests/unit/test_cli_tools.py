"""The commands that look at a mesh and at the machine."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import msgspec
import pytest

from pdmesh.apikeys import SCOPES, ApiKey, entry_of, hash_key
from pdmesh.cli import doctor
from pdmesh.cli.chat import run_chat
from pdmesh.cli.doctor import (
    Severity,
    check_encryption,
    check_memory,
    check_memory_reading,
    check_port,
    check_processor,
    check_start,
    check_transports,
)
from pdmesh.cli.http import Target
from pdmesh.cli.options import ChatOptions
from pdmesh.cli.process_id import process_id
from pdmesh.cli.request_view import requests_table
from pdmesh.cli.run import _serves
from pdmesh.cli.state_folder import MeshRecord, ServiceRecord, StateFolder, running_meshes, scheduler_of
from pdmesh.cli.status import (
    compute_lines,
    events_table,
    group_line,
    host_lines,
    instances_table,
    note_lines,
    processes_table,
    speed_line,
)
from pdmesh.cli.tables import Column, Table
from pdmesh.cli.up import down
from pdmesh.config import MeshConfig, SecurityConfig, TransferConfig, WorkerConfig
from pdmesh.engine.levels import CpuLevel, KernelChoice
from pdmesh.errors import ConfigError, InstanceUnavailable, PdmeshError, ProtocolError
from pdmesh.model import ComputePath, InstanceId, RequestId, Role
from pdmesh.transport.seal import seconds_to_seal
from pdmesh.wire import messages
from pdmesh.wire.admin import ask_scheduler
from pdmesh.wire.endpoint import serving

LOOPBACK = "127.0.0.1"

STATE = messages.MeshStatus(
    ready=True,
    reason="",
    instances=(
        messages.InstanceStatus(
            instance_id=InstanceId("prefill-0"),
            role=Role.PREFILL,
            model="m",
            device="cpu",
            pid=1234567,
            draining=True,
            num_blocks=8192,
            num_free_blocks=8192,
            num_held_blocks=0,
            num_quarantined_blocks=0,
            num_prefilling=0,
            num_decoding=0,
            num_queued_tokens=0,
        ),
    ),
    num_waiting=0,
    num_running=0,
    bundle="fcfs",
)


async def ask(answer: bytes) -> messages.AdminResponse:
    """Ask a scheduler that answers ``answer``."""

    async def serve(request: bytes, _context: Any) -> bytes:
        assert msgspec.msgpack.decode(request, type=list[messages.AdminRequest]) == [messages.GetStatus()]
        return answer

    methods: Any = {"Admin": grpc.unary_unary_rpc_method_handler(serve)}
    security = SecurityConfig()
    async with serving("pdmesh.v1.Scheduler", methods, host=LOOPBACK, port=0, security=security) as port:
        return await ask_scheduler(f"{LOOPBACK}:{port}", security, messages.GetStatus())


@pytest.mark.anyio
async def test_the_schedulers_answer_is_understood() -> None:
    assert await ask(msgspec.msgpack.encode([STATE])) == STATE


@pytest.mark.anyio
async def test_the_schedulers_no_is_told() -> None:
    with pytest.raises(PdmeshError, match="wrong mesh token"):
        await ask(msgspec.msgpack.encode([messages.AdminError(message="wrong mesh token")]))


@pytest.mark.anyio
@pytest.mark.parametrize("answer", [b"", b"garbage", msgspec.msgpack.encode([]), msgspec.msgpack.encode([{"a": 1}])])
async def test_a_malformed_answer_is_an_error_of_its_own(answer: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed answer"):
        await ask(answer)


@pytest.mark.anyio
async def test_a_scheduler_that_is_not_there() -> None:
    with socket.create_server((LOOPBACK, 0)) as held:
        address = f"{LOOPBACK}:{held.getsockname()[1]}"
    with pytest.raises(InstanceUnavailable, match=f"the scheduler at {address} does not answer"):
        await ask_scheduler(address, SecurityConfig(), messages.GetStatus())


def test_the_status_table_fits_a_terminal_of_80_columns() -> None:
    (one,) = STATE.instances
    kept = msgspec.structs.replace(one, num_cached_blocks=312)
    header, row = instances_table(msgspec.structs.replace(STATE, instances=(kept,))).lines(80)
    assert row.split() == ["prefill-0", "prefill", "drained", "cpu", "1234567", "0", "0", "0", "8192/8192", "312"]
    assert header.split()[0] == "instance"
    assert len(row) <= 80


def shown(width: int, table: Table) -> str:
    return "\n".join(table.lines(width))


def test_a_table_cuts_what_may_be_cut_and_wraps_its_last_column() -> None:
    table = Table([Column("id", min_width=4), Column("number", right=True), Column("detail")])
    table.add("abcdefghij", "1", "one two three")
    assert list(table.lines(80)) == ["id         number detail", "abcdefghij      1 one two three"]
    assert list(table.lines(5)) == list(table.lines(20)), "the last column is wide enough for words"
    assert list(table.lines(20)) == ["id   number detail", "abc…      1 one two", "            three"]


def test_the_speed_of_the_last_minute_is_a_line() -> None:
    def record(arrived_at: float, **more: Any) -> messages.RequestRecord:
        return messages.RequestRecord(
            request_id="r", arrived_at=arrived_at, num_prompt_tokens=1, bundle="fcfs", entries=(), **more
        )

    assert speed_line([], 100.0) is None
    assert speed_line([record(99.0)], 100.0) is None, "no token has come"
    old = record(10.0, first_token_s=9.0, num_output_tokens=900)
    recent = [record(90.0 + n, first_token_s=0.1 * (n + 1), num_output_tokens=50) for n in range(2)]
    told = "last 10 s: 2 requests, TTFT p50 200 ms, p99 200 ms, 10.0 tokens/s"
    assert speed_line([old, *recent], 100.0) == told


def test_the_processes_of_this_machine_have_age_restarts_and_memory(tmp_path: Path) -> None:
    me = process_id(os.getpid())
    assert me is not None
    service = ServiceRecord(name="decode-0", process=me, facts={}, num_restarts=2)
    _, row = processes_table(record_of(services=(service,))).lines(80)
    name, pid, *age, restarts, memory, unit = row.split()
    assert (name, pid, restarts, unit) == ("decode-0", str(os.getpid()), "2", "MB")
    assert age[-1] in ("s", "min")
    assert int(memory) > 10


def test_a_lost_instance_stays_with_its_cause_and_what_comes_next() -> None:
    note = messages.InstanceNote(at=988.0, cause="was killed by SIGKILL", next="its supervisor starts it again")
    gone = messages.GoneInstance(
        instance_id=InstanceId("decode-0"), role=Role.DECODE, state="restarting", note=note, pid=7, device="cpu"
    )
    event = messages.MeshEvent(at=900.0, what="lost", name="decode-0", detail="was killed by SIGKILL")
    (draining,) = STATE.instances
    draining = msgspec.structs.replace(draining, safe_to_delete=True, safe_to_delete_why="drained")
    state = msgspec.structs.replace(STATE, instances=(draining,), at=1000.0, gone=(gone,), events=(event,))
    row = list(instances_table(state).lines(80))[-1]
    assert row.split() == ["decode-0", "decode", "restarting", "cpu", "(7)"]
    assert note_lines(state) == [
        "prefill-0 is safe to delete: yes, drained",
        "decode-0 was killed by SIGKILL 12 s ago; its supervisor starts it again",
    ]
    _, line = events_table(state.events, state.at, 8).lines(80)
    assert line.split() == ["1", "min", "40", "s", "ago", "lost", "decode-0", "was", "killed", "by", "SIGKILL"]


def test_a_narrow_terminal_costs_the_ends_of_ids_and_no_column() -> None:
    record = messages.RequestRecord(
        request_id="0a57fd1ed650d5a659dfc0e3142cf4d7",
        arrived_at=0.0,
        num_prompt_tokens=131072,
        bundle="pdmesh",
        entries=(),
        state="prefilling",
        num_output_tokens=4096,
        first_token_s=12.3456,
        last_token_s=123.456,
    )
    labelled = msgspec.structs.replace(record, label="x" * 128)
    for records in ([record], [record, labelled]):
        header, *rows = shown(80, requests_table(records)).splitlines()
        assert header.split()[-4:] == ["first", "ms", "last", "ms"]
        for row in rows:
            assert row.startswith("0a57fd1ed65")
            assert row.split()[-4:] == ["131072", "4096", "12345.6", "123456.0"]
    assert record.request_id in shown(120, requests_table([record]))


def test_names_and_reasons_are_shown_as_they_are() -> None:
    """Brackets are no markup: after `pdmesh drain [/]`, every list of operations ended in a traceback."""
    (one,) = STATE.instances
    odd = msgspec.structs.replace(STATE, instances=(msgspec.structs.replace(one, instance_id=InstanceId("a[/b]:x:")),))
    assert "a[/b]:x:" in shown(80, instances_table(odd))


def test_instances_stand_by_role_and_number_however_they_joined() -> None:
    (one,) = STATE.instances
    joined = [
        ("decode-10", Role.DECODE),
        ("prefill-1", Role.PREFILL),
        ("mixed-0", Role.MIXED),
        ("decode-9", Role.DECODE),
        ("prefill-0", Role.PREFILL),
    ]
    instances = tuple(msgspec.structs.replace(one, instance_id=InstanceId(name), role=role) for name, role in joined)
    _, *rows = instances_table(msgspec.structs.replace(STATE, instances=instances)).lines(80)
    names = [row.split()[0] for row in rows]
    assert names == ["prefill-0", "prefill-1", "mixed-0", "decode-9", "decode-10"]


@contextmanager
def gateway(*events: object, done: bool = True, status: int = 200, bodies: list[Any] | None = None) -> Iterator[str]:
    """An HTTP server that streams ``events`` to any chat; yields its URL. ``bodies`` gets what it is sent."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(json.dumps({"data": [{"id": "m"}]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if bodies is not None:
                bodies.append(body)
            lines = [": ping", *(f"data: {json.dumps(event)}" for event in events), *(["data: [DONE]"] if done else [])]
            self._send("\n\n".join(lines))

        def _send(self, body: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer((LOOPBACK, 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://{LOOPBACK}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def chunk(text: str) -> dict[str, object]:
    return {"choices": [{"delta": {"content": text}}]}


def say_hi(url: str, key: str | None = None) -> int:
    options = ChatOptions(model=None, system=None, max_tokens=8, temperature=1.0)
    target = Target(MeshConfig(), StateFolder("default", Path("nowhere")), url, key)
    return run_chat(target, options, "Hi")


def test_chat_prints_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with gateway(chunk("Hel"), {"choices": []}, chunk("lo")) as url:
        assert say_hi(url) == 0
    assert capsys.readouterr().out == "Hello\n"


def test_chat_says_that_an_answer_was_cut_and_leaves_drawing_to_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    cut = {"choices": [{"delta": {}, "finish_reason": "length"}]}
    bodies: list[Any] = []
    with gateway(chunk("Hel"), cut, {"choices": []}, bodies=bodies) as url:
        options = ChatOptions(model=None, system=None, max_tokens=8)
        assert run_chat(Target(MeshConfig(), StateFolder("default", Path("nowhere")), url), options, "Hi") == 0
    told = capsys.readouterr()
    assert told.out == "Hel\n"
    assert told.err == "[cut at the limit of tokens: --max-tokens is 8, or the context is full]\n"
    assert "temperature" not in bodies[0]


def test_chat_shows_reasoning_and_calls_and_asks_for_results(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = [
        {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"a": 1}'}},
        {"index": 1, "id": "call_2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    deltas = [{"reasoning_content": "Hm"}, {"content": "Wait."}, *({"tool_calls": [call]} for call in calls)]
    asked: list[str] = []
    answers = iter(["Hi", "one", "two"])

    def say(prompt: str) -> str:
        asked.append(prompt)
        try:
            return next(answers)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", say)
    tools = tmp_path / "tools.json"
    tools.write_text('[{"name": "f"}, {"name": "g"}]')
    with gateway(*({"choices": [{"delta": delta}]} for delta in deltas)) as url:
        options = ChatOptions(
            model="m", system=None, max_tokens=8, temperature=1.0, tools=tools, tool_choice="required"
        )
        target = Target(MeshConfig(), StateFolder("default", Path("nowhere")), url, None)
        assert run_chat(target, options, None) == 0
        tools.write_text("{")
        with pytest.raises(PdmeshError, match="cannot read tools"):
            run_chat(target, options, None)
    assert asked == ["> ", "f returns> ", "g returns> ", "f returns> "]
    turn = 'Hm\nWait.\nf {"a": 1}\ng {}\n'
    assert capsys.readouterr().out.split("exits\n")[1] == turn * 2 + "\n"


def test_chat_tells_the_id_that_requests_show_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with gateway({"id": "chatcmpl-7", **chunk("Hello")}) as url:
        assert say_hi(url) == 0
    assert capsys.readouterr() == ("Hello\n", "[chatcmpl-7]\n")


@pytest.mark.parametrize(
    ("status", "key", "said"),
    [
        (401, None, "Set PDMESH_API_KEY to a key of this mesh"),
        (401, "wrong", "Set PDMESH_API_KEY to a key of this mesh"),
        (403, "mine", "The key in PDMESH_API_KEY, --api-key or security.api_key is not allowed to do this"),
        (403, None, "the gateway answered 403 Forbidden$"),
    ],
)
def test_chat_says_which_setting_a_mesh_with_keys_wants(status: int, key: str | None, said: str) -> None:
    with gateway(status=status) as url, pytest.raises(PdmeshError, match=said):
        say_hi(url, key)


def test_the_key_that_a_command_shows(tmp_path: Path) -> None:
    """A file of hashes has none to show; the one for this command alone comes before the mesh's own."""
    hashes, plain = tmp_path / "keys.toml", tmp_path / "keys"
    hashes.write_text(entry_of(ApiKey(name="alice", hash=hash_key("secret"), scopes=SCOPES)))
    plain.write_text("first second")

    def shown(given: str | None, **security: Any) -> str | None:
        config = MeshConfig(security=SecurityConfig(**security))
        return Target(config, StateFolder("default", tmp_path), None, given).key

    assert shown(None, api_keys_file=hashes) is None
    assert shown("secret", api_keys_file=hashes) == "secret"
    assert shown("secret", api_key="own") == "secret"
    assert shown(None, api_key="own", api_keys_file=plain) == "own"
    assert shown(None, api_keys_file=plain) == "first"
    with pytest.raises(PdmeshError, match="cannot read security"):
        shown(None, api_keys_file=tmp_path / "none")


def record_of(**more: Any) -> MeshRecord:
    """The record of a mesh whose supervisor is the test's process."""
    me = process_id(os.getpid())
    assert me is not None
    fields: dict[str, Any] = {
        "name": "default",
        "supervisor": me,
        "started_at": 0.0,
        "ready": True,
        "http_address": "127.0.0.1:8000",
        "scheduler_address": "127.0.0.1:9000",
        "mesh_token": "token",
        "model": "m",
        "config": {},
        "services": (),
    }
    return MeshRecord(**{**fields, **more})


def test_a_mesh_that_starts_is_stopped_before_it_has_a_record(tmp_path: Path) -> None:
    """It downloads a model, and the command that started it in the background is gone."""
    state = StateFolder("default", tmp_path / "default")
    assert not down(state, now=False, drain_s=None)
    hold = "import sys, time; from pathlib import Path; from pdmesh.cli.state_folder import StateFolder\n"
    hold += "with StateFolder('default', Path(sys.argv[1])).lock(): print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", hold, str(state.folder)], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        supervisor.stdout.readline()
        with pytest.raises(ConfigError, match="is running"), state.lock():
            pass
        found = state.supervisor()
        assert found is not None
        assert found.pid == supervisor.pid
        assert down(state, now=False, drain_s=None)
        assert supervisor.wait() == -signal.SIGTERM
    assert not down(state, now=False, drain_s=None)


def test_run_tells_models_of_one_name_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints of one training run differ by their parents' names alone."""
    for step in ("first", "second"):
        (tmp_path / step / "hf").mkdir(parents=True)
    (tmp_path / "latest").symlink_to(tmp_path / "first")
    monkeypatch.chdir(tmp_path)
    record = record_of(model="hf", config={"model": str(tmp_path / "first/hf")})
    for model, is_it in (
        ("first/hf", True),
        ("latest/hf", True),
        ("second/hf", False),
        ("hf", True),
        ("org/hf", False),
    ):
        assert _serves(record, MeshConfig(model=model)) is is_it
    named = replace(MeshConfig(model="org/hf"), worker=WorkerConfig(served_model_name="hf"))
    assert _serves(record, named)


def test_commands_know_a_meshs_certificates_by_its_record(tmp_path: Path) -> None:
    """Else they cannot be used but from where the mesh was started."""
    own = {"tls_cert": "/tls/mesh.pem", "tls_key": "/tls/mesh.key", "tls_ca": None}
    record = record_of(config={"security": own})
    state = StateFolder("default", tmp_path)
    state.write(record)
    _, _, security = scheduler_of(MeshConfig(), state)
    assert (security.mesh_token, security.tls_cert, security.tls_key, security.tls_ca) == (
        "token",
        Path("/tls/mesh.pem"),
        Path("/tls/mesh.key"),
        None,
    )
    given = SecurityConfig(tls_cert=Path("/mine.pem"), tls_key=Path("/mine.key"), tls_ca=Path("/ca.pem"))
    _, _, security = scheduler_of(MeshConfig(security=given), state)
    assert security == replace(given, mesh_token="token")


@pytest.mark.parametrize(
    ("draining", "reachable", "state"),
    [(False, True, "up"), (False, False, "unreachable"), (True, True, "draining"), (True, False, "draining")],
)
def test_an_instance_that_cannot_be_reached_does_not_drain(draining: bool, reachable: bool, state: str) -> None:
    row = msgspec.structs.replace(STATE.instances[0], draining=draining, reachable=reachable, num_decoding=1)
    assert row.state == state


@pytest.mark.parametrize("left", ["num_prefilling", "num_decoding", "num_queued_tokens", "num_taken_blocks"])
def test_an_instance_is_drained_once_nothing_is_left_on_it(left: str) -> None:
    (row,) = STATE.instances
    assert row.state == "drained"
    assert msgspec.structs.replace(row, **{left: 1}).state == "draining"


def test_chat_tells_a_failure_in_the_middle() -> None:
    events = (chunk("Hel"), {"error": {"message": "no worker is left"}})
    with gateway(*events) as url, pytest.raises(PdmeshError, match="no worker is left"):
        say_hi(url)


def test_chat_tells_a_stream_that_was_cut_off() -> None:
    with gateway(chunk("Hel"), done=False) as url, pytest.raises(PdmeshError, match="cut off"):
        say_hi(url)


UCX_INFO = "#      Transport: {}\n#         Device: memory\n"


@pytest.mark.parametrize(
    ("transports", "verdict", "advice"),
    [
        (["self", "tcp", "sysv", "posix", "cma"], Severity.OK, ""),
        (["self", "tcp"], Severity.OK, ""),
        (["self", "sysv", "cma"], Severity.FAILURE, "see `ucx_info -d`"),
        (["self"], Severity.FAILURE, "see `ucx_info -d`"),
    ],
)
def test_doctor_judges_transports(transports: list[str], verdict: Severity, advice: str) -> None:
    check = check_transports(lambda: "".join(map(UCX_INFO.format, transports)), None)
    assert check.verdict is verdict
    assert check.advice.startswith(advice)


def test_doctor_says_what_works_without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://127.0.0.1:1")
    check = doctor.check_hub()
    assert check.verdict is Severity.WARNING
    assert check.advice.startswith("`pdmesh up FOLDER` or FILE.gguf; smollm2, gemma3-270m still come from the package")


def test_doctor_finds_a_taken_port() -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        check = check_port(LOOPBACK, taken.getsockname()[1])
    assert check.verdict is Severity.WARNING
    assert "--port" in check.advice


def test_doctor_knows_the_mesh_that_has_the_port(tmp_path: Path) -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        state = StateFolder("mine", tmp_path / "pdmesh/mine")
        state.folder.mkdir(parents=True)
        state.write(record_of(name="mine", http_address=f"{LOOPBACK}:{port}"))
        check = check_port(LOOPBACK, port, running_meshes({"XDG_STATE_HOME": str(tmp_path)}))
    assert (check.verdict, check.found) == (Severity.OK, f"mesh 'mine' serves m at {LOOPBACK}:{port}")


@pytest.mark.parametrize(
    ("available_mib", "kv_cache_bytes", "verdict", "said"),
    [
        (500, None, Severity.WARNING, "lower --kv-cache-bytes"),
        (8000, None, Severity.OK, "3.9 GiB of them for two KV caches"),  # a quarter each of what is available
        (2400, None, Severity.OK, "1.2 GiB of them"),
        (2300, None, Severity.WARNING, ""),
        (4000, 2 << 30, Severity.WARNING, "lower --kv-cache-bytes"),
        (8000, 2 << 30, Severity.OK, "4.0 GiB of them"),
    ],
)
def test_doctor_judges_memory(available_mib: int, kv_cache_bytes: int | None, verdict: Severity, said: str) -> None:
    config = replace(MeshConfig(), worker=replace(MeshConfig().worker, kv_cache_bytes=kv_cache_bytes))
    check = check_memory(config, available_mib << 20)
    assert check.verdict is verdict
    assert said in f"{check.found} {check.advice}"


def test_doctor_says_nothing_of_memory_that_nobody_tells_of() -> None:
    assert check_memory(MeshConfig(), None).verdict is Severity.OK


def test_doctor_says_which_kernels_compute_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "processor_levels", lambda: (CpuLevel.AVX2, CpuLevel.BASELINE))
    avx2 = KernelChoice(SimpleNamespace(level=CpuLevel.AVX2), "the processor's best level")  # type: ignore[arg-type]
    monkeypatch.setattr(doctor, "choose_kernels", lambda _dtype, *, cpu_level: avx2)
    processor, *kernels = check_processor(WorkerConfig())
    assert processor.found.endswith(": avx2, baseline")
    assert [(check.verdict, check.found) for check in kernels] == [
        (Severity.OK, "avx2: the processor's best level")
    ] * 2


def test_doctor_finds_that_no_kernels_were_compiled_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "processor_levels", lambda: ())
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    monkeypatch.delenv("CXX", raising=False)
    _, kernels = check_processor(WorkerConfig())
    assert kernels.verdict is Severity.WARNING
    assert kernels.advice.startswith("install a C++ compiler")


def test_doctor_refuses_a_level_that_the_processor_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(_dtype: str, *, cpu_level: str) -> KernelChoice:
        raise ConfigError(f"worker.cpu_level is {cpu_level}, but this processor has only baseline")

    monkeypatch.setattr(doctor, "processor_levels", lambda: (CpuLevel.BASELINE,))
    monkeypatch.setattr(doctor, "choose_kernels", lacking)
    assert {check.verdict for check in list(check_processor(WorkerConfig(cpu_level="amx")))[1:]} == {Severity.FAILURE}


def test_doctor_finds_what_keeps_a_mesh_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_start(MeshConfig()).verdict is Severity.OK

    def refuse(_config: MeshConfig, *, num_processes: int) -> None:
        raise ConfigError(f"{num_processes} processes are too many: raise the limit (`ulimit -u`)")

    monkeypatch.setattr(doctor, "check_machine", refuse)
    found = check_start(MeshConfig())
    assert (found.verdict, found.found) == (Severity.FAILURE, "5 processes are too many")
    assert found.advice == "raise the limit (`ulimit -u`)"


def test_doctor_finds_restricted_attach() -> None:
    assert check_memory_reading(None).verdict is Severity.OK
    assert check_memory_reading("ptrace_scope is 3").verdict is Severity.WARNING


def test_doctor_prints_what_encryption_of_kv_costs() -> None:
    check = check_encryption(TransferConfig(encrypt=True), lambda num_bytes: num_bytes / 4e9)
    assert check.found == "AES-256-GCM at 4.0 GB/s on one core; transfer.encrypt is on"
    assert seconds_to_seal(1000) > 0


def test_what_computes_is_a_line_for_each_way() -> None:
    (row,) = STATE.instances[:1]
    avx2 = ComputePath(kernels="native avx2", dtype="bfloat16", reason="the processor's best level")
    torch = ComputePath(kernels="torch", dtype="float32")
    one, two = (msgspec.structs.replace(row, compute=avx2, instance_id=InstanceId(f"decode-{n}")) for n in range(2))
    told = "compute  native avx2 kernels in bfloat16 (the processor's best level)"
    assert compute_lines([row]) == [], "an instance of before says nothing"
    assert compute_lines([one, two]) == [told]
    other = msgspec.structs.replace(one, compute=torch)
    assert compute_lines([other, two]) == ["compute  torch kernels in float32: decode-0", f"{told}: decode-1"]


def test_hosts_are_lines_where_there_are_several() -> None:
    (row,) = STATE.instances[:1]
    one, two = (msgspec.structs.replace(row, host=f"node-{n}/abc", instance_id=InstanceId(f"d{n}")) for n in range(2))
    assert host_lines([one, msgspec.structs.replace(two, host=one.host)]) == []
    assert host_lines([two, one]) == ["host node-0/abc: d0", "host node-1/abc: d1"]


def test_a_group_is_a_line() -> None:
    group = messages.GroupStatus(
        request_id=RequestId("r1"),
        member_ids=(InstanceId("prefill-0"), InstanceId("prefill-1"), InstanceId("prefill-2")),
        num_prompt_tokens=16384,
        num_planned_tokens=4096,
    )
    assert group_line(group) == "prefill-0 + prefill-1 + prefill-2  compute r1 in turn: 4096 of 16384 tokens"
