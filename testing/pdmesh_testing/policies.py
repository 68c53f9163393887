"""A core that schedules prefills on one modelled instance in modelled time, for tests of policies."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pdmesh.core.commands import AdmitPrefill
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import Event, GatewayJoined, InstanceJoined, RequestArrived
from pdmesh.core.operator_events import BundleChangeRequested
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.model import GatewayId, InstanceId, Request, RequestId, Role
from pdmesh.policy.bundles import make_bundle
from pdmesh.policy.latency import ChunkShape, StepShape
from pdmesh_testing.modelled import modelled_profile
from pdmesh_testing.modelled_mesh import ModelledMesh

GATEWAY = GatewayId("g")


@dataclass(frozen=True, slots=True)
class PrefillRun:
    """First-token times, and the requests of each step."""

    first_token_s: dict[RequestId, float]
    steps: list[tuple[RequestId, ...]]
    placed_s: dict[RequestId, float] = field(default_factory=dict[RequestId, float])


def run_prefills(
    config: CoreConfig,
    bundle: str,
    requests: Iterable[Request],
    *,
    bundle_at: Callable[[float], str] | None = None,
) -> PrefillRun:
    """Feed ``requests`` to a core as they arrive, with one mixed instance whose steps take the predicted times.

    Generations end with their first token. Urgent steps interrupt others at once. ``bundle_at`` may name another
    bundle as time passes.
    """
    profile = modelled_profile(
        "i", Role.MIXED, num_blocks=1 << 20, block_size=16, max_model_len=1 << 22, max_num_seqs=1 << 16
    )
    mesh = ModelledMesh([profile])
    instance = mesh.instances[InstanceId("i")]
    core = SchedulerCore(config, make_bundle(bundle, config.policy), random.Random(0))
    arrivals = sorted(requests, key=lambda request: (request.arrival_s, request.request_id), reverse=True)
    run = PrefillRun({}, [])
    now_s = 0.0

    def feed(event: Event) -> None:
        for command in core.handle(event, now_s):
            if isinstance(command, AdmitPrefill):
                run.placed_s[command.request_id] = now_s
            mesh.send(command)
        while instance.commands:
            instance.take_command()

    feed(GatewayJoined(GATEWAY, ()))
    feed(InstanceJoined(profile, ()))
    #: Ends of the running step, and of an urgent one inside.
    ends_s: list[float] = []
    while arrivals or ends_s:
        if not ends_s or (arrivals and arrivals[-1].arrival_s <= ends_s[-1]):
            request = arrivals.pop()
            now_s = max(now_s, request.arrival_s)
            feed(RequestArrived(request))
        else:
            now_s = ends_s.pop()
            plan = instance.running[-1].plan
            run.steps.append(tuple(chunk.request_id for chunk in plan.chunks))
            instance.end_step(ended_by_first_token=True)
            for chunk in plan.chunks:
                if chunk.is_last:
                    run.first_token_s[chunk.request_id] = now_s
            while instance.events:
                feed(instance.events.popleft())
            core.check_integrity()
        if bundle_at is not None and bundle_at(now_s) != core.bundle:
            feed(BundleChangeRequested(bundle_at(now_s)))
        if instance.can_begin:
            plan = instance.begin_step()
            chunks = tuple(ChunkShape(chunk.num_tokens, chunk.start) for chunk in plan.chunks)
            step_s = config.policy.latency.step_s(StepShape(chunks, 0, 0))
            # Whole nanoseconds: rounding errors must not add up.
            ends_s = [round(end_s + step_s, 9) for end_s in (*ends_s, now_s)]
    return run
