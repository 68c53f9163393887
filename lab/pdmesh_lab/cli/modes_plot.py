"""Where exclusive batching pays, on instances of the built-in profiles: what the theory predicts, in one picture.

Needs matplotlib (the extra ``plot``); no display, no global state.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from pdmesh.policy.batching import Load, Mode, ModeChoice, SwitchingBatching
from pdmesh.policy.batching_theory import LengthMoments, StepCosts, StepLimit, geometric_threshold
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import PROFILES, LinearLatencyModel
from pdmesh_lab.sim.workload import Arrival

_AT_ONCE = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_SHARES = tuple(share / 20 for share in range(1, 20))

#: Requests at once, where the share of decodes varies.
_MANY = 64

#: Tokens of KV that an instance of a picture has: it limits nobody.
_KV_TOKENS = 1 << 22


def draw_modes(arrivals: Sequence[Arrival], policy: PolicyConfig) -> bytes:
    """Return a PNG of `eb`'s predicted throughput over `mb`'s, less 1, by profile; filled where `ebplus` is `eb`.

    On the left by the number of requests in progress, for the lengths of the workload; on the right by the share of
    output tokens, for as many tokens in total. Limits of steps, stalls and cycles are those of ``policy``; lengths are
    taken as geometric.
    """
    figure = Figure(figsize=(15, 6), layout="constrained")
    by_number, by_share = figure.subplots(1, 2, sharey=True)
    prompt = fmean(arrival.num_prompt_tokens for arrival in arrivals)
    output = fmean(arrival.num_output_tokens for arrival in arrivals)
    for name, model in PROFILES.items():
        at_once = [choice_of(model, policy, number, prompt, output) for number in _AT_ONCE]
        _line(by_number, name, _AT_ONCE, at_once)
        total = prompt + output
        shares = [choice_of(model, policy, _MANY, total * (1 - share), total * share) for share in _SHARES]
        _line(by_share, name, _SHARES, shares)
    by_number.set_xscale("log", base=2)
    by_number.set_xticks(_AT_ONCE, [str(number) for number in _AT_ONCE])
    by_number.set_xlabel(f"requests at once; prompts of {prompt:.0f}, outputs of {output:.0f} tokens")
    by_number.set_ylabel("throughput of eb over mb, predicted")
    by_number.legend(title="filled: ebplus is exclusive")
    by_share.set_xlabel(f"output tokens, of {prompt + output:.0f} in all; {_MANY} requests at once")
    by_share.xaxis.set_major_formatter(PercentFormatter(1.0))
    for axes in (by_number, by_share):
        axes.axhline(0, color="grey", linewidth=0.8)
        axes.set_yscale("symlog", linthresh=0.1)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_yticks((-0.1, -0.05, 0.0, 0.05, 0.1, 0.2, 0.5, 1.0))
        axes.grid(visible=True, alpha=0.3)
    image = BytesIO()
    figure.savefig(image, format="png", metadata={"Software": None})
    return image.getvalue()


def _line(axes: Axes, name: str, places: Sequence[float], choices: Sequence[ModeChoice]) -> None:
    gains = [0.0 if choice.gain is None else choice.gain for choice in choices]
    (line,) = axes.plot(places, gains, label=name)
    for mode, fill in ((Mode.EXCLUSIVE, line.get_color()), (Mode.MIXED, "white")):
        found = [
            (place, gain) for place, gain, chosen in zip(places, gains, choices, strict=True) if chosen.mode is mode
        ]
        if found:
            across, up = zip(*found, strict=True)
            axes.scatter(across, up, s=28, facecolor=fill, edgecolor=line.get_color(), zorder=3)


def choice_of(model: LinearLatencyModel, policy: PolicyConfig, number: int, prompt: float, output: float) -> ModeChoice:
    """Return what `ebplus` chooses for so many requests in progress, of these mean lengths."""
    decoded = max(1.0, output - 1)
    # The mean square of a geometric length is about twice its squared mean; its mean age is its mean.
    costs = StepCosts(
        switch_s=model.a_s,
        decode_step_s=model.decode_a_s,
        mixed_step_s=model.mixed_a_s,
        prompt_token_s=model.b_s + 2 * model.d_s * prompt,
        decode_token_s=model.decode_s + model.decode_context_s * (prompt + decoded),
        interference_s=model.interference_s,
    )
    load = Load(
        num_slots=number,
        max_num_seqs=max(_AT_ONCE),
        num_kv_tokens=_KV_TOKENS,
        lengths=LengthMoments(mean_prompt_tokens=prompt, mean_output_tokens=decoded, var_prompt_tokens=prompt**2),
        threshold=geometric_threshold(costs, decoded),
        costs=costs,
        tpot_s=None,
        mixed_limit=StepLimit(policy.slo_tpot_s, policy.max_chunk_tokens),
    )
    batching = SwitchingBatching(slo_ttft_s=policy.slo_ttft_s, max_stall_s=policy.max_stall_s)
    return batching.choose(load, Mode.MIXED)
