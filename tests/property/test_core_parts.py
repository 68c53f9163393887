"""Contexts that are spread over several instances, whatever happens to these, and in whatever order it is heard."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from pdmesh.core.commands import ExpectCopy, ForgetRequest, Reject, Restart, SetPlaces
from pdmesh.core.config import CoreConfig, KvReservation
from pdmesh.core.copies.context_ranges import FIND_ROOM_S
from pdmesh.core.events import (
    DrainRequested,
    Event,
    GatewayJoined,
    InstanceJoined,
    InstanceLost,
    InstanceSuspected,
    MembersSet,
    RequestArrived,
    RequestCancelled,
    Tick,
)
from pdmesh.core.instances.allocations import AllocationKind
from pdmesh.core.requests.phases import Phase
from pdmesh.core.requests.request import MAX_LOST_PARTS
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.model import Epoch, InstanceId, Request, RequestId, RequestKey, Role
from pdmesh.policy.bundles import make_bundle
from pdmesh.policy.config import PolicyConfig
from pdmesh_testing.core import GATEWAY, a_request
from pdmesh_testing.examples import examples
from pdmesh_testing.modelled import ModelledInstance, modelled_profile
from pdmesh_testing.modelled_mesh import ModelledMesh

BLOCK_SIZE, LIMIT = 4, 16
MOST_TOKENS = 4 * LIMIT  # of a context: in each mesh there are four instances for it beside the one that computes it
TWO_RANGES = 2 * LIMIT // BLOCK_SIZE
MESHES = {
    "two prefill, four decode": [Role.PREFILL] * 2 + [Role.DECODE] * 4,
    "five mixed": [Role.MIXED] * 5,
    "all kinds": [Role.PREFILL, Role.MIXED, Role.MIXED, Role.DECODE, Role.DECODE],
}
#: Blocks of the instances that compute prompts alone, the first and the second one.
ROOMS = {
    "as much as the others": (24, 24),
    "one is short": (24, 6),
    "two ranges": (8, 8),
    "a range and a half": (6, 10),
    "a range": (4, 4),
}


def new_core(config: CoreConfig, bundle: str) -> SchedulerCore:
    return SchedulerCore(config, make_bundle(bundle, config.policy), random.Random(0))


class Driver:
    """A core over modelled instances; what happens next is drawn."""

    def __init__(
        self,
        shape: str,
        bundle: str,
        reservation: KvReservation,
        rng: random.Random,
        room: str = "as much as the others",
        num_blocks: int = 24,
    ) -> None:
        """``num_blocks`` are of each instance that decodes."""
        self.rng = rng
        policy = PolicyConfig(chunk_tokens=16)
        config = CoreConfig(policy=policy, kv_reservation=reservation)
        self.new_core = partial(new_core, config, bundle)
        self.core = self.new_core()
        profiles = [
            modelled_profile(
                f"i{index}",
                role,
                num_blocks=ROOMS[room][index] if role is Role.PREFILL else num_blocks,
                block_size=BLOCK_SIZE,
                max_kv_tokens=LIMIT,
            )
            for index, role in enumerate(MESHES[shape])
        ]
        self.max_total_of: dict[RequestKey, int] = {}
        self.mesh = ModelledMesh(profiles, self.max_total_of)
        self.now_s = 0.0
        self.running: dict[RequestId, Request] = {}  # in their current epochs
        self.resumes: list[Request] = []
        self.most_members = 0
        self.num_part_moves = self.num_computed_again = self.num_moves = self.num_restarts = 0
        self.num_given_back = 0  # ranges of prompts longer than the room where they are computed
        self.num_requests = 0
        self.feed(GatewayJoined(GATEWAY, ()))
        for profile in profiles:
            self.feed(InstanceJoined(profile, ()))

    @property
    def instances(self) -> list[ModelledInstance]:
        return list(self.mesh.instances.values())

    def feed(self, event: Event) -> None:
        self.now_s += 0.01
        if isinstance(event, MembersSet):
            state = self.core._mesh.find((event.request_id, event.epoch))
            self.num_given_back += state is not None and state.phase is Phase.PREFILLING
        for command in self.core.handle(event, self.now_s):
            match command:
                case ExpectCopy(transfer=transfer) if transfer.is_hand_over:
                    self.most_members = max(self.most_members, len(transfer.destinations) - 1)
                    self.check(command)
                case ExpectCopy(transfer=transfer) if transfer.is_of_range and not transfer.computes:
                    self.num_part_moves += 1
                case ExpectCopy(transfer=transfer) if transfer.computes:
                    self.num_computed_again += 1
                case ExpectCopy(transfer=transfer) if transfer.is_move:
                    self.num_moves += len(command.members) > 0
                case SetPlaces(places=tuple() as members):
                    self.most_members = max(self.most_members, len(members))
                case Restart():
                    self.num_restarts += 1
                    request = self.running[command.request_id]
                    drawn = self.rng.randint(0, request.max_tokens - 1)
                    self.resumes.append(
                        replace(
                            request,
                            epoch=Epoch(request.epoch + 1),
                            num_prompt_tokens=request.num_prompt_tokens + drawn,
                            max_tokens=request.max_tokens - drawn,
                        )
                    )
                case ForgetRequest(outcome=outcome) if not outcome.goes_on:
                    self.running.pop(command.request_id, None)
                case Reject():
                    raise AssertionError(f"{command}, though there are instances enough")
                case _:
                    pass
            self.mesh.send(command)
        self.core.check_integrity()

    def check(self, command: ExpectCopy) -> None:
        """Ranges are whole, and in the order of the context; whoever decodes holds no more than one of the prompt."""
        (source,), destinations = command.transfer.sources, command.transfer.destinations
        home, members = destinations[0], destinations[1:]
        assert len({shard.instance_id for shard in (*destinations, source)}) == len(destinations) + 1
        begin = 0
        for shard in members:
            assert shard.part.blocks == (begin, begin + LIMIT // BLOCK_SIZE)
            begin = shard.part.blocks.stop
        assert home.part.blocks.start == begin
        prompt = self.running[command.request_id].num_prompt_tokens
        assert 0 < prompt - begin * BLOCK_SIZE <= LIMIT

    def arrive(self) -> None:
        prompt = self.rng.randint(1, 3 * LIMIT + 8)
        output = self.rng.randint(1, self.rng.choice([8, MOST_TOKENS - prompt]))
        self.submit(a_request(f"r{self.num_requests}", prompt, output, arrival_s=self.now_s))
        self.num_requests += 1

    def submit(self, request: Request) -> None:
        key = request.request_id, request.epoch
        self.max_total_of[key] = request.max_total_tokens
        self.running[request.request_id] = request
        self.feed(RequestArrived(request))

    def advance(self) -> bool:
        """One thing that goes on by itself; False if there is nothing."""
        able: list[Callable[[], object]] = [call for each in self.instances for call in self.calls(each)]
        able += [
            partial(self.mesh.land, *each) for each in self.mesh.transfers() if each[0].sequences[each[2]].is_computed
        ]
        able += [partial(self.mesh.land_range, *each) for each in self.mesh.ranges()]
        able += [partial(self.mesh.land_part, *each) for each in self.mesh.part_moves()]
        able += [partial(self.mesh.land_move, *each) for each in self.mesh.moves()]
        able += [partial(self.mesh.acknowledge_move, *each) for each in self.mesh.landed_moves()]
        if self.resumes:
            able.append(lambda: self.submit(self.resumes.pop()))
        if not able:
            return False
        self.rng.choice(able)()
        self.check_books()
        return True

    def settle(self) -> None:
        """All that goes on by itself, but for decode steps."""
        while able := [call for each in self.instances for call in self.calls(each, decodes=False)]:
            able[0]()
            for each in self.mesh.transfers():
                if each[0].sequences[each[2]].is_computed:
                    self.mesh.land(*each)
            for ready in self.mesh.ranges():
                self.mesh.land_range(*ready)
            for each in self.mesh.part_moves():
                self.mesh.land_part(*each)
            for each in self.mesh.moves():
                self.mesh.land_move(*each)
            for moved in self.mesh.landed_moves():
                self.mesh.acknowledge_move(*moved)
        self.check_books()

    def step(self) -> None:
        """All that goes on by itself, and then a decode step."""
        self.settle()
        for instance in self.instances:
            if instance.can_decode:
                instance.decode(1)

    def check_books(self) -> None:
        """The core's books have what instances have, once nothing is on its way."""
        if any(instance.commands or instance.events for instance in self.instances):
            return
        for instance in self.instances:
            allocations = self.core._mesh.instances[InstanceId(instance.instance_id)].allocations
            booked = {key: allocation.num_blocks for key, allocation in allocations.items()}
            assert booked == {key: held.num_blocks for key, held in instance.sequences.items()}

    def calls(self, instance: ModelledInstance, *, decodes: bool = True) -> list[Callable[[], object]]:
        able: list[Callable[[], object]] = []
        if instance.commands:
            able.append(instance.take_command)
        if instance.events:
            able.append(lambda: self.feed(instance.events.popleft()))
        if instance.can_begin:
            able.append(instance.begin_step)
        if instance.running and instance.can_end:
            able.append(instance.end_step)
        if instance.can_decode and decodes:
            able.append(lambda: instance.decode(self.rng.randint(1, 3)))
        return able

    def disturb(self) -> None:
        """One thing that goes wrong, or that somebody asks for."""
        instance = self.rng.choice(self.instances)
        match self.rng.randrange(9):
            case 8 if holders := [
                each for each in self.instances if any(sequence.is_range for sequence in each.sequences.values())
            ]:
                silent = self.rng.choice(holders)
                for other in self.instances:
                    other.do(other.machine.lose_member(silent.instance_id))
            case 0 if self.running:
                request = self.rng.choice(list(self.running.values()))
                self.resumes = [each for each in self.resumes if each.request_id != request.request_id]
                del self.running[request.request_id]
                self.feed(RequestCancelled(GATEWAY, request.request_id, request.epoch))
            case 1 if instance.sequences:
                key = self.rng.choice(list(instance.sequences))
                held = instance.sequences[key]
                if not held.moves_on and not held.is_freed:
                    instance.drop(key)
            case 2:
                self.lose(instance)
            case 3:
                gateways = dict.fromkeys(instance.sequences, GATEWAY)
                self.feed(instance.rejoin(gateways))
            case 4 if transfers := self.mesh.transfers():
                sender, receiver, key = self.rng.choice(transfers)
                self.mesh.fail(self.rng.choice([sender, receiver]), key)
            case 5 if parts := self.mesh.part_moves():
                source, target, key = self.rng.choice(parts)
                if self.rng.random() < 0.5:
                    self.mesh.fail(target, key)
                else:
                    self.mesh.fail_part(source, key)
            case 6 if moves := self.mesh.moves():
                source, target, key = self.rng.choice(moves)
                match self.rng.randrange(3):
                    case 0:
                        self.mesh.fail(target, key)
                    case 1:
                        self.mesh.fail_move(source, key)
                    case _:
                        self.mesh.commit_move(source, key)
            case 6:
                self.feed(DrainRequested(instance.instance_id, enabled=self.rng.random() < 0.6))
            case 7 if self.rng.random() < 0.3:
                self.restart_scheduler(most_between=4)
            case _:
                self.feed(Tick())

    def restart_scheduler(self, *, most_between: int = 0) -> None:
        """Another scheduler takes its place, with which all register in any order.

        Between two of them, those that have registered may do so many things.
        """
        self.core = self.new_core()
        starting = {each.request_id for each in self.resumes}
        waiting = [(each.request_id, each.epoch) for each in self.running.values() if each.request_id not in starting]
        gateways = {key: GATEWAY for each in self.instances for key in each.sequences}
        joins: list[tuple[ModelledInstance | None, Callable[[], Event]]] = [
            (each, partial(each.rejoin, gateways)) for each in self.instances
        ]
        joins.append((None, lambda: GatewayJoined(GATEWAY, tuple(waiting))))
        self.rng.shuffle(joins)
        for instance in self.instances:
            instance.commands.clear()
        registered: list[ModelledInstance] = []
        for instance_or_gateway, join in joins:
            self.feed(join())
            if instance_or_gateway is not None:
                registered.append(instance_or_gateway)
            for _ in range(self.rng.randint(0, most_between)):
                if able := [call for each in registered for call in self.calls(each)]:
                    self.rng.choice(able)()

    def lose(self, instance: ModelledInstance) -> None:
        """Its process ends, and another takes its place; homes of ranges that it held notice that, or hear it first."""
        profile = replace(instance.profile, pid=instance.profile.pid + 1)
        self.mesh.instances[instance.instance_id] = ModelledInstance(profile, self.max_total_of, self.mesh.pieces)
        if self.rng.random() < 0.7:
            for other in self.instances:
                other.do(other.machine.lose_member(instance.instance_id))
        self.feed(InstanceLost(instance.instance_id))
        self.feed(InstanceJoined(profile, ()))

    def end(self) -> None:
        """Everything comes to its end, and nothing is left."""
        for instance in self.instances:
            self.feed(DrainRequested(InstanceId(instance.instance_id), enabled=False))
        num_idle = 0
        while num_idle < 5:
            if not self.advance():
                num_idle += 1
                self.now_s += 60.0  # who did not reach whom is forgotten by then
                self.feed(Tick())
        assert not self.running, f"{self.running} hang"
        for instance in self.instances:
            assert not instance.sequences
            assert instance.machine.holding.num_free_blocks == instance.profile.num_blocks
        for instance_id, state in self.core._mesh.instances.items():
            assert not state.allocations, f"{instance_id} holds {state.allocations}"
            assert state.num_taken_blocks == 0


@pytest.mark.parametrize("seed", range(examples(60)))
def test_nothing_is_lost_or_left(seed: int) -> None:
    rng = random.Random(seed)
    driver = Driver(
        rng.choice(sorted(MESHES)),
        rng.choice(["fcfs", "pdmesh"]),
        rng.choice([*KvReservation]),
        rng,
        rng.choice(sorted(ROOMS)),
    )
    for _ in range(300):
        match rng.randrange(12):
            case 0:
                driver.arrive()
            case 1 if rng.random() < 0.3:
                driver.disturb()
            case _:
                driver.advance()
    driver.end()


def test_a_prompt_is_spread_and_its_parts_are_freed() -> None:
    driver = Driver("two prefill, four decode", "fcfs", KvReservation.FULL, random.Random(1))
    driver.submit(a_request("r", 3 * LIMIT + 1, 6))
    while not any(instance.decoding for instance in driver.instances):
        assert driver.advance()
    kinds = [
        allocation.kind for state in driver.core._mesh.instances.values() for allocation in state.allocations.values()
    ]
    assert kinds.count(AllocationKind.PART) == 3
    assert driver.most_members == 3
    driver.end()


@pytest.mark.parametrize("reservation", [*KvReservation])
@pytest.mark.parametrize("output", [1, 6])
@pytest.mark.parametrize("room", ["two ranges", "a range"])
def test_a_prompt_longer_than_the_room_where_it_is_computed(reservation: KvReservation, output: int, room: str) -> None:
    """Its first ranges are given back as they land, and another prompt has its room beside it."""
    driver = Driver("two prefill, four decode", "fcfs", reservation, random.Random(1), room)
    driver.submit(a_request("long", 3 * LIMIT + 1, output))
    driver.submit(a_request("longer", 4 * LIMIT - 1, 1))
    driver.submit(a_request("short", 5, 2))
    while driver.running:
        driver.step()
    driver.end()
    assert driver.num_given_back >= 4
    assert driver.num_restarts == 0
    assert driver.most_members == 3


def test_a_prompt_stands_still_until_its_ranges_are_where_they_go() -> None:
    """No more is planned than there is room for, and others go on meanwhile."""
    driver = Driver("two prefill, four decode", "fcfs", KvReservation.FULL, random.Random(1), "two ranges")
    driver.submit(a_request("long", 3 * LIMIT + 1, 6))
    for _ in range(20):
        for instance in driver.instances:
            for call in driver.calls(instance):
                call()
    (state,) = driver.core._mesh.requests.values()
    assert state.num_planned_tokens == LIMIT == state.held_tokens
    driver.submit(a_request("short", 5, 1))
    driver.submit(a_request("other", 5, 1))
    for _ in range(20):
        for instance in driver.instances:
            for call in driver.calls(instance):
                call()
    assert list(driver.running) == ["long"]
    driver.end()
    assert driver.num_restarts == 0


def test_a_prompt_that_some_instance_holds_whole_goes_there() -> None:
    driver = Driver("two prefill, four decode", "fcfs", KvReservation.FULL, random.Random(1), "one is short")
    for number in range(3):
        driver.submit(a_request(f"r{number}", 3 * LIMIT + 1, 6))
    while driver.running:
        driver.step()
    driver.end()
    assert driver.num_given_back == 0


@pytest.mark.parametrize("lost", ["member", "home", "prefill"])
def test_a_prompt_starts_again_if_an_instance_is_lost_while_it_gives_ranges_back(lost: str) -> None:
    driver = Driver("two prefill, four decode", "fcfs", KvReservation.FULL, random.Random(1), "a range and a half")
    driver.submit(a_request("r", 3 * LIMIT, 6))
    while not driver.num_given_back:
        assert driver.advance()
    (state,) = driver.core._mesh.requests.values()
    home_id, member_id, *_ = state.decode_ids
    lost_id = {"member": member_id, "home": home_id, "prefill": state.prefill_ids[0]}[lost]
    driver.lose(driver.mesh.instances[lost_id])
    driver.end()
    assert driver.num_restarts == 1


@pytest.mark.parametrize("comes", [False, True])
def test_a_context_that_may_need_more_instances_than_there_are_waits_for_one(comes: bool) -> None:
    """What it draws is part of its prompt should it be resumed."""
    core = Driver("two prefill, four decode", "fcfs", KvReservation.FULL, random.Random(1)).core
    fits, long = a_request("fits", 3 * LIMIT, LIMIT + 1), a_request("long", 3 * LIMIT, LIMIT + 2)
    for request in (fits, long):
        assert not [each for each in core.handle(RequestArrived(request), 1.0) if isinstance(each, Reject)]
    assert core.num_parked == core.num_waiting == 1
    if comes:
        another = modelled_profile("another", Role.DECODE, num_blocks=24, block_size=BLOCK_SIZE, max_kv_tokens=LIMIT)
        core.handle(InstanceJoined(another, ()), 2.0)
        assert core.num_waiting == 0
    else:
        (rejected,) = [each for each in core.handle(Tick(), 1000.0) if isinstance(each, Reject)]
        assert rejected.request_id == "long"


@pytest.mark.parametrize("reservation", [*KvReservation])
def test_a_context_of_one_range_grows_onto_others_and_leaves_one_that_stops(reservation: KvReservation) -> None:
    driver = Driver("two prefill, four decode", "fcfs", reservation, random.Random(2))
    driver.submit(a_request("r", 5, MOST_TOKENS - 5))
    while driver.most_members < 2:
        driver.step()
    driver.settle()
    first = next(each for each in driver.instances for sequence in each.sequences.values() if sequence.is_range)
    driver.feed(DrainRequested(first.instance_id))
    driver.settle()
    assert not first.sequences
    assert driver.running, "it ended before its range was elsewhere"
    driver.feed(DrainRequested(first.instance_id, enabled=False))
    while driver.running:
        driver.step()
    driver.end()
    assert driver.most_members == 3
    assert driver.num_part_moves == 4
    assert driver.num_restarts == 0


def filling_context() -> tuple[Driver, list[InstanceId]]:
    """A context that will need all instances, which have room for two ranges each; and those it does not use yet."""
    driver = Driver(
        "two prefill, four decode",
        "fcfs",
        KvReservation.ON_DEMAND,
        random.Random(2),
        num_blocks=TWO_RANGES,
    )
    driver.submit(a_request("r", LIMIT + 2, MOST_TOKENS - LIMIT - 2))
    driver.settle()
    unused = [each.instance_id for each in driver.instances if each.profile.role is Role.DECODE and not each.sequences]
    return driver, unused


def test_a_full_context_waits_for_an_instance_that_is_silent_for_a_moment() -> None:
    """It started again: it had all of its instance, and no other one could take its range just then."""
    driver, unused = filling_context()
    for instance_id in unused:
        driver.feed(InstanceSuspected(instance_id))
    for _ in range(MOST_TOKENS):
        driver.step()
    assert (driver.num_part_moves, driver.num_restarts, len(driver.running)) == (0, 0, 1)
    for instance_id in unused:
        driver.feed(InstanceSuspected(instance_id, suspected=False))
    driver.end()
    assert driver.num_part_moves == 2
    assert driver.num_restarts == 0


def test_a_full_context_starts_again_if_no_instance_has_room_for_its_range() -> None:
    driver, unused = filling_context()
    for instance_id in unused:
        driver.feed(DrainRequested(instance_id))
    for _ in range(MOST_TOKENS):
        driver.step()
    assert (driver.num_part_moves, driver.num_restarts) == (0, 1)
    driver.end()


def test_a_scheduler_finds_contexts_that_are_spread() -> None:
    """Also one that had just handed a range on, of which the scheduler before had not heard."""
    for seed in range(examples(40)):
        rng = random.Random(seed)
        driver = Driver("two prefill, four decode", "fcfs", rng.choice([*KvReservation]), rng)
        driver.submit(a_request("r", 2 * LIMIT + 1, MOST_TOKENS - 2 * LIMIT - 1))
        while not any(instance.decoding for instance in driver.instances):
            assert driver.advance()
        for _ in range(rng.randint(0, 30)):
            driver.advance()
        is_over = not driver.running
        driver.restart_scheduler()
        assert is_over or [state.phase for state in driver.core._mesh.requests.values()] == [Phase.DECODING]
        driver.end()
        assert driver.num_restarts == 0


def test_a_home_that_stops_leaves_with_its_seat_while_others_hold_their_ranges() -> None:
    driver = Driver("two prefill, four decode", "fcfs", KvReservation.ON_DEMAND, random.Random(3))
    driver.submit(a_request("r", LIMIT + 2, LIMIT - 4))
    while not any(instance.decoding for instance in driver.instances):
        driver.step()
    driver.settle()
    home = next(instance for instance in driver.instances if instance.decoding)
    (member,) = [instance for instance in driver.instances if instance.sequences and instance is not home]
    driver.feed(DrainRequested(home.instance_id))
    driver.settle()
    assert not home.sequences
    assert member.sequences
    assert driver.running
    while driver.running:
        driver.step()
    driver.end()
    assert (driver.num_moves, driver.num_part_moves, driver.num_restarts) == (1, 0, 0)


def test_what_a_lost_member_held_is_computed_again_and_nothing_else() -> None:
    """The request goes on in its epoch, at its home, with its other members."""
    driver = Driver("two prefill, four decode", "fcfs", KvReservation.FULL, random.Random(3))
    driver.submit(a_request("r", 3 * LIMIT - 2, 10))
    while not any(instance.decoding for instance in driver.instances):
        assert driver.advance()
    driver.settle()
    (state,) = driver.core._mesh.requests.values()
    home_id, lost_id, kept_id = state.decode_ids
    driver.lose(driver.mesh.instances[lost_id])
    driver.settle()
    home, computed_id, still_id = state.decode_ids
    assert (home, still_id) == (home_id, kept_id)
    assert computed_id not in (home_id, kept_id)
    assert (driver.num_computed_again, driver.num_restarts) == (1, 0)
    driver.end()


def test_a_lost_range_waits_for_an_instance_with_room_for_so_long() -> None:
    """And then its request starts again. Meanwhile the home keeps its own."""
    driver = Driver("two prefill, four decode", "fcfs", KvReservation.FULL, random.Random(4))
    driver.submit(a_request("r", 3 * LIMIT + 2, LIMIT - 4))
    while not any(instance.decoding for instance in driver.instances):
        assert driver.advance()
    driver.settle()
    (state,) = driver.core._mesh.requests.values()
    lost = driver.mesh.instances[state.decode_ids[1]]
    driver.feed(InstanceLost(lost.instance_id))
    driver.feed(Tick())
    assert (driver.num_computed_again, driver.num_restarts) == (0, 0)
    driver.now_s += FIND_ROOM_S
    driver.feed(Tick())
    assert (driver.num_computed_again, driver.num_restarts) == (0, 1)


def test_what_loses_its_ranges_again_and_again_starts_again() -> None:
    driver = Driver("two prefill, four decode", "fcfs", KvReservation.FULL, random.Random(5))
    driver.submit(a_request("r", 2 * LIMIT - 2, 10))
    while not any(instance.decoding for instance in driver.instances):
        assert driver.advance()
    driver.settle()
    (state,) = driver.core._mesh.requests.values()
    for _ in range(MAX_LOST_PARTS + 1):
        driver.lose(driver.mesh.instances[state.decode_ids[1]])
        driver.settle()
    assert (driver.num_computed_again, driver.num_restarts) == (MAX_LOST_PARTS, 1)
    driver.end()
