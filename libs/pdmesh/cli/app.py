"""The ``pdmesh`` command. Each of its commands imports what it needs when it runs, so that ``--help`` stays fast."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from pdmesh import __version__
from pdmesh.cli.help import WholeSummaries
from pdmesh.cli.keys import app as keys_app
from pdmesh.cli.operator_commands import app as operator_app
from pdmesh.cli.operator_commands import ops_app, pool_app
from pdmesh.cli.options import (
    Asked,
    ClientKey,
    ConfigFile,
    CpuLevel,
    Decode,
    Device,
    Dial,
    Dtype,
    Mixed,
    Model,
    Name,
    Output,
    OutputFormat,
    Prefill,
    Scheduler,
    Settings,
    Url,
    asks_quietly,
    asks_scheduler,
    build_config,
)
from pdmesh.cli.state import DEFAULT_NAME, state_folder
from pdmesh.cli.study_commands import app as study_app
from pdmesh.cli.tls import app as tls_app
from pdmesh.errors import ConfigError

if TYPE_CHECKING:  # ``--help`` needs no configuration
    from pdmesh.config import MeshConfig

app = typer.Typer(
    cls=WholeSummaries,
    name="pdmesh",
    help="A disaggregated serving mesh for large language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # tables cut long names, and take as long as all else of `--help`
    context_settings={"help_option_names": ["-h", "--help"]},
)
requests_app = typer.Typer(cls=WholeSummaries, help="Show single requests.", no_args_is_help=True)
policy_app = typer.Typer(
    cls=WholeSummaries, help="Show the scheduling policy, and switch it while serving.", no_args_is_help=True
)
config_app = typer.Typer(cls=WholeSummaries, help="Show the configuration.", no_args_is_help=True)

app.add_typer(study_app)
app.add_typer(operator_app)
app.add_typer(pool_app, name="pool")
app.add_typer(ops_app, name="ops")
app.add_typer(requests_app, name="requests")
app.add_typer(policy_app, name="policy")
app.add_typer(config_app, name="config")
app.add_typer(keys_app, name="keys")
app.add_typer(tls_app, name="tls")


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def pdmesh(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """A disaggregated serving mesh for large language models."""


@app.command("serve", hidden=True)  # its name in vLLM
@app.command(epilog="Example: pdmesh up ./my-model --prefill 2 --decode 2 --detach")
def up(
    checkpoint: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Same as --model, such as smollm2.")
    ] = None,
    model: Model = None,
    host: Annotated[str | None, typer.Option(help="Address that the gateway listens on. [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="HTTP port; 0 takes a free one. [default: 8000]")] = None,
    prefill: Prefill = None,
    decode: Decode = None,
    mixed: Mixed = 0,
    tensor_parallel_size: Annotated[
        int | None,
        typer.Option(
            "--tensor-parallel-size", "-tp", help="Processes that compute each instance's steps. [default: 1]"
        ),
    ] = None,
    prefill_tp: Annotated[int | None, typer.Option(help="The same, of prefill instances only.")] = None,
    decode_tp: Annotated[int | None, typer.Option(help="The same, of decode instances only.")] = None,
    pipeline_parallel_size: Annotated[
        int | None,
        typer.Option("--pipeline-parallel-size", "-pp", help="Stages that each instance's steps pass. [default: 1]"),
    ] = None,
    prefill_pp: Annotated[int | None, typer.Option(help="The same, of prefill instances only.")] = None,
    decode_pp: Annotated[int | None, typer.Option(help="The same, of decode instances only.")] = None,
    gateways: Annotated[int, typer.Option(min=1, max=64, help="Number of gateway processes; they share the port.")] = 1,
    name: Name = DEFAULT_NAME,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Run in the background; return once the mesh serves.")
    ] = False,
    served_model_name: Annotated[str | None, typer.Option(help="Model name that clients use.")] = None,
    lora: Annotated[Path | None, typer.Option(help="LoRA adapter to merge into the weights: PEFT's directory.")] = None,
    dtype: Dtype = None,
    cpu_level: CpuLevel = None,
    device: Device = None,
    max_model_len: Annotated[int | None, typer.Option(help="Context length. [default: the checkpoint's]")] = None,
    kv_cache_bytes: Annotated[int | None, typer.Option(help="Size of an instance's KV cache.")] = None,
    chunk_tokens: Annotated[int | None, typer.Option(help="Prompt tokens in a step.")] = None,
    bundle: Annotated[
        str | None, typer.Option(help="Policy bundle; see `pdmesh policy list`. [default: pdmesh]")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Latency model of an instance. [default: measured at start]")
    ] = None,
    deterministic: Annotated[
        bool | None, typer.Option("--deterministic", help="Bit-identical results whatever the batch.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Key that clients must send; safer: PDMESH_SECURITY_API_KEY.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Start a mesh on this machine. Ctrl-C drains and stops it; a second one kills it."""
    from pdmesh.cli.plan import make_pools
    from pdmesh.cli.up import MeshRun, up_detached

    if checkpoint is not None and model is not None:
        raise ConfigError(f"two models are given, {checkpoint!r} and --model {model!r}: give one")
    tree = build_config(
        config,
        settings,
        model=checkpoint or model,
        gateway__host=host,
        gateway__port=port,
        worker__served_model_name=served_model_name,
        worker__lora=lora,
        worker__dtype=dtype,
        worker__cpu_level=cpu_level,
        worker__device=device,
        worker__max_model_len=max_model_len,
        worker__kv_cache_bytes=kv_cache_bytes,
        worker__deterministic=deterministic,
        worker__tensor_parallel_size=tensor_parallel_size,
        prefill__tensor_parallel_size=prefill_tp,
        decode__tensor_parallel_size=decode_tp,
        worker__pipeline_parallel_size=pipeline_parallel_size,
        prefill__pipeline_parallel_size=prefill_pp,
        decode__pipeline_parallel_size=decode_pp,
        policy__chunk_tokens=chunk_tokens,
        scheduler__bundle=bundle,
        scheduler__profile=profile,
        security__api_key=api_key,
        telemetry__log_level=log_level,
    )
    pools = make_pools(prefill, decode, mixed)
    if tree.scheduler.batching == "eb" and not pools.mixed:
        from pdmesh.policy.batching import NOTHING_EXCLUSIVE

        raise ConfigError(f"scheduler.batching is eb: {NOTHING_EXCLUSIVE}")
    state = state_folder(os.environ, name)
    if detach:
        raise typer.Exit(up_detached(tree, pools, state, os.environ, gateways))
    MeshRun(tree, pools, state, os.environ, gateways).run()


@app.command(epilog="Example: pdmesh down --drain 10")
def down(
    name: Name = DEFAULT_NAME,
    now: Annotated[bool, typer.Option("--now", help="Kill at once, without draining.")] = False,
    drain: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="Time that requests have to finish. [default: the mesh's drain_s]"),
    ] = None,
) -> None:
    """Drain and stop a mesh on this machine, and wait until it has ended."""
    from pdmesh.cli.up import down as stop

    stopped = stop(state_folder(os.environ, name), now=now, drain_s=drain)
    typer.echo(f"pdmesh: mesh {name!r} {'stopped' if stopped else 'is not running'}")


@app.command(epilog="Example: pdmesh status -o json")
@asks_scheduler
def status(asked: Asked) -> None:
    """Show the instances of a mesh and what they are doing."""
    from pdmesh.cli.admin import show_status

    show_status(asked.config, asked.state, asked.output)


@app.command(epilog="Example: pdmesh top --once")
def top(
    name: Name = DEFAULT_NAME,
    url: Url = None,
    api_key: ClientKey = None,
    once: Annotated[bool, typer.Option("--once", help="Print the current state and exit.")] = False,
    output: OutputFormat = Output.TABLE,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Watch instances, their steps and requests, as on the gateway's page. Ctrl-C exits."""
    from pdmesh.cli.http import Target
    from pdmesh.cli.top import run_top

    target = Target(build_config(config, settings), state_folder(os.environ, name), url, api_key)
    run_top(target, once=once, output=output)


@requests_app.command("show", epilog="Example: pdmesh requests show chatcmpl-cd69")
@asks_scheduler
def requests_show(
    asked: Asked,
    request_id: Annotated[str, typer.Argument(metavar="ID", help="The request's id (`X-Request-Id` of its response).")],
) -> None:
    """Print a request's timeline: waiting, each chunk with its instance, the KV transfer, the tokens."""
    from pdmesh.cli.admin import show_request

    show_request(asked.config, asked.state, request_id, asked.output)


@requests_app.command("list", epilog="Example: pdmesh requests list -n 50")
@asks_scheduler
def requests_list(
    asked: Asked,
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, help="How many requests to list.")] = 20,
) -> None:
    """List the latest requests, newest first."""
    from pdmesh.cli.admin import list_requests

    list_requests(asked.config, asked.state, limit, asked.output)


@policy_app.command("list", epilog="Example: pdmesh policy list")
@asks_scheduler
def policy_list(asked: Asked) -> None:
    """List the policy bundles; a star marks the one in use."""
    from pdmesh.cli.policy import list_policies

    list_policies(asked.config, asked.state, asked.output)


@policy_app.command("get", epilog="Example: pdmesh policy get")
@asks_quietly
def policy_get(asked: Asked) -> None:
    """Print the policy bundle in use."""
    from pdmesh.cli.policy import get_policy

    get_policy(asked.config, asked.state)


@policy_app.command("set", epilog="Example: pdmesh policy set fcfs")
@asks_quietly
def policy_set(
    asked: Asked,
    policy: Annotated[
        str, typer.Argument(metavar="POLICY", help="A bundle or a batching mode, as in `pdmesh policy list`.")
    ],
    threshold: Annotated[
        float | None,
        typer.Option(help="For `eb`: share of idle seats that ends a decode phase. [default: the best in theory]"),
    ] = None,
) -> None:
    """Switch the policy bundle, or the batching mode, while serving. No request is dropped."""
    from pdmesh.cli.policy import set_policy

    set_policy(asked.config, asked.state, policy, threshold)


@app.command(epilog='Example: pdmesh chat -m "Why separate prefill and decode?"')
def chat(
    name: Name = DEFAULT_NAME,
    url: Url = None,
    api_key: ClientKey = None,
    model: Annotated[str | None, typer.Option(help="Name of the served model. [default: the first one]")] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 512,
    temperature: Annotated[float, typer.Option(min=0)] = 1.0,
    tools: Annotated[Path | None, typer.Option(help="JSON file with a list of tools that the model may call.")] = None,
    tool_choice: Annotated[
        str | None, typer.Option(help="auto, none, required, or the name of a tool. [default: auto]")
    ] = None,
    message: Annotated[
        str | None, typer.Option("--message", "-m", help="Send this message, print the answer and exit.")
    ] = None,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Chat with the model. Ctrl-C stops an answer, Ctrl-D exits."""
    from pdmesh.cli.chat import ChatOptions, run_chat
    from pdmesh.cli.http import Target

    options = ChatOptions(
        model=model,
        system=system,
        max_tokens=max_tokens,
        temperature=temperature,
        tools=tools,
        tool_choice=tool_choice,
    )
    target = Target(build_config(config, settings), state_folder(os.environ, name), url, api_key)
    raise typer.Exit(run_chat(target, options, message))


@app.command(epilog="Example: pdmesh doctor --mesh")
def doctor(
    output: OutputFormat = Output.TABLE,
    port: Annotated[int | None, typer.Option(help="HTTP port to check. [default: 8000]")] = None,
    mesh: Annotated[
        bool,
        typer.Option("--mesh", help="Check a running mesh instead: its instances try each other and the gateways."),
    ] = False,
    name: Name = DEFAULT_NAME,
    scheduler: Scheduler = None,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Check this machine: processor, kernels, torch, UCX, GPU, ports, memory. Says how to fix what is missing."""
    if mesh:
        from pdmesh.cli.mesh_doctor import run_mesh_doctor

        tree = build_config(config, settings, scheduler_address=scheduler)
        raise typer.Exit(run_mesh_doctor(tree, state_folder(os.environ, name), output))
    from pdmesh.cli.doctor import run_doctor

    raise typer.Exit(run_doctor(build_config(config, settings, gateway__port=port), output, os.environ))


@app.command(epilog="Example: pdmesh gateway --model ./my-model --scheduler 10.0.0.1:5000 --port 8000")
def gateway(
    model: Model = None,
    scheduler: Dial = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="HTTP port. [default: 8000]")] = None,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Run one gateway in the foreground."""
    tree = build_config(
        config, settings, model=model, scheduler_address=scheduler, gateway__host=host, gateway__port=port
    )
    _run_service("gateway", tree)


@app.command(epilog="Example: pdmesh scheduler --host 127.0.0.1 --port 5000")
def scheduler(
    host: Annotated[str | None, typer.Option(help="Address to listen on. [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="gRPC port. [default: a free one]")] = None,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Run one scheduler in the foreground."""
    _run_service("scheduler", build_config(config, settings, scheduler__host=host, scheduler__port=port))


@app.command(epilog="Example: pdmesh prefill --model ./my-model --scheduler 127.0.0.1:5000")
def prefill(
    model: Model = None,
    scheduler: Dial = None,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Run one prefill instance in the foreground."""
    _run_service("prefill", build_config(config, settings, model=model, scheduler_address=scheduler))


@app.command(epilog="Example: pdmesh decode --model ./my-model --scheduler 127.0.0.1:5000 --role mixed")
def decode(
    model: Model = None,
    scheduler: Dial = None,
    role: Annotated[str | None, typer.Option(help="decode or mixed. [default: decode]")] = None,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Run one decode or mixed instance in the foreground."""
    _run_service("decode", build_config(config, settings, model=model, scheduler_address=scheduler, worker__role=role))


@app.command(epilog="Example: pdmesh actuator --release mesh --scheduler mesh-scheduler:7000")
def actuator(
    release: Annotated[str | None, typer.Option(help="Name of the chart's release. [default: mesh]")] = None,
    scheduler: Dial = None,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Start, stop and replace instances in Kubernetes for `pool resize` and `restart --rolling`, from a pod there."""
    from pdmesh.cli.kubernetes_actuator import run_actuator

    tree = build_config(config, settings, scheduler_address=scheduler, kubernetes__release=release)
    raise typer.Exit(run_actuator(tree))


@config_app.command("show", epilog="Example: pdmesh config show --set scheduler.bundle=fcfs")
def config_show(
    output: Annotated[str, typer.Option("-o", "--output", help="toml or json.")] = "toml",
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Print the resolved configuration; flags override the environment, and that overrides the file."""
    from pdmesh.config_sources import to_dict, to_toml

    tree = build_config(config, settings)
    typer.echo(json.dumps(to_dict(tree), indent=2) if output == "json" else to_toml(tree), nl=output == "json")


@app.command(epilog="Example: pdmesh version")
def version() -> None:
    """Print the version, the compiled CPU kernels, and whether the scheduling core is compiled."""
    from pdmesh.build_info import core_build
    from pdmesh.engine.levels import compiled_levels

    kernels = ", ".join(compiled_levels()) or "none, built without a compiler"
    typer.echo(f"{__version__} (CPU kernels: {kernels}; core: {core_build()})")


def _run_service(name: str, config: MeshConfig) -> None:
    main = cast("Callable[[MeshConfig], int]", importlib.import_module(f"pdmesh_{name}.main").main)
    raise typer.Exit(main(config))
