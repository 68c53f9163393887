"""Measured steps of a recorded run, for fitting a latency model: planned steps, and sums of own decode steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import sqrt
from statistics import fmean, median

from pdmesh.model import InstanceId
from pdmesh.policy.fit import fit
from pdmesh.policy.latency import ChunkShape, LatencyModel, LinearLatencyModel, StepShape
from pdmesh_lab.sim.recorded import RecordedRun, RecordedStep

Sample = tuple[StepShape, float]


def step_noise(run: RecordedRun, model: LatencyModel) -> float:
    """Return the relative standard deviation of the run's steps from a model of them; outliers count as `_OUTLIER`."""
    ratios = [seconds / model.step_s(shape) - 1 for shape, seconds in measured_steps(run)]
    return sqrt(fmean([min(abs(ratio), _OUTLIER) ** 2 for ratio in ratios]))


#: Largest relative error of a step that counts as noise.
_OUTLIER = 0.5

#: Mixed steps by which a prior speaks of instances that only prefilled or only decoded. As many recorded ones weigh as
#: much.
_MIXED_STEPS = tuple(
    StepShape((ChunkShape(num_tokens, 0),), num_decodes, 512 * num_decodes)
    for num_tokens in (32, 128, 512, 2048)
    for num_decodes in (2, 8, 32, 128)
)


def fitted_model(run: RecordedRun, prior: LatencyModel | None = None) -> LinearLatencyModel:
    """Return the latency model of the run's instances, including the time between two steps.

    ``prior`` tells how long mixed steps take compared with others; without it, only the recorded steps do. Raises
    ValueError without a step.
    """
    samples = measured_steps(run)
    expected = [] if prior is None else _expected(prior, samples)
    model = _in_sum(fit([*samples, *expected]), samples)
    overhead_s = step_overhead_s(run)
    return replace(model, a_s=model.a_s + overhead_s, mixed_a_s=model.mixed_a_s + overhead_s)


def _expected(prior: LatencyModel, samples: Sequence[Sample]) -> list[Sample]:
    """Return mixed steps with the times that a prior predicts, if its error on recorded steps is a common factor."""
    ratios = [seconds / predicted_s for shape, seconds in samples if (predicted_s := prior.step_s(shape)) > 0]
    return [(shape, median(ratios) * prior.step_s(shape)) for shape in _MIXED_STEPS] if ratios else []


def _in_sum(model: LinearLatencyModel, samples: Sequence[Sample]) -> LinearLatencyModel:
    """Return the model scaled so that all steps together take as long as measured.

    The fit minimises relative errors, so its times lie below the mean of noisy ones. In a queue the sum counts. Decode
    steps are scaled first, then the chunks beside them.
    """
    alone = [(shape, seconds) for shape, seconds in samples if not shape.chunks]
    decode_factor = _over(sum(seconds for _, seconds in alone), sum(model.step_s(shape) for shape, _ in alone))
    model = replace(
        model,
        decode_a_s=model.decode_a_s * decode_factor,
        decode_s=model.decode_s * decode_factor,
        decode_context_s=model.decode_context_s * decode_factor,
        weights_s=model.weights_s * decode_factor,
    )
    chunked = [(shape, seconds) for shape, seconds in samples if shape.chunks]
    decodes_only = replace(model, a_s=0.0, b_s=0.0, c_s=0.0, d_s=0.0, mixed_a_s=0.0, interference_s=0.0, weights_s=0.0)
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
    """Return each planned step with its device time, and each report of own decode steps as one mean step.

    The mean includes the gaps between own steps.
    """
    samples: list[Sample] = []
    for step in run.steps:
        if step.duration_s > 0:
            chunks = tuple(ChunkShape(chunk.num_tokens, chunk.start) for chunk in step.chunks)
            shape = StepShape(chunks, step.num_decodes, step.num_decode_context_tokens)
            samples.append((shape, step.duration_s))
    for own in run.own_steps:
        number = own.num_steps
        if number > 0 and own.wall_s > 0:
            shape = StepShape((), own.num_tokens / number, own.num_context_tokens / number)
            samples.append((shape, own.wall_s / number))
    return samples


def step_overhead_s(run: RecordedRun) -> float:
    """Return the median time per planned step beside its device time; 0 without steps.

    A step's time is from the moment it could begin to its own report. It could begin once it was planned and the step
    before it was reported. Only steps without decodes count, because no decode step delays their beginning.
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
