"""Batching modes: whether prompts are computed beside decodes (mixed), in phases of their own (exclusive), or either.

An *exclusive* instance computes prompts alone until its idle seats are filled or no request waits. It then decodes
alone until a share of its seats is idle. A *switching* instance uses the mode that measured step times predict to be
faster, as long as the latency targets are kept. The theory is `pdmesh.policy.batching_theory`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import NamedTuple, Protocol

from pdmesh.policy.batching_theory import (
    LEAST_TOKENS,
    NO_LIMIT,
    LengthMoments,
    MixedState,
    StepCosts,
    StepLimit,
    Threshold,
    exclusive_throughput,
    max_safe_slots,
    mixed_state,
)
from pdmesh.policy.probing import NO_CORRECTION, Correction

#: Why `eb` is refused where there are only instances without a choice.
NOTHING_EXCLUSIVE = (
    "no instance has a choice of modes. An instance of one stage has one if it prefills and decodes: a mixed instance "
    "(`pdmesh role NAME mixed`), or a decode instance under the policy `pdmesh`"
)


class Mode(StrEnum):
    """Batching mode of an instance at one time."""

    MIXED = "mb"
    EXCLUSIVE = "eb"


def other_mode(mode: Mode) -> Mode:
    """Return the other of the two modes."""
    return Mode.MIXED if mode is Mode.EXCLUSIVE else Mode.EXCLUSIVE


class DecodePhase(NamedTuple):
    """State of an exclusive instance in a decode phase, and of the requests that wait for the end of the phase.

    Times are seconds on the core's clock.

    ``limit_s``: longest duration of a decode phase while a request waits.
    ``num_fillable``: number of waiting requests for which there are idle seats and free blocks.
    ``urgent_s``: when the first request in line must begin to keep its own target; infinite without such a target.
    ``turn_s``: earliest end, because another instance of the pool has just begun a prefill phase.
    """

    now_s: float
    began_s: float
    limit_s: float
    num_seats: int
    num_busy: int
    num_fillable: int
    urgent_s: float
    turn_s: float


class Load(NamedTuple):
    """Observed load of an instance, and the costs of its steps.

    ``num_slots``: mean number of requests that are there or could be.
    ``lengths``: outputs are counted without their first token, which prefill draws.
    ``threshold``: the best threshold for these costs and outputs.
    ``tpot_s``: the smallest TPOT target that a resident has of its own.
    ``together``: observed mean number of requests that begin at once in mixed batching.
    ``held``: lengths of single requests, where ``lengths`` are of something else.
    ``max_stall_s``: longest prefill phase, whatever the mode allows.
    ``few_prompts``: whether other instances compute nearly all prompts.
    """

    num_slots: float
    max_num_seqs: int
    num_kv_tokens: int
    lengths: LengthMoments
    threshold: Threshold
    costs: StepCosts
    tpot_s: float | None
    mixed_limit: StepLimit = NO_LIMIT
    correction: Correction = NO_CORRECTION
    together: float = 1.0
    held: LengthMoments | None = None
    max_stall_s: float = inf
    few_prompts: bool = False


class ModeChoice(NamedTuple):
    """Decision on how an instance batches until the next decision.

    ``idle_share``: share of the seats that are idle when a decode phase ends.
    ``gain``: throughput of exclusive over mixed batching, less 1; None: unknown.
    ``reason``: why a faster mode is not chosen.
    ``cycle_s``: predicted duration of a prefill phase and a decode phase.
    ``max_prompt_tokens``: a prompt with more tokens to compute is computed beside decodes.
    ``is_open``: whether a slightly wrong prediction could hide that the other mode is faster.
    ``max_stall_s``: longest prefill phase while no resident has a TPOT target of its own.
    ``least_stall_s``: duration of the shortest prefill phase; with less time to spare, batching is mixed.
    ``decodes_s``: predicted duration of a decode phase.
    """

    mode: Mode
    idle_share: float = 0.0
    num_seats: int = 0
    gain: float | None = None
    reason: str = ""
    cycle_s: float = 0.0
    max_prompt_tokens: float = inf
    is_open: bool = True
    max_stall_s: float = inf
    least_stall_s: float = 0.0
    decodes_s: float = 0.0


class Batching(Protocol):
    """Rule by which an instance that prefills and decodes shares its steps between both."""

    @property
    def name(self) -> str: ...

    @property
    def first(self) -> ModeChoice:
        """The choice before anything was observed."""
        ...

    @property
    def adapts(self) -> bool:
        """Whether `choose` depends on the load."""
        ...

    @property
    def probes(self) -> bool:
        """Whether the mode that is not chosen is probed where both are nearly as fast."""
        ...

    def choose(self, load: Load, now: Mode) -> ModeChoice:
        """Return the choice from now on for an instance that is in the mode ``now``."""
        ...

    def prefills_from_s(self, choice: ModeChoice, phase: DecodePhase) -> float:
        """Return when a decode phase may end if nothing else happens; at most ``phase.now_s`` if it may end now."""
        ...

    def carries_decodes(self, longest_tokens: int) -> bool:
        """Whether a mixed step also decodes for all residents, by the tokens to compute of its longest prompt."""
        ...


#: Share of a seat that counts as a rounding error: a share of 1 / 7.9 of eight seats is one seat, not two.
_NEARLY = 0.45


def phase_end_s(choice: ModeChoice, phase: DecodePhase) -> float:
    """Return when a decode phase ends, by the ratio form of EB(k); infinite if no waiting request has room.

    A phase with waiting requests ends when fillable / busy >= idle share / (1 - idle share), to the nearest seat. Three
    further conditions end a phase. No seat is busy, so nothing else frees memory. The first request in line must begin
    to keep its own target. Or the phase has lasted ``phase.limit_s``. The derivation is in `ebplus_math`, section 5.
    """
    if phase.num_busy == 0:
        return -inf
    if phase.num_fillable == 0:
        return inf
    wanted = (phase.num_busy + phase.num_fillable) * choice.idle_share
    if phase.num_fillable >= wanted - _NEARLY:
        return min(phase.urgent_s, phase.turn_s)
    return min(phase.urgent_s, max(phase.turn_s, phase.began_s + phase.limit_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedBatching:
    """Mixed batching: prompts and decodes in one step. Without ``colocates``, steps of short prompts decode nothing."""

    long_prompt_tokens: int
    colocates: bool = True
    name: str = "mb"
    adapts: bool = False
    probes: bool = False

    @property
    def first(self) -> ModeChoice:
        return ModeChoice(Mode.MIXED)

    def choose(self, load: Load, now: Mode) -> ModeChoice:
        return ModeChoice(Mode.MIXED)

    def prefills_from_s(self, choice: ModeChoice, phase: DecodePhase) -> float:
        return -inf

    def carries_decodes(self, longest_tokens: int) -> bool:
        return self.colocates or longest_tokens >= self.long_prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ExclusiveBatching:
    """Exclusive batching at all times: EB(k).

    ``idle_share`` is k / N; None: the best share in theory for the observed load. ``risk`` is the accepted chance of
    running out of KV in a decode phase.
    """

    idle_share: float | None = None
    risk: float = 0.01
    name: str = "eb"
    probes: bool = False

    #: Share before outputs were observed: the best for steps of about equal constants and outputs of a hundred tokens.
    UNKNOWN_IDLE_SHARE = 0.125

    @property
    def adapts(self) -> bool:
        return True

    @property
    def first(self) -> ModeChoice:
        return ModeChoice(Mode.EXCLUSIVE, self.idle_share or self.UNKNOWN_IDLE_SHARE)

    def choose(self, load: Load, now: Mode) -> ModeChoice:
        threshold = _at(load, load.threshold, self.idle_share) if self.idle_share else load.threshold
        num_seats = safe_seats(load, threshold, self.risk)
        prediction = ModePrediction.of(load, threshold, num_seats)
        return ModeChoice(Mode.EXCLUSIVE, threshold.idle_share, num_seats, prediction.gain, cycle_s=prediction.cycle_s)

    def prefills_from_s(self, choice: ModeChoice, phase: DecodePhase) -> float:
        return phase_end_s(choice, phase)

    def carries_decodes(self, longest_tokens: int) -> bool:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchingBatching:
    """EB+: exclusive where that is predicted to be faster and keeps the targets, mixed otherwise.

    A prefill phase stalls every resident. So no phase is longer than the smallest TPOT target of a resident, or than
    ``max_stall_s`` without such targets; the remaining prompt tokens wait for another decode phase. A cycle is no
    longer than ``slo_ttft_s``, for the requests that wait. The threshold is lowered until both hold in the mean, as
    long as exclusive batching stays faster. A prompt that takes longer than a cycle may is computed beside decodes.

    ``risk``: accepted chance of running out of KV in a decode phase.
    ``dead_band``: smallest gain in throughput that is worth a switch; the deviation of probes may raise it.
    ``min_slots``: with fewer requests, batching is mixed.
    """

    slo_ttft_s: float
    max_stall_s: float
    risk: float = 0.01
    dead_band: float = 0.003
    min_slots: float = 4.0
    name: str = "ebplus"
    probes: bool = True

    @property
    def adapts(self) -> bool:
        return True

    @property
    def first(self) -> ModeChoice:
        return ModeChoice(Mode.MIXED)

    def choose(self, load: Load, now: Mode) -> ModeChoice:
        num_seats = safe_seats(load, load.threshold, self.risk)
        least_share = 1 / max(1.0, min(load.num_slots, num_seats))
        best = ModePrediction.of(load, load.threshold, num_seats)
        share = min(best.threshold.idle_share, self._share_of_stall(load, least_share))
        reason = ""
        if load.num_slots < self.min_slots:
            reason = "few requests"
        elif load.few_prompts:
            reason = "few prompts"
        elif share < least_share:
            reason = "stall"
        prediction = best if share >= best.threshold.idle_share else best.at(load, max(share, least_share))
        if not reason and prediction.cycle_s > self.slo_ttft_s:
            share = prediction.share_of_cycle(load, self.slo_ttft_s)
            reason = "TTFT" if share < least_share else ""
            prediction = best.at(load, max(share, least_share))
        if not reason and load.tpot_s is not None and prediction.tpot_s > max(load.tpot_s, prediction.mixed_tpot_s):
            reason = "TPOT"
        log_gain = math.log1p(prediction.gain) + load.correction.log_gain
        band = max(self.dead_band, load.correction.deviation)
        least = -band if now is Mode.EXCLUSIVE else band
        return ModeChoice(
            Mode.MIXED if reason or log_gain <= least else Mode.EXCLUSIVE,
            prediction.threshold.idle_share,
            num_seats,
            math.expm1(log_gain),
            reason,
            prediction.cycle_s,
            self._tokens_within(load, self.slo_ttft_s),
            prediction.gain > 0 or load.costs.mixing_costs,
            min(self.max_stall_s, load.max_stall_s),
            load.costs.switch_s + LEAST_TOKENS * load.costs.prompt_token_s,
            prediction.decodes_s(load),
        )

    def _share_of_stall(self, load: Load, least_share: float) -> float:
        """Return the share of idle seats at which a prefill phase reaches its longest allowed duration."""
        return self._tokens_within(load, self.max_stall_s) / load.lengths.mean_prompt_tokens * least_share

    @staticmethod
    def _tokens_within(load: Load, limit_s: float) -> float:
        """Return how many prompt tokens a phase may have.

        The phase is no longer than the smallest TPOT target of a resident, or than ``limit_s`` without such a target,
        and never longer than ``load.max_stall_s``.
        """
        stall_s = min(load.max_stall_s, limit_s if load.tpot_s is None else load.tpot_s)
        token_s = load.costs.prompt_token_s
        return (stall_s - load.costs.switch_s) / token_s if token_s > 0 else inf

    def prefills_from_s(self, choice: ModeChoice, phase: DecodePhase) -> float:
        return phase_end_s(choice, phase)

    def carries_decodes(self, longest_tokens: int) -> bool:
        return True


class ModePrediction(NamedTuple):
    """Prediction for exclusive batching at a threshold and for mixed batching, with ``num_slots`` seats in use."""

    threshold: Threshold
    num_slots: float
    mixed: MixedState
    throughput: float

    @classmethod
    def of(cls, load: Load, threshold: Threshold, num_seats: int) -> ModePrediction:
        num_slots = max(1.0, min(load.num_slots, num_seats))
        num_mixed = max(1.0, min(load.num_slots, load.max_num_seqs))
        mixed = mixed_state(num_mixed, load.costs, load.lengths, load.mixed_limit, load.together)
        nothing_yet = cls(threshold, num_slots, mixed, 0.0)
        return nothing_yet.at(load, max(threshold.idle_share, 1 / num_slots))

    def at(self, load: Load, idle_share: float) -> ModePrediction:
        """Return the prediction at another share of idle seats."""
        threshold = _at(load, self.threshold, idle_share)
        throughput = exclusive_throughput(self.num_slots, threshold, load.costs, load.lengths)
        return self._replace(threshold=threshold, throughput=throughput)

    @property
    def gain(self) -> float:
        """Throughput of exclusive over mixed batching, less 1: 0.1 is 10 % more tokens per second."""
        return self.throughput / self.mixed.throughput - 1

    @property
    def cycle_s(self) -> float:
        return self.num_slots * self.threshold.idle_share / self.throughput

    def decodes_s(self, load: Load) -> float:
        """Return the seconds of a decode phase: the rest of a cycle."""
        num_prompts = self.num_slots * self.threshold.idle_share
        prompts_s = load.costs.prompt_token_s * load.lengths.mean_prompt_tokens * num_prompts
        return max(0.0, self.cycle_s - load.costs.switch_s - prompts_s)

    @property
    def tpot_s(self) -> float:
        return self.cycle_s / max(self.threshold.num_steps, 1.0)

    @property
    def mixed_tpot_s(self) -> float:
        return self.mixed.step_s

    def share_of_cycle(self, load: Load, limit_s: float) -> float:
        """Return a share of idle seats with which a cycle is no longer than ``limit_s``.

        Scaling the share is safe, because the duration of a cycle without its switch is convex in the share.
        """
        switch_s = load.costs.switch_s
        return self.threshold.idle_share * max(0.0, limit_s - switch_s) / (self.cycle_s - switch_s)


def safe_seats(load: Load, threshold: Threshold, risk: float) -> int:
    """Return N, at least 1: the most decodes at once with a chance of at most ``risk`` to run out of KV in a phase."""
    most = load.max_num_seqs
    lengths = load.held or load.lengths
    return max(1, max_safe_slots(load.num_kv_tokens, risk, threshold, lengths, at_most=most))


def _at(load: Load, threshold: Threshold, idle_share: float) -> Threshold:
    """Return the threshold at another share of idle seats.

    Seats empty exponentially, so the steps scale with -ln(1 - share). Where many outputs have the same length, this is
    too few: to free a share of the seats, all seats together decode that many whole outputs.
    """
    if idle_share == threshold.idle_share:
        return threshold
    best = -math.log1p(-min(threshold.idle_share, 0.999))
    num_steps = threshold.num_steps * -math.log1p(-min(idle_share, 0.999)) / best
    return Threshold(idle_share, max(1.0, num_steps, idle_share * load.lengths.mean_output_tokens))
