"""The mesh's state, for operators and gateways."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from pdmesh.core.events import LoadReported
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.model import InstanceId, InstanceProfile
from pdmesh.policy.batching import Mode
from pdmesh.wire.messages import BatchingStatus, GroupStatus, InstanceStatus, LinkStatus, MeshStatus, RevisionStatus
from pdmesh_scheduler.history import MeshHistory, safety

#: Largest numbers of groups and links in a state.
MAX_GROUPS = 64
MAX_LINKS = 64


def mesh_status(
    core: SchedulerCore,
    profiles: Mapping[InstanceId, InstanceProfile],
    loads: Mapping[InstanceId, LoadReported],
    history: MeshHistory,
    now_s: float,
    *,
    num_gateways: int,
    num_coming: int,
    silent: Collection[InstanceId],
    longest: int,
) -> MeshStatus:
    """Return the mesh's state.

    ``loads`` are the last reports of instances. ``silent`` are lost instances whose processes may still run.
    ``longest`` is the longest context served, in tokens.
    """
    resize = core.desired.pools
    reason = core.unready_reason
    return MeshStatus(
        ready=reason is None,
        reason=reason or "",
        instances=tuple(_instance_statuses(core, profiles, loads, history, now_s)),
        num_waiting=core.num_waiting,
        num_parked=core.num_parked,
        num_running=core.num_running,
        bundle=core.bundle,
        batching=core.batching,
        max_model_len=longest,
        num_gateways=num_gateways,
        num_coming=num_coming,
        num_fetched_tokens=core.num_fetched_tokens,
        new_weights=core.new_weights or "",
        revisions=tuple(
            RevisionStatus(
                weights=each.weights, instance_ids=each.instance_ids, share=each.share, takes_new=each.takes_new
            )
            for each in core.revisions
        ),
        services=tuple(core.actuators.processes),
        pools=None if resize is None else resize.pools,
        links=tuple(
            LinkStatus(
                source=link.source,
                destination=link.destination,
                bytes_per_s=link.bytes_per_s,
                num_transfers=link.num_transfers,
            )
            for link in core.link_rates[:MAX_LINKS]
        ),
        groups=tuple(
            GroupStatus(
                request_id=view.request_id,
                member_ids=(*view.instance_ids[:1], *view.helper_ids),
                num_prompt_tokens=view.num_prompt_tokens,
                num_planned_tokens=view.num_planned_tokens,
            )
            for view in core.helped[:MAX_GROUPS]
        ),
        at=history.wall_time(now_s),
        gone=history.gone(silent, now_s),
        events=history.events,
    )


def _instance_statuses(
    core: SchedulerCore,
    profiles: Mapping[InstanceId, InstanceProfile],
    loads: Mapping[InstanceId, LoadReported],
    history: MeshHistory,
    now_s: float,
) -> Iterable[InstanceStatus]:
    views = core.instances
    for view in views:
        is_safe, why = safety(view, views)
        profile, load = profiles[view.instance_id], loads.get(view.instance_id)
        yield InstanceStatus(
            instance_id=view.instance_id,
            role=view.role,
            model=profile.model,
            device=profile.device,
            pid=profile.pid,
            host=profile.host,
            draining=view.draining,
            reachable=view.reachable,
            suspected=view.suspected,
            num_blocks=profile.num_blocks,
            block_size=profile.kv_layout.block_size,
            num_free_blocks=profile.num_blocks if load is None else load.num_free_blocks + load.num_cached_blocks,
            num_cached_blocks=0 if load is None else load.num_cached_blocks,
            num_offloaded_granules=0 if load is None else load.num_offloaded_granules,
            num_offload_granules=profile.num_offload_granules,
            num_held_blocks=0 if load is None else load.num_held_blocks,
            num_quarantined_blocks=0 if load is None else load.num_quarantined_blocks,
            num_prefilling=view.num_prefilling,
            num_decoding=view.num_decoding,
            num_queued_tokens=view.num_queued_tokens,
            num_taken_blocks=view.num_blocks - view.num_free_blocks,
            batching=_batching_status(core, view.instance_id),
            compute=profile.compute,
            arithmetic=profile.arithmetic,
            weights=profile.weights,
            rank_pids=profile.rank_pids,
            num_stages=profile.num_stages,
            joined_at=history.joined_at(view.instance_id),
            num_restarts=history.num_restarts(view.instance_id),
            note=history.note(view, now_s),
            safe_to_delete=is_safe,
            safe_to_delete_why=why,
        )


def _batching_status(core: SchedulerCore, instance_id: InstanceId) -> BatchingStatus | None:
    view = core.batching_of(instance_id)
    if view is None:
        return None
    return BatchingStatus(
        mode=view.mode,
        phase="" if view.mode is Mode.MIXED else "prefill" if view.is_prefill_phase else "decode",
        idle_share=view.idle_share,
        num_seats=view.num_seats,
        gain=view.gain,
        reason=view.reason,
    )
