"""All transcripts of a gateway, and what their instances' token streams say to them.

Everything here is synchronous and belongs to the event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pdmesh.errors import RequestRejected
from pdmesh.model import Epoch, InstanceId, RequestId
from pdmesh.wire.messages import PromptLogprobs, TokenMessage, TokenOut, TurnOver
from pdmesh_gateway.request_transcript import Transcript


class Transcripts:
    """All transcripts of this gateway, by request."""

    def __init__(self) -> None:
        self._by_id: dict[RequestId, Transcript] = {}
        self._arithmetic: dict[InstanceId, str] = {}  # also of those that are gone: a few words for each
        self._num_open: Counter[InstanceId] = Counter()  # token streams
        self._closed_at: dict[InstanceId, int] = {}  # at which change the last stream of each ended; as many
        self.num_changes = 0  # token streams that were opened or have ended
        self.num_stray = 0  # messages for requests that are gone, or of old epochs and indices

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    def add(self, transcript: Transcript) -> None:
        self._by_id[transcript.request_id] = transcript

    def remove(self, transcript: Transcript) -> None:
        del self._by_id[transcript.request_id]
        self.num_stray += transcript.num_dropped

    def current(self, request_id: RequestId, epoch: Epoch) -> Transcript | None:
        """The transcript, if it still waits for something of this epoch."""
        transcript = self._by_id.get(request_id)
        if transcript is None or transcript.finished or transcript.epoch != epoch:
            return None
        return transcript

    def deliver(self, messages: Iterable[TokenMessage], source: InstanceId, weights: str = "") -> None:
        """Deliver one frame of a worker, which draws tokens with ``weights``."""
        by_id = self._by_id
        for message in messages:
            transcript = by_id.get(message.request_id)
            if transcript is None:
                self.num_stray += 1
                continue
            try:
                match message:
                    case TokenOut():
                        transcript.offer(message, source, weights)
                    case PromptLogprobs():
                        transcript.offer_prompt_logprobs(message, weights)
                    case TurnOver():
                        transcript.give_turn(message, source)
            except Exception as error:  # other requests share the frame
                transcript.break_off(error)

    def source_opened(self, source: InstanceId, arithmetic: str) -> None:
        """A worker of this arithmetic class opened its stream."""
        self._arithmetic[source] = arithmetic
        self.num_changes += 1
        self._num_open[source] += 1

    def arithmetic_of(self, transcript: Transcript) -> str:
        """Class of the instance that drew the last token; empty if there is none, or it did not say."""
        return "" if transcript.drawn_by is None else self._arithmetic.get(transcript.drawn_by, "")

    def was_unreachable(self, transcript: Transcript) -> bool:
        """Whether no stream from the instance whose token is missing was open at any time since it was submitted."""
        source = transcript.source or transcript.unheard
        if source is None or self._num_open[source]:
            return False
        return self._closed_at.get(source, 0) <= transcript.submitted_at_change

    def source_lost(self, source: InstanceId, *, was_silent: bool = False) -> None:
        """A worker's stream broke, or was given up since it ``was_silent``."""
        self.num_changes += 1
        self._num_open[source] -= 1
        if self._num_open[source] <= 0:
            del self._num_open[source]
            self._closed_at[source] = self.num_changes
        for transcript in self._by_id.values():
            if transcript.source == source:
                transcript.suspect(transcript.break_grace_s(was_silent=was_silent))

    def fail_all(self, error: RequestRejected) -> None:
        """The gateway stops: no request goes on."""
        for transcript in self._by_id.values():
            transcript.fail(error)

    def waiting(self) -> tuple[tuple[RequestId, Epoch], ...]:
        """What a scheduler must know after a reconnect."""
        return tuple(
            (t.request_id, t.epoch) for t in self._by_id.values() if not t.finished and t.submitted_on is not None
        )

    def unbegun(self, scheduler_id: str) -> tuple[RequestId, ...]:
        """What this scheduler was sent and no instance has begun to answer: it may be lost with the stream."""
        return tuple(t.request_id for t in self.unopened() if t.submitted_to == scheduler_id)

    def unopened(self) -> list[Transcript]:
        """Return transcripts that no instance is known to have begun to answer: what to submit to a new scheduler."""
        return [t for t in self._by_id.values() if not t.finished and t.source is None]
