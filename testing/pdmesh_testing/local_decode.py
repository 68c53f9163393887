"""The law of local decode: no computed KV waits for a decode instance that is not there."""

from __future__ import annotations

from pdmesh.core.scheduler import SchedulerCore


def waiting_in_vain(core: SchedulerCore) -> list[str]:
    """Name each computed request that waits although only its prefill instance could decode it, and has room."""
    mesh, found = core._mesh, list[str]()
    for key, state in mesh.awaiting_decode.items():
        source = mesh.instances[state.prefill_ids[0]]
        others = [each for each in mesh.instances.values() if each.takes_new and each.kv_group == source.kv_group]
        if (
            state.is_computed
            and source.can_keep_locally(state.request)
            and not any(each.could_decode(state.request) for each in others)
        ):
            found.append(f"{key} waits on {source.instance_id}, which could decode it")
    return found
