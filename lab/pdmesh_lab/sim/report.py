"""The figures of a simulated run, each by its definition in `pdmesh.metrics`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdmesh import metrics
from pdmesh.core.commands import Outcome
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.metrics import Slo
from pdmesh.model import PrefixHash
from pdmesh_lab.sim.result import RequestRun, SimResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Percentiles by nearest rank, in seconds; None without values."""

    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Percentiles:
        known = [value for value in values if value is not None]
        return cls(
            p50=metrics.percentile(known, 50), p90=metrics.percentile(known, 90), p99=metrics.percentile(known, 99)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """Figures of the short requests, the long ones, or all. Latencies are of finished requests only.

    `num_restarts` counts how often computed tokens of a request were lost or freed for others. `requests_per_s` counts
    finished requests, from the first arrival to their last token.
    """

    num_requests: int
    num_finished: int
    ttft_s: Percentiles
    tpot_s: Percentiles
    jct_s: Percentiles
    mean_jct_s: float | None
    queueing_s: Percentiles
    num_preemptions: int
    num_restarts: int
    requests_per_s: float | None
    slo_attainment: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SimReport:
    """Figures of one bundle on one workload.

    `makespan_s` lasts from the first arrival to the last token. `goodput_per_s` counts requests that met their targets;
    None without targets. `busy_share` is the computing share of all instances' time in the makespan. `reused_share` is
    the share of prompt tokens that were cached, `possible_share` the share that begins like an earlier prompt, in whole
    granules; both are None if no request names a prefix.
    """

    short: GroupReport
    long: GroupReport
    all: GroupReport
    makespan_s: float
    output_tokens_per_s: float | None
    goodput_per_s: float | None
    busy_share: float | None
    reused_share: float | None
    possible_share: float | None
    num_events: int


def report(result: SimResult, *, long_tokens: int, slo: Slo) -> SimReport:
    """Return the figures of a run. A request's own targets override ``slo``.

    Prompts of ``long_tokens`` and more are long.
    """
    runs = result.requests
    start_s = min((run.request.arrival_s for run in runs), default=0.0)
    makespan_s = _end_s(runs, start_s) - start_s
    num_tokens = sum(len(run.token_times_s) for run in runs)
    busy_s = sum(step.duration_s for instance in result.instances for step in instance.steps)
    instances_s = makespan_s * len(result.instances)
    has_target = any(_objective(run, slo) != metrics.NO_SLO for run in runs)
    return SimReport(
        short=_group([run for run in runs if run.request.num_prompt_tokens < long_tokens], start_s, slo),
        long=_group([run for run in runs if run.request.num_prompt_tokens >= long_tokens], start_s, slo),
        all=_group(runs, start_s, slo),
        makespan_s=makespan_s,
        output_tokens_per_s=num_tokens / makespan_s if makespan_s > 0 else None,
        goodput_per_s=metrics.goodput([_met(run, slo) for run in runs], makespan_s) if has_target else None,
        busy_share=busy_s / instances_s if instances_s > 0 else None,
        reused_share=_share_of_prompts(runs, sum(run.num_reused_tokens for run in runs)),
        possible_share=_share_of_prompts(runs, _num_possible_tokens(runs)),
        num_events=result.num_events,
    )


def _group(runs: Sequence[RequestRun], start_s: float, slo: Slo) -> GroupReport:
    finished = [run for run in runs if run.outcome is Outcome.FINISHED]
    jcts_s = [jct_s for run in finished if (jct_s := run.jct_s) is not None]
    duration_s = _end_s(finished, start_s) - start_s
    return GroupReport(
        num_requests=len(runs),
        num_finished=len(finished),
        ttft_s=Percentiles.of(run.ttft_s for run in finished),
        tpot_s=Percentiles.of(run.tpot_s for run in finished),
        jct_s=Percentiles.of(jcts_s),
        mean_jct_s=sum(jcts_s) / len(jcts_s) if jcts_s else None,
        queueing_s=Percentiles.of(run.queueing_s for run in finished),
        num_preemptions=sum(run.num_preemptions for run in runs),
        num_restarts=sum(run.num_restarts for run in runs),
        requests_per_s=len(finished) / duration_s if duration_s > 0 else None,
        slo_attainment=metrics.slo_attainment(_met(run, slo) for run in runs),
    )


def _share_of_prompts(runs: Sequence[RequestRun], num_tokens: int) -> float | None:
    if not any(run.request.prefix for run in runs):
        return None
    return num_tokens / sum(run.request.num_prompt_tokens for run in runs)


def _num_possible_tokens(runs: Sequence[RequestRun]) -> int:
    """Return how many prompt tokens an endless cache would have had, if each prompt was cached as it arrived."""
    seen: set[PrefixHash] = set()
    num_granules = 0
    for run in runs:
        chain = run.request.chain
        num_granules += next((index for index, granule in enumerate(chain) if granule not in seen), len(chain))
        seen.update(run.request.prefix)
    return num_granules * GRANULE_TOKENS


def _end_s(runs: Sequence[RequestRun], start_s: float) -> float:
    return max((run.token_times_s[-1] for run in runs if run.token_times_s), default=start_s)


def _met(run: RequestRun, slo: Slo) -> bool:
    own = _objective(run, slo)
    return run.outcome is Outcome.FINISHED and metrics.meets_slo(own, run.request.arrival_s, run.token_times_s)


def _objective(run: RequestRun, slo: Slo) -> Slo:
    return slo.with_own(run.request.slo_ttft_s, run.request.slo_tpot_s)
