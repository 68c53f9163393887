"""Transcripts: the gateway's state of a request, and the rules by which a token is added.

* A token is delivered if its epoch is current, its index is the next one, and its instance has the turn.
* The first instance to speak in an epoch has the turn. The turn passes to the instance that is named with the last
  token (`TokenOut.next_instance_id`). Until the named instance speaks, the previous one may name another
  (`StreamHandover`), because the receiver of its KV failed.
* A token of an older epoch or index is dropped.
* A token of a later index waits for the missing ones. The first token comes from the prefill instance and the second
  from the decode instance, on another stream, so they may overtake each other.
* If a missing token does not arrive within a grace period, it is lost. The request is resumed from its transcript
  under the next epoch.
* The same holds if log-probabilities of prompt tokens are missing when a token arrives, because these precede the
  token on the same stream.
* Weights of one identity draw all tokens of a transcript: tokens of other weights are dropped.

All of this is synchronous and runs on the event loop.
"""

from __future__ import annotations

import array
from collections.abc import Callable
from dataclasses import dataclass, field

from pdmesh.errors import RequestRejected
from pdmesh.metrics import NO_SLO, Slo
from pdmesh.model import Epoch, GatewayId, InstanceId, RequestId, SamplingParams, SessionName
from pdmesh.wire.messages import Generation, PromptLogprobs, StreamHandover, TokenLogprobs, TokenOut, pack_token_ids
from pdmesh_gateway.mailbox import Mailbox
from pdmesh_gateway.prompt_prefixes import PromptPrefix

#: Limit of one instance's tokens that wait for an earlier one. Beyond it the earlier one counts as lost, and its
#: request would be resumed anyway.
MAX_AHEAD = 256

#: Limit of instances whose tokens wait. Normally there are two: one that opens an epoch and one that continues.
MAX_SOURCES_AHEAD = 4

FIRST_EPOCH = Epoch(0)

#: Limit of a request's blame for restarts without progress; beyond it the client is told to try again. A request that
#: alone kills each instance that computes it has killed four by then.
MAX_BLAME = 3.0

#: Number of tokens that do not count as progress: computing the prompt again may draw them although decoding fails.
NO_PROGRESS_TOKENS = 1

#: Time that a missing token may be late before its request is resumed. Two streams of one mesh differ by far less.
STALL_GRACE_S = 2.0

#: The grace doubles with each such restart without a token, up to this limit. If an instance's way to the gateway is
#: broken, each attempt computes the prompt again. The attempts up to `MAX_BLAME` should outlast a short network
#: failure.
MAX_STALL_GRACE_S = 30.0

#: The grace after the token's stream broke. An instance that is alive reopens the stream within a tenth of this.
BREAK_GRACE_S = 0.5

#: The grace after the stream had been silent for a while, which means that the way is broken.
SILENCE_GRACE_S = 0.2


@dataclass(slots=True, kw_only=True, eq=False)
class Transcript:
    """A generation: the prompt, the tokens delivered so far, and the state of their delivery.

    ``prompt`` is packed token ids. ``label`` is the client's name for the request. ``finished``: the last token was
    delivered, the request failed, or the consumer has enough.

    * ``num_tokens_before``: prompt tokens of this request's other choices that were submitted before.
    * ``submitted_to``: the scheduler process that this epoch was last sent to.
    * ``submitted_at_change``: `Transcripts.num_changes` when this epoch was submitted.
    * ``silent_source``: the instance that drew a token that did not arrive, for a request resumed for this reason.
    * ``all_drawn``: the instance has reported its last token, so that any missing token is late or lost.
    * ``source``: the instance whose stream the next token must come from; None until the epoch is opened.
    * ``previous_source``: the instance that passed the turn to ``source``, until ``source`` speaks.
    * ``drawn_by``: the instance that drew the last token.
    * ``weights``: identity of the weights that drew all tokens; empty without tokens or if unknown.
    * ``num_cached_tokens``: prompt tokens that were cached when the first token was drawn.
    * ``num_preemptions``: restarts for lack of memory, a part of ``num_restarts``.
    * ``num_fruitless``: blamed restarts since the last token.
    * ``blame``: blame for restarts since the last progress.
    * ``num_drawn``: tokens delivered in this epoch.
    """

    request_id: RequestId
    gateway_id: GatewayId
    token_address: str
    prompt: bytes
    params: SamplingParams
    mailbox: Mailbox[Transcript]
    clock: Callable[[], float]
    prefix: PromptPrefix | None = None
    priority: int = 0
    slo: Slo = NO_SLO
    tenant: str = ""
    share: int = 1
    num_tokens_before: int = 0
    traceparent: str | None = None
    label: str = ""
    session: SessionName | None = None
    epoch: Epoch = FIRST_EPOCH
    output: array.array[int] = field(default_factory=lambda: array.array("i"))
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict[int, TokenLogprobs])
    #: Delivered tokens that the consumer has not taken.
    inbox: list[TokenOut] = field(default_factory=list[TokenOut])
    failure: Exception | None = None
    finished: bool = False
    #: The time at which the request is resumed, because a token is known or suspected to be missing.
    resume_at_s: float | None = None
    #: Number of the scheduler connection on which this epoch was submitted; None while it waits for one.
    submitted_on: int | None = None
    submitted_to: str | None = None
    submitted_at_change: int = 0
    silent_source: InstanceId | None = None
    all_drawn: bool = False
    source: InstanceId | None = None
    previous_source: InstanceId | None = None
    drawn_by: InstanceId | None = None
    weights: str = ""
    num_cached_tokens: int = 0
    num_dropped: int = 0
    num_restarts: int = 0
    num_preemptions: int = 0
    num_fruitless: int = 0
    blame: float = 0.0
    num_drawn: int = 0
    is_posted: bool = False
    began_s: float = field(init=False)
    _ahead: dict[InstanceId, dict[int, TokenOut]] = field(default_factory=dict[InstanceId, dict[int, TokenOut]])
    #: Identity of the weights by source, in this epoch.
    _weights_of: dict[InstanceId, str] = field(default_factory=dict[InstanceId, str])
    #: Identity of the weights that computed ``prompt_logprobs``.
    _logprobs_weights: str = ""
    #: The last `StreamHandover.num` of each instance.
    _num_turns: dict[InstanceId, int] = field(default_factory=dict[InstanceId, int])

    def __post_init__(self) -> None:
        self.began_s = self.clock()

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt) // 4

    @property
    def may_be_refused(self) -> bool:
        """Whether a rejection for lack of room fails the request.

        In its first epoch a request is resumed instead if its client may already have a part of the answer, from
        another choice. A scheduler does not refuse a resumed request for lack of room.
        """
        return self.epoch > FIRST_EPOCH or not self.mailbox.has_begun

    @property
    def stall_grace_s(self) -> float:
        """Time that a missing token may be late."""
        return min(STALL_GRACE_S * (1 << self.num_fruitless), MAX_STALL_GRACE_S)

    def break_grace_s(self, *, was_silent: bool) -> float:
        """Return how late the next token may be after its stream broke, or was closed because it ``was_silent``.

        The grace is longer if the source was named and has not spoken: it may have no KV yet, and the previous
        source can name another.
        """
        if self.previous_source not in (None, self.source):
            return STALL_GRACE_S
        return SILENCE_GRACE_S if was_silent else BREAK_GRACE_S

    @property
    def age_s(self) -> float:
        """Seconds since a request began that was submitted before, so that it keeps its place in the queue; else 0."""
        return self.clock() - self.began_s if self.epoch > FIRST_EPOCH or self.submitted_to else 0.0

    def generation(self, arithmetic: str = "") -> Generation:
        """Return the message that lets a worker continue from here.

        ``arithmetic`` is the class in which the last token was drawn.
        """
        output = pack_token_ids(self.output)
        prefix = self.prefix
        if prefix is not None and self.output and prefix.weights != self.weights:
            # Other weights compute the KV that these hashes name.
            prefix = None
        return Generation(
            request_id=self.request_id,
            epoch=self.epoch,
            gateway_id=self.gateway_id,
            token_address=self.token_address,
            token_ids=self.prompt + output if output else self.prompt,
            num_prompt_tokens=self.num_prompt_tokens,
            params=self.params,
            traceparent=self.traceparent,
            label=self.label,
            arithmetic=arithmetic,
            weights=self.weights,
            prefix_root=b"" if prefix is None else prefix.root,
            prefix=() if prefix is None else prefix.with_output(output),
            prefix_weights="" if prefix is None else prefix.weights,
        )

    def offer(self, token: TokenOut, source: InstanceId, weights: str = "") -> None:
        """Deliver, keep or drop an arrived token that ``source`` drew with ``weights``."""
        num_next = len(self.output)
        is_turn = self.source is None or self.source == source
        if token.epoch != self.epoch or self.finished or (token.token_id is not None and token.index < num_next):
            self.num_dropped += 1
        elif self._weights_of.setdefault(source, weights) != weights or not self._may_follow(source):
            self.num_dropped += 1
            self.suspect(0.0)
        elif token.token_id is not None and (token.index > num_next or not is_turn):
            self._keep(token, source)
        elif not is_turn:
            self.num_dropped += 1
        elif token.token_id is not None and self._lacks_prompt_logprobs:
            self.source = source
            self._keep(token, source)
            self.suspect(self.stall_grace_s)
        else:
            self._deliver(token, source)
            self._deliver_ahead()

    def _may_follow(self, source: InstanceId) -> bool:
        """Return whether an instance draws tokens with the weights of the tokens before."""
        return not self.output or self._weights_of.get(source, "") == self.weights

    def hand_over_stream(self, turn: StreamHandover, source: InstanceId) -> None:
        """Record that ``source``, which has or had the turn, names the instance that continues.

        An old or repeated message is counted as dropped. A message at another token, or from another source, is
        dropped, too, and the transcript is suspect at once.
        """
        if turn.epoch != self.epoch or self.finished or turn.num <= self._num_turns.get(source, -1):
            self.num_dropped += 1
            # The message is old, or was repeated after a stream broke.
            return
        self._num_turns[source] = turn.num
        if turn.index == len(self.output) and source in (self.source, self.previous_source):
            self.source, self.previous_source = turn.next_instance_id, source
            self._deliver_ahead()
        else:
            self.num_dropped += 1
            self.suspect(0.0)

    def offer_prompt_logprobs(self, message: PromptLogprobs, weights: str = "") -> None:
        """Record log-probabilities of prompt tokens, from any instance that computes them.

        For each token, the first ones count: a restart repeats them, and so does a chunk that is computed again. A
        message of another epoch, or about an ended request, is counted as dropped.
        """
        if message.epoch != self.epoch or self.finished or not 1 <= message.start < self.num_prompt_tokens:
            self.num_dropped += 1
            return
        if weights != self._logprobs_weights:
            # Other weights compute the prompt again.
            self.prompt_logprobs.clear()
            self._logprobs_weights = weights
        for position, logprobs in enumerate(message.logprobs, message.start):
            if position < self.num_prompt_tokens:
                self.prompt_logprobs.setdefault(position, logprobs)
        if self._ahead and not self._lacks_prompt_logprobs:
            self._deliver_ahead()

    @property
    def _lacks_prompt_logprobs(self) -> bool:
        """Whether some log-probabilities of the prompt have not arrived.

        Each chunk's come from the instance that computed it.
        """
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    def suspect(self, grace_s: float) -> None:
        """Resume the request after ``grace_s`` unless its next token is delivered before: that token may be lost.

        An earlier deadline stays, and a finished request is not resumed.
        """
        resume_at_s = self.clock() + grace_s
        if not self.finished and (self.resume_at_s is None or resume_at_s < self.resume_at_s):
            self.resume_at_s = resume_at_s
            self.mailbox.put(self)

    def restart(self, *, blame: float) -> bool:
        """Begin the request's next epoch. Return False, and begin none, if its blame exceeds `MAX_BLAME`.

        The caller submits the request again, as `generation` returns it. ``blame`` is this restart's share, as in
        `pdmesh.core.commands.Restart`. Blame adds up until the request progresses.
        """
        self.num_restarts += 1
        self.num_fruitless += blame > 0
        self.blame = blame if self.num_drawn > NO_PROGRESS_TOKENS else self.blame + blame
        if self.blame > MAX_BLAME:
            return False
        self.num_drawn = 0
        self.epoch = Epoch(self.epoch + 1)
        self._ahead.clear()
        self.resume_at_s = None
        self.submitted_on = self.submitted_to = None
        self.all_drawn = False
        self.source = self.previous_source = None
        self._num_turns.clear()
        self._weights_of.clear()
        return True

    def fail(self, error: RequestRejected) -> None:
        """Fail the request with an error for its client, unless it is finished."""
        if not self.finished:
            self.failure = error
            self.finished = True
            self.mailbox.put(self)

    def break_off(self, error: Exception) -> None:
        """Record an unexpected error of this request alone.

        The request's own task raises the error and cancels the request.
        """
        if self.failure is None and not self.finished:
            self.failure = error
            self.mailbox.put(self)

    def take(self) -> list[TokenOut]:
        """Return the tokens delivered since the last call."""
        tokens, self.inbox = self.inbox, []
        return tokens

    def _keep(self, token: TokenOut, source: InstanceId) -> None:
        """Keep a token that arrived before one that it follows; drop it beyond `MAX_AHEAD` or from too many sources."""
        ahead = self._ahead.get(source)
        if ahead is None:
            if len(self._ahead) == MAX_SOURCES_AHEAD:
                self.num_dropped += 1
                return
            ahead = self._ahead[source] = {}
        if len(ahead) < MAX_AHEAD:
            ahead[token.index] = token
            if token.index > len(self.output):
                self.suspect(self.stall_grace_s)

    def _deliver_ahead(self) -> None:
        """Deliver the early tokens that follow the token, or the turn, that has just arrived.

        If tokens are still missing, the request is resumed after `STALL_GRACE_S`.
        """
        while self._ahead and not self.finished and (following := self._pop_ahead()) is not None:
            self._deliver(following, self.source)
        is_missing = (self._ahead or self.all_drawn) and not self.finished
        self.resume_at_s = self.clock() + STALL_GRACE_S if is_missing else None
        self.mailbox.put(self)

    def _pop_ahead(self) -> TokenOut | None:
        """Return the next token if it came early and may be delivered, else None. Drop tokens that come too late."""
        num_next, following = len(self.output), None
        if self._lacks_prompt_logprobs:
            return None
        for source, ahead in list(self._ahead.items()):
            if source == self.source and self._may_follow(source):
                following = ahead.pop(num_next, None)
            for index in [index for index in ahead if index < num_next]:
                del ahead[index]
                self.num_dropped += 1
            if not ahead:
                del self._ahead[source]
        return following

    def _deliver(self, token: TokenOut, source: InstanceId | None) -> None:
        self.source, self.previous_source = token.next_instance_id or source, source if token.next_instance_id else None
        if token.token_id is not None:
            if not self.output:
                self.weights = "" if source is None else self._weights_of.get(source, "")
                self.num_cached_tokens = min(token.num_cached_tokens, self.num_prompt_tokens)
            self.output.append(token.token_id)
            self.drawn_by = source
            self.num_fruitless = 0
            self.num_drawn += 1
        self.inbox.append(token)
        self.mailbox.has_begun = True
        if token.finish_reason is not None:
            self.finished = True
