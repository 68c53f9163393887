"""Modelled instances: machines (`pdmesh.instance.machine`) to which anything may happen at any time.

What happens next (a step ends, a transfer lands or fails, a generation ends) is up to the caller: a property test draws
it. Commands and events travel through one queue each per instance, as on a stream, so that both may be late. Residents
change as soon as no step runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace

from pdmesh.core.commands import InstanceCommand, SendCopy
from pdmesh.core.events import Event, GroupPrefix, InstanceJoined
from pdmesh.instance.counted import CountedMachine
from pdmesh.instance.effects import (
    Computed,
    CopyEvent,
    CopyPaused,
    Effect,
    Forget,
    PauseSending,
    Refused,
    Regrouped,
    ResidentsChange,
    StopSending,
    WaitNoLonger,
)
from pdmesh.instance.residents import Length
from pdmesh.instance.sequence import Sequence
from pdmesh.instance.sequence_phases import LeavingState
from pdmesh.kv_layout import KvLayout
from pdmesh.model import FinishReason, GatewayId, InstanceId, InstanceProfile, PrefixHashes, RequestKey, Resident, Role
from pdmesh.plans import StepPlan
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
    num_cached_states: int = 0,
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
        num_cached_states=num_cached_states,
    )


class ModelledInstance:
    """Stand-in for a worker. Reports appear in ``events``, in order. Most other state is in ``machine``."""

    def __init__(
        self,
        profile: InstanceProfile,
        max_total_of: Mapping[RequestKey, int] | None = None,
        pieces: ModelledPieces | None = None,
    ) -> None:
        """``max_total_of``: most tokens of each request, as far as known. ``pieces``: pieces between the instances."""
        self.profile = profile
        self.instance_id = profile.instance_id
        self.max_total_of = {} if max_total_of is None else max_total_of
        # Granules of cached prompts.
        self.chain_of: Mapping[RequestKey, PrefixHashes] = {}
        self.pieces = ModelledPieces() if pieces is None else pieces
        # The instance's side of each prefill group.
        self.members: dict[RequestKey, ModelledMember] = {}
        # Requests that moved away and decode there, unknown here so far.
        self.landed: set[RequestKey] = set()
        # Commands on their way to this instance.
        self.commands: deque[InstanceCommand] = deque()
        # Events on their way to the scheduler.
        self.events: deque[Event] = deque()
        self.machine = CountedMachine(profile, self._length_of)
        self.sequences = self.machine.sequences
        self.plans = self.machine.steps.plans
        self.running = self.machine.steps.running
        self.own = self.machine.own

    def take_command(self) -> None:
        """Receive the next command."""
        command = self.commands.popleft()
        if isinstance(command, SendCopy) and (held := self.sequences.get((command.request_id, command.epoch))):
            onward = held.onward
            assert onward is not None or command.transfer.is_of_range or held.move is None, (
                f"{command} of a second move"
            )
            assert onward is None or onward.state is LeavingState.OFFERED, f"{command} without an offer"
            assert onward is None or onward.transfer in (command.transfer, None), f"{command} of another transfer"
        self.do(self.machine.obey(command))
        num_seated = sum(sequence.takes_seat for sequence in self.sequences.values())
        assert num_seated <= self.profile.max_num_seqs, f"{self.instance_id}: {num_seated} have a seat"

    def take_pieces(self, at_most: int) -> None:
        """Let the first ``at_most`` pieces under way to this instance arrive."""
        coming = [piece for piece in self.pieces.under_way if piece.destination_id == self.instance_id][:at_most]
        for piece in coming:
            self.pieces.under_way.remove(piece)
            if piece.key in self.sequences and (member := self.members.get(piece.key)) is not None:
                member.take(piece)

    # --- possible events ---

    @property
    def can_begin(self) -> bool:
        return self.machine.steps.can_begin

    def begin_step(self) -> StepPlan:
        self._check_group(self.plans[0])
        self.do(self.machine.begin_step())
        return self.running[-1].plan

    def _check_group(self, plan: StepPlan) -> None:
        """Check what keeps pages whole, and waits free of circles, where prompts are computed in turn."""
        size = self.profile.kv_layout.block_size
        chunks = [(chunk, self.sequences.get((chunk.request_id, chunk.epoch))) for chunk in plan.chunks]
        grouped = [(chunk, each) for chunk, each in chunks if each is not None and each.prompt.group is not None]
        for chunk, sequence in grouped:
            assert not plan.urgent, f"{chunk} in an urgent plan"
            assert len(grouped) == 1, f"{grouped} in one step"
            if not sequence.leads:
                assert len(plan.chunks) == 1, f"{plan} on a helper"
                assert not chunk.is_last, f"{chunk} on a helper"
                assert chunk.start % size == 0 == chunk.num_tokens % size, f"{chunk} on a helper"

    @property
    def can_end(self) -> bool:
        """Whether nothing in the step that ends next waits for KV of other members."""
        plan = self.running[self.machine.steps.next_to_end].plan
        return all(plan.plan_id in self.sequences[key].prompt.given_up for key in self._uncomputed(plan))

    def _uncomputed(self, plan: StepPlan) -> set[RequestKey]:
        """Return the prompts of a plan's chunks that lack KV before these."""
        keys = [((chunk.request_id, chunk.epoch), chunk) for chunk in plan.chunks]
        return {
            key
            for key, chunk in keys
            if key in self.sequences
            and self.sequences[key].prompt.group is not None
            and not self.members[key].has_before(chunk)
        }

    def end_step(self, *, ended_by_first_token: bool = False) -> None:
        """End the running step; ``ended_by_first_token``: and the generations of its last chunks at once."""
        uncomputed = self._uncomputed(self.running[self.machine.steps.next_to_end].plan)
        self.do(self.machine.end_step(uncomputed, ended_by_first_token=ended_by_first_token))
        self._turn()

    @property
    def can_decode(self) -> bool:
        """Whether it would make decode steps by itself now."""
        return not self.running and not self.plans and not self.own.held and len(self.machine.residents) > 0

    def decode(self, num_steps: int) -> None:
        """Make up to ``num_steps`` own decode steps of one second each, until no resident has room."""
        assert self.can_decode
        began_s = 0.0
        for num in self._stretches(num_steps):
            self.do(self.machine.make_own_steps(num, duration_s=float(num), began_s=began_s, ended_s=began_s + num))
            began_s += num

    def draw(self, num_steps: int) -> None:
        """Make up to ``num_steps`` decode steps that are not reported as own steps."""
        for num in self._stretches(num_steps):
            self.do(self.machine.draw(num))

    def _stretches(self, num_steps: int) -> Iterator[int]:
        """Yield parts of ``num_steps`` steps within which nothing is due, until no resident has room."""
        while num_steps and (residents := self.machine.residents):
            num = min(num_steps, residents.steps_left, self.own.num_left)
            yield num
            num_steps -= num

    @property
    def decoding(self) -> list[RequestKey]:
        return [key for key, sequence in self.sequences.items() if sequence.is_decoding]

    def num_tokens(self, key: RequestKey) -> int:
        """Return tokens of prompt and output of a request that decodes here."""
        return self.machine.residents.num_tokens(key)

    def finish(self, key: RequestKey, num_output_tokens: int = 1) -> None:
        """End a generation here."""
        self.do(self.machine.finish(self.sequences[key], FinishReason.STOP, num_output_tokens))

    def drop(self, key: RequestKey) -> None:
        self.do(self.machine.drop(self.sequences[key], "modelled"))

    def hear(self, event: CopyEvent) -> None:
        """Let an event of a copy happen."""
        self.do(self.machine.copy_event(event))

    def rejoin(self, gateway_of: dict[RequestKey, GatewayId]) -> InstanceJoined:
        """Open a new stream to the scheduler, and return the registration.

        Requests that do not decode are dropped, messages and pieces under way are lost, and copies have ended.
        """
        dropped = tuple([key for key, sequence in self.sequences.items() if sequence.decodes_nowhere])
        self.do(self.machine.drop_all_but_decoding())
        self._turn()
        self.pieces.cut_off(self.instance_id)
        self.commands.clear()
        self.events.clear()
        residents = tuple(
            Resident(
                request_id=key[0],
                epoch=key[1],
                gateway_id=gateway_of[key],
                num_blocks=sequence.num_blocks,
                num_context_tokens=self.num_tokens(key) if key in self.machine.residents else sequence.num_tokens,
                decoding=sequence.is_decoding or sequence.has_lost_range,
                max_total_tokens=0 if sequence.length is None else sequence.length.max_total_tokens,
                transfer_id=sequence.received_by,
                granules=self.machine.cache.reported(sequence.prefix),
                members=sequence.members,
                part=sequence.part,
            )
            for key, sequence in self.sequences.items()
        )
        return InstanceJoined(
            replace(self.profile, role=self.machine.role),
            residents,
            stopping=not self.machine.holding.admits,
            kept=self.machine.cache.granules,
            jumps=self.machine.cache.jumps,
            states=self.machine.cache.reported_states,
            offloaded=self.machine.cache.offloaded,
            dropped=dropped,
        )

    # --- what the machine asks for ---

    def _length_of(self, key: RequestKey) -> Length:
        most = self.max_total_of.get(key, 0)
        return Length(most or _FOREVER, 1, most, self.chain_of.get(key, ()))

    def _turn(self) -> None:
        """Let residents change if no step runs."""
        if not self.running:
            self.do(self.machine.turn())

    def do(self, effects: list[Effect]) -> None:
        """Carry out the effects of the machine, in order."""
        for effect in effects:
            if not isinstance(effect, tuple):
                self.events.append(effect)
                continue
            match effect:
                case ResidentsChange():
                    self._turn()
                case Regrouped(sequence=sequence, known=known):
                    self._regroup(sequence, is_new=known is None)
                case WaitNoLonger(sequence=sequence, group=group) if sequence.leads:
                    num_tokens = self.members[sequence.key].num_tokens
                    self.events.append(GroupPrefix(self.instance_id, *sequence.key, num_tokens, len(group.lost_ids)))
                case Computed(sequence=sequence, chunk=chunk) if sequence.prompt.group is not None:
                    self.members[sequence.key].compute(chunk)
                case StopSending(sequence=sequence):
                    assert sequence.key not in self.landed, f"{sequence.key} goes on here, and is decoded elsewhere"
                case PauseSending(sequence=sequence, transfer=transfer):
                    self.hear(CopyPaused(sequence.key, transfer.transfer_id))
                case Forget(sequence=sequence):
                    self.landed.discard(sequence.key)
                case Refused(command=command, reason=reason):
                    raise AssertionError(f"{self.instance_id} refuses {command}: {reason}")
                case _:
                    # Tests trigger the rest.
                    pass

    def _regroup(self, sequence: Sequence, *, is_new: bool) -> None:
        key, group = sequence.key, sequence.prompt.group
        assert group is not None, f"{key} has no group"
        if not is_new:
            self.members[key].regroup(group)
            return
        member = ModelledMember(key, group, self.instance_id, self.profile.kv_layout.block_size, self.pieces)
        self.members[key] = member
        member.begin(sequence.prompt.num_computed_tokens)
