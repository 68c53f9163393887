"""The vocabulary of the mesh: values that every part of pdmesh uses.

All values are pure and frozen. Times are in seconds on the clock of the code that drives the value. Sizes are in
tokens, blocks or bytes, as the name says. ``docs/terms.md`` defines the words.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final, NamedTuple, NewType

from msgspec import Meta

from pdmesh.kv_layout import GRANULE_TOKENS, KvLayout
from pdmesh.ranges import ANY_COUNT, COUNT, FINITE, SECONDS

RequestId = NewType("RequestId", str)
InstanceId = NewType("InstanceId", str)
GatewayId = NewType("GatewayId", str)

#: Number of times that a request was (re)started. A frame or piece of an older epoch is dropped.
Epoch = NewType("Epoch", int)


def request_id_of(gateway_id: GatewayId, name: str) -> RequestId:
    """Return the id of a gateway's request: ``NAME.MARK``, where the mark is the end of the gateway's id.

    The choices of one client request add ``-0``, ``-1``, … to it.
    """
    return RequestId(f"{name}.{_mark(gateway_id)}")


def is_request_of(gateway_id: GatewayId, request_id: RequestId) -> bool:
    """Return whether a request's id names this gateway."""
    return request_id.partition(".")[2].partition("-")[0] == _mark(gateway_id)


def _mark(gateway_id: GatewayId) -> str:
    return gateway_id.rpartition("-")[2]


#: A request in one of its epochs.
RequestKey = tuple[RequestId, Epoch]


#: Limit of one request's prompt, and of its output: the most that fits a frame between services. No model's context is
#: nearly as long, so a larger number is damage. Tables that grow with the longest prompt must not follow it.
MAX_REQUEST_TOKENS = 1 << 24

NumTokens = Annotated[int, Meta(ge=0, le=MAX_REQUEST_TOKENS)]
SomeTokens = Annotated[int, Meta(ge=1, le=MAX_REQUEST_TOKENS)]

#: Hash of a granule and all tokens before. Equal hashes mean equal tokens from the first on, of one model and tenant.
PrefixHash = NewType("PrefixHash", bytes)

#: Hashes of 16 bytes each.
PrefixHashes = tuple[Annotated[PrefixHash, Meta(min_length=16, max_length=16)], ...]


class Role(StrEnum):
    """Work of an instance, which can change at run time."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    @property
    def can_prefill(self) -> bool:
        return self is not Role.DECODE

    @property
    def can_decode(self) -> bool:
        return self is not Role.PREFILL


class FinishReason(StrEnum):
    """Reason why a generation ended."""

    STOP = "stop"  # an end-of-sequence token or a stop token id
    LENGTH = "length"  # max_tokens or the context length was reached
    CANCELLED = "cancelled"  # the client disconnected
    ERROR = "error"  # the instance failed; the client gets an error event


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of sampling, with the OpenAI API's defaults, or neutral ones for fields that it lacks.

    The gateway fills in ``eos_token_ids`` from the checkpoint, unless ``ignore_eos`` is set. Until ``min_tokens``
    output tokens exist, neither these nor ``stop_token_ids`` can be drawn. The gateway handles stop *strings*, because
    it has the text.

    A `temperature` of 0 is greedy, and a `top_k` of 0 keeps all tokens. `repetition_penalty` covers prompt and output,
    as in transformers; the other penalties cover output only. The counter-based generator's key is `seed` with the
    output index. `logprobs` of n reports the sampled token and the n most likely, or `logprob_token_ids` instead of
    these. `prompt_logprobs` does the same for prompt tokens (``echo`` of completions).

    An empty `grammar` (`pdmesh.grammars`) allows everything. With `allowed_token_ids`, nothing else can be drawn, not
    even an end. No sequence of `bad_token_sequences` can be completed. With `embeds`, the result is the last prompt
    token's embedding instead of tokens, and `max_tokens` is 1.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str = ""
    allowed_token_ids: tuple[int, ...] = ()
    bad_token_sequences: tuple[tuple[int, ...], ...] = ()
    logprob_token_ids: tuple[int, ...] = ()
    embeds: bool = False


#: Hash of a tenant and the name that the tenant's client gave a session.
SessionKey = NewType("SessionKey", bytes)

#: Pairs of indexes in a report of cached granules (`pdmesh.core.instances.kept_chains`).
Jumps = tuple[tuple[int, int], ...]

_SessionKey = Annotated[SessionKey, Meta(min_length=16, max_length=16)]


#: Longest lease of a session's cached KV.
MAX_LEASE_S: Final = 3600.0


class SessionName(NamedTuple):
    """The session that a request names, and the session above, if the client named that, too.

    ``is_last``: the client said that the session ends with the request. The session's KV should stay cached for
    ``lease_s`` after the request; 0: as long as any other.
    """

    key: _SessionKey
    parent: _SessionKey | None = None
    is_last: bool = False
    lease_s: Annotated[float, Meta(ge=0, le=MAX_LEASE_S)] = 0.0


class CacheUser(NamedTuple):
    """The tenant and session that use a prompt's cached KV, as the next scheduler should know them.

    ``session``, ``parent``: as in `SessionName`; None: the request names none, or the session ended with it. The
    session had ``num_turns``, with usual pauses of ``pause_s`` if these are known. Other sessions had cached
    ``num_shared_tokens`` of its first prompt. Its KV is leased for ``lease_s`` after the request.
    """

    tenant: str
    share: Annotated[int, COUNT] = 1
    session: _SessionKey | None = None
    parent: _SessionKey | None = None
    num_turns: Annotated[int, ANY_COUNT] = 0
    pause_s: Annotated[float, SECONDS] | None = None
    num_shared_tokens: Annotated[int, ANY_COUNT] = 0
    lease_s: Annotated[float, Meta(ge=0, le=MAX_LEASE_S)] = 0.0


class LastUse(NamedTuple):
    """The last use of cached granules: ``user``'s request of ``num_prompt_tokens``, which ended ``ago_s`` ago."""

    user: CacheUser
    num_prompt_tokens: NumTokens
    ago_s: Annotated[float, SECONDS]


#: Last uses of the granules in a report, and the runs of granules with one use: pairs of the index where a run begins
#: and the number of its use (`pdmesh.core.instances.last_uses`).
LastUses = tuple[tuple[LastUse, ...], tuple[tuple[int, int], ...]]

NO_USES: Final[LastUses] = ((), ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request as the scheduling core knows it: sizes, not tokens.

    A resumed request (``epoch`` > 0) counts the delivered tokens as prompt tokens, which are prefilled again. Then
    ``max_tokens`` is the number of tokens left to generate. A lower `priority` is earlier, as in vLLM.

    `tenant` is the name of the request's key, and `share` the key's weight. In line before it are `num_tokens_before`
    of other prompts of the same client request. `arithmetic` is the class of the instance that drew a resumed request's
    last token. `weights` identifies the weights that drew its tokens; empty: none were drawn. `prefix` has all full
    granules of the prompt, in order; empty: no KV is reused or cached. `prefix_weights` identifies the weights for
    which `prefix` was made. The core sets `always_moves` if no instance holds the whole prompt, so that its KV has to
    leave. `session` is a hint for placement and eviction, never for tokens.
    """

    request_id: RequestId
    epoch: Epoch
    gateway_id: GatewayId
    num_prompt_tokens: SomeTokens
    max_tokens: SomeTokens
    arrival_s: Annotated[float, FINITE]
    priority: int = 0
    slo_ttft_s: Annotated[float, SECONDS] | None = None
    slo_tpot_s: Annotated[float, SECONDS] | None = None
    tenant: str = ""
    share: Annotated[int, COUNT] = 1
    num_tokens_before: Annotated[int, ANY_COUNT] = 0
    arithmetic: str = ""
    weights: str = ""
    prefix: PrefixHashes = ()
    prefix_weights: str = ""
    always_moves: bool = False
    session: SessionName | None = None

    @property
    def max_total_tokens(self) -> int:
        """Largest number of tokens with KV at once. The last output token's KV is never written."""
        return self.num_prompt_tokens + self.max_tokens - 1

    @property
    def ends_with_prompt(self) -> bool:
        """Whether the request ends with its prompt's computation, which yields its only token or its embedding."""
        return self.max_tokens == 1 and not self.always_moves

    @property
    def chain(self) -> PrefixHashes:
        """Hashes of the prompt's full granules, which are cached once computed, and reused if cached already.

        A granule that ends with the prompt is excluded, because the last token is always computed. That granule is
        cached with the granules of the output.
        """
        return self.prefix[: (self.num_prompt_tokens - 1) // GRANULE_TOKENS]


#: Largest number of characters in a weights identity.
MAX_WEIGHTS_CHARS = 64


def short_weights(weights: str) -> str:
    """Return the first letters of a weights identity, for people; ``unknown`` for an empty one."""
    return weights[:6] or "unknown"


#: Name of a KV transfer, unique in one scheduler's life.
TransferId = NewType("TransferId", int)

#: Name that no KV transfer has.
NO_TRANSFER = TransferId(0)


class Then(StrEnum):
    """Use of copied KV at a destination."""

    DECODE = "decode"  # the sequence continues there
    HOLD = "hold"  # a range answers attention queries of the decoding instance
    KEEP = "keep"  # cached blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A step that an instance timed by itself: one chunk, decodes, or both.

    `num_decode_context_tokens` is the sum over the decodes.
    """

    num_tokens: NumTokens
    num_history_tokens: NumTokens
    num_decodes: Annotated[int, ANY_COUNT]
    num_decode_context_tokens: Annotated[int, ANY_COUNT]
    duration_s: Annotated[float, SECONDS]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputePath:
    """Kernels and data type of an instance, for people; nothing depends on them.

    `kernels` names their source and the processor level, such as "native avx2" or "torch". `reason` says why these, and
    nothing faster.
    """

    kernels: str
    dtype: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.kernels} kernels in {self.dtype}" + (f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceProfile:
    """Properties that an instance reports when it joins.

    `model` is the served name. The instance decodes at most `max_num_seqs` residents at once, and has
    `num_transfer_backends` receive slots for KV transfers. `data_address` is the address of its KV transport.
    `rank_pids` are its processes, the leader's first; empty: one process. `device_name` is the hardware's own; empty:
    not known. `num_parameters` counts the parameters that a token uses. `measured_steps` were timed at its start.

    If `joins_groups`, it can be a member of a `PrefillGroup`. `started_at` is its process's Unix time, by which new
    weights differ from old ones. If `deterministic`, it serves only in a mesh of one arithmetic class. Processes with
    the same `host` can share memory; empty: not known. If it `drafts`, it wants the prompts of requests that it only
    decodes. The offload tier has room for `num_offload_granules`, and brings KV back at `load_bytes_per_s`. If layers
    have states, at most `num_cached_states` are cached.
    """

    instance_id: InstanceId
    role: Role
    model: str
    kv_layout: KvLayout
    num_blocks: Annotated[int, COUNT]
    max_model_len: Annotated[int, COUNT]
    max_num_seqs: Annotated[int, COUNT]
    num_transfer_backends: Annotated[int, COUNT]
    data_address: bytes
    device: str = "cpu"
    pid: int = 0
    rank_pids: tuple[int, ...] = ()
    device_name: str = ""
    num_parameters: Annotated[int, ANY_COUNT] = 0
    num_heads: Annotated[int, ANY_COUNT] = 0
    measured_steps: tuple[MeasuredStep, ...] = ()
    joins_groups: bool = False
    compute: ComputePath | None = None
    #: *Arithmetic class*, such as ``bfloat16/ordered-2``: two instances of one class compute the same bits from the
    #: same tokens. Empty if the instance reports none; such instances are a class of their own.
    arithmetic: str = ""
    #: Identity of the loaded weights (`pdmesh.engine.identity`). No KV and no request passes between two identities.
    #: Empty if the instance reports none; such instances are an identity of their own.
    weights: str = ""
    started_at: Annotated[float, SECONDS] = 0.0
    deterministic: bool = False
    host: str = ""
    drafts: bool = False
    num_offload_granules: Annotated[int, ANY_COUNT] = 0
    load_bytes_per_s: Annotated[float, SECONDS] = 1e9
    #: Layer ranges that a step passes one after the other. As many steps are under way, each in another stage.
    num_stages: Annotated[int, COUNT] = 1
    #: Largest number of a decoding context's tokens on one instance, except drawn ones. A longer context is spread over
    #: several instances, in ranges of this length. 0: limited by the cache only.
    max_kv_tokens: Annotated[int, ANY_COUNT] = 0
    num_cached_states: Annotated[int, ANY_COUNT] = 0

    def is_process_of(self, other: InstanceProfile) -> bool:
        """Return whether ``other`` is the same process. Containers may number pids alike, so addresses count, too."""
        return (self.pid, self.data_address) == (other.pid, other.data_address)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartMember:
    """An instance that holds a range of a context that decodes elsewhere. Questions about it need ``capability``."""

    instance_id: InstanceId
    capability: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A request whose KV an instance holds, as reported when it (re)joins.

    ``decoding`` requests continue by themselves; others (a prefill cut short, a transfer half landed) are freed. At
    most `max_total_tokens` have KV at once; 0: as many as there is room for. The transfer `transfer_id` brings, or
    brought, the KV. `granules` name its blocks in order, including blocks cached for others. If it decodes here,
    `members` hold the first ranges of its context. Otherwise `part` may be the number of the range that is here. `user`
    has its tenant and session; None: without both.
    """

    request_id: RequestId
    epoch: Epoch
    gateway_id: GatewayId
    num_blocks: Annotated[int, ANY_COUNT]
    num_context_tokens: NumTokens
    decoding: bool
    max_total_tokens: Annotated[int, ANY_COUNT] = 0
    transfer_id: TransferId = NO_TRANSFER
    granules: PrefixHashes = ()
    members: tuple[PartMember, ...] = ()
    part: NumTokens | None = None
    user: CacheUser | None = None


#: Number of own decode steps after which an instance reports them, unless an earlier report includes them.
OWN_STEPS_PER_REPORT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnDecodeSteps:
    """Sums over the decode steps that an instance made by itself, without a plan, since its last such report.

    `num_tokens` counts one for each resident and step, and each drafted token. `num_context_tokens` are the tokens
    attended to. `duration_s` is device time. `wall_s` lasts from the first step's beginning to the last one's end, gaps
    included. `began_s` is on the instance's own clock, and only differences of it are used. `lent_share` sums the
    steps' shares (`StepDone`).
    """

    num_steps: Annotated[int, ANY_COUNT]
    num_tokens: Annotated[int, ANY_COUNT]
    num_context_tokens: Annotated[int, ANY_COUNT]
    duration_s: Annotated[float, SECONDS]
    wall_s: Annotated[float, SECONDS]
    began_s: Annotated[float, FINITE] = 0.0
    lent_share: Annotated[float, SECONDS] = 0.0

    @property
    def ended_s(self) -> float:
        return self.began_s + self.wall_s


class RejectReason(StrEnum):
    """Reason why a request is refused, by the client's remedy."""

    OVERLOADED = "overloaded"  # queue full: 429, try again later
    QUEUE_TIMEOUT = "queue_timeout"  # waited too long for room: 503
    NO_INSTANCE = "no_instance"  # no prefill or no decode instance: 503
    TOO_LONG = "too_long"  # can never fit any instance: 400
    INVALID = "invalid"  # breaks the contract between gateway and scheduler: 400
    WEIGHTS_GONE = "weights_gone"  # no instance has the weights that began the answer: 503
