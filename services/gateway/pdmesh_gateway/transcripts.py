"""All transcripts of a gateway, and delivery of the instances' token streams to them.

All of this is synchronous and runs on the event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pdmesh.errors import RequestRejected
from pdmesh.model import Epoch, InstanceId, RequestId
from pdmesh.wire.messages import PromptLogprobs, StreamHandover, TokenMessage, TokenOut
from pdmesh_gateway.request_transcript import Transcript


class Transcripts:
    """All transcripts of this gateway, by request."""

    def __init__(self) -> None:
        self._by_id: dict[RequestId, Transcript] = {}
        #: Arithmetic classes, also of instances that have gone: a few words for each.
        self._arithmetic: dict[InstanceId, str] = {}
        #: Open token streams by instance.
        self._num_open: Counter[InstanceId] = Counter()
        #: Value of `num_changes` when an instance's last stream ended.
        self._closed_at: dict[InstanceId, int] = {}
        #: Number of token streams opened and ended so far.
        self.num_changes = 0
        #: Number of messages for unknown requests, or for old epochs and indexes.
        self.num_stray = 0

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
        """Return the transcript if it is unfinished and in this epoch, else None."""
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
                    case StreamHandover():
                        transcript.hand_over_stream(message, source)
            except Exception as error:
                # Other requests share the frame.
                transcript.break_off(error)

    def source_opened(self, source: InstanceId, arithmetic: str) -> None:
        """Record that a worker of this arithmetic class opened its stream."""
        self._arithmetic[source] = arithmetic
        self.num_changes += 1
        self._num_open[source] += 1

    def arithmetic_of(self, transcript: Transcript) -> str:
        """Return the arithmetic class of the instance that drew the last token; empty without a token or if unknown."""
        return "" if transcript.drawn_by is None else self._arithmetic.get(transcript.drawn_by, "")

    def was_unreachable(self, transcript: Transcript) -> bool:
        """Return whether the instance whose token is missing has had no open stream since the request was submitted."""
        source = transcript.source or transcript.silent_source
        if source is None or self._num_open[source]:
            return False
        return self._closed_at.get(source, 0) <= transcript.submitted_at_change

    def source_lost(self, source: InstanceId, *, was_silent: bool = False) -> None:
        """Record that a worker's stream broke, or was closed because it ``was_silent``.

        Requests that wait for its tokens are resumed unless the stream returns in time.
        """
        self.num_changes += 1
        self._num_open[source] -= 1
        if self._num_open[source] <= 0:
            del self._num_open[source]
            self._closed_at[source] = self.num_changes
        for transcript in self._by_id.values():
            if transcript.source == source:
                transcript.suspect(transcript.break_grace_s(was_silent=was_silent))

    def fail_all(self, error: RequestRejected) -> None:
        """Fail all requests, because the gateway is stopping."""
        for transcript in self._by_id.values():
            transcript.fail(error)

    def waiting(self) -> tuple[tuple[RequestId, Epoch], ...]:
        """Return ids and epochs of the submitted, unfinished requests, for the registration with a scheduler."""
        return tuple(
            (t.request_id, t.epoch) for t in self._by_id.values() if not t.finished and t.submitted_on is not None
        )

    def unbegun(self, scheduler_id: str) -> tuple[RequestId, ...]:
        """Return the requests sent to this scheduler that no instance has begun to answer: the stream may have lost
        them.
        """
        return tuple(t.request_id for t in self.unopened() if t.submitted_to == scheduler_id)

    def unopened(self) -> list[Transcript]:
        """Return the unfinished transcripts that no instance is known to have begun to answer in their epoch."""
        return [t for t in self._by_id.values() if not t.finished and t.source is None]
