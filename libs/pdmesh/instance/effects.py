"""Effects that an instance machine asks its owner to carry out, in order, and events of copies that the owner reports.

An event for the scheduler is an effect, too: the owner sends the event.
"""

from __future__ import annotations

from typing import NamedTuple

from pdmesh.core.commands import ExpectCopy, InstanceCommand
from pdmesh.core.events import InstanceEvent
from pdmesh.instance.sequence import Sequence
from pdmesh.model import InstanceId, RequestKey, Then, TransferId
from pdmesh.plans import ChunkPlan, PrefillGroup, StepPlan, TransferPlan


class Planned(NamedTuple):
    """A plan was queued."""

    plan: StepPlan


class Admitted(NamedTuple):
    """This instance computes a prompt, and draws its first token."""

    sequence: Sequence


class Regrouped(NamedTuple):
    """The group of a prompt has other members than the ``known`` ones; None: the group is new here."""

    sequence: Sequence
    known: PrefillGroup | None


class WaitNoLonger(NamedTuple):
    """A member was lost: end the steps that wait for its KV. A leader reports how much of the prompt is here."""

    sequence: Sequence
    group: PrefillGroup


class Computed(NamedTuple):
    """The KV of a chunk is complete. ``ends``: the generation ends with the chunk's token."""

    sequence: Sequence
    chunk: ChunkPlan
    ends: bool


class Expect(NamedTuple):
    """Open the receiving side of a copy, before the report of the reserved blocks."""

    sequence: Sequence
    command: ExpectCopy


class Rehomed(NamedTuple):
    """A context may soon decode on ``home_id``: answer questions about its range from there, too."""

    sequence: Sequence
    home_id: InstanceId


class SendKv(NamedTuple):
    """Send KV of a sequence to the destinations of ``transfer``; ``is_renewed``: a new receiver."""

    sequence: Sequence
    transfer: TransferPlan
    is_renewed: bool = False


class StopSending(NamedTuple):
    """Stop sending KV of a sequence to the destinations of ``transfer``."""

    sequence: Sequence
    transfer: TransferPlan


class PauseSending(NamedTuple):
    """Stop sending KV of a sequence until the next grant, and answer by `CopyPaused`."""

    sequence: Sequence
    transfer: TransferPlan


class BeganToDecode(NamedTuple):
    """A sequence draws tokens from the next step on."""

    sequence: Sequence


class Froze(NamedTuple):
    """A moving sequence is paused until the rest of its KV is sent."""

    sequence: Sequence


class ResidentsChange(NamedTuple):
    """Residents join, leave or continue before the next step."""


class Stood(NamedTuple):
    """A resident is in no further step; ``joined_step`` is the number of its first step."""

    key: RequestKey
    joined_step: int


class Forget(NamedTuple):
    """A sequence ends here, and so must all its copies."""

    sequence: Sequence


class Refused(NamedTuple):
    """A command does not fit the state, and changed nothing. Scheduler and instance disagree."""

    command: InstanceCommand
    reason: str


#: Effects that only the owner of a machine handles.
OwnerEffect = (
    Planned
    | Admitted
    | Regrouped
    | WaitNoLonger
    | Computed
    | Expect
    | Rehomed
    | SendKv
    | StopSending
    | PauseSending
    | BeganToDecode
    | Froze
    | ResidentsChange
    | Stood
    | Forget
    | Refused
)
Effect = InstanceEvent | OwnerEffect


class CopyLanded(NamedTuple):
    """The expected KV of a sequence is here, with ``num_tokens`` of prompt and output."""

    key: RequestKey
    num_tokens: int
    num_bytes: int
    duration_s: float


class CopySent(NamedTuple):
    """A destination has acknowledged a whole copy.

    ``waited_s``: seconds that a stream waited for the end of the copy.
    ``sent_s``: seconds on the way between hosts, to ``destination_id`` and by ``carrier``; 0: unknown.
    """

    key: RequestKey
    then: Then
    num_bytes: int
    duration_s: float
    waited_s: float = 0.0
    sent_s: float = 0.0
    destination_id: InstanceId | None = None
    carrier: str = ""


class CopyPaused(NamedTuple):
    """No piece of a copy is on its way until the next grant."""

    key: RequestKey
    transfer_id: TransferId


class CopyFailed(NamedTuple):
    """A copy failed; ``then`` is None for a copy to this instance."""

    key: RequestKey
    then: Then | None
    reason: str


class CopyCaughtUp(NamedTuple):
    """A copy has little left to send: the sequence may pause for the rest."""

    key: RequestKey


class CopyCommitted(NamedTuple):
    """The last message of a move is on its way: the destination may begin."""

    key: RequestKey


CopyEvent = CopyLanded | CopySent | CopyPaused | CopyFailed | CopyCaughtUp | CopyCommitted
