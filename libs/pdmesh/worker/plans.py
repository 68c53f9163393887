"""The next work of an instance: waiting plans, and the batches made from them.

A plan may hold the residents' own decode steps until a later plan ends the hold (`StepPlan.holds_decodes`). Residents
do not depend on that later plan. The hold also ends with the scheduler's stream (`Plans.release_decodes`), and when no
plan comes for `HOLD_LIMIT_S` after the last one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from math import ceil
from operator import attrgetter

import anyio
import structlog

from pdmesh.core.events import InstanceEvent
from pdmesh.core.instances.own_steps import HOLD_LIMIT_S, OwnSteps
from pdmesh.instance.lost_ranges import LostRanges
from pdmesh.instance.sequence_phases import SeqPhase
from pdmesh.kv.frames import OutOfFrames
from pdmesh.kv.gate import Wakeup
from pdmesh.model import InstanceId
from pdmesh.plans import ChunkPlan, StepPlan
from pdmesh.worker.batch import Batch, BatchChunk, BatchDecode
from pdmesh.worker.compiling import GrammarCompiler
from pdmesh.worker.drafts import Drafter
from pdmesh.worker.replies import step_done
from pdmesh.worker.sequences import LocalRequest, Sequences
from pdmesh.worker.windows import Windows

log = structlog.get_logger()

#: Most plans waiting for the engine. A scheduler keeps a few in flight; further plans are answered as dropped.
MAX_QUEUED_PLANS = 1024

#: Phases of requests that free their blocks without computing more of a prompt.
_GIVING_BACK = (SeqPhase.COMPUTED, SeqPhase.DECODING, SeqPhase.PAUSED)


class Plans:
    """Source of batches: urgent plans, then other plans, then decode steps of the residents unless ``own`` holds them.

    A plan without remaining work is answered at once. Plans and residents that draw under a grammar wait until
    `grammars` has compiled the grammar, while others continue. With several stages, each step has an equal share of the
    residents, and a resident is in one step at a time.

    ``wakeup``: wakes an engine's thread that waits, when an urgent batch comes.
    ``drop``: drops a request whose chunk does not follow its computed tokens.
    ``drafter``: drafts tokens for steps of decodes alone; steps with chunks keep their planned size.
    """

    def __init__(
        self,
        instance_id: InstanceId,
        sequences: Sequences,
        own: OwnSteps,
        *,
        windows: Windows,
        wakeup: Wakeup,
        report: Callable[[InstanceEvent], None],
        drop: Callable[[LocalRequest, str], None],
        begin_chunk: Callable[[LocalRequest], None],
        drafter: Drafter | None,
        num_stages: int = 1,
    ) -> None:
        self._instance_id = instance_id
        self._sequences = sequences
        self._own = own
        self._windows = windows
        self._wakeup = wakeup
        #: End of a hold, set while decodes are held and no plan waits.
        self._held_until_s: float | None = None
        self._report = report
        self._drop = drop
        self._begin_chunk = begin_chunk
        self._drafter = drafter
        self._num_stages = num_stages
        self._num_batches = 0
        self.lost_ranges = LostRanges()
        self._plans: deque[StepPlan] = deque()
        #: Read by the engine's thread, too.
        self._urgent: deque[Batch] = deque()
        self._has_work = anyio.Event()
        self.newest_plan_id = -1
        self.grammars = GrammarCompiler(self.wake)

    @property
    def under_way(self) -> list[StepPlan]:
        """Queued plans that have not begun, oldest first, without urgent plans that can begin at once."""
        return [*self._plans]

    def queue(self, plan: StepPlan) -> bool:
        """Add a plan, and return True. Plans beyond `MAX_QUEUED_PLANS` are answered as dropped."""
        self.newest_plan_id = plan.plan_id
        if plan.urgent and len(self._urgent) < MAX_QUEUED_PLANS and not (self._may_wait(plan) or self._must_wait(plan)):
            batch = self._batch(plan)
            if batch is not None:
                self._urgent.append(batch)
                self._wakeup.ring()
                self.wake()
        elif len(self._plans) < MAX_QUEUED_PLANS:
            self._plans.append(plan)
            self.wake()
        else:
            log.error("too many step plans are waiting; dropping one", plan_id=plan.plan_id)
            self._report(step_done(self._instance_id, plan))
        return True

    def forget(self) -> None:
        """Forget all plans without an answer. Another scheduler numbers its plans from 0."""
        self.release_decodes()
        self.newest_plan_id = -1
        self._plans.clear()
        while (batch := self.take_urgent()) is not None:
            for chunk in batch.chunks:
                self._sequences.step_ended(chunk.request)

    def release_decodes(self) -> None:
        """Let the residents decode, because the scheduler that held them is gone."""
        self._own.held = False
        self.wake()

    def wake(self) -> None:
        """Let `wait_for_work` return, because there is something to do."""
        self._has_work.set()

    async def wait_for_work(self) -> None:
        """Return when `next_batch` is worth another call. After `HOLD_LIMIT_S`, release held decodes and warn."""
        if self._urgent or self._next_index is not None or self._free_residents or self._has_range:
            return
        self._has_work = anyio.Event()
        if not self._own.held:
            await self._has_work.wait()
            return
        if self._held_until_s is None:
            self._held_until_s = anyio.current_time() + HOLD_LIMIT_S
        with anyio.CancelScope(deadline=self._held_until_s) as limit:
            await self._has_work.wait()
        if limit.cancelled_caught:
            log.warning("no step plan arrived while decodes were paused; decoding again", limit_s=HOLD_LIMIT_S)
            self.release_decodes()

    def next_batch(self) -> Batch | None:
        """Return an urgent plan, a lost range's chunk, the next plan, or a decode step; None without work."""
        urgent = self.take_urgent()
        if urgent is not None:
            return urgent
        ranges = self.lost_ranges
        if self._has_range and not (ranges.is_plans_turn and self._next_index is not None):
            ranges.is_plans_turn = True
            return self._made(None, (self._range_chunk(),), self._decodes(self._free_residents, drafts=False))
        ranges.is_plans_turn = False
        while (index := self._next_index) is not None:
            plan = self._plans[index]
            del self._plans[index]
            if (batch := self._batch(plan)) is not None:
                return batch
        residents = self._free_residents
        return self._made(None, (), self._decodes(residents)) if residents else None

    @property
    def _has_range(self) -> bool:
        """Whether a chunk of the oldest due range can be computed now: there is one, and its request is in no step."""
        sequence = self.lost_ranges.next
        request = None if sequence is None else self._sequences.get(*sequence.key)
        return request is not None and not request.in_step

    def _range_chunk(self) -> BatchChunk:
        """Make the next tokens of a lost range part of the step that begins now."""
        plan = self.lost_ranges.next_chunk()
        request = self._sequences.get(plan.request_id, plan.epoch)
        assert request is not None, f"{plan.request_id} is not held"
        request.num_chunks += 1
        request.num_steps += 1
        return BatchChunk(request, plan, request.num_chunks - 1)

    def take_urgent(self) -> Batch | None:
        """Return the next urgent batch, to be executed at once; None if there is none. Any thread; cheap."""
        try:
            return self._urgent.popleft()
        except IndexError:
            return None

    @property
    def has_urgent(self) -> bool:
        """Whether `take_urgent` has something. Any thread; cheap."""
        return bool(self._urgent)

    def _may_wait(self, plan: StepPlan) -> bool:
        """Whether a plan may have to wait for KV of a group or of a load; such a plan overtakes no other."""
        requests = (self._sequences.get(part.request_id, part.epoch) for part in plan.chunks)
        return any(
            request is not None and (request.exchange is not None or request.load is not None) for request in requests
        )

    def _must_wait(self, plan: StepPlan) -> bool:
        """Whether a plan draws under a grammar that is being compiled, or needs KV frames that requests will free."""
        if self._waits_for_frames(plan):
            return True
        if self.grammars.is_idle:
            return False
        requests = (self._sequences.get(part.request_id, part.epoch) for part in plan.chunks if part.is_last)
        return any(request is not None and not self._is_ready(request) for request in requests)

    @property
    def _next_index(self) -> int | None:
        """Index of the next plan: the first, or one that may overtake plans that must wait; None if none can run.

        A plan overtakes no earlier plan of the same requests, and no plan that holds decodes differently.
        """
        if not self._plans or not self._must_wait(self._plans[0]):
            return 0 if self._plans else None
        passed = {part.request_id for part in self._plans[0].chunks}
        for index, plan in enumerate(islice(self._plans, 1, None), 1):
            if plan.holds_decodes != self._plans[0].holds_decodes:
                return None
            if not (self._may_wait(plan) or self._must_wait(plan)) and passed.isdisjoint(
                part.request_id for part in plan.chunks
            ):
                return index
            passed.update(part.request_id for part in plan.chunks)
        return None

    @property
    def _free_residents(self) -> list[LocalRequest]:
        """Residents that may decode in a step of the instance's own; none if decodes are held and no plan must wait."""
        if self._own.held and not (self._plans and self._next_index is None):
            return []
        return self._ready(self._share(self._sequences.decoding))

    def _share(self, residents: list[LocalRequest]) -> list[LocalRequest]:
        """Return residents for the next step: at most a stage's share of all, and only ones that are in no step.

        The residents whose last step began first come first. Otherwise steps that do not overlap would all decode the
        same share.
        """
        free = [request for request in residents if not request.in_step]
        if self._num_stages > 1:
            free.sort(key=attrgetter("decoded_in"))
        return free[: ceil(len(residents) / self._num_stages)]

    def _follows_at_once(self, request: LocalRequest) -> bool:
        """Whether a chunk may begin before the previous one is computed, following it from stage to stage."""
        return self._num_stages > 1 and request.exchange is None and request.load is None

    def _ready(self, residents: list[LocalRequest]) -> list[LocalRequest]:
        """Return the residents without a grammar that is being compiled."""
        return residents if self.grammars.is_idle else list(filter(self._is_ready, residents))

    def _is_ready(self, request: LocalRequest) -> bool:
        return self.grammars.is_ready(request.generation.params.grammar)

    def _waits_for_frames(self, plan: StepPlan) -> bool:
        """Whether a plan needs more frames than are free, while some request holds frames that it will free.

        With several stages, prompts in steps under way will free frames, too.
        """
        requests = ((self._sequences.get(part.request_id, part.epoch), part) for part in plan.chunks)
        num_wanted = sum(
            self._windows.num_to_take(request.held, part.start + part.num_tokens)
            for request, part in requests
            if request is not None
        )
        return num_wanted > self._windows.num_available and any(
            (request.phase in _GIVING_BACK or request.in_step) and request.held.places for request in self._sequences
        )

    def _take_frames(self, request: LocalRequest, num_tokens: int) -> bool:
        """Take the frames for a request's first ``num_tokens``, and return True.

        If frames are short, drop other begun prompts, the latest first. Without such a prompt, drop the request itself
        and return False.
        """
        while True:
            try:
                self._windows.take(request.held, request.sequence.block_table, num_tokens)
                return True
            except OutOfFrames as error:
                victim = self._last_begun(request)
                self._drop(victim or request, str(error))
                if victim is None:
                    return False

    def _last_begun(self, request: LocalRequest) -> LocalRequest | None:
        """Return the latest other prompt that has begun and is in no step; None if there is none."""
        for other in reversed(list(self._sequences)):
            if other.phase is SeqPhase.PREFILLING and other.held.places and not other.in_step and other is not request:
                return other
        return None

    def _batch(self, plan: StepPlan) -> Batch | None:
        """Return the batch of a plan; if no work is left, report the plan as done and return None."""
        self._own.planned(plan)
        self._held_until_s = None
        chunks = tuple(chunk for part in plan.chunks if (chunk := self._begin(part)) is not None)
        residents = self._ready(self._share(self._sequences.decoding)) if plan.with_decodes else []
        if chunks or residents:
            return self._made(plan, chunks, self._decodes(residents, drafts=not chunks))
        self._report(step_done(self._instance_id, plan))
        return None

    def _made(self, plan: StepPlan | None, chunks: tuple[BatchChunk, ...], decodes: tuple[BatchDecode, ...]) -> Batch:
        """Return a batch that waits for all copies that use the blocks to be written. Own decode steps have no plan."""
        guards = self._sequences.guards
        copies = [guard for each in chunks for guard in guards(each.request, each.plan.start, each.plan.num_tokens)]
        for each in decodes:
            first_token = len(each.request.sequence.token_ids) - 1
            copies += guards(each.request, first_token, each.num_tokens)
        return Batch(plan=plan, chunks=chunks, decodes=decodes, guards=tuple(copies))

    def _decodes(self, residents: Iterable[LocalRequest], *, drafts: bool = True) -> tuple[BatchDecode, ...]:
        """Make residents part of the step that begins now, except residents without frames, which are dropped."""
        begun: list[BatchDecode] = []
        self._num_batches += 1
        for request in residents:
            decode = BatchDecode(request, self._drafter.draft(request) if self._drafter is not None and drafts else ())
            if self._goes_on(decode):
                request.num_steps += 1
                request.decoded_in = self._num_batches
                begun.append(decode)
        return tuple(begun)

    def _goes_on(self, decode: BatchDecode) -> bool:
        """Take the frames for a resident's next tokens, and free frames behind the window.

        A moving request frees none, because all its frames are sent. Returns False if the request was dropped.
        """
        request = decode.request
        num_tokens = len(request.sequence.token_ids) - 1
        if request.move is None:
            self._windows.pass_by(request.held, request.sequence.block_table, num_tokens)
        return self._take_frames(request, num_tokens + decode.num_tokens - request.sequence.num_remote_tokens)

    def _begin(self, part: ChunkPlan) -> BatchChunk | None:
        request = self._sequences.get(part.request_id, part.epoch)
        # The request may have been freed meanwhile, and may now receive its KV.
        if request is None or request.state.incoming is not None:
            return None
        end = part.start + part.num_tokens
        num_tokens = len(request.sequence.token_ids)
        if (
            request.phase is not SeqPhase.PREFILLING
            or (request.in_step and not self._follows_at_once(request))
            or not part.start < end <= num_tokens
            or part.is_last != (end == num_tokens)
            or not self._sequences.may_write(request, part)
            or not request.begins(part)
        ):
            self._drop(
                request,
                f"chunk {part.start}…{end} does not follow {request.num_computed_tokens} of {num_tokens} tokens",
            )
            return None
        if not self._take_frames(request, end - request.sequence.num_remote_tokens):
            return None
        self._begin_chunk(request)
        if request.trace is not None and request.num_chunks == 0:
            request.trace.prefill_began()
        request.num_chunks += 1
        request.num_begun_tokens = end
        request.num_steps += 1
        return BatchChunk(request, part, request.num_chunks - 1, request.exchange, request.load)
