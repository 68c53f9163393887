"""Measured steps of a recorded run, to fit a latency model to.

Prefill comes from planned steps: their device time is recorded. Decode steps that an instance takes by itself are not,
but a request's decode phase tells the mean of them: its duration, less the planned steps in it, over its tokens, beside
the requests that decoded at the same time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from pdmesh.model import InstanceId
from pdmesh.policy.fit import fit
from pdmesh.policy.latency import ChunkShape, LinearLatencyModel, StepShape
from pdmesh.sim.recorded import RecordedRun, RecordedStep
from pdmesh.sim.result import RequestRun

Sample = tuple[StepShape, float]


@dataclass(frozen=True, slots=True)
class _Stay:
    """One request's decode phase on an instance: from ``from_s``, with its first token, to ``until_s``, its last."""

    from_s: float
    until_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    landed: bool  # at any time, perhaps in the middle of a step

    def num_context_tokens(self, at_s: float) -> float:
        share = (at_s - self.from_s) / (self.until_s - self.from_s)
        return self.num_prompt_tokens + 1 + share * (self.num_output_tokens - 1)


def fitted_model(run: RecordedRun) -> LinearLatencyModel:
    """The latency model of the run's instances, time between two steps included. Raises ValueError without a step."""
    samples = measured_steps(run)
    model = _in_sum(fit(samples), samples)
    overhead_s = step_overhead_s(run)
    return replace(model, a_s=model.a_s + overhead_s, mixed_a_s=model.mixed_a_s + overhead_s)


def _in_sum(model: LinearLatencyModel, samples: Sequence[Sample]) -> LinearLatencyModel:
    """Scaled so that all steps together take as long as they did: the least relative error of noisy times lies below
    them, and in a queue the sum is what counts. Decode steps first, then the chunks beside them.
    """
    alone = [(shape, seconds) for shape, seconds in samples if not shape.chunks]
    decode_factor = _over(sum(seconds for _, seconds in alone), sum(model.step_s(shape) for shape, _ in alone))
    model = replace(
        model,
        decode_a_s=model.decode_a_s * decode_factor,
        decode_s=model.decode_s * decode_factor,
        decode_context_s=model.decode_context_s * decode_factor,
    )
    chunked = [(shape, seconds) for shape, seconds in samples if shape.chunks]
    decodes_only = replace(model, a_s=0.0, b_s=0.0, c_s=0.0, d_s=0.0, mixed_a_s=0.0, interference_s=0.0)
    beside_s = sum(decodes_only.step_s(shape) for shape, _ in chunked)
    chunks_s = sum(model.step_s(shape) for shape, _ in chunked) - beside_s
    factor = _over(sum(seconds for _, seconds in chunked) - beside_s, chunks_s)
    return replace(
        model,
        a_s=model.a_s * factor,
        b_s=model.b_s * factor,
        c_s=model.c_s * factor,
        d_s=model.d_s * factor,
        mixed_a_s=model.mixed_a_s * factor,
        interference_s=model.interference_s * factor,
    )


def _over(measured_s: float, predicted_s: float) -> float:
    return measured_s / predicted_s if measured_s > 0 and predicted_s > 0 else 1.0


def measured_steps(run: RecordedRun) -> list[Sample]:
    """Each planned step with its device time, and each decode phase as one mean decode step."""
    samples: list[Sample] = []
    by_instance = _by_instance(run.steps)
    for profile in run.profiles:
        steps = by_instance.get(profile.instance_id, [])
        stays = _stays(run.result.requests, profile.instance_id)
        samples += [(_shape(step, stays), step.duration_s) for step in steps if step.duration_s > 0]
        samples += _mean_decode_steps(stays, steps)
    return samples


def step_overhead_s(run: RecordedRun) -> float:
    """Time per planned step beside its device time: from the moment it could begin, planned and the one before it
    reported, to its own report. The median over the steps without decodes, whose beginning no decode step delays.
    """
    overheads_s: list[float] = []
    for steps in _by_instance(run.steps).values():
        before_s = 0.0
        for step in steps:
            if not step.num_decodes:
                overheads_s.append(step.done_s - max(before_s, step.planned_s) - step.duration_s)
            before_s = step.done_s
    return max(0.0, median(overheads_s)) if overheads_s else 0.0


def _by_instance(steps: Iterable[RecordedStep]) -> dict[InstanceId, list[RecordedStep]]:
    by_instance: dict[InstanceId, list[RecordedStep]] = {}
    for step in steps:
        by_instance.setdefault(step.instance_id, []).append(step)
    return by_instance


def _stays(runs: Iterable[RequestRun], instance_id: InstanceId) -> list[_Stay]:
    stays: list[_Stay] = []
    for run in runs:
        if run.decode_id == instance_id and len(run.token_times_s) > 1:
            from_s = run.token_times_s[0] if run.landed_s is None else run.landed_s
            if from_s < run.token_times_s[-1]:
                num_tokens, landed = len(run.token_times_s), run.landed_s is not None
                stays.append(_Stay(from_s, run.token_times_s[-1], run.request.num_prompt_tokens, num_tokens, landed))
    return sorted(stays, key=lambda stay: stay.from_s)


def _shape(step: RecordedStep, stays: Sequence[_Stay]) -> StepShape:
    chunks = tuple(ChunkShape(chunk.num_tokens, chunk.start) for chunk in step.chunks)
    began_s = step.done_s - step.duration_s
    contexts = [stay.num_context_tokens(began_s) for stay in stays if stay.from_s <= began_s < stay.until_s]
    # The step itself says how many decoded beside its chunks; of whom, only the time tells.
    mean = sum(contexts) / len(contexts) if contexts else 0.0
    return StepShape(chunks, step.num_decodes, mean * step.num_decodes)


def _mean_decode_steps(stays: Sequence[_Stay], steps: Sequence[RecordedStep]) -> Iterator[Sample]:
    ends_s = [step.done_s for step in steps]
    for stay in stays:
        planned = steps[bisect_right(ends_s, stay.from_s) : bisect_right(ends_s, stay.until_s)]
        num_steps = stay.num_output_tokens - 1.0 - sum(step.num_decodes > 0 for step in planned)
        if stay.landed and any(other.from_s < stay.from_s < other.until_s for other in stays):
            num_steps += 0.5  # it waited for the step that was running, on average half of one
        alone_s = stay.until_s - stay.from_s - sum(step.duration_s for step in planned)
        if num_steps > 0 and alone_s > 0:
            yield StepShape((), *_mean_company(stay, stays)), alone_s / num_steps


def _mean_company(stay: _Stay, stays: Sequence[_Stay]) -> tuple[float, float]:
    """Requests that decode during a stay, itself included, and their context tokens: means over its time."""
    duration_s = stay.until_s - stay.from_s
    num_decodes = num_context_tokens = 0.0
    for other in stays:
        from_s, until_s = max(stay.from_s, other.from_s), min(stay.until_s, other.until_s)
        if from_s < until_s:
            share = (until_s - from_s) / duration_s
            num_decodes += share
            num_context_tokens += share * other.num_context_tokens((from_s + until_s) / 2)
    return num_decodes, num_context_tokens
