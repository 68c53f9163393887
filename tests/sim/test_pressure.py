"""Where decode is short of room, on demand: hand-over under pressure keeps its laws, whatever is asked of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdmesh.core.commands import Command, ExpectCopy, Hold, Outcome, Restart
from pdmesh.core.config import CoreConfig, KvReservation
from pdmesh.core.events import Event
from pdmesh.core.instances.allocations import AllocationKind
from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.core.waiting.awaiting_decode import turn_of
from pdmesh.model import InstanceId, RequestKey, Role
from pdmesh.policy.bundles import make_bundle
from pdmesh.policy.config import PolicyConfig
from pdmesh_lab.sim.result import SimResult
from pdmesh_lab.sim.simulator import SimConfig, Simulator
from pdmesh_lab.sim.workload import Arrival, ClosedLoop
from pdmesh_testing.core import FixedGrowth
from pdmesh_testing.examples import examples
from pdmesh_testing.sim import UNEVEN_MODEL, tiny_mesh

#: The core's state is checked after each event: a busy machine may take minutes.
pytestmark = pytest.mark.timeout(400)

#: Of an instance that decodes, and of one that prefills.
NUM_DECODE_TOKENS, NUM_PREFILL_TOKENS = 512, 1024

#: Of KV: a large prompt in 25 ms, or in 2 s, so that what has room promised waits for its link.
FAST, SLOW = 2e6, 25e3

NO_LIMIT = 10**15


@dataclass(slots=True)
class PressedCore:
    """In the place of a core: looks after each event whether the laws hold."""

    core: SchedulerCore
    share: float
    in_flight: dict[InstanceId, int] = field(default_factory=dict[InstanceId, int])
    before: dict[RequestKey, set[RequestKey]] = field(default_factory=dict[RequestKey, set[RequestKey]])
    num_ahead: int = 0  # most at once, of KV that was begun without room
    num_retracted: int = 0
    num_moved: int = 0  # decodes, while computed KV waited for room

    def handle(self, event: Event, now_s: float) -> list[Command]:
        commands = self.core.handle(event, now_s)
        for command in commands:
            match command:
                case ExpectCopy(transfer=transfer) if transfer.is_hand_over:
                    self._overtakes_nobody((command.request_id, command.epoch))
                case ExpectCopy():
                    self.num_moved += bool(self.before)
                case Hold(decodes=True):
                    self._overtakes_nobody((command.request_id, command.epoch))
                case Restart():
                    assert command.retracted, f"{command}: nothing fails here"
                    self.num_retracted += 1
                case _:
                    pass
        for instance in self.core._mesh.instances.values():
            if instance.role is Role.PREFILL:
                self._waits_within_bounds(instance)
        self._has_room_once_those_before_it_are_gone()
        return commands

    def _has_room_once_those_before_it_are_gone(self) -> None:
        """KV that waits for room has it when whoever had a place, or waited for one, before it has left.

        Whatever grows, moves to and fro or is retracted and comes again meanwhile.
        """
        mesh = self.core._mesh
        placed = {
            key for instance in mesh.instances.values() for key in instance.allocations if instance.role is Role.DECODE
        }
        self.before = {key: before for key, before in self.before.items() if key in mesh.awaiting_decode}
        for key, state in mesh.awaiting_decode.items():
            if not state.is_computed:
                continue
            if key not in self.before:
                earlier = {other.key for other in mesh.awaiting_decode.values() if turn_of(other) < turn_of(state)}
                self.before[key] = placed | earlier
            self.before[key] &= placed | mesh.awaiting_decode.keys()
            assert self.before[key], f"{key} waits for room, and nobody who came before it has any"

    def _overtakes_nobody(self, key: RequestKey) -> None:
        """Room goes to none before KV that is computed, waits for room, and was offered first earlier."""
        mesh = self.core._mesh
        state = mesh.find(key)
        if state is None:
            return
        kv_group = mesh.instances[state.prefill_ids[0]].kv_group
        for other in mesh.awaiting_decode.values():
            if other.is_computed and mesh.instances[other.prefill_ids[0]].kv_group == kv_group:
                assert state.rank_of_offer is not None, f"{key} has room before {other.key}, which waits for it"
                assert turn_of(state) < turn_of(other), f"{key} has room before {other.key}, which was offered first"

    def _waits_within_bounds(self, instance: InstanceState) -> None:
        """Of KV begun without room never more than the bound waits, or one alone.

        With KV whose room was promised, more only by what of that was being computed when the bound was reached: none
        of it begins after that.
        """
        bound = self.share * instance.profile.num_blocks
        holds = {key: hold for key, hold in instance.allocations.items() if hold.kind is AllocationKind.LEAVING}
        awaiting_decode = self.core._mesh.awaiting_decode
        ahead = [hold.num_blocks for key, hold in holds.items() if key in awaiting_decode]
        assert len(ahead) <= 1 or sum(ahead) <= bound, f"{instance.instance_id}: {ahead} of {bound} blocks wait"
        self.num_ahead = max(self.num_ahead, len(ahead))
        waiting = [hold.num_blocks for hold in holds.values() if hold.waits]
        most = max(bound, *waiting, 0)
        if sum(waiting) <= most:
            self.in_flight[instance.instance_id] = sum(hold.num_blocks for hold in holds.values() if not hold.waits)
        most += self.in_flight[instance.instance_id]
        assert sum(waiting) <= most, f"{instance.instance_id}: {waiting} wait, of at most {most} blocks"

    def check_integrity(self) -> None:
        self.core.check_integrity()


def run(
    arrivals: Sequence[Arrival],
    *,
    prefill: int = 1,
    decode: int = 1,
    share: float = 0.5,
    slo_ttft_s: float = 1.0,
    risk: float = 0.01,
    reckless: bool = False,
    num_decode_tokens: int = NUM_DECODE_TOKENS,
    num_seats: int = 16,
    num_backends: int = 4,
    control_delay_s: float = 0.0,
    port_bytes_per_s: float = FAST,
    clients: int | None = None,
    events_between_checks: int = 1,
) -> tuple[SimResult, PressedCore]:
    """``reckless``: it expects every output to end with its next token."""
    policy = PolicyConfig(
        latency=UNEVEN_MODEL, waiting_kv_share=share, slo_ttft_s=slo_ttft_s, slo_tpot_s=0.05, long_prompt_tokens=150
    )
    config = CoreConfig(
        max_queue_entries=NO_LIMIT,
        max_queue_tokens=NO_LIMIT,
        max_queue_s=float(NO_LIMIT),
        kv_reservation=KvReservation.ON_DEMAND,
        kv_risk=risk,
        policy=policy,
    )
    core = SchedulerCore(config, make_bundle("pdmesh", policy), random.Random(0))
    if reckless:
        core._mesh.growth = FixedGrowth(1.0, risk=0.5)
    mesh = tiny_mesh(
        {"prefill": prefill, "decode": decode},
        num_kv_tokens=NUM_PREFILL_TOKENS,
        max_num_seqs=num_seats,
        num_transfer_backends=num_backends,
    )
    instances = [
        (replace(profile, num_blocks=num_decode_tokens // 4) if profile.role is Role.DECODE else profile, model)
        for profile, model in mesh.instances(UNEVEN_MODEL)
    ]
    pressed = PressedCore(core, share)
    loop = None if clients is None else ClosedLoop(num_clients=((0, clients),))
    simulated = SimConfig(
        control_delay_s=control_delay_s, port_bytes_per_s=port_bytes_per_s, events_between_checks=events_between_checks
    )
    return Simulator(pressed, instances, arrivals, simulated, closed_loop=loop).run(), pressed


def asked(rng: random.Random, number: int, *, mean_output: int, burst: int = 1, gap_s: float = 0.0) -> list[Arrival]:
    """Prompts of which one in six takes most of what an instance has to decode; outputs that nobody foresees."""
    arrivals: list[Arrival] = []
    for index in range(number):
        prompt = rng.randint(200, 400) if rng.random() < 1 / 6 else rng.randint(1, 90)
        most = NUM_DECODE_TOKENS - prompt - 8
        output = min(most, 1 + int(rng.expovariate(1 / mean_output)))
        arrivals.append(
            Arrival(
                arrival_s=gap_s * (index // burst),
                num_prompt_tokens=prompt,
                num_output_tokens=output,
                max_tokens=most,
            )
        )
    return arrivals


def served(result: SimResult) -> bool:
    """Whether every request has all its tokens, one after the other."""
    return all(
        each.outcome is Outcome.FINISHED
        and len(each.token_times_s) == each.num_output_tokens
        and all(before < after for before, after in pairwise(each.token_times_s))
        for each in result.requests
    )


@settings(max_examples=examples(30), deadline=None)
@example(  # one is retracted at the moment in which its KV has landed, and leaves its source
    prefill=1,
    decode=1,
    share=0.05,
    slo_ttft_s=0.0,
    reckless=True,
    num_seats=5,
    num_backends=1,
    control_delay_s=0.0,
    port_bytes_per_s=FAST,
    mean_output=150,
    burst=1,
    gap_s=0.0,
    clients=4,
    seed=0,
)
@given(
    prefill=st.integers(1, 3),
    decode=st.integers(1, 3),
    share=st.sampled_from((0.05, 0.3, 0.5, 1.0)),
    slo_ttft_s=st.sampled_from((0.0, 1.0, 30.0)),
    reckless=st.booleans(),
    num_seats=st.sampled_from((2, 5, 16)),
    num_backends=st.integers(1, 3),
    control_delay_s=st.sampled_from((0.0, 0.003)),
    port_bytes_per_s=st.sampled_from((FAST, SLOW)),
    mean_output=st.sampled_from((3, 40, 150)),
    burst=st.sampled_from((1, 20)),
    gap_s=st.sampled_from((0.0, 0.05, 2.0)),
    clients=st.sampled_from((None, 4, 24)),
    seed=st.integers(0, 10_000),
)
def test_all_are_served_in_turn_and_what_waits_is_bounded(
    prefill: int,
    decode: int,
    share: float,
    slo_ttft_s: float,
    reckless: bool,
    num_seats: int,
    num_backends: int,
    control_delay_s: float,
    port_bytes_per_s: float,
    mean_output: int,
    burst: int,
    gap_s: float,
    clients: int | None,
    seed: int,
) -> None:
    result, _ = run(
        asked(random.Random(seed), 30, mean_output=mean_output, burst=burst, gap_s=gap_s),
        prefill=prefill,
        decode=decode,
        share=share,
        slo_ttft_s=slo_ttft_s,
        reckless=reckless,
        num_seats=num_seats,
        num_backends=num_backends,
        control_delay_s=control_delay_s,
        port_bytes_per_s=port_bytes_per_s,
        clients=clients,
    )
    assert served(result)


def test_these_workloads_press() -> None:
    """Or the laws above say nothing: prompts run ahead, and decodes are retracted, many times each."""
    result, pressed = run(asked(random.Random(3), 120, mean_output=80), prefill=2, decode=3, reckless=True)
    assert served(result)
    assert pressed.num_moved >= 1, "nothing moved while computed KV waited for room"
    assert pressed.num_ahead >= 5
    assert pressed.num_retracted >= 20
    assert max(each.num_restarts for each in result.requests) >= 3


@pytest.mark.parametrize("risk", [0.01, 0.1])
def test_fewer_are_retracted_than_the_accepted_risk(risk: float) -> None:
    """Where requests end at a rate that does not change, and there is never room for all that come."""
    rng = random.Random(1)
    arrivals = [
        Arrival(
            arrival_s=0.0,
            num_prompt_tokens=rng.randint(1, 40),
            num_output_tokens=min(900, 1 + int(rng.expovariate(1 / 40))),
            max_tokens=900,
        )
        for _ in range(300)
    ]
    result, pressed = run(
        arrivals, prefill=2, risk=risk, num_decode_tokens=2048, num_seats=64, clients=48, events_between_checks=1000
    )
    assert served(result)
    assert pressed.num_ahead > 5, "there was room"
    assert pressed.num_retracted <= risk * len(arrivals)
