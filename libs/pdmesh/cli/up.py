"""`pdmesh up` and `pdmesh down`: start a mesh on this machine, in the foreground or detached, and stop it."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.request import getproxies_environment

import anyio
import anyio.to_thread
import typer

from pdmesh.cli.http import base_url, is_live, wait_until_ready
from pdmesh.cli.plan import (
    WorkerSpecs,
    fork_server_spec,
    gateway_specs,
    pinned_settings,
    scheduler_spec,
    threads_per_worker,
    with_brief_spinning,
)
from pdmesh.cli.preflight import check_access, check_checkpoint, check_machine, check_ranks, check_settings
from pdmesh.cli.process_id import process_id, wait_for_end
from pdmesh.cli.processes import ChildSpec
from pdmesh.cli.state_folder import DEFAULT_NAME, MeshRecord, ServiceRecord, StateFolder, mesh_at, running_meshes
from pdmesh.cli.supervisor import END_S, MIN_DRAIN_S, MeshPlan, Supervisor
from pdmesh.cli.supervisor_actuator import follow_scheduler
from pdmesh.config import MeshConfig
from pdmesh.config_sources import PREFIX, environment_of, to_dict
from pdmesh.errors import ConfigError, PdmeshError
from pdmesh.failures import describe_exit, sentence
from pdmesh.host import num_usable_cores
from pdmesh.model import Role
from pdmesh.operations import PoolCounts
from pdmesh.rotation import cut_off
from pdmesh.telemetry.log_lines import UnfailingStream
from pdmesh.wire.admin import ask_scheduler
from pdmesh.wire.endpoint import bind_socket
from pdmesh.wire.messages import FollowPools, PoolsDesired
from pdmesh.worker.cores import create_cores_file

#: Seconds of a drain without a configured limit.
LONGEST_DRAIN_S = 7 * 24 * 3600.0

_stdout = UnfailingStream(1)


@dataclass(slots=True)
class MeshRun:
    """Run of a mesh in this process, with its record on disk and its messages to the user."""

    config: MeshConfig
    pools: PoolCounts
    state: StateFolder
    environ: Mapping[str, str]
    num_gateways: int = 1
    _started_at: float = field(default_factory=time.time)
    _began_s: float = field(default_factory=time.monotonic)
    _announced: bool = False
    _record_is_stale: bool = False
    _supervisor: Supervisor | None = None
    _complaints: set[str] = field(default_factory=set[str])

    def run(self) -> None:
        """Start, serve until told to stop, and drain. Raises ConfigError, StartFailed."""
        try:
            self._run()
        except (PdmeshError, OSError, MemoryError) as error:
            self._tell({"failed": sentence(error)})
            raise

    def _run(self) -> None:
        with self.state.lock():
            model = self.config.model or "the built-in demo model"
            check_settings(self.config)
            check_access(self.config)
            num_workers = sum(self.pools.of(role) * self.config.degrees_of(role).num_processes for role in Role)
            check_machine(self.config, num_processes=3 + self.num_gateways + num_workers)
            self.config = _with_token(resolved(self.config, self._say))
            check_checkpoint(self.config, Path(str(self.config.model)), num_instances=self.pools.total)
            check_ranks(self.config, {self.config.degrees_of(role) for role in Role if self.pools.of(role)})
            check_profile(self.config)
            self.state.forget_desired()
            self._set_logs_aside()
            listener = self._listener()
            cores = num_usable_cores()
            threads = threads_per_worker(self.config, self.pools.total, cores)
            self._say(
                f"starting {self.pools} for {model}; {cores} {'core' if cores == 1 else 'cores'}, "
                f"{threads} engine {'thread' if threads == 1 else 'threads'} a worker"
            )
            self._supervisor = supervisor = Supervisor(
                self._plan(listener), act=follow_scheduler, on_change=self._changed, say=self._say
            )
            try:
                with listener:
                    anyio.run(supervisor.run)
            finally:
                try:
                    self.state.remove()
                except OSError as error:
                    self._complain(f"cannot remove {self.state.record_file}: {error.strerror}")
        self._say("stopped")

    def _set_logs_aside(self) -> None:
        """Begin new logs, because an earlier mesh's logs are not about this one."""
        own = None if self.config.ready_fd is None else self.state.log_file("supervisor")
        for file in self.state.folder.glob("*.log"):
            if file != own:
                self.state.fresh_log(file.stem, self.config.supervisor.log_keep)

    def _listener(self) -> socket.socket:
        """Return the gateways' socket. Raises ConfigError, which names a mesh that has the port."""
        host, port = self.config.gateway.host, self.config.gateway.port
        try:
            return bind_socket(host, port, setting="--port (gateway.port)")
        except ConfigError as error:
            mesh = mesh_at(port, running_meshes(self.environ))
            if mesh is None:
                raise
            raise ConfigError(
                f"mesh {mesh.name!r} serves {mesh.model} on port {port}: give this mesh another --port, or stop the "
                f"other with `pdmesh down --name {mesh.name}`"
            ) from error

    def _say(self, message: str) -> None:
        """Print a message. A detached mesh logs it, and also sends it to the process that started it, until ready."""
        if self.config.ready_fd is None:
            _say(message)
            return
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        event = {"service": "supervisor", "event": message, "level": "info", "timestamp": now}
        _stdout.write(json.dumps(event) + "\n")
        self._tell({"said": message})

    def _tell(self, facts: Mapping[str, Any]) -> None:
        """Send a line of JSON to the process that started this one, unless the mesh has been announced."""
        if self.config.ready_fd is not None and not self._announced:
            with suppress(OSError):  # the reader may have ended
                os.write(self.config.ready_fd, json.dumps(facts).encode() + b"\n")

    def _plan(self, listener: socket.socket) -> MeshPlan:
        config = self.config

        cores_file = None
        if config.worker.lend_cores and self.pools.total > 1:
            try:
                cores_file = create_cores_file()
                self.environ = with_brief_spinning(self.environ)
            except OSError as error:
                self._say(f"workers cannot share cores: this system has no shared memory for them ({error.strerror})")
        workers = WorkerSpecs(config, self.state, self.environ, cores_file)

        def others(scheduler: Mapping[str, Any]) -> tuple[Sequence[ChildSpec], Sequence[ChildSpec]]:
            workers.scheduler = scheduler
            gateways = gateway_specs(config, self.num_gateways, listener.fileno(), self.state, self.environ, scheduler)
            return gateways, workers.of_pools(self.pools)

        async def wait_ready(gateway: Mapping[str, Any]) -> None:
            await wait_until_ready(base_url(gateway["http_address"], config.security), config.security)

        return MeshPlan(
            scheduler=scheduler_spec(config, self.state, self.environ),
            others=others,
            pin=pinned_settings,
            answers=self._answers,
            wait_ready=wait_ready,
            tend=self._tend,
            start_timeout_s=config.supervisor.start_timeout_s,
            hang_s=config.supervisor.hang_s,
            drain_s=self._drain_s,
            name_prefix=workers.name_prefix,
            worker=workers.member,
            resized=workers.resized,
            follow=self._follow,
            close=listener.close,
            fork_server=fork_server_spec(config, self.pools, self.state, self.environ),
        )

    async def _answers(self, name: str, facts: Mapping[str, Any]) -> bool:
        """Return whether a service answers: a gateway at its own port, the others at their metrics port."""
        own = facts.get("own_address") or facts.get("http_address")
        address = own or f"{_host(self.config.telemetry.metrics_host)}:{facts['metrics_port']}"
        return await is_live(base_url(address, self.config.security), self.config.security)

    async def _follow(self, question: FollowPools) -> PoolsDesired | None:
        assert self._supervisor is not None
        address = str(self._supervisor.facts("scheduler")["address"])
        try:
            answer = await ask_scheduler(address, self.config.security, question)
        except PdmeshError:
            return None  # absent, or another supervisor is connected, as its log says
        assert isinstance(answer, PoolsDesired)
        return answer

    async def _tend(self) -> None:
        await anyio.to_thread.run_sync(self._cut_logs)
        if self._record_is_stale and self._supervisor is not None:
            self._changed(self._supervisor)

    def _cut_logs(self) -> None:
        for file in sorted(self.state.folder.glob("*.log")):
            try:
                cut_off(file, max_bytes=self.config.supervisor.log_max_bytes, keep=self.config.supervisor.log_keep)
            except OSError as error:
                self._complain(f"cannot rotate {file}: {error.strerror}")

    def _drain_s(self) -> float:
        """Return how long to drain: as `pdmesh down` requested, else as configured; without a limit, a week."""
        told_s = self.state.read_drain()
        limit_s = self.config.drain_s if told_s is None else told_s
        return LONGEST_DRAIN_S if limit_s is None else limit_s

    def _complain(self, message: str) -> None:
        """Print a message once: a failure on a full disk comes again and again."""
        if message not in self._complaints:
            self._complaints.add(message)
            self._say(message)

    def _changed(self, supervisor: Supervisor) -> None:
        me = process_id(os.getpid())
        assert me is not None
        http_address = next(
            (str(each.facts["http_address"]) for each in supervisor.services if "http_address" in each.facts), ""
        )
        record = MeshRecord(
            name=self.state.name,
            supervisor=me,
            started_at=self._started_at,
            ready=supervisor.ready,
            http_address=http_address,
            scheduler_address=str(supervisor.facts("scheduler").get("address", "")),
            mesh_token=self.config.security.mesh_token,
            model=str(self.config.worker.served_model_name),
            config=to_dict(self.config),
            services=tuple(
                ServiceRecord(
                    name=service.name, process=process, facts=service.facts, num_restarts=service.num_restarts
                )
                for service in supervisor.services
                if service.child is not None and (process := process_id(service.child.pid)) is not None
            ),
        )
        try:
            self.state.write(record)
            self._record_is_stale = False
        except OSError as error:
            self._record_is_stale = True  # `_tend` tries again
            self._complain(
                f"cannot write {self.state.record_file}: {error.strerror}; the mesh serves, but other commands "
                "cannot find it: free some space, or set XDG_STATE_HOME to another folder"
            )
        if supervisor.ready and not self._announced:
            self._announce(record)
            self._tell({"pid": os.getpid()})
            self._announced = True
            if self.config.ready_fd is not None:
                os.close(self.config.ready_fd)

    def _announce(self, record: MeshRecord) -> None:
        from pdmesh.engine.files import load_model_info

        url = base_url(record.http_address, self.config.security)
        command = _command()
        named = "" if record.name == DEFAULT_NAME else f" --name {record.name}"
        body = {
            "model": record.model,
            "temperature": 0,
            "stream": True,
            "messages": [{"role": "user", "content": "Hello!"}],
        }
        has_key = self.config.security.api_key or self.config.security.api_keys_file
        page = f", or {url}/ui; talk to the model at {url}/chat" if self.config.gateway.ui else ""
        key = ' -H "Authorization: Bearer $PDMESH_API_KEY"' if has_key else ""
        tls = self.config.security
        trusted = f" --cacert {shlex.quote(str(tls.tls_ca or tls.tls_cert))}" if tls.tls_cert else ""
        ways = sorted(
            {
                str(service.facts["compute"]).partition(" (")[0]
                for service in record.services
                if "compute" in service.facts
            }
        )
        computed = f", computed by {'; '.join(ways)}" if ways else ""
        direct = " --noproxy '*'" if getproxies_environment() else ""  # curl would ask a proxy for this machine, too
        self._say(
            f"ready in {time.monotonic() - self._began_s:.1f} s: {url}/v1, model {record.model!r}{computed}\n\n"
            f"  try   curl -sN{trusted}{direct} {url}/v1/chat/completions{key} \\\n"
            f"          -H 'Content-Type: application/json' -d '{json.dumps(body)}'\n"
            f"  draw  sampling defaults: {load_model_info(Path(str(self.config.model))).default_sampling}\n"
            f"  look  {command} status{named}{page}\n"
            f"  logs  {command} logs -f{named}\n"
            f"  stop  {'Ctrl-C, or ' if self.config.ready_fd is None else ''}{command} down{named}\n"
        )


def resolved(config: MeshConfig, say: Callable[[str], None] | None = None) -> MeshConfig:
    """Return the configuration with the model as a directory, its served name, and absolute paths of certificates.

    A model that is neither local nor cached is downloaded. Raises ConfigError if there is no such model.
    """
    from pdmesh.engine.files import resolve_model, served_name, with_adapter

    if config.model is None:
        from pdmesh.demo.demo_checkpoint import DEMO_MODEL_NAME, demo_checkpoint

        name = DEMO_MODEL_NAME
        directory = demo_checkpoint()
    else:
        directory = resolve_model(config.model, say or _say)
        name = served_name(config.model)  # a hub model's directory is a hash
    served = config.worker.served_model_name or with_adapter(name, config.worker.lora)
    lora = None if config.worker.lora is None else config.worker.lora.absolute()
    given = {name: getattr(config.security, name) for name in ("tls_cert", "tls_key", "tls_ca")}
    files: dict[str, Any] = {name: path.absolute() for name, path in given.items() if path is not None}
    return replace(
        config,
        model=str(directory.absolute()),
        worker=replace(config.worker, served_model_name=served, lora=lora),
        security=replace(config.security, **files),
    )


def _with_token(config: MeshConfig) -> MeshConfig:
    """Return the configuration with a mesh token; a new random one if none is set."""
    token = config.security.mesh_token or secrets.token_hex(16)
    return replace(config, security=replace(config.security, mesh_token=token))


def check_profile(config: MeshConfig) -> None:
    """Raise ConfigError if the latency profile does not cover the model and device here."""
    if config.scheduler.profile is None or config.worker.engine != "torch":
        return
    from pdmesh.engine.files import load_model_config
    from pdmesh.policy.latency_profile import Subject
    from pdmesh.profiles import load_profile
    from pdmesh.worker.engines import block_size_of

    profile = load_profile(config.scheduler.profile)
    model = load_model_config(Path(str(config.model)))
    layout = model.kv_layout(dtype=config.worker.dtype, block_size=block_size_of(config.worker, model))
    device, device_name = _device(config.worker.device)
    problem = profile.mismatch(
        Subject(
            model=str(config.worker.served_model_name),
            num_parameters=model.num_parameters,
            num_layers=layout.num_layers,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            dtype=layout.dtype,
            device=device,
            device_name=device_name,
        )
    )
    if problem is not None:
        raise ConfigError(problem)


def _device(name: str) -> tuple[str, str]:
    """Return the device that workers will choose for ``name``, and its hardware. Another process loads torch for this.

    Raises ConfigError if there is no such device, or torch cannot be loaded.
    """
    code = (
        "import sys; from pdmesh.engine.runner import torch_device; from pdmesh.worker.engines import hardware_name; "
        "device = str(torch_device(sys.argv[1])); print(device); print(hardware_name(device))"
    )
    asked = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        raise ConfigError((asked.stderr.strip() or "torch cannot be loaded").splitlines()[-1])
    device, hardware = asked.stdout.splitlines()
    return device, hardware


def up_detached(
    config: MeshConfig,
    pools: PoolCounts,
    state: StateFolder,
    environ: Mapping[str, str],
    num_gateways: int = 1,
    say: Callable[[str], None] = typer.echo,
) -> int:
    """Start a supervisor in its own session. Return 0 once its mesh can serve, else the supervisor's exit code.

    Raises ConfigError if a mesh of this name runs. The supervisor's messages are passed to ``say``, and the reason of a
    failure is printed to standard error.
    """
    with state.lock():  # fail here if one runs; the supervisor takes the lock later
        log_file = state.fresh_log("supervisor", config.supervisor.log_keep)
    foreign = {key: value for key, value in environ.items() if not key.startswith(PREFIX)}
    read_fd, write_fd = os.pipe()
    arguments = ["--name", state.name, "--prefill", pools.prefill, "--decode", pools.decode, "--mixed", pools.mixed]
    arguments += ["--gateways", num_gateways]
    with log_file.open("ab") as log:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "pdmesh.cli", "up", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**foreign, **environment_of(replace(config, ready_fd=write_fd))},
            start_new_session=True,
            pass_fds=(write_fd,),
        )
    os.close(write_fd)
    failure = ""
    with open(read_fd, "rb") as lines:
        try:
            for line in lines:
                told: dict[str, Any] = json.loads(line)
                if "pid" in told:
                    supervisor.returncode = 0  # `Popen` must not wait for the supervisor
                    return 0
                failure = told.get("failed", failure)
                if "said" in told:
                    say(f"pdmesh: {told['said']}")
        except KeyboardInterrupt:
            supervisor.send_signal(signal.SIGTERM)
            raise
    exit_code = supervisor.wait() or 1
    # A killed supervisor sends nothing, and a traceback is only in its log.
    why = f"pdmesh: {failure}" if failure else log_file.read_text(errors="replace").rstrip()
    typer.echo(why or f"pdmesh: the supervisor {describe_exit(exit_code)}", err=True)
    return exit_code


def down(state: StateFolder, *, now: bool, drain_s: float | None) -> bool:
    """Stop the mesh and wait until it is gone. Return False if none of that name runs.

    Requests may continue for ``drain_s``, else for the mesh's configured time. Raises PdmeshError if the mesh does not
    end.
    """
    record = state.read()
    if record is None:
        state.remove()
        starting = state.supervisor()  # a start may take minutes to download models
        if starting is None:
            return False
        os.kill(starting.pid, signal.SIGTERM)
        if not wait_for_end(starting, 3 * END_S + 2 * MIN_DRAIN_S):
            raise PdmeshError(f"the supervisor (pid {starting.pid}) still runs; see {state.folder}")
        return True
    if drain_s is not None:
        state.write_drain(drain_s)
    os.kill(record.supervisor.pid, signal.SIGTERM)
    if now:
        os.kill(record.supervisor.pid, signal.SIGINT)  # another signal: two equal ones may merge
    configured_s = record.config.get("drain_s")
    limit_s = drain_s if drain_s is not None else LONGEST_DRAIN_S if configured_s is None else float(configured_s)
    if not wait_for_end(record.supervisor, limit_s + 3 * END_S + 2 * MIN_DRAIN_S):
        raise PdmeshError(f"the supervisor (pid {record.supervisor.pid}) still runs; see {state.folder}")
    return True


def _command() -> str:
    """Return the user's command for pdmesh: its name if the PATH finds it, else its path."""
    installed = Path(sys.executable).with_name("pdmesh")
    if shutil.which("pdmesh") == str(installed) or not installed.exists():
        return "pdmesh"
    return os.path.relpath(installed)


def _host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _say(message: str) -> None:
    """Print to standard output, which may be a log on a full disk or a pipe without a reader."""
    _stdout.write(f"pdmesh: {message}\n")
