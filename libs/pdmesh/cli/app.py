"""The ``pdmesh`` command. Each command imports its implementation when it runs, so that ``--help`` stays fast."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer
from typer import Argument, Exit, Option

from pdmesh import __version__
from pdmesh.cli.command_group import Commands, takes
from pdmesh.cli.keys import app as keys_app
from pdmesh.cli.operator_commands import app as operator_app
from pdmesh.cli.operator_commands import ops_app, pool_app
from pdmesh.cli.options import (
    DEVICE,
    DIAL,
    DTYPE,
    HOST,
    MODEL,
    PORT,
    Asked,
    ChatOptions,
    ConfigFile,
    Decode,
    Flag,
    Given,
    Mixed,
    Name,
    Output,
    OutputFormat,
    Prefill,
    Scheduler,
    Settings,
    asks_quietly,
    asks_scheduler,
    configured,
)
from pdmesh.cli.state_folder import DEFAULT_NAME, state_folder
from pdmesh.cli.tls import app as tls_app
from pdmesh.errors import ConfigError
from pdmesh.units import parse_seconds

if TYPE_CHECKING:
    from pdmesh.config import MeshConfig


app = Commands("pdmesh", "A disaggregated serving mesh for large language models.")
requests_app = Commands("requests", "Show single requests.")
sessions_app = Commands("sessions", "Show sessions: the agents and conversations that clients name.", default="list")
policy_app = Commands("policy", "Show the scheduling policy, and switch it while serving.")
config_app = Commands("config", "Show the configuration.")


def _print_version(ctx: typer.Context, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        version()
        raise Exit


@app.callback()
def _root(
    shows_version: Annotated[
        bool, Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None: ...


#: Options of `up` that set settings.
UP_FLAGS = (
    MODEL,
    Flag("--served-model-name", "worker.served_model_name", "Model name that clients use.", "NAME", panel="Model"),
    Flag("--lora", "worker.lora", "LoRA adapter to merge into the weights: PEFT's directory.", "PATH", panel="Model"),
    DTYPE,
    DEVICE,
    Flag("--cpu-level", "worker.cpu_level", "Highest level of CPU kernels to use, such as avx2.", panel="Model"),
    Flag("--max-model-len", "worker.max_model_len", "Context length. [default: the checkpoint's]", "N", panel="Model"),
    Flag("--kv-cache-bytes", "worker.kv_cache_bytes", "KV cache of an instance, such as 4GiB.", "SIZE", panel="Model"),
    Flag(
        "--deterministic",
        "worker.deterministic",
        "Bit-identical results whatever the batch.",
        panel="Model",
        is_switch=True,
    ),
    Flag(
        "--tensor-parallel-size",
        "worker.tensor_parallel_size",
        "Processes that compute each instance's steps. [default: 1]",
        "N",
        short="-tp",
        panel="Pools",
    ),
    Flag("--prefill-tp", "prefill.tensor_parallel_size", "The same, of prefill instances only.", "N", panel="Pools"),
    Flag("--decode-tp", "decode.tensor_parallel_size", "The same, of decode instances only.", "N", panel="Pools"),
    Flag(
        "--pipeline-parallel-size",
        "worker.pipeline_parallel_size",
        "Stages that each instance's steps pass. [default: 1]",
        "N",
        short="-pp",
        panel="Pools",
    ),
    Flag("--prefill-pp", "prefill.pipeline_parallel_size", "The same, of prefill instances only.", "N", panel="Pools"),
    Flag("--decode-pp", "decode.pipeline_parallel_size", "The same, of decode instances only.", "N", panel="Pools"),
    Flag(
        "--bundle",
        "scheduler.bundle",
        "Policy bundle; see `pdmesh policy list`. [default: pdmesh]",
        "NAME",
        panel="Policy",
    ),
    Flag(
        "--profile",
        "scheduler.profile",
        "Latency model of an instance. [default: measured at start]",
        "NAME|FILE",
        panel="Policy",
    ),
    Flag("--chunk-tokens", "policy.chunk_tokens", "Prompt tokens in a step.", "N", panel="Policy"),
    HOST,
    PORT,
    Flag(
        "--api-key",
        "security.api_key",
        "Key that clients must send; safer: PDMESH_SECURITY_API_KEY.",
        "KEY",
        panel="Network",
    ),
    Flag("--log-level", "telemetry.log_level", "debug, info, warning or error.", "LEVEL", panel="Output"),
)


@app.command("up, serve", example="pdmesh up ./my-model --prefill 2 --decode 2 --detach")
@configured(*UP_FLAGS)
def up(
    given: Given,
    model: Annotated[str | None, Argument(metavar="MODEL", help="Same as --model, such as smollm2.")] = None,
    prefill: Prefill = None,
    decode: Decode = None,
    mixed: Mixed = 0,
    gateways: Annotated[
        int, Option(min=1, max=64, rich_help_panel="Network", help="Number of gateway processes; they share the port.")
    ] = 1,
    name: Name = DEFAULT_NAME,
    detach: Annotated[
        bool, Option("--detach", "-d", help="Run in the background; return once the mesh serves.")
    ] = False,
) -> None:
    """Start a mesh on this machine. Ctrl-C drains and stops it; a second one kills it."""
    from pdmesh.cli.plan import make_pools
    from pdmesh.cli.up import MeshRun, up_detached

    if model is not None and (other := given.flag("model")) is not None:
        raise ConfigError(f"two models are given, {model!r} and --model {other!r}: give one")
    tree = given.config(model=model)
    pools = make_pools(prefill, decode, mixed)
    if tree.scheduler.batching == "eb" and not pools.mixed:
        from pdmesh.policy.batching import NOTHING_EXCLUSIVE
        from pdmesh.policy.bundles import make_bundle

        if not pools.decode or make_bundle(tree.scheduler.bundle, tree.policy).local_prefill is None:
            raise ConfigError(f"scheduler.batching is eb: {NOTHING_EXCLUSIVE}")
    state = state_folder(os.environ, name)
    if detach:
        raise Exit(up_detached(tree, pools, state, os.environ, gateways))
    MeshRun(tree, pools, state, os.environ, gateways).run()


@app.command(example='pdmesh run smollm2 "Why is the sky blue?"')
@configured(DTYPE, DEVICE, HOST, PORT)
def run(
    given: Given,
    model: Annotated[str | None, Argument(metavar="MODEL", help="As of `pdmesh up`.")] = None,
    message: Annotated[list[str] | None, Argument(metavar="MESSAGE", help="Print the answer to this and exit.")] = None,
    name: Name = DEFAULT_NAME,
) -> None:
    """Chat with a model: start a mesh in the background unless one runs, and leave it running.

    A running mesh of that name must serve the model.
    """
    from pdmesh.cli.run import run_model

    tree = given.config(model=model)
    raise Exit(run_model(tree, state_folder(os.environ, name), " ".join(message or ()) or None))


@app.command("down, stop", example="pdmesh down --drain 10s")
def down(
    name: Name = DEFAULT_NAME,
    now: Annotated[bool, Option("--now", help="Kill at once, without draining.")] = False,
    drain: Annotated[
        float | None,
        Option(min=0, parser=parse_seconds, help="Time that requests have to finish. [default: the mesh's drain_s]"),
    ] = None,
) -> None:
    """Drain and stop a mesh on this machine, and wait until it has ended."""
    from pdmesh.cli.up import down as stop

    stopped = stop(state_folder(os.environ, name), now=now, drain_s=drain)
    typer.echo(f"pdmesh: mesh {name!r} {'stopped' if stopped else 'is not running'}")


@app.command("status, ps", example="pdmesh status -o json")
@asks_scheduler
def status(asked: Asked) -> None:
    """Show the instances of a mesh, their work and the latest events.

    `pdmesh policy list` explains policies and batching modes. "fixed": the instance has no choice of mode, such as one
    that only prefills.
    """
    from pdmesh.cli.status import show_status

    show_status(asked)


@app.command("models, ls", example="pdmesh models")
def models(output: OutputFormat = Output.TABLE) -> None:
    """List the models on this machine, and the names of others that are downloaded at first use."""
    from pdmesh.cli.models import list_models

    list_models(output)


@app.command(example="pdmesh logs decode-0 -f")
def logs(
    process: Annotated[
        list[str] | None, Argument(metavar="PROCESS", help="Such as gateway or decode-0. [default: all]")
    ] = None,
    name: Name = DEFAULT_NAME,
    lines: Annotated[int, Option("-n", "--lines", min=0, help="How many of the latest lines to print.")] = 100,
    follow: Annotated[bool, Option("-f", "--follow", help="Go on with new lines until Ctrl-C.")] = False,
    output: OutputFormat = Output.TABLE,
) -> None:
    """Print the logs of all processes of a mesh that was started with `pdmesh up`, in the order of time."""
    from pdmesh.cli.logs import print_logs

    print_logs(state_folder(os.environ, name), process or (), lines, follow=follow, output=output)


@requests_app.command("show", example="pdmesh requests show chatcmpl-cd69")
@asks_scheduler
def requests_show(
    asked: Asked,
    request_id: Annotated[str, Argument(metavar="ID", help="The request's id (`X-Request-Id` of its response).")],
) -> None:
    """Print a request's timeline: waiting, each chunk with its instance, the KV transfer, the tokens.

    If several requests have the id, list them instead.
    """
    from pdmesh.cli.request_view import show_request

    show_request(asked, request_id)


@requests_app.command("list, ls", example="pdmesh requests list -n 50")
@asks_scheduler
def requests_list(
    asked: Asked,
    limit: Annotated[int, Option("-n", "--limit", min=1, help="How many requests to list.")] = 20,
) -> None:
    """List the latest requests, newest first."""
    from pdmesh.cli.request_view import list_requests

    list_requests(asked, limit)


@sessions_app.command("list, ls", example="pdmesh sessions list -n 50")
@asks_scheduler
def sessions_list(
    asked: Asked,
    limit: Annotated[int, Option("-n", "--limit", min=1, help="How many sessions to list.")] = 20,
) -> None:
    """List the sessions that were used last, newest first. Ids are hashes of clients' names."""
    from pdmesh.cli.session_view import list_sessions

    list_sessions(asked, limit)


@sessions_app.command("show", example="pdmesh sessions show 3f2a9c01")
@asks_scheduler
def sessions_show(asked: Asked, session: Annotated[str, Argument(metavar="ID", help="Beginning of its id.")]) -> None:
    """Show a session: its turns, its pauses, and where its KV is cached."""
    from pdmesh.cli.session_view import show_session

    show_session(asked, session)


@sessions_app.command("end", example="pdmesh sessions end 3f2a9c01")
@asks_quietly
def sessions_end(asked: Asked, session: Annotated[str, Argument(metavar="ID", help="Beginning of its id.")]) -> None:
    """End a session: no more requests are expected of it. A further request opens it again."""
    from pdmesh.cli.session_view import end_session

    end_session(asked, session)


@policy_app.command("list, ls", example="pdmesh policy list")
@asks_scheduler
def policy_list(asked: Asked) -> None:
    """List the policy bundles and batching modes; a star marks what a running mesh uses."""
    from pdmesh.cli.policy import list_policies

    list_policies(asked)


@policy_app.command("get", example="pdmesh policy get")
@asks_quietly
def policy_get(asked: Asked) -> None:
    """Print the policy bundle in use."""
    from pdmesh.cli.policy import get_policy

    get_policy(asked)


@policy_app.command("set", example="pdmesh policy set fcfs")
@asks_quietly
def policy_set(
    asked: Asked,
    policy: Annotated[str, Argument(metavar="POLICY", help="A bundle or a batching mode, as in `pdmesh policy list`.")],
    threshold: Annotated[
        float | None,
        Option(help="For `eb`: share of idle seats that ends a decode phase. [default: the best in theory]"),
    ] = None,
) -> None:
    """Switch the policy bundle, or the batching mode, while serving. No request is dropped.

    A bundle brings its own batching mode, unless scheduler.batching sets one. `pdmesh down` forgets the choice.
    """
    from pdmesh.cli.policy import set_policy

    set_policy(asked, policy, threshold)


@app.command(example='pdmesh chat -m "Why separate prefill and decode?"')
@takes(ChatOptions)
def chat(
    options: ChatOptions,
    name: Name = DEFAULT_NAME,
    url: Annotated[
        str | None, Option("--url", metavar="URL", help="Use this gateway, such as http://host:8000.")
    ] = None,
    api_key: Annotated[
        str | None,
        Option(metavar="KEY", envvar="PDMESH_API_KEY", help="Key for the gateway; safer from the environment."),
    ] = None,
    message: Annotated[
        str | None, Option("--message", "-m", help="Send this message, print the answer and exit.")
    ] = None,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Chat with the model. Ctrl-C stops an answer, Ctrl-D exits."""
    from pdmesh.cli.chat import run_chat
    from pdmesh.cli.http import Target

    target = Target(Given(config, settings or (), {}).config(), state_folder(os.environ, name), url, api_key)
    raise Exit(run_chat(target, options, message))


@app.command(example="pdmesh doctor --mesh")
@configured(PORT)
def doctor(
    given: Given,
    output: OutputFormat = Output.TABLE,
    mesh: Annotated[
        bool, Option("--mesh", help="Check a running mesh instead: its instances try each other and the gateways.")
    ] = False,
    name: Name = DEFAULT_NAME,
    scheduler: Scheduler = None,
) -> None:
    """Check this machine: processor, kernels, torch, UCX, GPU, ports, memory. Says how to fix what is missing."""
    if mesh:
        from pdmesh.cli.mesh_doctor import run_mesh_doctor

        tree = given.config(scheduler_address=scheduler)
        raise Exit(run_mesh_doctor(Asked(tree, state_folder(os.environ, name), output)))
    from pdmesh.cli.doctor import run_doctor

    raise Exit(run_doctor(given.config(), output, os.environ))


@app.command(example="pdmesh profile --model ./my-model --prefill 2 --decode 2")
@configured(MODEL, DTYPE, DEVICE)
def profile(
    given: Given,
    file: Annotated[Path | None, Option(help="File to write. [default: MODEL.profile.json]")] = None,
    prefill: Prefill = None,
    decode: Decode = None,
    mixed: Mixed = 0,
    seconds: Annotated[float, Option(min=1, parser=parse_seconds, help="How long to measure.")] = 30.0,
) -> None:
    """Measure how long steps of a model take on this machine, and write a profile for the scheduler."""
    from pdmesh.cli.plan import make_pools
    from pdmesh.cli.profile import ProfileOptions, run_profile
    from pdmesh.cli.up import resolved

    run_profile(
        resolved(given.config()), ProfileOptions(file=file, pools=make_pools(prefill, decode, mixed), limit_s=seconds)
    )


@app.command(example="pdmesh gateway --model ./my-model --scheduler 10.0.0.1:5000 --port 8000")
@configured(MODEL, DIAL, HOST, PORT)
def gateway(given: Given) -> None:
    """Run one gateway in the foreground."""
    _run_service("gateway", given.config())


@app.command(example="pdmesh scheduler --host 127.0.0.1 --port 5000")
@configured(
    Flag("--host", "scheduler.host", "Address to listen on. [default: 127.0.0.1]", metavar="ADDRESS"),
    Flag("--port", "scheduler.port", "gRPC port. [default: a free one]", metavar="PORT"),
)
def scheduler(given: Given) -> None:
    """Run one scheduler in the foreground."""
    _run_service("scheduler", given.config())


@app.command(example="pdmesh prefill --model ./my-model --scheduler 127.0.0.1:5000")
@configured(MODEL, DIAL)
def prefill(given: Given) -> None:
    """Run one prefill instance in the foreground."""
    _run_service("prefill", given.config())


@app.command(example="pdmesh decode --model ./my-model --scheduler 127.0.0.1:5000 --role mixed")
@configured(MODEL, DIAL, Flag("--role", "worker.role", "decode or mixed. [default: decode]", metavar="ROLE"))
def decode(given: Given) -> None:
    """Run one decode or mixed instance in the foreground."""
    _run_service("decode", given.config())


@app.command(example="pdmesh actuator --release mesh --scheduler mesh-scheduler:7000")
@configured(
    Flag("--release", "kubernetes.release", "Name of the chart's release. [default: mesh]", metavar="NAME"), DIAL
)
def actuator(
    given: Given,
    compose: Annotated[
        bool, Option("--compose", help="Make and remove containers with `docker compose`, which COMPOSE_FILE is for.")
    ] = False,
) -> None:
    """Start and stop instances for `pool resize` and `restart --rolling`: from a pod in Kubernetes, or in Compose."""
    if compose:
        from pdmesh.cli.compose_actuator import run_actuator
    else:
        from pdmesh.extensions import extension

        wanted, install = "the actuator of Kubernetes", "pdmesh[kubernetes]"
        run_actuator = extension("pdmesh.actuators", "kubernetes", wanted=wanted, install=install).load()

    raise Exit(run_actuator(given.config()))


@config_app.command("show", example="pdmesh config show --set scheduler.bundle=fcfs")
@configured()
def config_show(
    given: Given,
    output: Annotated[Literal["toml", "json"], Option("-o", "--output", help="Output format.")] = "toml",
) -> None:
    """Print the resolved configuration; flags override the environment, and that overrides the file."""
    from pdmesh.config_sources import to_dict, to_toml

    tree = given.config()
    typer.echo(json.dumps(to_dict(tree), indent=2) if output == "json" else to_toml(tree), nl=output == "json")


@app.command(example="pdmesh version")
def version() -> None:
    """Print the version, the compiled CPU kernels, and whether the scheduling core is compiled."""
    from pdmesh.build_info import core_build
    from pdmesh.engine.levels import compiled_levels

    kernels = ", ".join(compiled_levels()) or "none, built without a compiler"
    typer.echo(f"{__version__} (CPU kernels: {kernels}; core: {core_build()})")


app.infos |= operator_app.infos
for group in (pool_app, ops_app, requests_app, sessions_app, policy_app, config_app, keys_app, tls_app):
    app.add_typer(group)


def _run_service(name: str, config: MeshConfig) -> None:
    main = cast("Callable[[MeshConfig], int]", importlib.import_module(f"pdmesh_{name}.main").main)
    raise Exit(main(config))
