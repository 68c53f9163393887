"""The vocabulary of the mesh: values that every part of pdmesh speaks about.

Pure and frozen. Times are in seconds on the clock of whoever drives the value, sizes in tokens, blocks or
bytes as the name says. ``docs/terms.md`` defines the words.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, NamedTuple, NewType

from msgspec import Meta

from pdmesh.ranges import ANY_COUNT, COUNT, FINITE, SECONDS

RequestId = NewType("RequestId", str)
InstanceId = NewType("InstanceId", str)
GatewayId = NewType("GatewayId", str)

#: How many times a request was (re)started; a frame or piece of an older epoch is dropped.
Epoch = NewType("Epoch", int)


def request_id_of(gateway_id: GatewayId, name: str) -> RequestId:
    """What a gateway calls a request of its own: ``NAME.MARK``, where the mark is the end of the gateway's id.

    The choices of one client request are called that and ``-0``, ``-1``, …
    """
    return RequestId(f"{name}.{_mark(gateway_id)}")


def is_request_of(gateway_id: GatewayId, request_id: RequestId) -> bool:
    """Whether a request's id says that it is this gateway's."""
    return request_id.partition(".")[2].partition("-")[0] == _mark(gateway_id)


def _mark(gateway_id: GatewayId) -> str:
    return gateway_id.rpartition("-")[2]


#: A request in one of its epochs.
RequestKey = tuple[RequestId, Epoch]


#: Of one request, its prompt and its output each: what fits a frame between services. No model's context comes near it,
#: so that a larger number is damage, and tables that grow with the longest prompt must not follow it.
MAX_REQUEST_TOKENS = 1 << 24

NumTokens = Annotated[int, Meta(ge=0, le=MAX_REQUEST_TOKENS)]
SomeTokens = Annotated[int, Meta(ge=1, le=MAX_REQUEST_TOKENS)]

#: Tokens of a *granule*: KV is kept for other requests, and reused, in granules of a prompt's tokens.
GRANULE_TOKENS = 128

#: Names a granule and all that comes before it: equal hashes, equal tokens from the first on, of one model and tenant.
PrefixHash = NewType("PrefixHash", bytes)

#: 16 bytes each.
PrefixHashes = tuple[Annotated[PrefixHash, Meta(min_length=16, max_length=16)], ...]


def blocks_of_granule(block_size: int) -> int:
    """Blocks that hold a granule's KV; 0 where blocks of ``block_size`` tokens do not divide it: nothing is kept."""
    return 0 if GRANULE_TOKENS % block_size else GRANULE_TOKENS // block_size


class Role(StrEnum):
    """What an instance does; it can change at run time."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    @property
    def can_prefill(self) -> bool:
        return self is not Role.DECODE

    @property
    def can_decode(self) -> bool:
        return self is not Role.PREFILL


#: Names an operator's operation; whoever asks for it makes the name, so that asking twice does it once.
OperationId = NewType("OperationId", str)


class OperationKind(StrEnum):
    """What operators do with an instance."""

    DRAIN = "drain"  # nothing new goes there, and what is there leaves
    UNDRAIN = "undrain"  # it is used again
    ROLE = "role"  # it gets another role, once all that this does not do has left
    RESTART = "restart"  # once everything has left its process ends; whoever looks after it starts it again
    MOVE = "move"  # a request that decodes elsewhere goes on there, with its KV
    RESIZE = "resize"  # of the pools: instances get other roles, are started and leave
    ROLLING = "rolling"  # a restart of every process, one after the other


class OperationState(StrEnum):
    """How far an operator's operation is, or how it ended."""

    RUNNING = "running"
    DONE = "done"
    REFUSED = "refused"  # nothing was changed
    CANCELLED = "cancelled"  # the instance is used as before
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCounts:
    """How many instances of each role."""

    prefill: Annotated[int, ANY_COUNT]
    decode: Annotated[int, ANY_COUNT]
    mixed: Annotated[int, ANY_COUNT] = 0

    def of(self, role: Role) -> int:
        match role:
            case Role.PREFILL:
                return self.prefill
            case Role.DECODE:
                return self.decode
            case Role.MIXED:
                return self.mixed

    @property
    def total(self) -> int:
        return self.prefill + self.decode + self.mixed

    @property
    def why_not(self) -> str | None:
        """Why no request could be served by such pools."""
        if not (self.prefill or self.mixed):
            return "no instance could prefill: --prefill or --mixed must be at least 1"
        if not (self.decode or self.mixed):
            return "no instance could decode: --decode or --mixed must be at least 1"
        return None

    def __str__(self) -> str:
        """Return, for instance, "2 prefill + 1 mixed"."""
        return " + ".join(f"{self.of(role)} {role}" for role in Role if self.of(role))


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMember:
    """An instance that is wanted, and the role that it starts with, or gets."""

    instance_id: InstanceId
    role: Role


class ProcessKind(StrEnum):
    """What a process is that an actuator keeps running, in the order in which a rolling restart replaces them."""

    INSTANCE = "instance"
    GATEWAY = "gateway"
    SCHEDULER = "scheduler"  # the last, since the others dial it


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedProcess:
    """A process that an actuator keeps running. Instances go by their ids, as ``pdmesh status`` lists them.

    ``pid`` is a number that no other process had under the name; 0 while one is being started. It is only compared.
    """

    name: str
    pid: int
    kind: ProcessKind = ProcessKind.INSTANCE


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"  # an end-of-sequence token or a stop token id
    LENGTH = "length"  # max_tokens or the context length was reached
    CANCELLED = "cancelled"  # the client went away
    ERROR = "error"  # the instance could not go on; the client gets an error event


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. Defaults are those of the OpenAI API, or neutral where it is silent.

    ``eos_token_ids`` is filled in by the gateway from the checkpoint and is empty under ``ignore_eos``; until
    ``min_tokens`` output tokens exist, neither these nor ``stop_token_ids`` can be drawn. Stop *strings* are
    the gateway's business: it has the text.
    """

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps all
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output tokens, as in transformers
    presence_penalty: float = 0.0  # over output tokens
    frequency_penalty: float = 0.0  # over output tokens
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0  # with the output index, the whole key of the counter-based generator
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # None: none; 0: the sampled token's; n: and the n most likely
    prompt_logprobs: int | None = None  # the same for prompt tokens (completions' ``echo`` with ``logprobs``)
    grammar: str = ""  # that output tokens are held to (`pdmesh.grammars`); empty: none
    allowed_token_ids: tuple[int, ...] = ()  # nothing else can be drawn, an end neither; empty: all can
    bad_token_sequences: tuple[tuple[int, ...], ...] = ()  # none of which can be completed
    logprob_token_ids: tuple[int, ...] = ()  # with ``logprobs``: these ids' instead of the most likely ones'
    embeds: bool = False  # its last prompt token's embedding is wanted instead of any token; ``max_tokens`` is 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the scheduling core knows of a request: sizes, not tokens.

    A resumed request (``epoch`` > 0) counts the tokens delivered before as prompt tokens: they are prefilled
    again, and ``max_tokens`` is what is left to generate.
    """

    request_id: RequestId
    epoch: Epoch
    gateway_id: GatewayId
    num_prompt_tokens: SomeTokens
    max_tokens: SomeTokens
    arrival_s: Annotated[float, FINITE]
    priority: int = 0  # lower is earlier, as in vLLM
    slo_ttft_s: Annotated[float, SECONDS] | None = None
    slo_tpot_s: Annotated[float, SECONDS] | None = None
    tenant: str = ""  # the name of the key that it came with
    share: Annotated[int, COUNT] = 1  # of that key, among others
    num_tokens_before: Annotated[int, ANY_COUNT] = 0  # of other prompts, in line before it, of the same client request
    arithmetic: str = ""  # class of the instance that drew its last token, of one that is resumed
    weights: str = ""  # identity of the weights that drew its tokens so far; empty: none was drawn, any will do
    prefix: PrefixHashes = ()  # of all full granules of its prompt, in order; empty: no KV is reused, and none kept
    prefix_weights: str = ""  # identity of the weights that ``prefix`` is made for: KV of others has other hashes
    always_moves: bool = False  # set by the core: no instance holds its whole prompt, so that its KV has to leave

    @property
    def max_total_tokens(self) -> int:
        """Tokens whose KV may exist at once. The last output token's KV is never written."""
        return self.num_prompt_tokens + self.max_tokens - 1

    @property
    def ends_with_prompt(self) -> bool:
        """Whether computing its prompt is all there is to do: its last token, or its embedding, comes of that."""
        return self.max_tokens == 1 and not self.always_moves

    @property
    def chain(self) -> PrefixHashes:
        """The granules of its prompt that are kept as they are computed, and need not be where they are kept.

        Not the one that ends with the prompt: the last token is always computed. It counts as drawn.
        """
        return self.prefix[: (self.num_prompt_tokens - 1) // GRANULE_TOKENS]


#: Of a weights identity.
MAX_WEIGHTS_CHARS = 64


def short_weights(weights: str) -> str:
    """Return the first letters of a weights identity, for people."""
    return weights[:6] or "unknown"


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold ``num_tokens`` tokens."""
    return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Shape of an instance's KV cache; a KV transfer needs equal layouts on both ends."""

    num_layers: Annotated[int, COUNT]
    num_kv_heads: Annotated[int, COUNT]
    head_dim: Annotated[int, COUNT]
    block_size: Annotated[int, COUNT]  # tokens
    dtype: str  # "float32" | "bfloat16"
    #: Of layers whose KV is given up behind a window: the latest tokens that a token attends to, its own among them.
    window: Annotated[int, ANY_COUNT] = 0
    windowed_layers: tuple[int, ...] = ()  # their numbers, ascending

    @property
    def block_bytes(self) -> int:
        """Bytes of one (layer, block) piece: keys and values."""
        itemsize = {"float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]
        return 2 * self.num_kv_heads * self.block_size * self.head_dim * itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return self.num_layers * self.block_bytes // self.block_size

    def cache_bytes(self, num_blocks: int, num_frames: int) -> int:
        """Bytes of a cache of so many blocks, and frames of layers with a window (`pdmesh.kv.frames`)."""
        num_windowed = len(self.windowed_layers)
        return ((self.num_layers - num_windowed) * num_blocks + num_windowed * (num_frames + 1)) * self.block_bytes

    def with_all_held(self) -> KvLayout:
        """Return the layout in which nothing is given up behind windows."""
        return replace(self, window=0, windowed_layers=())

    def first_seen_block(self, num_tokens: int) -> int:
        """Return the first block of a sequence that the token behind ``num_tokens`` sees in layers with a window."""
        return max(0, num_tokens + 1 - self.window) // self.block_size if self.window else 0

    def first_held_block(self, num_tokens: int) -> int:
        """Return the first block that is held there of a sequence of ``num_tokens``, and goes with it when it moves.

        What is seen from the end of its last granule on: another request may go on from there.
        """
        return self.first_seen_block(num_tokens // GRANULE_TOKENS * GRANULE_TOKENS)


class IndexRange(NamedTuple):
    """The numbers from ``start`` to ``stop - 1``."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def moved(self, distance: int) -> IndexRange:
        """Return as many numbers, each larger by ``distance``."""
        return IndexRange(self.start + distance, self.stop + distance)

    def scaled(self, size: int) -> IndexRange:
        """Return what it is when each number stands for ``size`` smaller ones."""
        return IndexRange(self.start * size, self.stop * size)

    def holds(self, other: IndexRange) -> bool:
        """Whether all of ``other``, which is not empty, is in it."""
        return self.start <= other.start < other.stop <= self.stop

    def common(self, other: IndexRange) -> IndexRange:
        """What is in both; of size 0 if nothing is."""
        start = max(self.start, other.start)
        return IndexRange(start, max(start, min(self.stop, other.stop)))


class KvPart(NamedTuple):
    """A part of a request's KV: blocks of its block table, in some layers, of some KV heads.

    Blocks are counted from the request's first token on, so they have the same numbers on every instance.
    """

    blocks: IndexRange
    layers: IndexRange
    heads: IndexRange

    @property
    def num_pages(self) -> int:
        """Blocks, counted in each of its layers."""
        return self.blocks.size * self.layers.size

    def common(self, other: KvPart) -> KvPart:
        """What is in both."""
        return KvPart(*(mine.common(theirs) for mine, theirs in zip(self, other, strict=True)))


#: Names a KV transfer, for as long as one scheduler lives.
TransferId = NewType("TransferId", int)

#: What no KV transfer is called.
NO_TRANSFER = TransferId(0)


class Then(StrEnum):
    """What a destination does with KV that was copied to it."""

    DECODE = "decode"  # the sequence continues there
    HOLD = "hold"  # a range answers attention queries of the instance that decodes
    KEEP = "keep"  # cached blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A step that an instance timed on its own: one chunk, decodes, or both."""

    num_tokens: NumTokens
    num_history_tokens: NumTokens
    num_decodes: Annotated[int, ANY_COUNT]
    num_decode_context_tokens: Annotated[int, ANY_COUNT]  # summed over the decodes
    duration_s: Annotated[float, SECONDS]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputePath:
    """What an instance computes with, for people: it decides nothing."""

    kernels: str  # whose, and of which processor level, such as "native avx2" or "torch"
    dtype: str
    reason: str = ""  # why these, and nothing faster

    def __str__(self) -> str:
        return f"{self.kernels} kernels in {self.dtype}" + (f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceProfile:
    """What an instance says of itself when it joins."""

    instance_id: InstanceId
    role: Role
    model: str  # served model name
    kv_layout: KvLayout
    num_blocks: Annotated[int, COUNT]
    max_model_len: Annotated[int, COUNT]
    max_num_seqs: Annotated[int, COUNT]  # residents it decodes at once
    num_transfer_backends: Annotated[int, COUNT]  # receive slots for KV transfers
    data_address: bytes  # worker address of its KV transport
    device: str = "cpu"
    pid: int = 0
    rank_pids: tuple[int, ...] = ()  # of its processes, the leader's first; empty: it is one
    device_name: str = ""  # the hardware's own; empty: not known, as below
    num_parameters: Annotated[int, ANY_COUNT] = 0  # that a token meets
    num_heads: Annotated[int, ANY_COUNT] = 0
    measured_steps: tuple[MeasuredStep, ...] = ()  # how fast it is, measured when it started
    joins_groups: bool = False  # it can be a member of a `PrefillGroup`
    compute: ComputePath | None = None
    #: Its *arithmetic class*, such as ``bfloat16/ordered-2``: two instances of one class compute the same bits from the
    #: same tokens. Empty if the instance does not say; such instances are a class of their own.
    arithmetic: str = ""
    #: The identity of the weights that it loaded (`pdmesh.engine.identity`). No KV and no request passes between two
    #: identities. Empty if the instance does not say; such instances are an identity of their own.
    weights: str = ""
    started_at: Annotated[float, SECONDS] = 0.0  # Unix time of its process, by which new weights are told from old ones
    deterministic: bool = False  # it serves only in a mesh of one arithmetic class
    host: str = ""  # where processes can share memory, for people; empty: it does not say
    drafts: bool = False  # it guesses tokens from what was said before: it wants prompts of what it only decodes
    num_offload_granules: Annotated[int, ANY_COUNT] = 0  # that its tier, host memory and disk, has room for
    load_bytes_per_s: Annotated[float, SECONDS] = 1e9  # at which the tier brings KV back into the cache
    #: Layer ranges that a step passes one after the other: as many steps are under way, each in another stage.
    num_stages: Annotated[int, COUNT] = 1
    #: Of one context it holds no more tokens while that decodes, but for those that are drawn; a longer one is spread
    #: over several instances, in ranges of so many tokens. 0: as many as its cache has room for.
    max_kv_tokens: Annotated[int, ANY_COUNT] = 0

    def is_process_of(self, other: InstanceProfile) -> bool:
        """Whether that one registers again. Containers may count pids each for itself, so addresses count, too."""
        return (self.pid, self.data_address) == (other.pid, other.data_address)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartMember:
    """An instance that holds a range of a context that decodes elsewhere; ``capability`` is for questions about it."""

    instance_id: InstanceId
    capability: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A request whose KV an instance holds, as reported when it (re)joins.

    ``decoding`` ones go on by themselves; others (a prefill cut short, a transfer half landed) are freed.
    """

    request_id: RequestId
    epoch: Epoch
    gateway_id: GatewayId
    num_blocks: Annotated[int, ANY_COUNT]
    num_context_tokens: NumTokens
    decoding: bool
    max_total_tokens: Annotated[int, ANY_COUNT] = 0  # whose KV may exist at once; 0: those that it has room for
    transfer_id: TransferId = NO_TRANSFER  # that is to bring its KV, or brought it
    granules: PrefixHashes = ()  # of its blocks, in order: those that the instance keeps for others, too
    members: tuple[PartMember, ...] = ()  # that hold the first ranges of its context, if it decodes here
    part: NumTokens | None = None  # the number of the range that is here, if it decodes elsewhere


#: An instance reports its own decode steps after so many without another report that would have told of them.
OWN_STEPS_PER_REPORT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnDecodeSteps:
    """Decode steps that an instance made by itself, without a plan, since it last told of any; summed over them.

    ``began_s`` is on the instance's own clock, which only differences are taken of.
    """

    num_steps: Annotated[int, ANY_COUNT]
    num_tokens: Annotated[int, ANY_COUNT]  # one for each resident and step, and each that it drafted
    #: That were attended to: what the residents had come to, not what they have room for.
    num_context_tokens: Annotated[int, ANY_COUNT]
    duration_s: Annotated[float, SECONDS]  # device time
    #: From the beginning of the first to the end of the last: what is more than duration_s are gaps.
    wall_s: Annotated[float, SECONDS]
    began_s: Annotated[float, FINITE] = 0.0
    lent_share: Annotated[float, SECONDS] = 0.0  # sum of the shares of the steps (`StepDone`)

    @property
    def ended_s(self) -> float:
        return self.began_s + self.wall_s


class RejectReason(StrEnum):
    """Why a request is refused, by what its client can do."""

    OVERLOADED = "overloaded"  # queue full: 429, try again later
    QUEUE_TIMEOUT = "queue_timeout"  # waited too long for room: 503
    NO_INSTANCE = "no_instance"  # no prefill or no decode instance is there: 503
    TOO_LONG = "too_long"  # can never fit any instance: 400
    INVALID = "invalid"  # breaks the contract between gateway and scheduler: 400
    WEIGHTS_GONE = "weights_gone"  # no instance has the weights that began the answer: 503
