"""An instance machine that only counts blocks and tokens, for the simulator and the laws."""

from __future__ import annotations

from collections.abc import Callable, Collection

from pdmesh.instance.effects import Effect
from pdmesh.instance.holding import Holding
from pdmesh.instance.machine import InstanceMachine
from pdmesh.instance.planned_steps import Steps
from pdmesh.instance.residents import Length
from pdmesh.instance.sequence import Sequence
from pdmesh.model import FinishReason, InstanceId, InstanceProfile, PartMember, PrefixHashes, RequestKey


class CountedMachine(InstanceMachine):
    """Counting machine of one instance. ``length_of`` returns the length of a request."""

    def __init__(self, profile: InstanceProfile, length_of: Callable[[RequestKey], Length]) -> None:
        self.holding = holding = Holding(profile, length_of)
        self.steps = steps = Steps(holding)
        self.residents = holding.residents
        self.cache = holding.cache
        self.own = holding.own
        super().__init__(holding, steps, profile.role)

    # --- copies ---

    def end_copies(self) -> list[Effect]:
        """Note that no copy is under way, free the blocks that copies kept in quarantine, and return the effects.

        Later releases free their blocks at once, until ``holding.copies_run`` is set again.
        """
        self.holding.end_copies()
        return self.done()

    def lose_member(self, instance_id: InstanceId) -> list[Effect]:
        """Continue without an instance, which may have held ranges."""
        for sequence in list(self.sequences.values()):
            numbers = [number for number, each in enumerate(sequence.members) if each.instance_id == instance_id]
            if numbers and (sequence.next_members is None or instance_id in _ids(sequence.next_members)):
                self._spreading.lose_members(sequence, numbers)
        return self.done()

    def lose_offloaded(self, granules: PrefixHashes) -> list[Effect]:
        """Lose granules of the offload tier."""
        self.holding.lose_offloaded(granules)
        return self.done()

    # --- steps ---

    def turn(self) -> list[Effect]:
        """Let residents join and leave, between two steps."""
        self.steps.turn()
        return self.done()

    def begin_step(self) -> list[Effect]:
        """Begin the next plan's step, and append it to ``steps.running``."""
        self.steps.begin()
        return self.done()

    def end_step(
        self,
        uncomputed: Collection[RequestKey] = (),
        *,
        duration_s: float = 0.0,
        began_s: float = 0.0,
        ended_s: float = 0.0,
        ended_by_first_token: bool = False,
    ) -> list[Effect]:
        """End the running step. Chunks of ``uncomputed`` were not computed, because earlier KV did not come.

        With ``ended_by_first_token``, generations end with the first token.
        """
        self.steps.end(
            uncomputed,
            duration_s=duration_s,
            began_s=began_s,
            ended_s=ended_s,
            ended_by_first_token=ended_by_first_token,
        )
        return self.done()

    def make_own_steps(self, num_steps: int, *, duration_s: float, began_s: float, ended_s: float) -> list[Effect]:
        """Make decode steps without a plan: at most `Residents.steps_left`, and at most `OwnSteps.num_left`."""
        self.steps.make_own(num_steps, duration_s=duration_s, began_s=began_s, ended_s=ended_s)
        return self.done()

    def draw(self, num_steps: int) -> list[Effect]:
        """Give every resident a token for each step, and report no step."""
        self.steps.draw(num_steps)
        return self.done()

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        num_output_tokens: int | None = None,
        drawn: PrefixHashes | None = None,
    ) -> list[Effect]:
        """End a generation with its full length, or with ``num_output_tokens`` (`Steps.finish`)."""
        self.steps.finish(sequence, reason, num_output_tokens, drawn)
        return self.done()

    # --- the scheduler ---

    def report_load(self) -> list[Effect]:
        self.holding.report_load()
        return self.done()

    def drop_all_but_decoding(self) -> list[Effect]:
        """End every copy, and drop all plans and all sequences that do not decode."""
        self.holding.end_copies()
        effects = super().drop_all_but_decoding()
        self.cache.drop_headless()
        return effects


def _ids(members: tuple[PartMember, ...]) -> list[InstanceId]:
    return [member.instance_id for member in members]
