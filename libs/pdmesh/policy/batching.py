"""Batching modes: whether prompts are computed beside decodes (mixed), in phases of their own (exclusive), or either.

An *exclusive* instance computes prompts alone until its idle seats are filled or nobody waits, then decodes alone until
a share of its seats is idle. A *switching* one does what is predicted to be faster with what was measured, as long as
that keeps its targets. The theory is `pdmesh.policy.batching_theory`.
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
    """What an instance does now."""

    MIXED = "mb"
    EXCLUSIVE = "eb"


def other_mode(mode: Mode) -> Mode:
    """Return the other of the two modes."""
    return Mode.MIXED if mode is Mode.EXCLUSIVE else Mode.EXCLUSIVE


class DecodePhase(NamedTuple):
    """A decode phase of an exclusive instance, and what waits for its end. Times are seconds on the core's clock."""

    now_s: float
    began_s: float
    limit_s: float  # how long one may last while somebody waits
    num_seats: int
    num_busy: int
    num_fillable: int  # of those that wait: as many as idle seats and free blocks take
    urgent_s: float  # when the first in line must begin for its own target; infinite without one that can be kept
    turn_s: float  # not before: another instance of the pool has just begun a prefill phase


class Load(NamedTuple):
    """What an instance has to serve, as observed, and what its steps cost."""

    num_slots: float  # requests that are there or could be, in the mean
    max_num_seqs: int
    num_kv_tokens: int
    lengths: LengthMoments  # outputs without their first token, which prefill draws
    threshold: Threshold  # the best one for these costs and outputs
    costs: StepCosts
    tpot_s: float | None  # the smallest target that a resident has of its own
    mixed_limit: StepLimit = NO_LIMIT
    correction: Correction = NO_CORRECTION
    together: float = 1.0  # requests that begin at once where it is mixed, as observed
    held: LengthMoments | None = None  # lengths of single requests, if ``lengths`` are not
    max_stall_s: float = inf  # longest prefill phase, whatever the mode allows
    few_prompts: bool = False  # other instances compute nearly all prompts


class ModeChoice(NamedTuple):
    """What an instance is to do, until more is known."""

    mode: Mode
    idle_share: float = 0.0  # of its seats, at which a decode phase ends
    num_seats: int = 0
    gain: float | None = None  # throughput of exclusive over mixed batching, less 1; None: not known
    reason: str = ""  # why a faster mode is not chosen
    cycle_s: float = 0.0  # predicted, of a prefill phase and a decode phase
    max_prompt_tokens: float = inf  # a prompt with more to compute is computed beside decodes
    is_open: bool = True  # whether the other mode could be the faster one, if the prediction is a little wrong
    max_stall_s: float = inf  # of a prefill phase, while nothing decodes that has a TPOT target of its own
    least_stall_s: float = 0.0  # a phase with anything in it takes as long; with less to spare it is mixed
    decodes_s: float = 0.0  # predicted, of a decode phase


class Batching(Protocol):
    """What an instance that prefills and decodes does at once, and what after the other."""

    @property
    def name(self) -> str: ...

    @property
    def first(self) -> ModeChoice:
        """Return the choice while nothing is known."""
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
        """What to do from here on, by an instance that does ``now``."""
        ...

    def prefills_from_s(self, choice: ModeChoice, phase: DecodePhase) -> float:
        """Return when a decode phase may end if nothing else happens; not after ``phase.now_s`` if it may now."""
        ...

    def carries_decodes(self, longest_tokens: int) -> bool:
        """Whether a step of a mixed instance has a token for every resident too, by the longest prompt in it."""
        ...


#: Of a seat: a share of 1 / 7.9, of eight seats, is one, not two.
_NEARLY = 0.45


def phase_end_s(choice: ModeChoice, phase: DecodePhase) -> float:
    """The rule of EB(k) in its ratio form, which serves a queue shorter than k too (`ebplus_math`, section 5).

    A phase ends when fillable / busy >= idle share / (1 - idle share), to the nearest seat, when nobody is busy, when
    the first in line must begin for its own target, or when it has lasted its limit.
    """
    if phase.num_busy == 0:
        return -inf  # nothing else frees memory either
    if phase.num_fillable == 0:
        return inf
    wanted = (phase.num_busy + phase.num_fillable) * choice.idle_share
    if phase.num_fillable >= wanted - _NEARLY:
        return min(phase.urgent_s, phase.turn_s)
    return min(phase.urgent_s, max(phase.turn_s, phase.began_s + phase.limit_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedBatching:
    """Prompts and decodes in one step. Without ``colocates`` a step of short prompts has no decodes."""

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
    """Phases, always: EB(k). ``idle_share`` is k / N; None takes that of the theory, from what was observed."""

    idle_share: float | None = None
    risk: float = 0.01  # of running out of KV in a decode phase
    name: str = "eb"
    probes: bool = False

    #: Before outputs were observed, with steps of about equal constants and a hundred tokens.
    UNKNOWN_IDLE_SHARE = 0.125

    @property
    def adapts(self) -> bool:
        return True

    @property
    def first(self) -> ModeChoice:
        return ModeChoice(Mode.EXCLUSIVE, self.idle_share or self.UNKNOWN_IDLE_SHARE)

    def choose(self, load: Load, now: Mode) -> ModeChoice:
        threshold = _at(load.threshold, self.idle_share) if self.idle_share else load.threshold
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

    A prefill phase stalls every resident, so none is longer than the smallest TPOT target among them, or than
    ``max_stall_s`` if none has one: what does not fit goes on after another decode phase. And a cycle is no longer than
    ``slo_ttft_s``, which stands for those that wait. The threshold is lowered until both hold in the mean: that costs
    throughput, but no more than is still gained. A prompt that alone would take longer than a cycle may is computed
    beside decodes.
    """

    slo_ttft_s: float
    max_stall_s: float
    risk: float = 0.01
    dead_band: float = 0.003  # of throughput: no switch for less, nor for less than a probe may be wrong by
    min_slots: float = 4.0  # below, mixed
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
        """Return the share of idle seats at which a prefill phase is as long as it may be."""
        return self._tokens_within(load, self.max_stall_s) / load.lengths.mean_prompt_tokens * least_share

    @staticmethod
    def _tokens_within(load: Load, limit_s: float) -> float:
        """Prompt tokens of a phase that stalls nobody for longer than that, or than its own target."""
        stall_s = min(load.max_stall_s, limit_s if load.tpot_s is None else load.tpot_s)
        token_s = load.costs.prompt_token_s
        return (stall_s - load.costs.switch_s) / token_s if token_s > 0 else inf

    def prefills_from_s(self, choice: ModeChoice, phase: DecodePhase) -> float:
        return phase_end_s(choice, phase)

    def carries_decodes(self, longest_tokens: int) -> bool:
        return True


class ModePrediction(NamedTuple):
    """Exclusive batching at a threshold compared with mixed batching, for the seats that there are requests for."""

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
        """The same at another share of idle seats."""
        threshold = _at(self.threshold, idle_share)
        throughput = exclusive_throughput(self.num_slots, threshold, load.costs, load.lengths)
        return self._replace(threshold=threshold, throughput=throughput)

    @property
    def gain(self) -> float:
        """Throughput of exclusive over mixed batching, less 1."""
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
        """The share with which a cycle is no longer than that: but for its switch, it is convex in the share."""
        switch_s = load.costs.switch_s
        return self.threshold.idle_share * max(0.0, limit_s - switch_s) / (self.cycle_s - switch_s)


def safe_seats(load: Load, threshold: Threshold, risk: float) -> int:
    """N: as many as decode at once and, with the observed lengths, run out of KV in a phase with less than ``risk``."""
    most = load.max_num_seqs
    lengths = load.held or load.lengths
    return max(1, max_safe_slots(load.num_kv_tokens, risk, threshold, lengths, at_most=most))


def _at(threshold: Threshold, idle_share: float) -> Threshold:
    """Another share of idle seats, and the steps until it: -ln(1 - share) of them in proportion, as seats empty."""
    if idle_share == threshold.idle_share:
        return threshold
    best = -math.log1p(-min(threshold.idle_share, 0.999))
    return Threshold(idle_share, max(1.0, threshold.num_steps * -math.log1p(-min(idle_share, 0.999)) / best))
