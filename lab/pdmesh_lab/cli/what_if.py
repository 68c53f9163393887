"""Another bundle's simulated results for a recorded run: the same requests on the same instances."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pdmesh.cli.options import Output
from pdmesh.cli.progress import advance, progress_bar
from pdmesh.errors import ConfigError
from pdmesh.eventlog import EventLogError, Header, core_of
from pdmesh.garbage import rare_collections
from pdmesh.metrics import Slo
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh.profiles import load_profile
from pdmesh_lab.sim.recorded import RecordedRun
from pdmesh_lab.sim.report import SimReport, report
from pdmesh_lab.sim.result import SimResult
from pdmesh_lab.sim.samples import fitted_model
from pdmesh_lab.sim.simulator import Simulator


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Results in three columns: the record, the recorded bundle simulated, and another bundle simulated.

    The second column shows how far to trust the third. `latency` is the model of the simulated instances.
    """

    latency: LinearLatencyModel
    results: Mapping[str, SimResult]
    reports: Mapping[str, SimReport]
    notes: tuple[str, ...]


def what_if(
    header: Header, run: RecordedRun, bundle: str, *, profile: str | None, long_tokens: int, output: Output
) -> WhatIf:
    """Simulate the run under its own bundle and ``bundle``. Raises ConfigError if there is nothing to simulate."""
    if not run.arrivals:
        raise ConfigError("no request in the log finished, so there is nothing to simulate")
    latency = _fitted(run) if profile is None else load_profile(profile).latency
    instances = [(instance, latency) for instance in run.profiles]
    results = {"recorded": run.result}
    with rare_collections(), progress_bar(output) as progress:
        for name in dict.fromkeys((header.bundle, bundle)):
            task = progress.add_task(name, total=len(run.arrivals))
            simulator = Simulator(core_of(header, name), instances, run.arrivals)
            try:
                results[f"{name}, simulated"] = simulator.run(advance(progress, task))
            except Exception as error:  # impossible times or sizes: a bug, or a damaged log
                raise EventLogError(
                    f"the log cannot be simulated ({type(error).__name__}: {error}): "
                    "it is damaged, was written by another version of pdmesh, or shows a bug"
                ) from error
    return WhatIf(
        latency=latency,
        results=results,
        reports={name: report(result, long_tokens=long_tokens, slo=Slo()) for name, result in results.items()},
        notes=tuple(_notes(run, profile)),
    )


def _fitted(run: RecordedRun) -> LinearLatencyModel:
    try:
        return fitted_model(run)
    except ValueError:
        raise ConfigError("the log has no steps to fit a latency model to: give one with --profile") from None


def _notes(run: RecordedRun, profile: str | None) -> Iterator[str]:
    yield "simulated with a latency model fitted to this log" if profile is None else f"simulated with {profile}"
    if run.left_out:
        counts = ", ".join(f"{number} {outcome}" for outcome, number in run.left_out.items())
        yield f"requests left out, also from the recorded figures: {counts}"
    if run.num_lost:
        yield f"instances were lost {run.num_lost} times; in the simulation they stay"
