"""A transcript: what the gateway owns of a request, and the laws by which a token joins one.

A token is delivered if its epoch is current, its index is the next one, and it comes from the instance whose turn it
is: an epoch belongs to whoever opens it, and passes to another only if the one whose turn it was has named it with its
last token (`TokenOut.next_instance_id`). Until that one has spoken, the one that named it may name another (`TurnOver`:
the receiver of its KV failed). An older epoch or index is dropped. A later index waits for the missing ones:
the first token comes from the prefill instance and the second from the decode instance, on another stream, so they can
overtake each other. If what is missing does not come within a grace period it is lost, and the request is resumed from
its transcript under the next epoch. So it is if log-probabilities of its prompt's tokens are missing when a token
comes: they come before it, on the same stream. Weights of one identity draw all tokens of a transcript: tokens of
others are dropped.

Everything here is synchronous and belongs to the event loop.
"""

from __future__ import annotations

import array
from collections.abc import Callable
from dataclasses import dataclass, field

from pdmesh.errors import RequestRejected
from pdmesh.metrics import NO_SLO, Slo
from pdmesh.model import Epoch, GatewayId, InstanceId, RequestId, SamplingParams
from pdmesh.wire.messages import Generation, PromptLogprobs, TokenLogprobs, TokenOut, TurnOver, pack_token_ids
from pdmesh_gateway.mailbox import Mailbox
from pdmesh_gateway.prompt_prefixes import PromptPrefix

#: Tokens of one instance that wait for an earlier one. More than that and the earlier one is lost: its request would be
#: resumed anyway.
MAX_AHEAD = 256

#: Instances whose tokens wait. There are two, one to open an epoch and one to go on, unless something is wrong.
MAX_SOURCES_AHEAD = 4

FIRST_EPOCH = Epoch(0)

#: The blame that a request may get for restarts, without progress in between, before its client is told to try again.
#: What kills each instance that computes it, alone, has killed four by then.
MAX_BLAME = 3.0

#: As many tokens may be drawn by computing the prompt again, where its decoding is what fails: they are no progress.
NO_PROGRESS_TOKENS = 1

#: How long a missing token may be late before its request is resumed: far more than two streams of one mesh differ.
STALL_GRACE_S = 2.0

#: It doubles with each such restart without a token, up to this: where an instance's way to a gateway is broken, each
#: computes the prompt again, and those up to `MAX_BLAME` must outlast what breaks a network for a while.
MAX_STALL_GRACE_S = 30.0

#: The same once the stream that it would come on broke: an instance that lives opens it again within a tenth of this.
BREAK_GRACE_S = 0.5

#: The same where nothing had come on it for a while: then it is the way that is broken.
SILENCE_GRACE_S = 0.2


@dataclass(slots=True, kw_only=True, eq=False)
class Transcript:
    """One generation: the prompt and the tokens delivered so far."""

    request_id: RequestId
    gateway_id: GatewayId
    token_address: str
    prompt: bytes  # packed token ids
    params: SamplingParams
    mailbox: Mailbox[Transcript]
    clock: Callable[[], float]
    prefix: PromptPrefix | None = None
    priority: int = 0
    slo: Slo = NO_SLO
    tenant: str = ""
    share: int = 1
    num_tokens_before: int = 0  # of the prompts of other choices of the same request, sent before
    traceparent: str | None = None
    label: str = ""  # what its client calls it
    epoch: Epoch = FIRST_EPOCH
    output: array.array[int] = field(default_factory=lambda: array.array("i"))
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict[int, TokenLogprobs])
    #: Delivered, not yet taken by the consumer.
    inbox: list[TokenOut] = field(default_factory=list[TokenOut])
    failure: Exception | None = None
    finished: bool = False  # the last token was delivered, or the request failed, or its consumer has enough
    #: A token is known or suspected to be missing: when the request is resumed, unless it comes before.
    resume_at_s: float | None = None
    #: Which connection to the scheduler this epoch was submitted on; None while it waits for one.
    submitted_on: int | None = None
    submitted_to: str | None = None  # which scheduler process was last sent this epoch
    submitted_at_change: int = 0  # `Transcripts.num_changes` when this epoch was submitted
    unheard: InstanceId | None = None  # which instance drew what did not come, of one that is resumed for that
    all_drawn: bool = False  # its instance says that there will be no more tokens: what is not here is late or lost
    source: InstanceId | None = None  # whose stream the next token must come from; None until the epoch is opened
    giver: InstanceId | None = None  # which named the source, until that speaks
    drawn_by: InstanceId | None = None  # which instance drew the last token
    weights: str = ""  # identity of the weights that drew all tokens; empty: there are none, or it was not said
    num_cached_tokens: int = 0  # of the prompt: their KV was there when its first token was drawn
    num_dropped: int = 0
    num_restarts: int = 0
    num_preemptions: int = 0  # of these, for want of memory
    num_fruitless: int = 0  # restarts since the last token that it may have caused
    blame: float = 0.0  # for restarts since it last made progress
    num_drawn: int = 0  # tokens delivered in this epoch
    is_posted: bool = False
    began_s: float = field(init=False)
    _ahead: dict[InstanceId, dict[int, TokenOut]] = field(default_factory=dict[InstanceId, dict[int, TokenOut]])
    _weights_of: dict[InstanceId, str] = field(
        default_factory=dict[InstanceId, str]
    )  # identity by source, in this epoch
    _logprobs_weights: str = ""  # identity that computed ``prompt_logprobs``
    _num_turns: dict[InstanceId, int] = field(default_factory=dict[InstanceId, int])  # the last `TurnOver.num` of each

    def __post_init__(self) -> None:
        self.began_s = self.clock()

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt) // 4

    @property
    def may_be_refused(self) -> bool:
        """Whether it ends for want of room: not while another choice may have given its client a part of the answer.

        One that was resumed is not refused for that by a scheduler, so it is not resumed for that again.
        """
        return self.epoch > FIRST_EPOCH or not self.mailbox.has_begun

    @property
    def stall_grace_s(self) -> float:
        """How late a missing token may be."""
        return min(STALL_GRACE_S * (1 << self.num_fruitless), MAX_STALL_GRACE_S)

    def break_grace_s(self, *, was_silent: bool) -> float:
        """How late the next token may be once the stream that it was to come on broke, or was given up.

        What had only been named may have nothing yet: then the one that named it, and still has all, names another.
        """
        if self.giver not in (None, self.source):
            return STALL_GRACE_S
        return SILENCE_GRACE_S if was_silent else BREAK_GRACE_S

    @property
    def age_s(self) -> float:
        """Seconds since a resumed request began, so that it keeps its place in the queue; 0 for a new one."""
        return self.clock() - self.began_s if self.epoch > FIRST_EPOCH else 0.0

    def generation(self, arithmetic: str = "") -> Generation:
        """What a worker needs to go on from here; ``arithmetic`` is the class that its last token was drawn in."""
        output = pack_token_ids(self.output)
        prefix = self.prefix
        if prefix is not None and self.output and prefix.weights != self.weights:
            prefix = None  # other weights compute the KV that these hashes name
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
        """A token arrived, drawn with ``weights``: deliver it, keep it for later, or drop it."""
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
        """Whether tokens of an instance are drawn with the weights that drew those before."""
        return not self.output or self._weights_of.get(source, "") == self.weights

    def give_turn(self, turn: TurnOver, source: InstanceId) -> None:
        """The instance whose turn it is, or that gave it away, names the one that goes on."""
        if turn.epoch != self.epoch or self.finished or turn.num <= self._num_turns.get(source, -1):
            self.num_dropped += 1
            return  # it is old, or was said again after a stream broke
        self._num_turns[source] = turn.num
        if turn.index == len(self.output) and source in (self.source, self.giver):
            self.source, self.giver = turn.next_instance_id, source
            self._deliver_ahead()
        else:
            self.num_dropped += 1
            self.suspect(0.0)

    def offer_prompt_logprobs(self, message: PromptLogprobs, weights: str = "") -> None:
        """Log-probabilities of prompt tokens, from any of those that compute them; the first that come count.

        The same ones come again after a restart, or when a chunk is computed again.
        """
        if message.epoch != self.epoch or self.finished or not 1 <= message.start < self.num_prompt_tokens:
            self.num_dropped += 1
            return
        if weights != self._logprobs_weights:
            self.prompt_logprobs.clear()  # other weights compute the prompt again
            self._logprobs_weights = weights
        for position, logprobs in enumerate(message.logprobs, message.start):
            if position < self.num_prompt_tokens:
                self.prompt_logprobs.setdefault(position, logprobs)
        if self._ahead and not self._lacks_prompt_logprobs:
            self._deliver_ahead()

    @property
    def _lacks_prompt_logprobs(self) -> bool:
        """Some are late or lost, once a token is here: each comes with its chunk, from whoever computed that."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    def suspect(self, grace_s: float) -> None:
        """What is still to come may be lost: its stream broke, or it should be here by now."""
        resume_at_s = self.clock() + grace_s
        if not self.finished and (self.resume_at_s is None or resume_at_s < self.resume_at_s):
            self.resume_at_s = resume_at_s
            self.mailbox.put(self)

    def restart(self, *, blame: float) -> bool:
        """Move to the next epoch, so that `generation` resumes the request. False if it got too much of the blame.

        ``blame`` is this restart's, as in `pdmesh.core.commands.Restart`.
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
        self.source = self.giver = None
        self._num_turns.clear()
        self._weights_of.clear()
        return True

    def fail(self, error: RequestRejected) -> None:
        """The request will not go on."""
        if not self.finished:
            self.failure = error
            self.finished = True
            self.mailbox.put(self)

    def break_off(self, error: Exception) -> None:
        """What belongs to this request alone failed in a way nobody foresaw: its own task raises it, and cancels."""
        if self.failure is None and not self.finished:
            self.failure = error
            self.mailbox.put(self)

    def take(self) -> list[TokenOut]:
        """Tokens delivered since the last call."""
        tokens, self.inbox = self.inbox, []
        return tokens

    def _keep(self, token: TokenOut, source: InstanceId) -> None:
        """A token came before one that it follows."""
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
        """What waited for the token, or the turn, that has just come."""
        while self._ahead and not self.finished and (following := self._pop_ahead()) is not None:
            self._deliver(following, self.source)
        is_missing = (self._ahead or self.all_drawn) and not self.finished
        self.resume_at_s = self.clock() + STALL_GRACE_S if is_missing else None
        self.mailbox.put(self)

    def _pop_ahead(self) -> TokenOut | None:
        """The next token, if all that comes before it is here, too; what can no longer be next is dropped."""
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
        self.source, self.giver = token.next_instance_id or source, source if token.next_instance_id else None
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
