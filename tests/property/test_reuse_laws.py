"""Laws of reuse between a core and modelled instances: prompts of several tenants share prefixes while all fails.

Commands and reports cross, steps end in any order, what is kept is copied from instance to instance, groups lose
helpers, instances, gateways and the scheduler go and come back, and roles change. Each side checks the other: an
instance has what it is to share and room for what it is told (`pdmesh.instance.machine`), and the core's books balance
after each event.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from hashlib import blake2b

import pytest

from pdmesh.core.admission.aside import NUM_WAITS
from pdmesh.core.commands import AdmitPrefill, ExpectCopy, Reject, Restart
from pdmesh.core.config import CoreConfig, KvReservation
from pdmesh.core.copies import tier_loads
from pdmesh.core.events import (
    DrainRequested,
    Event,
    GatewayJoined,
    InstanceLost,
    InstanceUnreachable,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    Tick,
)
from pdmesh.core.operator_events import BundleChangeRequested
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.core.sessions import session_state
from pdmesh.instance.effects import CopyFailed, CopyLanded
from pdmesh.instance.sequence import Sequence as HeldSequence
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import (
    Epoch,
    FinishReason,
    GatewayId,
    InstanceId,
    PrefixHash,
    PrefixHashes,
    Request,
    RequestId,
    RequestKey,
    Role,
    SessionKey,
    SessionName,
    Then,
)
from pdmesh.policy.bundles import BUNDLE_NAMES, make_bundle
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh.policy.prefill_groups import Schedule
from pdmesh_testing.core import a_role
from pdmesh_testing.modelled import ModelledInstance, modelled_profile
from pdmesh_testing.modelled_mesh import ModelledMesh

GATEWAY = GatewayId("g")
MESHES = (
    (Role.MIXED, Role.MIXED),
    (Role.PREFILL, Role.PREFILL, Role.DECODE),
    (Role.PREFILL, Role.MIXED, Role.DECODE),
    (Role.PREFILL, Role.PREFILL, Role.PREFILL, Role.DECODE),
)

#: A block is a granule. A second for each 32 tokens.
POLICY = PolicyConfig(
    chunk_tokens=256,
    latency=LinearLatencyModel(a_s=0.0, b_s=1 / 32, c_s=0.0, d_s=0.0),
    prefill_step_s=8.0,
    slo_tpot_s=4.0,
    long_prompt_tokens=640,
    local_step_share=2.0,
)


def a_chain(tenant: str, path: list[int]) -> PrefixHashes:
    return tuple(
        [PrefixHash(blake2b(f"{tenant} {path[:n]}".encode(), digest_size=16).digest()) for n in range(1, len(path) + 1)]
    )


class Workload:
    """What may happen next, drawn by a seeded stream."""

    def __init__(self, seed: int, *, has_tiers: bool = False, has_names: bool = False, hybrid: bool = False) -> None:
        self.rng = rng = random.Random(seed)
        self.now_s = 0.0
        self.has_groups = bool(seed % 2) and not hybrid
        schedule = rng.choice(list(Schedule))
        self.policy = replace(POLICY, sequence_parallel=schedule)
        self.config = CoreConfig(
            max_queue_entries=8, max_queue_s=200.0, policy=self.policy, kv_reservation=rng.choice(list(KvReservation))
        )
        self.bundle = "pdmesh" if self.has_groups or has_tiers else rng.choice(BUNDLE_NAMES)
        self.max_total_of: dict[RequestKey, int] = {}
        self.chain_of: dict[RequestKey, PrefixHashes] = {}
        self.path_of: dict[RequestId, tuple[str, list[int]]] = {}
        num_blocks = rng.randint(12, 30)
        self.of_tiers = random.Random(f"tiers {seed}")
        self.of_names = random.Random(f"names {seed}") if has_names else None
        self.num_aside = self.num_loads = 0
        num_offload_granules = self.of_tiers.choice((2, 20, 100)) if has_tiers else 0
        num_cached_states = random.Random(f"states {seed}").choice((1, 2, 4, 12)) if hybrid else 0
        # What is in a tier is found again only if there is time for it: prompts go through, and processes last.
        self.arrivals, self.faults = (0.05, 0.004) if has_tiers else (0.1, 0.02)
        if has_tiers:
            num_blocks = 11 + num_blocks % 4  # the longest prompt, and little more
        self.profiles = {
            profile.instance_id: profile
            for index, role in enumerate(rng.choice(MESHES))
            for profile in [
                modelled_profile(
                    f"i{index}",
                    role,
                    num_blocks=num_blocks,
                    block_size=GRANULE_TOKENS,
                    max_model_len=4096,
                    max_num_seqs=3,
                    num_transfer_backends=1,
                    num_layers=3,
                    joins_groups=self.has_groups,
                    num_offload_granules=num_offload_granules,
                    num_cached_states=num_cached_states,
                )
            ]
        }
        self.mesh = ModelledMesh(self.profiles.values(), self.max_total_of)
        for instance in self.mesh.instances.values():
            instance.chain_of = self.chain_of
        self.awaited: dict[RequestId, Request] = {}
        self.to_resume: dict[RequestId, None] = {}
        self.gateway_of: dict[RequestKey, GatewayId] = {}
        self.num_reused = self.num_loaded = self.num_requests = self.num_helpers = 0
        self.num_fetches = self.num_fetched = self.num_role_changes = self.num_cores = 0
        self.core: SchedulerCore
        self.new_core()

    def new_core(self) -> None:
        self.num_fetched += 0 if self.num_cores == 0 else self.core.num_fetched_tokens
        self.num_cores += 1
        self.core = SchedulerCore(self.config, make_bundle(self.bundle, self.policy), random.Random(0))
        waiting = tuple([(request.request_id, request.epoch) for request in self.awaited.values()])
        self.feed(GatewayJoined(GATEWAY, waiting))
        for instance in self.mesh.instances.values():
            self.feed(instance.rejoin(self.gateway_of))

    def feed(self, event: Event) -> None:
        for command in self.core.handle(event, self.now_s):
            if isinstance(command, Reject | Restart):
                request = self.awaited.get(command.request_id)
                if request is not None and request.epoch == command.epoch:
                    if isinstance(command, Reject):
                        del self.awaited[command.request_id]
                    else:
                        self.to_resume[command.request_id] = None
            elif self.mesh.send(command) and isinstance(command, AdmitPrefill):
                self.num_reused += command.num_reused_granules
                self.num_loaded += command.num_loaded_granules
                self.num_helpers += not command.leads
            self.num_fetches += isinstance(command, ExpectCopy) and command.transfer.then is Then.KEEP
        self.core.check_integrity()
        turns_aside = self.core._mesh.queue.turns_aside.values()
        self.num_aside += bool(turns_aside)
        for _, since_s in turns_aside:
            assert self.now_s < since_s + NUM_WAITS * self.config.max_queue_s, "a turn is aside for too long"

    # --- requests ---

    def arrive(self) -> None:
        """A conversation begins, perhaps by a system prompt; goes on behind an answer; or is asked for once more."""
        rng = self.rng
        tenant = rng.choice("aab")
        known = [path for of, path in self.path_of.values() if of == tenant]
        path = list(rng.choice(known))[: rng.randint(0, 9)] if known and rng.random() < 0.8 else [0] * rng.randint(0, 2)
        path += [rng.randrange(3) for _ in range(rng.randint(0, 8 - min(8, len(path))))]
        self.num_requests += 1
        request_id = RequestId(f"r{self.num_requests:04}")
        self.path_of[request_id] = tenant, path
        session = None
        if self.of_names is not None:
            number = ord(tenant) << 8 | self.of_names.randrange(1 if self.of_names.random() < 0.1 else 6)
            is_last, lease_s = self.of_names.random() < 0.1, self.of_names.choice((0.0, 0.0, 20.0, 300.0))
            session = SessionName(SessionKey(number.to_bytes(16)), is_last=is_last, lease_s=lease_s)
        request = Request(
            request_id=request_id,
            epoch=Epoch(0),
            gateway_id=GATEWAY,
            num_prompt_tokens=len(path) * GRANULE_TOKENS + rng.choice((0, 1, 60, 127)) or 1,
            max_tokens=rng.randint(1, 400),
            arrival_s=self.now_s,
            tenant=tenant,
            share=1 + (tenant == "b"),
            priority=rng.choice((0, 0, 1)),
            prefix=a_chain(tenant, path),
            session=session,
        )
        self.submit(request)

    def submit(self, request: Request) -> None:
        key = request.request_id, request.epoch
        self.awaited[request.request_id] = request
        self.gateway_of[key], self.chain_of[key] = GATEWAY, tuple(request.chain)
        self.max_total_of[key] = request.max_total_tokens
        self.feed(RequestArrived(request))

    def resume(self) -> None:
        if self.to_resume:
            request_id, _ = self.to_resume.popitem()
            if (old := self.awaited.get(request_id)) is not None:
                self.submit(replace(old, epoch=Epoch(old.epoch + 1)))

    def cancel(self) -> None:
        if self.awaited:
            request = self.awaited.pop(self.rng.choice(sorted(self.awaited)))
            self.feed(RequestCancelled(request.gateway_id, request.request_id, request.epoch))

    # --- instances ---

    def an_instance(self) -> ModelledInstance | None:
        return self.rng.choice(list(self.mesh.instances.values())) if self.mesh.instances else None

    def commands_arrive(self) -> None:
        if instance := self.an_instance():
            for _ in range(min(self.rng.choice((1, 9)), len(instance.commands))):
                instance.take_command()

    def reports_arrive(self) -> None:
        if instance := self.an_instance():
            for _ in range(min(self.rng.choice((1, 9)), len(instance.events))):
                self.feed(instance.events.popleft())

    def pieces_arrive(self) -> None:
        if instance := self.an_instance():
            instance.take_pieces(self.rng.choice((1, 9)))

    def step(self) -> None:
        if instance := self.an_instance():
            if instance.can_begin and not instance.running:
                instance.begin_step()
            if instance.running and instance.can_end:
                instance.end_step()
                self.see_finished(instance)

    def decode(self) -> None:
        instance = self.an_instance()
        if instance and instance.can_decode:
            instance.decode(self.rng.choice((1, 50)))
            self.see_finished(instance)

    def see_finished(self, instance: ModelledInstance) -> None:
        for event in instance.events:
            if isinstance(event, RequestFinished):
                request = self.awaited.get(event.request_id)
                if request is not None and request.epoch == event.epoch:
                    del self.awaited[event.request_id]

    def finish(self) -> None:
        """A generation ends; what it drew may be what others' prompts have there."""
        for instance in self.mesh.instances.values():
            for key, held in list(instance.sequences.items()):
                if held.is_decoding and key not in instance.landed and not instance.running:
                    drawn = self.drawn_by(key, held)
                    instance.do(instance.machine.finish(held, FinishReason.STOP, drawn=drawn))
                    self.see_finished(instance)
                    return

    def drawn_by(self, key: RequestKey, held: HeldSequence) -> PrefixHashes:
        tenant, path = self.path_of[key[0]]
        num_more = self.rng.randint(0, max(0, held.num_blocks - len(held.chain) - 1))
        answer = path[: len(held.chain) + num_more]
        answer += [self.rng.randrange(2) for _ in range(len(held.chain) + num_more - len(answer))]
        self.path_of[RequestId(f"{key[0]} and its answer")] = tenant, answer
        return a_chain(tenant, answer)[len(held.chain) :]

    def land(self) -> None:
        transfers = [(s, r, key) for s, r, key in self.mesh.transfers() if s.sequences[key].is_computed]
        if transfers:
            self.mesh.land(*self.rng.choice(transfers))

    def land_loads(self) -> None:
        """What instances load from their tiers, without a request, is there."""
        for instance in self.mesh.instances.values():
            for key, held in list(instance.sequences.items()):
                transfer = held.incoming
                if transfer is not None and transfer.source_ids == transfer.destination_ids:
                    self.num_loads += 1
                    failed = CopyFailed(key, None, "modelled") if self.of_tiers.random() < 0.2 else None
                    instance.hear(failed or CopyLanded(key, 0, 0, 0.0))

    def fail(self) -> None:
        if transfers := self.mesh.transfers():
            sender, receiver, key = self.rng.choice(transfers)
            self.mesh.fail(self.rng.choice((sender, receiver)), key)

    # --- what goes wrong, and operators ---

    def lose_offloaded(self) -> None:
        """A tier loses a granule by itself, in the middle of a chain perhaps."""
        instance = self.an_instance()
        if instance and (offloaded := instance.machine.cache.offloaded):
            instance.do(instance.machine.lose_offloaded((self.of_tiers.choice(offloaded),)))

    def lose_instance(self) -> None:
        if len(self.mesh.instances) > 1 and (instance := self.an_instance()):
            del self.mesh.instances[instance.instance_id]
            self.mesh.pieces.cut_off(instance.instance_id)
            self.feed(InstanceLost(instance.instance_id))

    def return_instance(self) -> None:
        for instance_id in sorted(set(self.profiles) - set(self.mesh.instances)):
            instance = ModelledInstance(self.profiles[instance_id], self.max_total_of, self.mesh.pieces)
            instance.chain_of = self.chain_of
            self.mesh.instances[instance_id] = instance
            self.feed(instance.rejoin(self.gateway_of))
            return

    def reconnect(self) -> None:
        if instance := self.an_instance():
            self.feed(InstanceUnreachable(instance.instance_id))
            self.feed(instance.rejoin(self.gateway_of))

    def drain(self) -> None:
        instance_id: InstanceId = self.rng.choice(sorted(self.profiles))
        self.feed(DrainRequested(instance_id, self.rng.random() < 0.4))

    def change_role(self) -> None:
        self.num_role_changes += 1
        role = a_role(self.rng.choice(sorted(self.profiles)), self.rng.choice(list(Role)), f"o{self.num_role_changes}")
        self.feed(role)

    def switch(self) -> None:
        if not self.has_groups:
            self.feed(BundleChangeRequested(self.rng.choice(BUNDLE_NAMES)))

    def pass_time(self) -> None:
        self.now_s += self.rng.choice((0.0, 0.5, 5.0))
        self.feed(Tick())

    def check(self) -> None:
        """Free, held, kept and quarantined blocks are all there are; each granule's owners are those that have it."""
        for instance in self.mesh.instances.values():
            holding, cache = instance.machine.holding, instance.machine.cache
            held = [*holding.sequences.values(), *holding.quarantined.values()]
            num_own = sum(holding.num_own_blocks(each) for each in held)
            assert num_own + cache.num_blocks + holding.num_free_blocks == instance.profile.num_blocks
            owners = Counter(granule for each in held for granule in each.prefix.cached)
            assert owners == Counter({granule: n for granule, n in cache._owners.items() if n})
            instance.machine.check_integrity()

    def run(self, num_actions: int) -> None:
        work = (
            self.commands_arrive,
            self.reports_arrive,
            self.pieces_arrive,
            self.step,
            self.step,
            self.decode,
            self.land,
        )
        rare = (
            self.cancel,
            self.fail,
            self.lose_instance,
            self.return_instance,
            self.reconnect,
            self.new_core,
            self.switch,
            self.drain,
            self.change_role,
        )
        for _ in range(num_actions):
            if self.of_tiers.random() < 0.01:
                self.lose_offloaded()
            if self.of_names is not None and self.of_names.random() < 0.2:
                self.land_loads()
            drawn = self.rng.random()
            if drawn < self.arrivals:
                self.arrive()
            elif drawn < 0.15:
                self.resume()
            elif drawn < 0.2:
                self.pass_time()
            elif drawn < 0.28:
                self.finish()
            elif drawn < 0.28 + self.faults:
                self.rng.choice(rare)()
            else:
                self.rng.choice(work)()
            self.check()

    def end(self) -> None:
        """Everything is cancelled, and all that is on its way arrives: both sides keep the same."""
        for request in list(self.awaited.values()):
            self.feed(RequestCancelled(request.gateway_id, request.request_id, request.epoch))
        for _ in range(40):
            for instance in self.mesh.instances.values():
                while instance.commands:
                    instance.take_command()
                self.land_loads()
                instance.take_pieces(1 << 20)
                if instance.can_begin and not instance.running:
                    instance.begin_step()
                if instance.running and instance.can_end:
                    instance.end_step()
                while instance.events:
                    self.feed(instance.events.popleft())
        for instance in self.mesh.instances.values():
            if instance.sequences:
                continue  # a resident that nobody claims any more, until its time is over
            kept = self.core._mesh.instances[instance.instance_id].kept
            assert {granule for granule in instance.machine.cache.granules if granule not in kept} <= {*kept._orphans}
            assert kept._where.of(kept._bit) <= {*instance.machine.cache.granules}
            assert kept._where.offloaded.of(kept._bit) == {*instance.machine.cache.offloaded}
            known = {granule for granule in instance.machine.cache.states if granule in kept}
            assert kept.states is None or kept.states.granules == known


#: A seed after which an instance has granules whose beginning it was told to drop, as a new scheduler begins.
HOLED_SEED = 143


@pytest.mark.slow
def test_a_new_scheduler_hears_of_no_chain_without_its_beginning() -> None:
    Workload(HOLED_SEED).run(400)


@pytest.mark.parametrize(
    "seeds", [range(20), *[pytest.param(range(20 + 60 * n, 80 + 60 * n), marks=pytest.mark.slow) for n in range(6)]]
)
def test_core_and_instances_agree_while_everything_fails(seeds: range) -> None:
    num_reused = num_helpers = num_fetches = num_fetched = 0
    for seed in seeds:
        workload = Workload(seed)
        workload.run(400)
        workload.end()
        num_reused += workload.num_reused
        num_helpers += workload.num_helpers
        num_fetches += workload.num_fetches
        num_fetched += workload.num_fetched + workload.core.num_fetched_tokens
    assert num_reused > 5 * len(seeds)
    assert num_helpers > 0
    assert num_fetches > len(seeds) / 2
    assert num_fetched > 0


@pytest.mark.parametrize(
    "seeds", [range(6), *[pytest.param(range(6 + 40 * n, 46 + 40 * n), marks=pytest.mark.slow) for n in range(4)]]
)
def test_core_and_tiers_agree_while_everything_fails(seeds: range) -> None:
    """What is loaded is there, what is evicted is nobody's, and what a tier lost by itself is computed again."""
    num_loaded = 0
    for seed in seeds:
        workload = Workload(seed, has_tiers=True)
        workload.run(2000)
        workload.end()
        num_loaded += workload.num_loaded
    assert num_loaded > 5 * len(seeds)


@pytest.mark.parametrize(
    "seeds", [range(12), *[pytest.param(range(12 + 60 * n, 72 + 60 * n), marks=pytest.mark.slow) for n in range(3)]]
)
def test_core_and_instances_agree_while_sessions_are_set_aside(seeds: range) -> None:
    num_aside = num_reused = 0
    for seed in seeds:
        workload = Workload(seed, has_tiers=bool(seed % 2), has_names=True)
        workload.run(400)
        workload.end()
        num_aside += workload.num_aside
        num_reused += workload.num_reused
    assert num_aside > len(seeds)
    assert num_reused > len(seeds)


@pytest.mark.parametrize("seeds", [range(1, 11, 2), pytest.param(range(11, 91, 2), marks=pytest.mark.slow)])
def test_core_and_tiers_agree_while_sessions_are_loaded(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses are known after one, and loads begin as soon as anything has gone to the tier."""
    monkeypatch.setattr(session_state, "NUM_PAUSES", 1)
    monkeypatch.setattr(tier_loads, "LEAD_SHARE", 1.0)
    num_loads = 0
    for seed in seeds:
        workload = Workload(seed, has_tiers=True, has_names=True)
        workload.run(2000)
        workload.end()
        num_loads += workload.num_loads
    assert num_loads > 0


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 250), marks=pytest.mark.slow)])
def test_core_and_instances_agree_on_states_while_everything_fails(seeds: range) -> None:
    workloads = [Workload(seed, hybrid=True) for seed in seeds]
    for workload in workloads:
        workload.run(400)
        workload.end()
    assert sum(workload.num_reused for workload in workloads) > 2 * len(seeds)
