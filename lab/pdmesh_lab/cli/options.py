"""Options of the commands that study a mesh, one field each with its command-line form.

`pdmesh.cli.command_group.takes` makes a command's parameters of such a class, so that an option is declared once.
Nothing here imports the simulator, because ``--help`` reads this module.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from pdmesh.cli.options import Decode, Mixed, Prefill
from pdmesh.units import parse_seconds

# Options in the panels of the help.
_workload = functools.partial(Option, rich_help_panel="Workload")
_pools = functools.partial(Option, rich_help_panel="Pools")
_instances = functools.partial(Option, rich_help_panel="Instances")
_policy = functools.partial(Option, rich_help_panel="Policy")
_targets = functools.partial(Option, rich_help_panel="Targets", parser=parse_seconds)
_network = functools.partial(Option, rich_help_panel="Network")
_output = functools.partial(Option, rich_help_panel="Output")

SloTtft = Annotated[float | None, _targets("--slo-ttft", help="Target for the time to first token.")]
SloTpot = Annotated[float | None, _targets("--slo-tpot", help="Target for the time per output token.")]
PerfettoFile = Annotated[
    Path | None, _output(metavar="FILE.json", help="Write the instances' timelines, for ui.perfetto.dev.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOptions:
    """Options of every simulation: the workload and the instances."""

    trace: Annotated[
        str, _workload(metavar="FILE|FOLDER|synthetic", help="A trace, a folder of agent sessions, or drawn requests.")
    ] = "synthetic"
    limit: Annotated[
        int | None, _workload(min=1, help="Use only the first N requests or sessions. [default: all; drawn: 1000]")
    ] = None
    rate_scale: Annotated[float, _workload(help="Multiply the arrival rate.")] = 1.0
    rate: Annotated[float, _workload(help="Arrival rate of drawn requests, per second.")] = 5.5
    long_share: Annotated[float, _workload(min=0, max=1, help="Share of long prompts among drawn requests.")] = 0.0
    long_percentile: Annotated[
        float | None, _workload(min=0, max=100, help="Replace prompts above this percentile with long ones.")
    ] = None
    long_range: Annotated[
        str,
        _workload(metavar="LOW,HIGH", help="Length of long prompts in tokens; prompts from LOW on count as long."),
    ] = "100000,500000"
    profile: Annotated[str, _instances(help="Latency model of an instance; an unknown name lists them.")] = (
        "a100-llama3-8b"
    )
    chunk_tokens: Annotated[int | None, _policy(min=1, help="Prompt tokens in a step, with static packing.")] = None
    kv_tokens: Annotated[int, _instances(min=16, help="Size of an instance's KV cache, in tokens.")] = 1 << 20
    max_kv_tokens: Annotated[
        int,
        _instances(min=0, help="Most tokens of a context on an instance: longer ones are spread over several. 0: all."),
    ] = 0
    part_exchange_us: Annotated[
        float | None,
        _instances(
            min=0,
            help="What a layer takes longer where a context is spread, in microseconds. [default: as measured in a "
            "host]",
        ),
    ] = None
    transfer_backends: Annotated[int, _network(min=1, help="KV transfers that an instance receives at once.")] = 4
    port_gbytes_per_s: Annotated[float, _network(help="Network bandwidth of an instance, each way.")] = 25.0
    num_hosts: Annotated[
        int,
        _network("--hosts", min=0, help="Hosts that instances of each role are dealt out to. [0: one each]"),
    ] = 0
    host_gbytes_per_s: Annotated[
        float | None, _network(help="Network bandwidth between two hosts, each way. [as ports]")
    ] = None
    control_delay_ms: Annotated[float, _network(min=0, help="Delay between scheduler and instance, each way.")] = 0.0
    slo_ttft_s: SloTtft = None
    slo_tpot_s: SloTpot = None
    seed: Annotated[int, Option(help="The same seed gives the same bytes.")] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions(StudyOptions):
    """The options of `pdmesh simulate`."""

    prefill: Prefill = None
    decode: Decode = None
    mixed: Mixed = 0
    prefill_pp: Annotated[
        int, _pools(min=1, max=64, help="Stages of each instance that computes prompts; --profile is of all.")
    ] = 1
    decode_pp: Annotated[int, _pools(min=1, max=64, help="Stages of each instance that only decodes.")] = 1
    group_size: Annotated[
        int, _pools(min=1, help="Instances that compute each long prompt, under PecSched's bundles.")
    ] = 1
    reserved: Annotated[int, _pools(min=0, help="Instances that `reservation` keeps for long prompts.")] = 0
    max_group_members: Annotated[int, _pools(min=1, help="Most instances that may compute one long prompt.")] = 16
    sequence_parallel: Annotated[
        Literal["auto", "pipelined", "parallel"],
        _pools(help="Whether they compute chunks in turn, slices at once, or at once while instances are spare."),
    ] = "auto"
    noise: Annotated[
        float, _instances(min=0, max=1, help="Random variation of step times: standard deviation, relative.")
    ] = 0.0
    deaths: Annotated[int, _instances(min=0, help="How many times an instance dies, at random times.")] = 0
    away_s: Annotated[
        float, _instances("--away", min=0.1, parser=parse_seconds, help="How long a dead instance is away.")
    ] = 10.0
    offload_tokens: Annotated[
        int, _instances(min=0, help="Size of the offload tier behind an instance's KV cache, in tokens. 0: none.")
    ] = 0
    load_gbytes_per_s: Annotated[
        float, _instances(min=0.001, help="Speed at which KV comes back from the offload tier.")
    ] = 10.0
    cached_states: Annotated[
        int, _instances(min=0, help="Most states that an instance caches. 0: no layer has states.")
    ] = 0
    bundles: Annotated[
        list[str] | None, _policy("--bundle", help="Policy bundle; repeat to compare. [default: fcfs and pdmesh]")
    ] = None
    batchings: Annotated[
        list[str] | None,
        _policy("--batching", metavar="mb|eb|ebplus", help="Batching mode; repeat to compare. [default: the bundle's]"),
    ] = None
    threshold: Annotated[
        float | None, _policy(help="For eb: share of idle seats that ends a decode phase. [default: the best]")
    ] = None
    clients: Annotated[
        int | None,
        _workload(
            min=1, help="Closed loop: number of clients with one request or session each; ignores arrival times."
        ),
    ] = None
    duration_s: Annotated[
        float | None,
        _workload(
            "--duration", min=0.001, parser=parse_seconds, help="Agent sessions: no turn begins later. [default: all]"
        ),
    ] = None
    think_s: Annotated[
        float, _workload("--think", min=0, parser=parse_seconds, help="Pause of a client between two requests.")
    ] = 0.0
    max_tokens: Annotated[
        int | None,
        _workload(min=1, help="Output tokens that each request asks for. [default: as many as it generates]"),
    ] = None
    kv_reservation: Annotated[
        Literal["full", "on_demand"],
        _policy(help="Reserve KV for the longest answer, or on demand as the services do."),
    ] = "full"
    perfetto: PerfettoFile = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(StudyOptions):
    """The options of `pdmesh plan`."""

    attainment: Annotated[float, Option(help="Share of requests that must meet both targets.")] = 0.99
    bundle: Annotated[str, Option(help="Policy bundle.")] = "pdmesh"
    max_instances: Annotated[int, Option(min=1, help="Most instances of each role.")] = 64
    spread: Annotated[
        bool, Option("--spread", help="Spread contexts over instances whose decode would miss --slo-tpot on one.")
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """The options of `pdmesh replay`."""

    log: Annotated[Path, Argument(metavar="LOG", help="A scheduler's event log (`scheduler.event_log`).")]
    bundle: Annotated[
        str | None, Option(help="Compare with this bundle: the first different decision, and simulated results.")
    ] = None
    profile: Annotated[str | None, Option(help="Latency model of an instance. [default: fitted to the log]")] = None
    long_tokens: Annotated[
        int | None, Option(min=1, help="Length from which a prompt counts as long. [default: the recorded policy's]")
    ] = None
    perfetto: PerfettoFile = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceOptions:
    """The options of `pdmesh pool advise`."""

    log: Annotated[
        Path | None, Option(metavar="FILE", help="Event log of a scheduler. [default: what it has in memory]")
    ] = None
    last_s: Annotated[
        float, Option("--last", min=1, parser=parse_seconds, help="How much of the latest events to use.")
    ] = 300.0
    slo_ttft_s: SloTtft = None
    slo_tpot_s: SloTpot = None
    min_gain_percent: Annotated[
        float,
        Option("--min-gain", min=0, metavar="PERCENT", help="Least gain of requests within targets that counts."),
    ] = 2.0
