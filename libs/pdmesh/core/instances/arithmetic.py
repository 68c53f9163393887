"""Arithmetic classes in a mesh: the condition for instances to join, and the warning about several classes.

Two instances of one class compute the same bits from the same tokens. So a request that moves between them draws the
same tokens. `pdmesh.core.steps.placing` and `pdmesh.core.copies.decode_moves` prefer to keep a request in its class;
nothing here places requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pdmesh.model import InstanceId, InstanceProfile


def why_not_joins(instance: InstanceProfile, others: Iterable[InstanceProfile]) -> str | None:
    """Return a sentence on why an instance may not serve beside ``others``; None if it may.

    Instances of one model must be of one class if one of them is deterministic. An instance of the same name is left
    out: it is an earlier process of the registering instance.
    """
    for other in others:
        if other.instance_id == instance.instance_id or other.model != instance.model:
            continue
        if other.arithmetic != instance.arithmetic and (other.deterministic or instance.deterministic):
            return (
                f"{instance.instance_id} computes in the arithmetic class {instance.arithmetic or 'unknown'} and "
                f"{other.instance_id} in {other.arithmetic or 'unknown'}, but a deterministic mesh has one class: "
                "give both the same dtype, pdmesh version and kernels (`pdmesh doctor` names them), or start without "
                "--deterministic"
            )
    return None


def several_classes(class_of: Mapping[InstanceId, str]) -> str | None:
    """Return a warning for a mesh whose instances are of several classes; None with one class."""
    members: dict[str, list[InstanceId]] = {}
    for instance_id, arithmetic in class_of.items():
        members.setdefault(arithmetic, []).append(instance_id)
    if len(members) < 2:
        return None
    classes = "; ".join(f"{name or 'unknown'}: {', '.join(ids)}" for name, ids in members.items())
    return (
        f"{len(members)} arithmetic classes ({classes}): a request that moves between classes may get other "
        "tokens; --deterministic keeps a mesh in one class"
    )
