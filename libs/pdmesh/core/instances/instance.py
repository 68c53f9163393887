"""State of one instance in the core: its allocations, prompts, and plans in flight."""

from __future__ import annotations

from pdmesh.core.instances.batching_state import BatchingState
from pdmesh.core.instances.cache_index import CacheIndex
from pdmesh.core.instances.instance_load import InstanceLoad
from pdmesh.core.instances.kv_growth import Growth
from pdmesh.core.requests.request import RequestState
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import InstanceId, InstanceProfile, Request, RequestKey
from pdmesh.plans import StepPlan
from pdmesh.policy.latency_profile import device_class_of
from pdmesh.policy.switching import SwitchTimes
from pdmesh.policy.views import InstanceView

#: Least relative change of the residents' context share that is taken over.
_CONTEXT_MOVED = 0.05


class InstanceState(InstanceLoad):
    """State of one instance in the core.

    ``plans`` are in flight, and ``urgent_plan_id`` is the plan among them that overtakes the others. ``turned_s``: when
    the oldest of them began, as far as is known. ``prefills`` are placed here, with tokens not yet planned. Instances
    of one ``device_class`` are equally fast. KV that moves inside an ``arithmetic_class`` continues with the same bits.
    """

    def __init__(
        self,
        profile: InstanceProfile,
        *,
        changed: dict[InstanceId, None],
        growth: Growth,
        cache_index: CacheIndex | None = None,
        number: int = 0,
        next_plan_id: int = 0,
        draining: bool = False,
    ) -> None:
        """``changed`` records every change. ``number`` identifies the instance in ``cache_index``, the mesh's index."""
        cache_index = CacheIndex() if cache_index is None else cache_index
        super().__init__(profile, growth, changed=changed, cache_index=cache_index, number=number, draining=draining)
        self.device_class = device_class_of(profile)
        self.num_stages = profile.num_stages
        self.switches = SwitchTimes()
        self.arithmetic = profile.arithmetic
        self.arithmetic_class = f"{self.kv_group} {profile.arithmetic}"
        self.next_plan_id = next_plan_id
        self.plans: dict[int, StepPlan] = {}
        self.turned_s = 0.0
        self.batching = BatchingState()
        self.urgent_plan_id: int | None = None
        self.prefills: list[RequestState] = []
        self.num_queued_tokens = 0
        #: Share of the residents' room that they attend to; all of it until reported.
        self._context_share = 1.0
        self._view: InstanceView | None = None
        self._change()

    def num_reusable_granules(self, request: Request) -> int:
        """Return how many granules of a prompt are cached here, up to one with a state where layers have states."""
        num_cached = self.num_cached_granules(request)
        return num_cached if self.kept.states is None else self.kept.states.depth(request.chain, num_cached)

    def num_received_granules(self, request: Request) -> int:
        """Return how many cached granules a request whose KV comes here can share: the state behind it comes, too.

        If all whole granules of the context are cached here, the last one needs its state here, or is sent.
        """
        num_cached = self.num_cached_granules(request)
        states = self.kept.states
        if states is None or num_cached * GRANULE_TOKENS <= request.num_prompt_tokens - GRANULE_TOKENS:
            return num_cached
        return num_cached if request.chain[num_cached - 1] in states else num_cached - 1

    def num_coming_granules(self, key: RequestKey, num_granules: int) -> int:
        """Return how many of a live request's first ``num_granules`` another can reuse once they are computed here."""
        use = self.allocations[key].granules.use if key in self.allocations else None
        if self.kept.states is None or use is None:
            return num_granules
        chain = self.allocations[key].granules.chain
        asked = max([number for number in use.asked if number <= num_granules], default=0)
        return max(asked, self.kept.states.depth(chain, num_granules))

    def _change(self) -> None:
        self._view = None
        super()._change()

    # --- plans ---

    @property
    def num_regular_plans(self) -> int:
        """Number of plans in flight, without an urgent one."""
        return len(self.plans) - (self.urgent_plan_id is not None)

    def has_step_slot(self, plans_in_flight: int) -> bool:
        """Whether another regular plan may be sent: fewer than ``plans_in_flight``, plus one per further stage, are."""
        return self.num_regular_plans < plans_in_flight + self.num_stages - 1

    def begin_plan(self, plan: StepPlan, now_s: float) -> None:
        """Record a plan that is sent."""
        if not self.plans:
            self.turned_s = now_s
        self.next_plan_id = plan.plan_id + 1
        self.plans[plan.plan_id] = plan
        self.num_flights += 1
        if plan.urgent:
            self.urgent_plan_id = plan.plan_id
        self._change()

    def end_plan(self, plan_id: int, now_s: float) -> StepPlan | None:
        """Remove a plan in flight, and its prompt tokens from the queued ones. Return the plan; None if unknown.

        ``now_s`` becomes the begin of the next plan in either case.
        """
        self.turned_s = now_s
        if plan_id == self.urgent_plan_id:
            self.urgent_plan_id = None
        plan = self.plans.pop(plan_id, None)
        if plan is not None:
            self.num_flights += 1
            self.queue_tokens(-sum([chunk.num_tokens for chunk in plan.chunks]))
        return plan

    # --- prompt tokens ---

    def queue_tokens(self, num_tokens: int) -> None:
        """Count prompt tokens placed here (or, negative, computed or dropped)."""
        self.num_queued_tokens += num_tokens
        self._change()

    def add_prefill(self, state: RequestState) -> None:
        """Add a prompt that is placed here, with its tokens that are not planned."""
        self.prefills.append(state)
        self.queue_tokens(state.request.num_prompt_tokens - state.num_planned_tokens)

    def drop_prefill(self, state: RequestState) -> None:
        """Remove the prompt of a request that ended, with its tokens that are not planned."""
        self.num_flights += 1
        self._change()
        if state in self.prefills:
            self.prefills.remove(state)
            self.queue_tokens(state.num_planned_tokens - state.request.num_prompt_tokens)

    # --- views and checks ---

    def note_context(self, num_decodes: float, num_tokens: float) -> None:
        """Learn which share of the residents' blocks is filled, from the latest step.

        The step had ``num_decodes`` decodes, with ``num_tokens`` of context in all. A change of at most 5 % is ignored.
        """
        room = self.allocated.num_resident_blocks * self.block_size * num_decodes / max(1, self.allocated.num_decoding)
        share = min(1.0, num_tokens / room) if room and num_tokens else self._context_share
        if abs(share - self._context_share) > _CONTEXT_MOVED * self._context_share:
            self._context_share = share
            self.num_flights += 1
            self._change()

    @property
    def view(self) -> InstanceView:
        """The instance as policies see it; rebuilt only after a change."""
        if self._view is None:
            long_tokens = self.allocated.long_prefill_tokens
            # Positional, since keywords take twice as long, for each placement.
            self._view = InstanceView(
                self.instance_id,
                self.role,
                self.num_blocks,
                self.num_free_blocks,
                self.allocated.num_promised_blocks,
                self.allocated.num_seats_taken,
                self.max_num_seqs,
                self.allocated.num_prefilling,
                self.allocated.num_decoding,
                self.num_queued_tokens,
                self.draining or self.closed,
                self.reachable,
                self.suspected,
                int(self.allocated.num_resident_blocks * self.block_size * self._context_share)
                + self.allocated.num_range_blocks * self.block_size,
                long_tokens.total() if long_tokens else 0,
                self.allocated.num_long_decoding,
                min(long_tokens) if long_tokens else None,
                self.allocated.slo_tpots_s,
                self.number,
                self.device_class,
                self.num_stages,
            )
        return self._view

    def check_integrity(self) -> None:
        """Check allocations, urgent plans and queued tokens; AssertionError names the numbers that do not balance."""
        self.check_occupied()
        name = self.instance_id
        urgent = [plan_id for plan_id, plan in self.plans.items() if plan.urgent]
        known = [] if self.urgent_plan_id is None else [self.urgent_plan_id]
        assert urgent == known, f"{name}: plans {urgent} are urgent, recorded: {known}"
        queued = sum(chunk.num_tokens for plan in self.plans.values() for chunk in plan.chunks)
        queued += sum(state.request.num_prompt_tokens - state.num_planned_tokens for state in self.prefills)
        assert queued == self.num_queued_tokens, f"{name}: {queued} tokens queued, recorded: {self.num_queued_tokens}"
        for state in self.prefills:
            assert not state.is_planned, f"{name}: {state.key} is planned and still in line"
            assert name in state.prefill_ids, f"{name}: {state.key} is in line here, placed on {state.prefill_ids}"
