"""Laws of sessions that wait as a whole: none waits too long, all are served, and tenants stay within their shares."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from pdmesh.core.admission.aside import NUM_WAITS
from pdmesh.core.commands import AdmitPrefill, RunStep, WakeAt
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import RequestArrived, Tick
from pdmesh.core.sessions.working_set import RETURNS_ASSUMED
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import SessionKey, SessionName
from pdmesh.plans import StepPlan
from pdmesh.policy.config import PolicyConfig
from pdmesh_testing.core import CoreBench, of
from pdmesh_testing.reuse import a_profile, a_prompt

MOST_S = 60.0


@dataclass
class Client:
    """An agent that sends a turn, waits for its end, and pauses. ``number`` names its context, and the session."""

    number: int
    tenant: str
    num_granules: int
    grows: bool = True
    named: bool = True
    new_names: bool = False
    ready_s: float = 0.0
    sent_s: float | None = None
    waits_s: list[float] = field(default_factory=list[float])


class Mesh(CoreBench):
    """An instance that computes 100 granules a second, one step after another, and clients in a closed loop."""

    def __init__(self, clients: list[Client], num_blocks: int, seed: int) -> None:
        policy = PolicyConfig(chunk_tokens=1 << 20)
        super().__init__(
            a_profile("m0", num_blocks),
            config=CoreConfig(policy=policy, plans_in_flight=1, max_queue_s=MOST_S / NUM_WAITS),
        )
        self.rng = random.Random(seed)
        self.clients = clients
        self.by_request: dict[str, Client] = {}
        self.plan: tuple[float, str, StepPlan] | None = None
        self.wake_s: float | None = None
        self.num_turns = 0

    def send(self, client: Client) -> None:
        self.num_turns += 1
        request_id = f"r{self.num_turns}"
        self.by_request[request_id] = client
        client.sent_s = self.now_s
        number = 1000 + self.num_turns if client.new_names else client.number
        prompt = a_prompt(request_id, client.num_granules * GRANULE_TOKENS + 1, name=client.number)
        name = SessionName(SessionKey(number.to_bytes(16))) if client.named else None
        self.take(RequestArrived(replace(prompt, arrival_s=self.now_s, tenant=client.tenant, session=name)))
        client.num_granules = client.num_granules + 1 if client.grows and client.num_granules < 12 else 3

    def take(self, event: RequestArrived | Tick) -> None:
        self.carry_out(self.feed(event))

    def carry_out(self, commands: list) -> None:  # type: ignore[type-arg]
        for wake in of(WakeAt, commands):
            self.wake_s = wake.at_s
        for admit in of(AdmitPrefill, commands):
            client = self.by_request[admit.request_id]
            assert client.sent_s is not None
            client.waits_s.append(self.now_s - client.sent_s)
        for step in of(RunStep, commands):
            num_tokens = sum(chunk.num_tokens for chunk in step.plan.chunks)
            self.plan = self.now_s + num_tokens / GRANULE_TOKENS / 100, step.instance_id, step.plan

    def end_step(self) -> None:
        assert self.plan is not None
        _, instance_id, plan = self.plan
        self.plan = None
        commands = self.done(instance_id, plan)
        for chunk in plan.chunks:
            commands += self.finish(instance_id, chunk.request_id, chunk.epoch)
            commands += self.released(instance_id, chunk.request_id, chunk.epoch)
            client = self.by_request.pop(chunk.request_id)
            client.sent_s, client.ready_s = None, self.now_s + self.rng.expovariate(0.5)
        self.carry_out(commands)

    def run(self, until_s: float) -> None:
        """Serve turns that are sent until ``until_s``, to the last one."""
        while True:
            ready = [client for client in self.clients if client.sent_s is None and client.ready_s < until_s]
            moments = [(client.ready_s, 0) for client in ready]
            if self.plan is not None:
                moments.append((self.plan[0], 1))
            if self.wake_s is not None and self.by_request:
                moments.append((self.wake_s, 2))
            if not moments:
                break
            at_s, what = min(moments)
            self.now_s = max(self.now_s, at_s)
            if what == 0:
                self.send(min(ready, key=lambda client: client.ready_s))
            elif what == 1:
                self.end_step()
            else:
                self.wake_s = None
                self.take(Tick())
        assert not self.by_request, "a turn was never served"

    @property
    def longest_aside_s(self) -> float:
        return self.core.sessions.working_set.longest_aside_s


@pytest.mark.parametrize("seed", range(4))
def test_every_turn_is_served_and_none_is_aside_for_longer_than_the_limit(seed: int) -> None:
    rng = random.Random(seed)
    clients = [Client(number, "", rng.randint(1, 12)) for number in range(1, rng.randint(6, 12))]
    mesh = Mesh(clients, rng.choice((64, 128)), seed)
    mesh.run(200.0)
    assert 0.0 < mesh.longest_aside_s <= MOST_S
    assert all(len(client.waits_s) > 2 for client in clients), "a session starves"


@pytest.mark.parametrize("seed", range(2))
def test_a_tenant_within_its_share_is_never_set_aside(seed: int) -> None:
    """Two tenants: one has less than half of the room, and the other one much more."""
    modest = [Client(number, "modest", 3, grows=False) for number in (1, 2)]
    greedy = [Client(number, "greedy", 5) for number in range(3, 20)]
    mesh = Mesh([*modest, *greedy], 64, seed)
    mesh.run(120.0)
    assert mesh.longest_aside_s > 10.0
    for number in (1, 2):
        session = mesh.core.sessions.find(SessionKey(number.to_bytes(16)))
        assert session is None or session.member is None or session.member.num_waits == 0
    assert max(max(client.waits_s) for client in modest) < 2.0


def test_a_client_with_a_new_name_for_each_request_sets_no_other_session_aside() -> None:
    """Others wait as long as beside the same load without names: agents that return, and a new session in the mean."""

    def waits_s(seed: int, *, named: bool) -> tuple[float, float]:
        agents = [Client(number, "", 3, grows=False) for number in (1, 2)]
        hostile = [Client(0, "", 4, grows=False, named=named, new_names=True) for _ in range(6)]
        mesh = Mesh([*agents, *hostile], 64, seed)
        mesh.run(80.0)
        late = Client(99, "", 2, ready_s=mesh.now_s)
        assert mesh.num_turns > 4 * RETURNS_ASSUMED
        mesh.clients.append(late)
        for client in agents:
            client.waits_s.clear()
        mesh.run(140.0)
        return max(max(client.waits_s) for client in agents), max(late.waits_s)

    named = [waits_s(seed, named=True) for seed in range(4)]
    unnamed = [waits_s(seed, named=False) for seed in range(4)]
    assert all(ours <= others + 1.0 for (ours, _), (others, _) in zip(named, unnamed, strict=True))
    assert sum(late for _, late in named) <= 1.2 * sum(late for _, late in unnamed)


@pytest.mark.parametrize("seed", range(2))
def test_names_change_no_command_while_all_contexts_have_room(seed: int) -> None:
    def commands(*, named: bool) -> list[object]:
        clients = [Client(number, "", number % 4 + 1, grows=False, named=named) for number in range(1, 6)]
        mesh = Mesh(clients, 1024, seed)
        mesh.run(50.0)
        return [type(command).__name__ for command in mesh.commands]

    assert commands(named=True) == commands(named=False)
