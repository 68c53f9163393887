"""The steps of an instance: waiting and running plans, their results, and the tokens of residents."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from pdmesh.core.commands import RunStep
from pdmesh.core.events import DecodeStepsDone, KvLow, StepDone
from pdmesh.instance.chunks import Chunks
from pdmesh.instance.copying import CopyRules
from pdmesh.instance.effects import Computed, Refused
from pdmesh.instance.endings import Endings
from pdmesh.instance.holding import Holding
from pdmesh.instance.residents import Shares
from pdmesh.instance.sequence import Sequence
from pdmesh.instance.spreading import Spreading
from pdmesh.model import FinishReason, PrefixHashes, RequestKey
from pdmesh.plans import ChunkDone, ChunkPlan, StepPlan


class RunningStep:
    """A planned step that has begun. ``num_context_tokens`` is the context of the decodes."""

    __slots__ = ("has_share", "num_context_tokens", "num_decodes", "plan")

    def __init__(self, plan: StepPlan, num_decodes: int, num_context_tokens: int, has_share: bool) -> None:
        """``has_share``: whether the step decodes a share of the residents (`Shares`).

        A share may be empty if there are fewer residents than stages.
        """
        self.plan = plan
        self.num_decodes = num_decodes
        self.num_context_tokens = num_context_tokens
        self.has_share = has_share


class Steps:
    """The steps of one instance. ``plans`` have not begun."""

    def __init__(self, holding: Holding) -> None:
        self._holding = holding
        self._spreading = Spreading(holding)
        self._endings = Endings(holding)
        self._copying = CopyRules(holding)
        self._chunks = Chunks(holding)
        self._effects = holding.effects
        self._instance_id = holding.instance_id
        self._num_stages = holding.profile.num_stages
        self._own = holding.own
        self.plans: deque[StepPlan] = deque()
        #: With one stage, the last step runs between two layers of the first. With several, each follows another.
        self.running: list[RunningStep] = []
        self.shares = Shares(self._num_stages)

    def queue(self, plan: StepPlan) -> bool:
        """Add a plan, an urgent one before the others. Returns False for a second urgent plan."""
        if plan.urgent and self.plans and self.plans[0].urgent:
            return False
        if plan.urgent:
            self.plans.appendleft(plan)
        else:
            self.plans.append(plan)
        return True

    @property
    def under_way(self) -> list[StepPlan]:
        return [*[step.plan for step in self.running], *self.plans]

    def forget(self) -> None:
        """Forget all plans, because their scheduler is gone."""
        self.plans.clear()
        self.running.clear()
        self.shares.forget()
        self._own.held = False

    # --- between two steps ---

    def turn(self) -> None:
        """Let residents join and leave, between two steps.

        Does nothing within a round of several stages, where some residents have a token of the round already. Without
        residents no step ends a round, so the next resident begins a new one.
        """
        if not self._holding.residents and not any(step.has_share for step in self.running):
            self.shares.forget()
        if self.running and not self.shares.is_between_rounds:
            return
        holding = self._holding
        for sequence in list(holding.sequences.values()) if holding.profile.max_kv_tokens else ():
            self._spreading.set_members(sequence)
        for key, num_tokens in holding.residents.seat():
            sequence = holding.sequences[key]
            if sequence.is_freed:
                holding.release(sequence)
                continue
            if sequence.has_lost_range:
                sequence.pause(num_tokens)
            else:
                self._copying.freeze(sequence, num_tokens)

    # --- planned steps ---

    @property
    def can_begin(self) -> bool:
        """Whether the next plan could start: no step runs or the plan is urgent; with several stages, one is free."""
        if self._num_stages > 1:
            return bool(self.plans) and len(self.running) < self._num_stages
        return bool(self.plans) and (not self.running or self.plans[0].urgent)

    def begin(self) -> None:
        """Begin the next plan's step. With several stages, it gets a share of the residents."""
        plan = self.plans.popleft()
        self._own.planned(plan)
        for chunk in plan.chunks:
            sequence = self._holding.sequences.get((chunk.request_id, chunk.epoch))
            if sequence is not None:
                self._chunks.begin(sequence)
        residents = self._holding.residents
        num_decodes = num_context_tokens = 0
        if has_share := plan.with_decodes and len(residents) > 0:
            num_decodes = self.shares.begin(len(residents))
            num_context_tokens = residents.num_context_tokens * num_decodes // len(residents)
        self.running.append(RunningStep(plan, num_decodes, num_context_tokens, has_share))

    @property
    def next_to_end(self) -> int:
        return 0 if self._num_stages > 1 else -1

    def end(
        self,
        uncomputed: Collection[RequestKey],
        *,
        duration_s: float,
        began_s: float,
        ended_s: float,
        ended_by_first_token: bool,
    ) -> None:
        """End the running step, and report its chunks. Residents draw a token once each was in a step of the round.

        With one stage, the step that began last ends, else the step that began first. Chunks of ``uncomputed`` were not
        computed, because earlier KV did not come. With ``ended_by_first_token``, generations end with the first token.
        """
        step = self.running.pop(self.next_to_end)
        computed: list[tuple[Sequence, ChunkPlan]] = []
        results: list[ChunkDone] = []
        for chunk in step.plan.chunks:
            sequence = self._computes(step, chunk, uncomputed)
            if sequence is not None:
                self._chunks.end(sequence, chunk)
                computed.append((sequence, chunk))
            results.append(
                ChunkDone(
                    request_id=chunk.request_id,
                    epoch=chunk.epoch,
                    num_tokens=0 if sequence is None else chunk.num_tokens,
                    is_last=chunk.is_last,
                )
            )
        self._effects.append(
            StepDone(
                self._instance_id,
                step.plan.plan_id,
                duration_s,
                tuple(results),
                step.num_decodes,
                step.num_context_tokens,
                self._own.take(),
                began_s,
                ended_s,
            )
        )
        for sequence, chunk in computed:
            if chunk.is_last:
                self._end_prompt(sequence, chunk, ended_by_first_token=ended_by_first_token)
            else:
                self._effects.append(Computed(sequence, chunk, False))
        draws = self.draws_with(step)
        if step.has_share:
            self.shares.end()
        if draws:
            self.draw(1)

    def draws_with(self, step: RunningStep) -> bool:
        """Whether all residents get a token when a step ends, because each has been in a step of the round."""
        return step.has_share and self.shares.ends_round

    def _computes(self, step: RunningStep, chunk: ChunkPlan, uncomputed: Collection[RequestKey]) -> Sequence | None:
        """Return the sequence whose chunk is computed.

        Returns None if the sequence is gone, or if earlier KV did not come. Drops a sequence whose chunk does not
        follow the computed tokens, or exceeds the room, and returns None.
        """
        key = (chunk.request_id, chunk.epoch)
        sequence = self._holding.sequences.get(key)
        # The sequence may have been freed, and expected again since then.
        if sequence is None or sequence.incoming is not None:
            return None
        prompt = sequence.prompt
        if prompt.group is not None:
            if key not in uncomputed:
                return sequence
            assert step.plan.plan_id in prompt.given_up, f"{chunk} does not wait"
            return None
        num_blocks = self._holding.num_context_blocks(sequence) if prompt.num_blocks_at_once else 0
        room = num_blocks * self._holding.profile.kv_layout.block_size
        if chunk.start == prompt.num_computed_tokens and (not room or chunk.start + chunk.num_tokens <= room):
            return sequence
        if not prompt.has_older_plans:
            reason = f"{chunk} after {prompt.num_computed_tokens} tokens, with room for {room or 'all'}"
            self._effects.append(Refused(RunStep(instance_id=self._instance_id, plan=step.plan), reason))
        self._endings.drop(sequence, "the chunk does not follow")
        return None

    def _end_prompt(self, sequence: Sequence, chunk: ChunkPlan, *, ended_by_first_token: bool) -> None:
        """Draw the first token. Then the generation ends, decodes here, or moves on."""
        length = sequence.length
        assert length is not None, f"{chunk} on a helper"
        is_full = chunk.start + chunk.num_tokens + 1 >= length.num_total_tokens
        ends = is_full or ended_by_first_token
        self._effects.append(Computed(sequence, chunk, ends))
        self._chunks.end_prompt(sequence, ends=ends)
        if ends:
            self.finish(sequence, FinishReason.LENGTH if is_full else FinishReason.STOP)

    # --- decode steps ---

    def make_own(self, num_steps: int, *, duration_s: float, began_s: float, ended_s: float) -> None:
        """Make decode steps without a plan: at most `Residents.steps_left`, and at most `OwnSteps.num_left`."""
        residents = self._holding.residents
        num_decodes = len(residents)
        self._own.made(
            num_steps=num_steps,
            num_tokens=num_steps * num_decodes,
            num_context_tokens=num_steps * residents.num_context_tokens
            + num_decodes * num_steps * (num_steps - 1) // 2,
            duration_s=duration_s,
            began_s=began_s,
            ended_s=ended_s,
        )
        self.draw(num_steps)
        if self._own.num_left <= 0 and (own_steps := self._own.take()) is not None:
            self._effects.append(DecodeStepsDone(self._instance_id, own_steps))

    def draw(self, num_steps: int) -> None:
        """Give every resident a token for each step, and end complete generations."""
        drawn = self._holding.residents.decoded(num_steps)
        for key in drawn.finished:
            self.finish(self._holding.sequences[key], FinishReason.LENGTH)
        if drawn.low:
            self._effects.append(KvLow(self._instance_id, drawn.low))

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        num_output_tokens: int | None = None,
        drawn: PrefixHashes | None = None,
    ) -> None:
        """End a generation with its full length, or with ``num_output_tokens``.

        At its full length, the granules that the output completes are cached, or ``drawn`` instead; otherwise none.
        """
        if num_output_tokens is None:
            assert sequence.length is not None, f"{sequence.key} ends, and how long it is is not known"
            num_output_tokens = sequence.length.num_output_tokens
            sequence.end(sequence.length.drawn if drawn is None else drawn)
        self._endings.finish(sequence, reason, num_output_tokens)
