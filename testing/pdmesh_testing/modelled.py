"""Modelled instances: untimed ones (`pdmesh_lab.sim.untimed`) to which anything may happen at any time.

What happens next (a step ends, a transfer lands or fails, a generation ends) is up to the caller: a property test draws
it. Commands and events travel through one queue each per instance, as on a stream, so that both may be late. Residents
change as soon as no step runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace

from pdmesh.core.commands import InstanceCommand
from pdmesh.core.events import Event, InstanceJoined
from pdmesh.model import (
    FinishReason,
    GatewayId,
    InstanceId,
    InstanceProfile,
    KvLayout,
    PrefixHashes,
    RequestKey,
    Resident,
    Role,
)
from pdmesh.plans import ChunkPlan, PrefillGroup, StepPlan
from pdmesh_lab.sim.held import Held
from pdmesh_lab.sim.residents import Length
from pdmesh_lab.sim.untimed import UntimedInstance
from pdmesh_testing.modelled_groups import ModelledMember, ModelledPieces

#: More tokens than any generation has whose length is not known: it ends when the caller says so.
_FOREVER = 1 << 60


def modelled_profile(
    instance_id: str,
    role: Role,
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 1024,
    max_num_seqs: int = 8,
    num_transfer_backends: int = 2,
    num_layers: int = 2,
    model: str = "modelled",
    joins_groups: bool = False,
    num_stages: int = 1,
    arithmetic: str = "",
    weights: str = "",
    started_at: float = 0.0,
    deterministic: bool = False,
    num_offload_granules: int = 0,
    max_kv_tokens: int = 0,
) -> InstanceProfile:
    return InstanceProfile(
        instance_id=InstanceId(instance_id),
        role=role,
        model=model,
        kv_layout=KvLayout(num_layers=num_layers, num_kv_heads=1, head_dim=8, block_size=block_size, dtype="float32"),
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        num_transfer_backends=num_transfer_backends,
        data_address=instance_id.encode(),
        joins_groups=joins_groups,
        num_stages=num_stages,
        arithmetic=arithmetic,
        weights=weights,
        started_at=started_at,
        deterministic=deterministic,
        num_offload_granules=num_offload_granules,
        max_kv_tokens=max_kv_tokens,
    )


class ModelledInstance:
    """One worker. Reports appear in ``events``, in order; all else of it is in ``untimed``."""

    def __init__(
        self,
        profile: InstanceProfile,
        max_total_of: Mapping[RequestKey, int] | None = None,
        pieces: ModelledPieces | None = None,
    ) -> None:
        """``max_total_of`` says how many tokens requests have at most; of others it is not known.

        ``pieces`` are those between this one and other instances.
        """
        self.profile = profile
        self.instance_id = profile.instance_id
        self.max_total_of = {} if max_total_of is None else max_total_of
        self.chain_of: Mapping[RequestKey, PrefixHashes] = {}  # granules of prompts that are kept
        self.pieces = ModelledPieces() if pieces is None else pieces
        self.members: dict[RequestKey, ModelledMember] = {}  # of groups, as the instance was told
        self.landed: set[RequestKey] = set()  # moved away and decoded there, which is not known here yet
        self.commands: deque[InstanceCommand] = deque()  # on their way here
        self.events: deque[Event] = deque()  # on their way to the scheduler
        self.untimed = UntimedInstance(profile, report=self.events.append, length_of=self._length_of, surroundings=self)
        self.held = self.untimed.held
        self.plans = self.untimed.plans
        self.running = self.untimed.running
        self.own = self.untimed.own

    def take_command(self) -> None:
        """Receive the next command."""
        self.untimed.obey(self.commands.popleft())
        num_seated = sum(held.takes_seat for held in self.held.values())
        assert num_seated <= self.profile.max_num_seqs, f"{self.instance_id}: {num_seated} have a seat"

    def take_pieces(self, at_most: int) -> None:
        """The first so many of the pieces that are under way to this instance arrive."""
        coming = [piece for piece in self.pieces.under_way if piece.destination_id == self.instance_id][:at_most]
        for piece in coming:
            self.pieces.under_way.remove(piece)
            if piece.key in self.held and (member := self.members.get(piece.key)) is not None:
                member.take(piece)

    # --- what may happen ---

    @property
    def can_begin(self) -> bool:
        return self.untimed.can_begin

    def begin_step(self) -> StepPlan:
        self._check_group(self.plans[0])
        return self.untimed.begin_step().plan

    def _check_group(self, plan: StepPlan) -> None:
        """Check what keeps pages whole, and waits free of circles, where prompts are computed in turn."""
        size = self.profile.kv_layout.block_size
        grouped = [
            (chunk, held)
            for chunk in plan.chunks
            if (held := self.held.get((chunk.request_id, chunk.epoch))) is not None and held.group is not None
        ]
        for chunk, held in grouped:
            assert not plan.urgent, f"{chunk} in an urgent plan"
            assert len(grouped) == 1, f"{grouped} in one step"
            if not held.leads:
                assert len(plan.chunks) == 1, f"{plan} on a helper"
                assert not chunk.is_last, f"{chunk} on a helper"
                assert chunk.start % size == 0 == chunk.num_tokens % size, f"{chunk} on a helper"

    @property
    def can_end(self) -> bool:
        return self.untimed.can_end

    def end_step(self, *, ended_by_first_token: bool = False) -> None:
        """End the running step; ``ended_by_first_token``: and the generations of its last chunks at once."""
        self.untimed.end_step(ended_by_first_token=ended_by_first_token)
        self.stirs()

    @property
    def can_decode(self) -> bool:
        """Whether it would make decode steps by itself now."""
        return not self.running and not self.plans and not self.own.held and len(self.untimed.residents) > 0

    def decode(self, num_steps: int) -> None:
        """Make so many decode steps without a plan, each of a second, of those that have room."""
        assert self.can_decode
        began_s = 0.0
        for num in self._stretches(num_steps):
            self.untimed.make_own_steps(num, duration_s=float(num), began_s=began_s, ended_s=began_s + num)
            began_s += num

    def draw(self, num_steps: int) -> None:
        """Make so many decode steps of which nothing is told."""
        for num in self._stretches(num_steps):
            self.untimed.draw(num)

    def _stretches(self, num_steps: int) -> Iterator[int]:
        """Parts of so many steps, between which nothing is due, until nobody has room."""
        while num_steps and (residents := self.untimed.residents):
            num = min(num_steps, residents.steps_left, self.own.num_left)
            yield num
            num_steps -= num

    @property
    def decoding(self) -> list[RequestKey]:
        return [key for key, held in self.held.items() if held.is_decoding]

    def num_tokens(self, key: RequestKey) -> int:
        """Return tokens of prompt and output of a request that decodes here."""
        return self.untimed.residents.num_tokens(key)

    def finish(self, key: RequestKey, num_output_tokens: int = 1) -> None:
        """A generation ends here."""
        self.untimed.finish(self.held[key], FinishReason.STOP, num_output_tokens)

    def drop(self, key: RequestKey) -> None:
        self.untimed.drop(self.held[key], "modelled")

    def rejoin(self, gateway_of: dict[RequestKey, GatewayId]) -> InstanceJoined:
        """A new stream: what does not decode is dropped, what was on its way is lost, and copies have ended."""
        dropped = tuple([key for key, held in self.untimed.held.items() if held.decodes_nowhere])
        self.untimed.drop_all_but_decoding()
        self.pieces.cut_off(self.instance_id)
        self.commands.clear()
        self.events.clear()
        residents = tuple(
            Resident(
                request_id=key[0],
                epoch=key[1],
                gateway_id=gateway_of[key],
                num_blocks=held.num_blocks,
                num_context_tokens=self.num_tokens(key) if held.is_decoding else held.num_tokens,
                decoding=held.is_decoding,
                max_total_tokens=0 if held.length is None else held.length.max_total_tokens,
                transfer_id=held.received_by,
                granules=tuple(held.kept),
                members=held.members,
                part=held.part,
            )
            for key, held in self.held.items()
        )
        return InstanceJoined(
            replace(self.profile, role=self.untimed.role),
            residents,
            stopping=not self.untimed.admits,
            kept=self.untimed.kept.granules,
            offloaded=self.untimed.kept.offloaded,
            dropped=dropped,
        )

    # --- what the untimed instance tells ---

    def _length_of(self, key: RequestKey) -> Length:
        most = self.max_total_of.get(key, 0)
        return Length(most or _FOREVER, 1, most, self.chain_of.get(key, ()))

    def stirs(self) -> None:
        if not self.running:
            self.untimed.turn()

    def regrouped(self, held: Held, known: PrefillGroup | None) -> None:
        assert held.group is not None
        if known is not None:
            self.members[held.key].regroup(held.group)
            return
        member = ModelledMember(held.key, held.group, self.instance_id, self.profile.kv_layout.block_size, self.pieces)
        self.members[held.key] = member
        member.begin(held.num_computed_tokens)

    def has_before(self, held: Held, chunk: ChunkPlan) -> bool:
        return self.members[held.key].has_before(chunk)

    def num_present_tokens(self, held: Held) -> int:
        return self.members[held.key].num_tokens

    def computed(self, held: Held, chunk: ChunkPlan, *, ends: bool) -> None:
        if held.group is not None:
            self.members[held.key].compute(chunk)

    def stops_sending(self, held: Held) -> None:
        assert held.key not in self.landed, f"{held.key} goes on here, and is decoded elsewhere"

    def forgets(self, held: Held) -> None:
        self.landed.discard(held.key)

    def admitted(self, held: Held) -> None: ...
    def planned(self, plan: StepPlan) -> None: ...
    def began_to_decode(self, held: Held) -> None: ...
    def stood(self, key: RequestKey, joined_step: int) -> None: ...
    def sends(self, held: Held) -> None: ...
    def gave_up(self, held: Held) -> None: ...
