"""Hard limits of a mesh: the requests that its instances could serve if all of them were empty."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.instances.revisions import can_serve
from pdmesh.model import Request


def could_place(request: Request, instances: Collection[InstanceState], *, by_number: bool = True) -> bool:
    """Whether some pair of the instances, or one alone, could take the request if they were empty.

    If contexts are spread, there must be as many instances as the request may need after a resumption, when its output
    is part of the prompt. Without ``by_number``, one instance of each kind is enough, since a lost one soon returns.
    """
    able = _able(as_placed(request, instances), instances, by_number=by_number)
    return next(able, None) is not None


def is_held_whole(request: Request, instances: Collection[InstanceState]) -> bool:
    """Whether a usable instance that could compute the prompt, if all were empty, has room for all of it."""
    return any(each.is_usable and not each.streams_out(request) for each in _able(request, instances))


def as_placed(request: Request, instances: Collection[InstanceState]) -> Request:
    """Return the request, changed to always move if it ends with its prompt and no usable instance could hold that."""
    if request.ends_with_prompt and not is_held_whole(request, instances):
        return replace(request, always_moves=True)
    return request


def _able(request: Request, instances: Collection[InstanceState], *, by_number: bool = True) -> Iterator[InstanceState]:
    """Yield the instances that could compute a prompt, if enough others could decode it; see `could_place`."""
    able = Counter([instance.kv_group for instance in instances if instance.could_decode(request)])
    for instance in instances:
        if not instance.could_prefill(request):
            continue
        num_parts = instance.most_parts(request) if by_number else 0
        num_others = able[instance.kv_group] - (num_parts > 0 and instance.could_decode(request))
        if num_others > num_parts or (not num_parts and instance.could_finish(request)):
            yield instance


def unready_reason(instances: Iterable[InstanceState]) -> str | None:
    """Return a phrase for users on why no request can be served now; None if one can."""
    takers = [instance for instance in instances if instance.is_usable]
    if can_serve(takers):
        return None
    if not any(instance.role_prefills for instance in takers):
        return "no prefill instance is running"
    if not any(instance.role_decodes for instance in takers):
        return "no decode instance is running"
    return "no prefill and decode instance have the same model, weights and KV layout"
