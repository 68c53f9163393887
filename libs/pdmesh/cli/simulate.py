"""`pdmesh simulate`: one workload through a simulated mesh, once for each bundle, side by side."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from pdmesh import __version__
from pdmesh.cli.options import Output
from pdmesh.cli.progress import advance, progress_bar
from pdmesh.errors import ConfigError, PdmeshError
from pdmesh.garbage import collect_rarely
from pdmesh.metrics import Slo
from pdmesh.model import KvLayout
from pdmesh.policy.base import PolicyConfig
from pdmesh.policy.bundles import BUNDLES
from pdmesh.policy.latency import LLAMA_3_8B, LLAMA_3_70B, PROFILES
from pdmesh.sim.mesh import MeshShape, study_core
from pdmesh.sim.perfetto import chrome_trace
from pdmesh.sim.report import GroupReport, Percentiles, SimReport, report
from pdmesh.sim.result import SimResult
from pdmesh.sim.simulator import SimConfig, Simulator
from pdmesh.sim.workload import Arrival, Synthetic, synthetic, with_long_inputs, with_rate_scaled
from pdmesh.traces import read_trace

SYNTHETIC = "synthetic"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """The command's options, as given."""

    trace: str
    limit: int | None
    rate_scale: float
    rate: float
    long_share: float
    long_percentile: float | None
    long_range: str
    prefill: int
    decode: int
    mixed: int
    profile: str
    bundles: Sequence[str]
    chunk_tokens: int | None
    kv_tokens: int
    transfer_backends: int
    port_gbytes_per_s: float
    control_delay_ms: float
    slo_ttft_s: float | None
    slo_tpot_s: float | None
    seed: int
    plot: Path | None
    perfetto: Path | None


def run_simulate(options: SimulateOptions, output: Output) -> None:
    """Simulate and print. Raises ConfigError for options that make no sense, TraceError for a trace."""
    long_range = _checked(options)
    write_plot = None if options.plot is None else _plotter()
    arrivals = _workload(options, long_range)
    policy = PolicyConfig(latency=PROFILES[options.profile])
    if options.chunk_tokens is not None:
        policy = replace(policy, chunk_tokens=options.chunk_tokens)
    mesh = MeshShape(
        num_prefill=options.prefill,
        num_decode=options.decode,
        num_mixed=options.mixed,
        kv_layout=_kv_layout(options.profile),
        num_kv_tokens=options.kv_tokens,
        num_transfer_backends=options.transfer_backends,
    )
    config = SimConfig(port_bytes_per_s=options.port_gbytes_per_s * 1e9, control_delay_s=options.control_delay_ms / 1e3)
    results: dict[str, SimResult] = {}
    collect_rarely()
    with progress_bar(output) as progress:
        for bundle in options.bundles:
            task = progress.add_task(bundle, total=len(arrivals))
            simulator = Simulator(
                study_core(bundle, policy, options.seed), mesh.instances(policy.latency), arrivals, config
            )
            results[bundle] = simulator.run(advance(progress, task))

    slo = Slo(ttft_s=options.slo_ttft_s, tpot_s=options.slo_tpot_s)
    reports = {name: report(result, long_tokens=long_range[0], slo=slo) for name, result in results.items()}
    if options.perfetto is not None:
        _write(options.perfetto, json.dumps(chrome_trace(results)).encode())
    if write_plot is not None and options.plot is not None:
        _write(options.plot, write_plot(results, long_range[0]))
    if output is Output.JSON:
        record = {
            "pdmesh": __version__,
            "options": msgspec.to_builtins(replace(options, plot=None, perfetto=None)),
            "policy": msgspec.to_builtins(policy),
            "mesh": msgspec.to_builtins(mesh),
            "bundles": {name: msgspec.to_builtins(figures) for name, figures in reports.items()},
        }
        typer.echo(json.dumps(record, indent=2))
    else:
        Console().print(figures_table(reports))


# --- options ---


def _checked(options: SimulateOptions) -> tuple[int, int]:
    """The range of long prompts, if all options make sense."""
    for name in options.bundles:
        if name not in BUNDLES:
            raise ConfigError(f"no policy bundle is called {name!r}: use one of {', '.join(sorted(BUNDLES))}")
    if options.profile not in PROFILES:
        raise ConfigError(f"no profile is called {options.profile!r}: use one of {', '.join(PROFILES)}")
    if not options.mixed and not (options.prefill and options.decode):
        raise ConfigError("a mesh needs prefill and decode instances, or mixed ones")
    low, comma, high = options.long_range.partition(",")
    try:
        long_range = int(low), int(high)
    except ValueError:
        raise ConfigError(f"--long-range {options.long_range!r}: wanted LOW,HIGH, such as 100000,500000") from None
    if not comma or not 1 <= long_range[0] <= long_range[1]:
        raise ConfigError(f"--long-range {options.long_range!r}: wanted 1 <= LOW <= HIGH")
    return long_range


def _workload(options: SimulateOptions, long_range: tuple[int, int]) -> list[Arrival]:
    rng = random.Random(options.seed)
    if options.trace == SYNTHETIC:
        shape = Synthetic(
            num_requests=options.limit or Synthetic().num_requests,
            requests_per_s=options.rate,
            long_share=options.long_share,
            long_range=long_range,
        )
        arrivals = synthetic(shape, rng)
    else:
        arrivals = read_trace(Path(options.trace), limit=options.limit)
    if options.long_percentile is not None:
        arrivals = with_long_inputs(arrivals, options.long_percentile, long_range, rng)
    return with_rate_scaled(arrivals, options.rate_scale)


def _kv_layout(profile: str) -> KvLayout:
    """Of the model that a built-in profile is for."""
    shape = LLAMA_3_70B if profile.endswith("70b") else LLAMA_3_8B
    return KvLayout(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=16,
        dtype="bfloat16",
    )


# --- what is shown ---


def figures_table(reports: Mapping[str, SimReport]) -> Table:
    """One column for each bundle."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in reports:
        table.add_column(name, justify="right")
    runs = list(reports.values())
    for name, groups in (("short", [run.short for run in runs]), ("long", [run.long for run in runs])):
        if any(group.num_requests for group in groups):
            for row in _group_rows(name, groups):
                table.add_row(*row)
    table.add_row("goodput, requests/s", *(_one(run.goodput_per_s) for run in runs))
    table.add_row("output tokens/s", *(_one(run.output_tokens_per_s) for run in runs))
    table.add_row("busy", *("-" if run.busy_share is None else f"{run.busy_share:.1%}" for run in runs))
    table.add_row("makespan, s", *(_one(run.makespan_s) for run in runs))
    return table


def _group_rows(name: str, groups: Sequence[GroupReport]) -> Iterator[tuple[str, ...]]:
    yield f"{name}: finished", *(f"{group.num_finished} of {group.num_requests}" for group in groups)
    yield from _percentile_rows("TTFT", "s", [group.ttft_s for group in groups])
    yield from _percentile_rows("queueing", "s", [group.queueing_s for group in groups])
    yield from _percentile_rows("TPOT", "ms", [group.tpot_s for group in groups], 1e3)
    yield "  JCT mean, s", *(_one(group.mean_jct_s) for group in groups)
    yield "  requests/s", *(_one(group.requests_per_s) for group in groups)
    yield "  preemptions", *(str(group.num_preemptions) for group in groups)


def _percentile_rows(
    name: str, unit: str, figures: Sequence[Percentiles], scale: float = 1.0
) -> Iterator[tuple[str, ...]]:
    yield f"  {name} p50, {unit}", *(_one(values.p50, scale) for values in figures)
    yield "    p90", *(_one(values.p90, scale) for values in figures)
    yield "    p99", *(_one(values.p99, scale) for values in figures)


def _one(value: float | None, scale: float = 1.0) -> str:
    if value is None:
        return "-"
    value *= scale
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


# --- files ---


def _plotter() -> Callable[[Mapping[str, SimResult], int], bytes]:
    try:
        from pdmesh.cli.plots import draw
    except ImportError as error:
        raise PdmeshError("--plot needs matplotlib: pip install 'pdmesh[plot]'") from error
    return draw


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise PdmeshError(f"cannot write {path}: {error.strerror}") from error
