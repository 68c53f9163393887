"""Weights identities in a mesh: the choice for new requests, and the notice to operators of several identities.

KV and tokens never pass from one identity to another. A request without tokens may be computed by any identity; one
with tokens continues on instances of its identity.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from pdmesh.core.instances.instance import InstanceState
from pdmesh.model import InstanceId, Role, short_weights

#: Number of the latest new requests that shares are computed from.
NUM_COUNTED = 1000


@dataclass(frozen=True, slots=True)
class RevisionView:
    """The instances of one weights identity.

    ``share`` is the share of the latest new requests, 0 to 1. ``takes_new``: new requests are placed on this identity.
    """

    weights: str
    instance_ids: tuple[InstanceId, ...]
    share: float
    takes_new: bool


class NewRequestShares:
    """Counts of the latest new requests, by the weights that they were placed on."""

    def __init__(self) -> None:
        self._latest: deque[str] = deque()
        self._numbers = Counter[str]()

    def placed(self, weights: str) -> None:
        """Note that a new request was placed on an instance with these weights."""
        self._latest.append(weights)
        self._numbers[weights] += 1
        if len(self._latest) > NUM_COUNTED:
            self._numbers[self._latest.popleft()] -= 1

    def of(self, weights: str) -> float:
        """Return the share of the latest new requests that these weights took."""
        return self._numbers[weights] / max(1, len(self._latest))


def have_pair(instances: Collection[InstanceState]) -> bool:
    """Return whether an instance prefills, and it or another one in its KV group decodes."""
    groups = {instance.kv_group for instance in instances if instance.role_decodes}
    return any(instance.role_prefills and instance.kv_group in groups for instance in instances)


def pairs_as(instance: InstanceState, role: Role, others: Iterable[InstanceState]) -> bool:
    """Return whether the instance in another role and one of the others, in its KV group, prefill and decode."""
    return any(
        other.kv_group == instance.kv_group
        and ((role.can_prefill and other.role_decodes) or (role.can_decode and other.role_prefills))
        for other in others
    )


def can_serve(instances: Collection[InstanceState]) -> bool:
    """Return whether the instances have a pair, or a prefill instance that may decode."""
    return any(instance.decodes_locally for instance in instances) or have_pair(instances)


def is_needed(instance: InstanceState, others: Collection[InstanceState]) -> bool:
    """Return whether the others, without the instance, lose their last pair or can serve no request any more."""
    everything = [instance, *others]
    return (have_pair(everything) and not have_pair(others)) or (can_serve(everything) and not can_serve(others))


def weights_for_new(instances: Collection[InstanceState]) -> str | None:
    """Return the newest identity whose usable instances can serve a request; None if there is none.

    An identity with a prefill and a decode role comes before any whose prefill instances would decode everything.
    """
    members = [[each for each in members if each.is_usable] for members in _newest_first(instances)]
    able = next(filter(have_pair, members), None) or next(filter(can_serve, members), None)
    return None if able is None else able[0].weights


def role_that_new_weights_lack(instances: Collection[InstanceState]) -> Role | None:
    """Return the role without which the newest identity cannot serve a request; None if it can, or lacks both."""
    members = next(iter(_newest_first(instances)), [])
    can_prefill, can_decode = any(each.role_prefills for each in members), any(each.role_decodes for each in members)
    if can_prefill == can_decode:
        return None
    return Role.DECODE if can_prefill else Role.PREFILL


def _newest_first(instances: Collection[InstanceState]) -> list[list[InstanceState]]:
    """Return the instances of each identity, the newest identity first.

    An identity is as old as its oldest running process, so a restarted instance does not make its weights new. Of two
    equally old identities the later by name comes first.
    """
    members: dict[str, list[InstanceState]] = {}
    for each in instances:
        members.setdefault(each.weights, []).append(each)

    def age(weights: str) -> tuple[float, str]:
        return min([each.profile.started_at for each in members[weights]]), weights

    return [members[weights] for weights in sorted(members, key=age, reverse=True)]


def revisions(instances: Collection[InstanceState], shares: NewRequestShares) -> list[RevisionView]:
    """Return one view for each identity, in the order in which their first instances joined."""
    members: dict[str, list[InstanceId]] = {}
    for each in instances:
        members.setdefault(each.weights, []).append(each.instance_id)
    newest = weights_for_new(instances)
    return [RevisionView(name, tuple(ids), shares.of(name), name == newest) for name, ids in members.items()]


def several_revisions(model: str, shares: Mapping[str, tuple[int, float]]) -> str | None:
    """Return a sentence on a model that several identities serve; None if there is only one.

    ``shares``: number of instances and share of the latest new requests, by identity.
    """
    if len(shares) < 2:
        return None
    parts = [
        f"{short_weights(weights)} ({number} {'instance' if number == 1 else 'instances'}, {share:.0%} of new requests)"
        for weights, (number, share) in shares.items()
    ]
    return (
        f"model {model!r} is served by {len(parts)} revisions of its weights: {', '.join(parts)}. Each answer is "
        "finished by the weights that began it; `pdmesh restart --rolling` brings all instances to one revision"
    )
