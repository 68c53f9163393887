"""The commands that study a mesh. They import what they need when they run.

`pdmesh.cli` finds both groups by the entry points `pdmesh.commands` of this distribution.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Exit, Option

from pdmesh.cli.command_group import Commands
from pdmesh.cli.operator_commands import DEFAULT_TIMEOUT_S, Timeout
from pdmesh.cli.options import Asked, Decode, Mixed, Output, OutputFormat, Prefill, asks_scheduler
from pdmesh.units import parse_seconds

app = Commands("pdmesh")
pool_app = Commands("pool")

# Options of the panels of help.
_workload = functools.partial(Option, rich_help_panel="Workload")
_pools = functools.partial(Option, rich_help_panel="Pools")
_instances = functools.partial(Option, rich_help_panel="Instances")
_policy = functools.partial(Option, rich_help_panel="Policy")
_network = functools.partial(Option, rich_help_panel="Network")
_output = functools.partial(Option, rich_help_panel="Output")

# What is simulated: a workload, and what its instances are.
Trace = Annotated[str, _workload(metavar="FILE|synthetic", help="A trace file, or drawn requests.")]
Limit = Annotated[int | None, _workload(min=1, help="Use only the first N requests. [default: all; drawn: 1000]")]
RateScale = Annotated[float, _workload(help="Multiply the arrival rate.")]
Rate = Annotated[float, _workload(help="Arrival rate of drawn requests, per second.")]
LongShare = Annotated[float, _workload(min=0, max=1, help="Share of long prompts among drawn requests.")]
LongPercentile = Annotated[
    float | None, _workload(min=0, max=100, help="Replace prompts above this percentile with long ones.")
]
LongRange = Annotated[
    str, _workload(metavar="LOW,HIGH", help="Length of long prompts in tokens; prompts from LOW on count as long.")
]
InstanceProfile = Annotated[str, _instances(help="Latency model of an instance; an unknown name lists them.")]
ChunkTokens = Annotated[int | None, _policy(min=1, help="Prompt tokens in a step, with static packing.")]
KvTokens = Annotated[int, _instances(min=16, help="Size of an instance's KV cache, in tokens.")]
MaxKvTokens = Annotated[
    int, _instances(min=0, help="Most tokens of a context on an instance: longer ones are spread over several. 0: all.")
]
PartExchange = Annotated[
    float | None,
    _instances(
        min=0,
        help="What a layer takes longer where a context is spread, in microseconds. [default: as measured in a host]",
    ),
]
OffloadTokens = Annotated[
    int, _instances(min=0, help="Size of the offload tier behind an instance's KV cache, in tokens. 0: none.")
]
LoadSpeed = Annotated[float, _instances(min=0.001, help="Speed at which KV comes back from the offload tier.")]
TransferBackends = Annotated[int, _network(min=1, help="KV transfers that an instance receives at once.")]
PortSpeed = Annotated[float, _network(help="Network bandwidth of an instance, each way.")]
Hosts = Annotated[int, _network(min=0, help="Hosts that instances of each role are dealt out to. [0: one each]")]
HostSpeed = Annotated[float | None, _network(help="Network bandwidth between two hosts, each way. [as ports]")]
ControlDelay = Annotated[float, _network(min=0, help="Delay between scheduler and instance, each way.")]
Seed = Annotated[int, Option(help="The same seed gives the same bytes.")]
PerfettoFile = Annotated[
    Path | None, _output(metavar="FILE.json", help="Write the instances' timelines, for ui.perfetto.dev.")
]


SloTtft = Annotated[
    float | None, Option(parser=parse_seconds, rich_help_panel="Targets", help="Target for the time to first token.")
]
SloTpot = Annotated[
    float | None, Option(parser=parse_seconds, rich_help_panel="Targets", help="Target for the time per output token.")
]

# Options of advice.
LogFile = Annotated[
    Path | None, Option("--log", metavar="FILE", help="Event log of a scheduler. [default: what it has in memory]")
]
Last = Annotated[float, Option("--last", min=1, parser=parse_seconds, help="How much of the latest events to use.")]
MinGain = Annotated[
    float,
    Option(
        "--min-gain",
        min=0,
        max=100,
        metavar="POINTS",
        help="Least gain that counts, in percentage points of requests within targets.",
    ),
]


@app.command(example="pdmesh simulate --trace FILE --bundle fcfs --bundle pdmesh")
def simulate(
    trace: Trace = "synthetic",
    limit: Limit = None,
    rate_scale: RateScale = 1.0,
    rate: Rate = 5.5,
    long_share: LongShare = 0.0,
    long_percentile: LongPercentile = None,
    long_range: LongRange = "100000,500000",
    prefill: Prefill = None,
    decode: Decode = None,
    mixed: Mixed = 0,
    prefill_pp: Annotated[
        int, _pools(min=1, max=64, help="Stages of each instance that computes prompts; --profile is of all.")
    ] = 1,
    decode_pp: Annotated[int, _pools(min=1, max=64, help="Stages of each instance that only decodes.")] = 1,
    group_size: Annotated[
        int, _pools(min=1, help="Instances that compute each long prompt, under PecSched's bundles.")
    ] = 1,
    reserved: Annotated[int, _pools(min=0, help="Instances that `reservation` keeps for long prompts.")] = 0,
    max_group_members: Annotated[int, _pools(min=1, help="Most instances that may compute one long prompt.")] = 4,
    sequence_parallel: Annotated[
        Literal["pipelined", "parallel"], _pools(help="Whether they compute chunks in turn, or slices at once.")
    ] = "pipelined",
    noise: Annotated[
        float, _instances(min=0, max=1, help="Random variation of step times: standard deviation, relative.")
    ] = 0.0,
    deaths: Annotated[int, _instances(min=0, help="How many times an instance dies, at random times.")] = 0,
    away: Annotated[float, _instances(min=0.1, parser=parse_seconds, help="How long a dead instance is away.")] = 10.0,
    profile: InstanceProfile = "a100-llama3-8b",
    bundle: Annotated[
        list[str] | None, _policy(help="Policy bundle; repeat to compare. [default: fcfs and pdmesh]")
    ] = None,
    batching: Annotated[
        list[str] | None,
        _policy(metavar="mb|eb|ebplus", help="Batching mode; repeat to compare. [default: the bundle's]"),
    ] = None,
    threshold: Annotated[
        float | None, _policy(help="For eb: share of idle seats that ends a decode phase. [default: the best]")
    ] = None,
    clients: Annotated[
        int | None,
        _workload(min=1, help="Closed loop: number of clients with one request each; ignores arrival times."),
    ] = None,
    think: Annotated[
        float, _workload(min=0, parser=parse_seconds, help="Pause of a client between two requests.")
    ] = 0.0,
    max_tokens: Annotated[
        int | None,
        _workload(min=1, help="Output tokens that each request asks for. [default: as many as it generates]"),
    ] = None,
    kv_reservation: Annotated[
        Literal["full", "on_demand"],
        _policy(help="Reserve KV for the longest answer, or on demand as the services do."),
    ] = "full",
    chunk_tokens: ChunkTokens = None,
    kv_tokens: KvTokens = 1 << 20,
    max_kv_tokens: MaxKvTokens = 0,
    part_exchange_us: PartExchange = None,
    offload_tokens: OffloadTokens = 0,
    load_gbytes_per_s: LoadSpeed = 10.0,
    transfer_backends: TransferBackends = 4,
    port_gbytes_per_s: PortSpeed = 25.0,
    hosts: Hosts = 0,
    host_gbytes_per_s: HostSpeed = None,
    control_delay_ms: ControlDelay = 0.0,
    slo_ttft: SloTtft = None,
    slo_tpot: SloTpot = None,
    seed: Seed = 0,
    plot: Annotated[
        Path | None,
        _output(metavar="FILE.png", help="Draw latency distributions and timelines (needs the extra `plot`)."),
    ] = None,
    plot_modes: Annotated[
        Path | None,
        _output(metavar="FILE.png", help="Draw where `eb` is predicted to gain, for each built-in profile."),
    ] = None,
    perfetto: PerfettoFile = None,
    output: OutputFormat = Output.TABLE,
) -> None:
    """Run a workload through a simulated mesh, once for each bundle, and compare the results."""
    from pdmesh.cli.plan import make_pools
    from pdmesh.core.config import KvReservation
    from pdmesh.policy.prefill_groups import Schedule
    from pdmesh_lab.cli.simulate import SimulateOptions, run_simulate

    pools = make_pools(prefill, decode, mixed)
    options = SimulateOptions(
        trace=trace,
        limit=limit,
        rate_scale=rate_scale,
        rate=rate,
        long_share=long_share,
        long_percentile=long_percentile,
        long_range=long_range,
        prefill=pools.prefill,
        decode=pools.decode,
        mixed=pools.mixed,
        prefill_pp=prefill_pp,
        decode_pp=decode_pp,
        group_size=group_size,
        reserved=reserved,
        max_group_members=max_group_members,
        sequence_parallel=Schedule(sequence_parallel),
        noise=noise,
        deaths=deaths,
        away_s=away,
        profile=profile,
        bundles=tuple(dict.fromkeys(bundle or ("fcfs", "pdmesh"))),
        batchings=tuple(dict.fromkeys(batching or ())),
        threshold=threshold,
        clients=clients,
        think_s=think,
        max_tokens=max_tokens,
        kv_reservation=KvReservation(kv_reservation),
        chunk_tokens=chunk_tokens,
        kv_tokens=kv_tokens,
        max_kv_tokens=max_kv_tokens,
        part_exchange_us=part_exchange_us,
        offload_tokens=offload_tokens,
        load_gbytes_per_s=load_gbytes_per_s,
        transfer_backends=transfer_backends,
        port_gbytes_per_s=port_gbytes_per_s,
        num_hosts=hosts,
        host_gbytes_per_s=host_gbytes_per_s,
        control_delay_ms=control_delay_ms,
        slo_ttft_s=slo_ttft,
        slo_tpot_s=slo_tpot,
        seed=seed,
        plot=plot,
        plot_modes=plot_modes,
        perfetto=perfetto,
    )
    run_simulate(options, output)


@app.command(example="pdmesh plan --trace FILE --slo-ttft 2 --slo-tpot 0.05")
def plan(
    slo_ttft: SloTtft = None,
    slo_tpot: SloTpot = None,
    attainment: Annotated[float, Option(help="Share of requests that must meet both targets.")] = 0.99,
    trace: Trace = "synthetic",
    limit: Limit = None,
    rate_scale: RateScale = 1.0,
    rate: Rate = 5.5,
    long_share: LongShare = 0.0,
    long_percentile: LongPercentile = None,
    long_range: LongRange = "100000,500000",
    profile: InstanceProfile = "a100-llama3-8b",
    bundle: Annotated[str, Option(help="Policy bundle.")] = "pdmesh",
    max_instances: Annotated[int, Option(min=1, help="Most instances of each role.")] = 64,
    chunk_tokens: ChunkTokens = None,
    kv_tokens: KvTokens = 1 << 20,
    spread: Annotated[
        bool, Option("--spread", help="Spread contexts over instances whose decode would miss --slo-tpot on one.")
    ] = False,
    max_kv_tokens: MaxKvTokens = 0,
    part_exchange_us: PartExchange = None,
    transfer_backends: TransferBackends = 4,
    port_gbytes_per_s: PortSpeed = 25.0,
    hosts: Hosts = 0,
    host_gbytes_per_s: HostSpeed = None,
    control_delay_ms: ControlDelay = 0.0,
    seed: Seed = 0,
    output: OutputFormat = Output.TABLE,
) -> None:
    """Find the smallest prefill and decode pools that serve a workload within its targets, by simulation."""
    from pdmesh_lab.cli.capacity import PlanOptions, run_plan

    options = PlanOptions(
        trace=trace,
        limit=limit,
        rate_scale=rate_scale,
        rate=rate,
        long_share=long_share,
        long_percentile=long_percentile,
        long_range=long_range,
        profile=profile,
        bundle=bundle,
        attainment=attainment,
        max_instances=max_instances,
        chunk_tokens=chunk_tokens,
        kv_tokens=kv_tokens,
        spread=spread,
        max_kv_tokens=max_kv_tokens,
        part_exchange_us=part_exchange_us,
        transfer_backends=transfer_backends,
        port_gbytes_per_s=port_gbytes_per_s,
        num_hosts=hosts,
        host_gbytes_per_s=host_gbytes_per_s,
        control_delay_ms=control_delay_ms,
        slo_ttft_s=slo_ttft,
        slo_tpot_s=slo_tpot,
        seed=seed,
    )
    run_plan(options, output)


@app.command(example="pdmesh replay events.log")
def replay(
    log: Annotated[Path, Argument(metavar="LOG", help="A scheduler's event log (`scheduler.event_log`).")],
    bundle: Annotated[
        str | None, Option(help="Compare with this bundle: the first different decision, and simulated results.")
    ] = None,
    profile: Annotated[str | None, Option(help="Latency model of an instance. [default: fitted to the log]")] = None,
    long_tokens: Annotated[
        int | None, Option(min=1, help="Length from which a prompt counts as long. [default: the recorded policy's]")
    ] = None,
    perfetto: PerfettoFile = None,
    output: OutputFormat = Output.TABLE,
) -> None:
    """Replay a recorded run through the scheduling core and check that every decision is the same."""
    from pdmesh_lab.cli.replay import ReplayOptions, run_replay

    options = ReplayOptions(log=log, bundle=bundle, profile=profile, long_tokens=long_tokens, perfetto=perfetto)
    raise Exit(run_replay(options, output))


@pool_app.command("advise", example="pdmesh pool advise --slo-ttft 0.5 --last 600")
@asks_scheduler
def pool_advise(
    asked: Asked,
    log: LogFile = None,
    last: Last = 300.0,
    slo_ttft: SloTtft = None,
    slo_tpot: SloTpot = None,
    min_gain: MinGain = 3.0,
) -> None:
    """Simulate other pools and bundles on recent requests, and print how many would have met the targets."""
    from pdmesh.metrics import Slo
    from pdmesh_lab.cli.advise import AdviceOptions, run_advise

    slo = Slo(ttft_s=slo_ttft, tpot_s=slo_tpot)
    run_advise(asked, AdviceOptions(log=log, last_s=last, slo=slo, min_gain=min_gain / 100))


@pool_app.command("auto", example="pdmesh pool auto --slo-ttft 0.5 --every 120")
@asks_scheduler
def pool_auto(
    asked: Asked,
    log: LogFile = None,
    last: Last = 300.0,
    slo_ttft: SloTtft = None,
    slo_tpot: SloTpot = None,
    min_gain: MinGain = 3.0,
    every: Annotated[float, Option(min=1, parser=parse_seconds, help="Time between two checks.")] = 60.0,
    least: Annotated[int, Option(min=1, help="Least number of prefill and of decode instances to keep.")] = 1,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    once: Annotated[bool, Option("--once", help="Check once, make at most one change, and exit.")] = False,
) -> None:
    """Follow `pool advise`, one role at a time, and undo changes that make things worse. Ctrl-C exits."""
    from pdmesh.metrics import Slo
    from pdmesh_lab.cli.advise import AdviceOptions
    from pdmesh_lab.cli.auto import run_auto

    options = AdviceOptions(log=log, last_s=last, slo=Slo(ttft_s=slo_ttft, tpot_s=slo_tpot), min_gain=min_gain / 100)
    raise Exit(run_auto(asked, options, every_s=every, least=least, timeout_s=timeout, once=once))
