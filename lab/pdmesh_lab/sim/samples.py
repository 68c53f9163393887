"""Measured steps of a recorded run, for fitting a latency model: planned steps, and sums of own decode steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

from pdmesh.model import InstanceId
from pdmesh.policy.fit import fit
from pdmesh.policy.latency import ChunkShape, LinearLatencyModel, StepShape
from pdmesh_lab.sim.recorded import RecordedRun, RecordedStep

Sample = tuple[StepShape, float]


def fitted_model(run: RecordedRun) -> LinearLatencyModel:
    """Return the latency model of the run's instances, including the time between two steps.

    Raises ValueError without a step.
    """
    samples = measured_steps(run)
    model = _in_sum(fit(samples), samples)
    overhead_s = step_overhead_s(run)
    return replace(model, a_s=model.a_s + overhead_s, mixed_a_s=model.mixed_a_s + overhead_s)


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
