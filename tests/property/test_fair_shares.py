"""The law of fair shares: what tenants with requests in line are charged never differs by more than a bound.

Of two tenants in line, the counter of neither is more than ``B`` tokens ahead of the other's, over the least share,
where ``B`` is the longest prompt and what the output tokens cost that may be under way in the mesh at once. So over any
span in which both have requests in line, what they are charged differs by 2 ``B`` at most, whatever each asks for; and
what they really got, counted by the commands and reports alone, by 2 ``B`` and twice what is under way.

A policy that lets prompts wait for their turn lets others go past them. So all prompts here are short ones.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdmesh.core.commands import AdmitPrefill, Command, ForgetRequest, Outcome, Restart
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import Event, GatewayJoined, InstanceJoined, RequestArrived, RequestCancelled, RequestFinished
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.core.waiting.fairness import OUTPUT_COST, UNITS, TenantView
from pdmesh.model import Epoch, GatewayId, Request, RequestId, RequestKey, Role
from pdmesh.policy.bundles import make_bundle
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh_testing.examples import examples
from pdmesh_testing.modelled import modelled_profile
from pdmesh_testing.modelled_mesh import ModelledMesh

POLICY = PolicyConfig(chunk_tokens=8, latency=LinearLatencyModel(a_s=0.0, b_s=1.0, c_s=0.0, d_s=0.0))
CONFIG = CoreConfig(max_queue_s=1e9, policy=POLICY)
GATEWAY = GatewayId("g")
MESHES = {"1P+1D": (Role.PREFILL, Role.DECODE), "2M": (Role.MIXED, Role.MIXED)}
BUNDLES = ("fcfs", "sjf", "lars", "pecsched", "pdmesh")
MAX_PROMPT, MAX_OUTPUT = 24, 12

#: A kind, and whose and how much, for the kinds that ask.
Move = tuple[str, int, int, int]
MOVES = st.lists(
    st.tuples(
        st.sampled_from(("arrive", "arrive", "arrive", "work", "work", "work", "cancel", "fail", "wait")),
        st.integers(0, 3),
        st.integers(1, MAX_PROMPT),
        st.integers(1, MAX_OUTPUT),
    ),
    min_size=1,
    max_size=120,
)


@dataclass
class Ledger:
    """What each tenant got, told by events and commands alone."""

    paid: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))  # tokens, of what has ended
    running: dict[RequestKey, Request] = field(default_factory=dict[RequestKey, Request])
    most_under_way: int = 0  # output tokens that those placed at once may draw

    def note(self, request: Request, event: Event, command: Command) -> None:
        key = (request.request_id, request.epoch)
        match command:
            case AdmitPrefill():
                self.running[key] = request
                under_way = sum(running.max_tokens for running in self.running.values())
                self.most_under_way = max(self.most_under_way, under_way)
            case ForgetRequest() if self.running.pop(key, None) is not None:
                drawn = event.num_output_tokens or 0 if isinstance(event, RequestFinished | RequestCancelled) else 0
                drawn = drawn if command.outcome in (Outcome.FINISHED, Outcome.CANCELLED) else 0
                self.paid[request.tenant] += max(1, cost(request) + OUTPUT_COST * drawn)
            case _:
                pass

    def got(self, tenant: str) -> int:
        """Prompts count from their placement on, outputs from their end on."""
        return self.paid.get(tenant, 0) + sum(
            cost(request) for request in self.running.values() if request.tenant == tenant
        )


def cost(request: Request) -> int:
    return 0 if request.epoch else request.num_prompt_tokens


class World:
    """A core and modelled instances, and tenants that ask; every move is made at once, but for what is under way."""

    def __init__(self, mesh: Sequence[Role], bundle: str, shares: Sequence[int], seed: int) -> None:
        self.core = SchedulerCore(CONFIG, make_bundle(bundle, POLICY), random.Random(0))
        self.rng = random.Random(seed)
        self.shares = shares
        self.now_s = 0.0
        self.num_failing = 0  # transfers, of the next ones
        self.ledger = Ledger()
        self.requests: dict[RequestKey, Request] = {}
        self.log: list[tuple[float, Event, list[Command]]] = []
        self.since: dict[tuple[str, str], tuple[int, int]] = {}  # pairs in line: what they were charged, and got, then
        profiles = [
            modelled_profile(f"i{number}", role, num_blocks=24, max_num_seqs=3) for number, role in enumerate(mesh)
        ]
        self.mesh = ModelledMesh(profiles)
        self.feed(GatewayJoined(GATEWAY, ()))
        for profile in profiles:
            self.feed(InstanceJoined(profile, ()))

    # --- what happens ---

    def feed(self, event: Event) -> None:
        before = {view.tenant: view for view in self.core.tenants}
        commands = self.core.handle(event, self.now_s)
        self.core.check_integrity()
        self.log.append((self.now_s, event, commands))
        restarted: list[Request] = []
        for command in commands:
            if isinstance(command, AdmitPrefill | ForgetRequest | Restart):
                request = self.requests[command.request_id, command.epoch]
                self.ledger.note(request, event, command)
                if isinstance(command, Restart):
                    restarted.append(request)
            self.mesh.send(command)
        if not any(isinstance(command, ForgetRequest) for command in commands):  # which settles what was expected
            self.no_credit_for_idling(before)
        self.law()
        for request in restarted:
            self.submit(replace(request, epoch=Epoch(request.epoch + 1), arrival_s=self.now_s))

    def submit(self, request: Request) -> None:
        self.requests[request.request_id, request.epoch] = request
        self.feed(RequestArrived(request))

    def move(self, move: Move) -> None:
        kind, number, prompt, output = move
        match kind:
            case "arrive":
                for _ in range(1 + output % 4):
                    tenant = number % len(self.shares)
                    self.submit(
                        Request(
                            request_id=RequestId(f"r{len(self.requests):05}"),
                            epoch=Epoch(0),
                            gateway_id=GATEWAY,
                            num_prompt_tokens=prompt,
                            max_tokens=output,
                            arrival_s=self.now_s,
                            tenant=f"t{tenant}",
                            share=self.shares[tenant],
                        )
                    )
            case "work":
                self.work()
            case "cancel":
                active = [key for key in self.requests if self.core.is_active(key)]
                if active:
                    key = active[number % len(active)]
                    drawn = self.rng.randint(0, self.requests[key].max_tokens) if key in self.ledger.running else 0
                    self.feed(RequestCancelled(GATEWAY, *key, drawn))
            case "fail":
                self.num_failing = 1 + number
            case _:
                self.now_s += output

    def work(self) -> bool:
        """A round of everything that is under way; False if nothing is."""
        busy = False
        for instance in self.mesh.instances.values():
            while instance.commands:
                instance.take_command()
                busy = True
            while instance.running or instance.plans:
                if instance.can_begin:
                    instance.begin_step()
                instance.end_step()
                busy = True
            for key in [key for key in instance.decoding if self.rng.random() < 0.7]:
                if key in self.ledger.running:
                    instance.finish(key, self.rng.randint(1, self.requests[key].max_tokens))
                    busy = True
        for sender, receiver, key in self.mesh.transfers():
            if self.num_failing:
                self.num_failing -= 1
                self.mesh.fail(sender, key)
                busy = True
            elif sender.sequences[key].is_computed:
                self.mesh.land(sender, receiver, key)
                busy = True
        for instance in self.mesh.instances.values():
            while instance.events:
                self.feed(instance.events.popleft())
                busy = True
        return busy or bool(self.ledger.running)

    # --- laws ---

    @property
    def bound(self) -> int:
        return MAX_PROMPT + OUTPUT_COST * self.ledger.most_under_way

    def law(self) -> None:
        in_line = {view.tenant: view for view in self.core.tenants if view.num_waiting}
        pairs = [(one, other) for one in in_line.values() for other in in_line.values() if one.tenant < other.tenant]
        now = {(one.tenant, other.tenant): self.ahead(one, other) for one, other in pairs}
        self.since = {pair: self.since.get(pair, ahead) for pair, ahead in now.items()}
        most = self.bound * UNITS // min(self.shares) + 2
        under_way = OUTPUT_COST * self.ledger.most_under_way * UNITS // min(self.shares)
        for pair, (charged, got) in now.items():
            assert abs(charged) <= most, f"{pair}: {charged} units ahead, {most} at most"
            charged_then, got_then = self.since[pair]
            assert abs(charged - charged_then) <= 2 * most, pair
            assert abs(got - got_then) <= 2 * (most + under_way), pair

    def ahead(self, one: TenantView, other: TenantView) -> tuple[int, int]:
        """How far the one is ahead of the other: by its counter, and by what it got."""
        one_got, other_got = (UNITS * self.ledger.got(view.tenant) // view.share for view in (one, other))
        return one.counter - other.counter, one_got - other_got

    def no_credit_for_idling(self, before: dict[str, TenantView]) -> None:
        floor = min((view.counter for view in before.values() if view.num_waiting), default=0)
        for view in self.core.tenants:
            was = before.get(view.tenant)
            if was is None or not was.num_waiting:
                assert view.counter >= (0 if was is None else was.counter), f"{view} lost its debt"
                assert not view.num_waiting or view.counter >= floor, f"{view} comes with a credit"

    def end(self) -> None:
        """Everyone is served, and has been charged for what it got, and for nothing else."""
        for _ in range(10_000):
            if not self.work():
                break
        assert self.core.num_waiting == self.core.num_running == 0
        assert {view.tenant: view.num_tokens for view in self.core.tenants if view.num_tokens} == self.ledger.paid


@given(
    mesh=st.sampled_from(sorted(MESHES)),
    bundle=st.sampled_from(BUNDLES),
    shares=st.lists(st.sampled_from((1, 1, 2, 5)), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
    moves=MOVES,
)
@example(  # a withdrawn transfer of a preempted request was asked to give its backend back
    mesh="1P+1D",
    bundle="lars",
    shares=[1],
    seed=0,
    moves=[("arrive", 0, 17, 1), ("arrive", 0, 16, 1), ("fail", 0, 1, 1)],
)
@example(  # the ledger took a tenant that it was asked about for one that had paid nothing
    mesh="1P+1D",
    bundle="fcfs",
    shares=[1, 1],
    seed=0,
    moves=[("arrive", 0, 1, 3), ("arrive", 1, 1, 4), ("cancel", 0, 1, 1), ("cancel", 0, 1, 1), ("cancel", 2, 1, 1)],
)
@settings(max_examples=examples(150), deadline=None)
def test_nobody_gets_more_than_its_share(
    mesh: str, bundle: str, shares: list[int], seed: int, moves: list[Move]
) -> None:
    world = World(MESHES[mesh], bundle, shares, seed)
    for move in moves:
        world.move(move)
    world.end()
    again = SchedulerCore(CONFIG, make_bundle(bundle, POLICY), random.Random(0))
    for now_s, event, commands in world.log:
        assert again.handle(event, now_s) == commands, "a replay decides otherwise"
    assert again.tenants == world.core.tenants


@given(mesh=st.sampled_from(sorted(MESHES)), bundle=st.sampled_from(BUNDLES), seed=st.integers(0, 2**32), moves=MOVES)
@settings(max_examples=examples(40), deadline=None)
def test_one_name_is_as_none(mesh: str, bundle: str, seed: int, moves: list[Move]) -> None:
    world = World(MESHES[mesh], bundle, [1], seed)
    for move in moves:
        world.move(move)
    nameless = SchedulerCore(CONFIG, make_bundle(bundle, POLICY), random.Random(0))
    for now_s, event, commands in world.log:
        if isinstance(event, RequestArrived):
            event = RequestArrived(replace(event.request, tenant="", share=7))
        assert nameless.handle(event, now_s) == commands


@pytest.mark.parametrize("bundle", BUNDLES)
def test_a_few_requests_do_not_wait_for_anothers_many(bundle: str) -> None:
    """Whoever floods the line is as far ahead as the law allows, and no further, when a newcomer is placed."""
    world = World(MESHES["1P+1D"], bundle, [1, 1], seed=1)
    for _ in range(100):
        world.move(("arrive", 0, MAX_PROMPT, 3))
    world.now_s = 1000.0  # all are late, and would go first
    got_before = world.ledger.got("t0")
    world.move(("arrive", 1, MAX_PROMPT, 4))
    newcomer = next(key for key, request in world.requests.items() if request.tenant == "t1")
    while newcomer not in world.ledger.running:
        assert world.work()
    assert world.ledger.got("t0") - got_before <= world.bound
