"""What an instance is in: what owns it and says when things happen, and the other members of its groups."""

from __future__ import annotations

from typing import Protocol

from pdmesh.model import RequestKey
from pdmesh.plans import ChunkPlan, PrefillGroup, StepPlan
from pdmesh_lab.sim.held import Held


class Surroundings(Protocol):
    """Hears at once what commands let happen, and answers for the KV of groups."""

    def planned(self, plan: StepPlan) -> None:
        """Hear of a plan that can begin, in its turn."""
        ...

    def admitted(self, held: Held) -> None:
        """Hear of a request whose prompt is to be computed here, and whose first token is sampled here."""
        ...

    def stirs(self) -> None:
        """Hear that residents join, leave or go on before the next step."""
        ...

    def began_to_decode(self, held: Held) -> None: ...

    def stood(self, key: RequestKey, joined_step: int) -> None:
        """Hear of a resident that takes part in no step any more, as `Residents` says it."""
        ...

    def computed(self, held: Held, chunk: ChunkPlan, *, ends: bool) -> None:
        """Hear of a chunk whose KV is complete; ``ends``: with its token the generation does."""
        ...

    def sends(self, held: Held) -> None:
        """Hear of a grant: KV of the request may go to another instance."""
        ...

    def stops_sending(self, held: Held) -> None:
        """Hear that no more of it goes there, for now or for good."""
        ...

    def forgets(self, held: Held) -> None:
        """Hear that the request ends here: nothing of it comes or goes any more."""
        ...

    # --- prompts that several instances compute ---

    def regrouped(self, held: Held, known: PrefillGroup | None) -> None:
        """Hear of other members of ``held.group`` than those ``known`` before."""
        ...

    def gave_up(self, held: Held) -> None:
        """Hear that plans of ``held.given_up`` wait no more."""
        ...

    def has_before(self, held: Held, chunk: ChunkPlan) -> bool:
        """Whether all KV is here that a group's chunk attends to."""
        ...

    def num_present_tokens(self, held: Held) -> int:
        """Return how many tokens of a group's prompt, from its start, have KV here."""
        ...
