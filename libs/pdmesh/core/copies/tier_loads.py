"""Loads of sessions' KV from the offload tier before their next turns are expected.

While a session pauses, other requests may take the room of its KV, which then goes to the tier. Shortly before the
session usually returns, the tier's part of its latest prompt is loaded. So the next turn need not wait for it. A load
takes room that is unused, or that holds KV without a lease and without a session that is expected earlier. Loads are
fetches (`pdmesh.core.copies.prefix_fetches`) that no request wants.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import inf
from typing import Final

from pdmesh.core.copies.prefix_fetches import Fetches
from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.sessions.session_state import Session
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import PrefixHash, PrefixHashes, SessionKey

#: A load ends this share of the usual pause before the expected return, because pauses vary, and at least so long.
LEAD_SHARE: Final = 0.25
LEAD_S: Final = 0.2

#: A load may take this many times as long as predicted.
LATE: Final = 2.0

#: The next attempt follows after this share of the usual pause if no KV was loaded, and at least so long.
RETRY_SHARE: Final = 1 / 16
RETRY_S: Final = 0.5

#: Most sessions whose expected returns are compared for one load. Beyond, loads take unused room only.
MAX_COMPARED: Final = 256

#: Looks at pauses that are over are removed when all exceed twice the sessions by this number.
_SPARE_LOOKS: Final = 64


class TierLoads:
    """Decisions which KV is loaded from the tier. ``next_look_s`` is when to call `advance` at the latest."""

    def __init__(self, mesh: MeshState, fetches: Fetches) -> None:
        self._mesh = mesh
        self._fetches = fetches
        #: Times at which to look at sessions, each with the session's tenant and the beginning of its pause.
        self._looks: list[tuple[float, SessionKey, str, float]] = []
        self.next_look_s = inf

    def advance(self, now_s: float) -> None:
        """Note the sessions that paused, and begin the loads that are due."""
        paused = self._mesh.sessions.paused
        if not paused and now_s < self.next_look_s:
            return
        if paused:
            tiers = [tier for tier in self._mesh.instances.values() if tier.kept.offloaded is not None]
            for each in paused if tiers else ():
                load_s = max([tier.load_s(each.depth) for tier in tiers])
                due_s = self._mesh.sessions.return_s(each) - _lead_s(each, load_s)
                heappush(self._looks, (max(now_s, due_s), each.key, each.tenant, each.since_s))
            paused.clear()
            if len(self._looks) > 2 * len(self._mesh.sessions) + _SPARE_LOOKS:
                self._looks = [look for look in self._looks if self._paused(look) is not None]
                heapify(self._looks)
        while self._looks and self._looks[0][0] <= now_s:
            look = heappop(self._looks)
            session = self._paused(look)
            if session is None or self._load(session, now_s):
                continue
            if session.pause_s is not None and now_s < session.since_s + 2 * session.pause_s:
                retry_s = now_s + max(RETRY_S, RETRY_SHARE * session.pause_s)
                heappush(self._looks, (retry_s, session.key, session.tenant, session.since_s))
        self.next_look_s = self._looks[0][0] if self._looks else inf

    def _paused(self, look: tuple[float, SessionKey, str, float]) -> Session | None:
        """Return the session of a look, if it still pauses."""
        _, key, tenant, since_s = look
        session = self._mesh.sessions.find(key, tenant)
        if session is None or session.num_live or session.is_ended or session.since_s != since_s:
            return None
        return session

    def _load(self, session: Session, now_s: float) -> bool:
        """Begin to load a session's KV. Return False to try again later: nothing is to load, or there is no room."""
        member = session.member
        if member is None or not member.chain:
            return True
        chain, index = member.chain, self._mesh.cache_index
        holders = index.mask_of(chain[-1])
        if any(holders >> each.number & 1 and each.takes_prompts for each in self._mesh.instances.values()):
            return False
        if not any(self._may_load(chain, each) for each in self._mesh.instances.values()):
            return False
        cached, depths = index.depths(chain, len(chain)), index.depths_with_tiers(chain, len(chain))
        able = [self._mesh.by_number[number] for number in depths]
        able = [each for each in able if each.takes_prompts]
        num_cached = max([cached.get(each.number, 0) for each in able], default=0)
        able = [each for each in able if depths[each.number] > num_cached]
        if not able:
            return True
        able = [each for each in able if self._may_load(chain, each)]
        instance = max(able, default=None, key=lambda each: depths[each.number])
        if instance is None or not self._make_room(session, instance, chain[: depths[instance.number]]):
            return False
        self._begin(chain[: depths[instance.number]], session, instance, now_s)
        return True

    def _may_load(self, chain: PrefixHashes, instance: InstanceState) -> bool:
        """Whether a load may have room, as far as this is known without a walk along the chain."""
        kept = instance.kept
        if kept.offloaded is None or not self._fetches.may_receive(instance):
            return False
        # With the last granule, the tier usually has all that the cache lacks; otherwise, the load may be short.
        num_granules = len(chain) - kept.depth(chain, len(chain)) if chain[-1] in kept.offloaded else 1
        return num_granules * kept.granule_blocks <= int(max(instance.room)) and (
            instance.num_short_granules(num_granules) <= 0 or not self._has_many
        )

    @property
    def _has_many(self) -> bool:
        """Whether there are too many sessions to compare their expected returns."""
        return self._mesh.sessions.working_set.num_members > MAX_COMPARED

    def _make_room(self, session: Session, instance: InstanceState, chain: PrefixHashes) -> bool:
        """Whether no other KV is needed in the room that a load takes. Then the KV that is needed is evicted last."""
        kept = instance.kept
        num_granules = len(chain) - kept.depth(chain, len(chain))
        if num_granules * kept.granule_blocks > int(max(instance.room)):
            return False
        num_short = instance.num_short_granules(num_granules)
        if num_short <= 0:
            return True
        sessions = self._mesh.sessions
        if self._has_many:
            return False
        return_s = sessions.return_s(session)
        needed: dict[PrefixHash, PrefixHashes] = {chain[-1]: chain}
        num_needed = kept.depth(chain, len(chain)) + kept.num_leased
        for tenant in sessions.working_set.tenants:
            for member in sessions.working_set.members(tenant):
                other = member.session
                if other is session or not member.chain or member.chain[-1] not in kept:
                    continue
                if sessions.return_s(other) <= return_s:
                    needed[member.chain[-1]] = member.chain
                    num_needed += member.num_own_tokens // GRANULE_TOKENS
        if num_short * kept.granule_blocks > kept.num_idle_blocks - num_needed * kept.granule_blocks:
            return False
        kept.spare(needed, num_short)
        return True

    def _begin(self, chain: PrefixHashes, session: Session, instance: InstanceState, now_s: float) -> None:
        num_loaded = len(chain) - instance.kept.depth(chain, len(chain))
        arrives_s = now_s + instance.load_s(num_loaded)
        until_s = max(self._mesh.sessions.return_s(session), now_s + _lead_s(session, instance.load_s(num_loaded)))
        self._fetches.begin(
            chain,
            instance,
            instance,
            tenant=session.tenant,
            share=self._mesh.sessions.working_set.share_of(session.tenant),
            arrives_s=arrives_s,
            until_s=until_s,
        )


def _lead_s(session: Session, load_s: float) -> float:
    """Return how long before a session's expected return a load of ``load_s`` begins."""
    assert session.pause_s is not None, "the pause is unknown"
    return LATE * load_s + max(LEAD_S, LEAD_SHARE * session.pause_s)
