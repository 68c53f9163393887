"""Pictures of simulated runs. Needs matplotlib (the extra ``plot``); no display, no global state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pdmesh.metrics import percentile
from pdmesh_lab.sim.result import RequestRun, SimResult, StepSpan

_PERCENTS = (1, 25, 50, 75, 90, 99)
_MAX_ROWS = 32  # instances in a timeline
_COLOURS = {"short prefill": "tab:blue", "long prefill": "tab:orange", "decode": "tab:green"}


def draw(results: Mapping[str, SimResult], long_tokens: int) -> bytes:
    """Return a PNG with TTFT of short and long requests, queueing delay, and a timeline for each bundle."""
    figure = Figure(figsize=(15, 4.5 + 3.2 * len(results)), layout="constrained")
    axes = figure.subplots(1 + len(results), 3, gridspec_kw={"height_ratios": [4.5, *([3.2] * len(results))]})
    short, long, queueing = axes[0]
    for name, result in results.items():
        by_length = [
            [run for run in result.requests if (run.request.num_prompt_tokens >= long_tokens) is is_long]
            for is_long in (False, True)
        ]
        _distribution(short, name, by_length[0])
        _distribution(long, name, by_length[1])
        delays_s = [delay_s for run in by_length[0] if (delay_s := run.queueing_s) is not None]
        if delays_s:
            queueing.plot(_PERCENTS, [percentile(delays_s, percent) for percent in _PERCENTS], "o-", label=name)
            queueing.legend()
    short.set_title("TTFT of short requests, s")
    long.set_title("TTFT of long requests, s")
    queueing.set_title("queueing delay of short requests, s, by percentile")
    for row, (name, result) in enumerate(results.items(), 1):
        grid = axes[row][0].get_gridspec()
        for unused in axes[row]:
            unused.remove()
        _timeline(figure.add_subplot(grid[row, :]), name, result, long_tokens)
    image = BytesIO()
    figure.savefig(image, format="png", metadata={"Software": None})
    return image.getvalue()


def _distribution(axes: Axes, name: str, runs: Sequence[RequestRun]) -> None:
    values_s = sorted(ttft_s for run in runs if (ttft_s := run.ttft_s) is not None)
    if values_s:
        axes.plot(values_s, [(index + 1) / len(values_s) for index in range(len(values_s))], label=name)
        axes.set_xscale("log")
        axes.legend()


def _timeline(axes: Axes, name: str, result: SimResult, long_tokens: int) -> None:
    """What each instance computes, step by step. A preemption is a long prefill with short ones inside it."""
    is_long = {run.request.request_id: run.request.num_prompt_tokens >= long_tokens for run in result.requests}

    def kind(step: StepSpan) -> str:
        if not step.chunks:
            return "decode"
        return "long prefill" if any(is_long[chunk.request_id] for chunk in step.chunks) else "short prefill"

    instances = result.instances[:_MAX_ROWS]
    for row, instance in enumerate(instances):
        for title, colour in _COLOURS.items():
            spans = [(step.start_s, step.end_s - step.start_s) for step in instance.steps if kind(step) == title]
            axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=colour, label=title if row == 0 else None)
    axes.set_yticks(range(len(instances)), [instance.instance_id for instance in instances], fontsize=6)
    axes.invert_yaxis()
    axes.set_title(f"{name}: instances over time, s")
    axes.legend(loc="upper right")
