"""The interface of engines, which execute steps.

An engine blocks. The worker runtime calls `Engine.execute` on one thread, one call at a time, unless the engine has
several stages. Scheduling decisions are made elsewhere.

``pdmesh.engine`` has the torch engine, and ``pdmesh_testing.fake_engine`` a stand-in of known speed.
"""

from __future__ import annotations

import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from pdmesh.model import ComputePath, FinishReason, RequestId, SamplingParams

if TYPE_CHECKING:  # numpy takes a third of a second to import
    from pdmesh.engine.grammar_state import GrammarState
    from pdmesh.kv.remote_kv import RangeQuestion, RemoteKv
    from pdmesh.kv.store import KvStore


@dataclass(slots=True, weakref_slot=True, kw_only=True)
class EngineSequence:
    """State of a request on an instance. The runtime owns and updates it, and the engine reads it.

    ``token_ids`` is the transcript known here: prompt and output. On a decode instance the prompt part is zeros of the
    right length, unless sampling needs the prompt (`needs_prompt_tokens`).

    ``num_prompt_tokens`` counts the client's own prompt. All later tokens are output, including those drawn on other
    instances.

    ``block_table`` may only grow. Tokens whose KV is ``elsewhere`` have no blocks here. ``elsewhere`` is set during
    decoding if several instances share the context.

    The engine creates ``guide`` from ``params.grammar`` and the output, and advances it. With ``is_timing``, steps are
    only timed, and the KV or states of earlier tokens may be anything.
    """

    request_id: RequestId
    params: SamplingParams
    token_ids: array.array[int]
    num_prompt_tokens: int
    block_table: list[int] = field(default_factory=list[int])
    guide: GrammarState | None = None
    elsewhere: RemoteKv | None = None
    is_timing: bool = False

    @property
    def num_remote_tokens(self) -> int:
        """Number of first tokens whose KV other instances hold, in whole ranges."""
        return 0 if self.elsewhere is None else self.elsewhere.num_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> array.array[int]:
        return self.token_ids[self.num_prompt_tokens :]


def needs_prompt_tokens(params: SamplingParams) -> bool:
    """Return whether drawing an output token depends on the prompt."""
    return params.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSlice:
    """Tokens ``start`` … ``start + num_tokens - 1`` of a sequence, computed in one step. The step writes their KV.

    A decode is a slice of the last token (``sample``). A chunk samples only if it is the last of its prompt.

    ``draft`` are guesses of the next tokens. They are the slice's last tokens, and not in the sequence yet. The slice
    samples before the draft and after each draft token. The KV of rejected draft tokens is ignored. A sequence with a
    grammar has no draft.

    ``prompt_logprobs`` requests the log-probabilities of the prompt tokens that *follow* the slice's tokens.
    """

    sequence: EngineSequence
    start: int
    num_tokens: int
    sample: bool
    prompt_logprobs: bool = False
    draft: tuple[int, ...] = ()

    @property
    def token_ids(self) -> array.array[int]:
        """Tokens whose KV the step writes."""
        known = self.sequence.token_ids[self.start : self.start + self.num_tokens - len(self.draft)]
        return known + array.array("i", self.draft) if self.draft else known


@dataclass(frozen=True, slots=True)
class Logprobs:
    """``logprob`` of one token, and the ``top`` most likely tokens at its position.

    ``top`` has pairs of token id and log-probability, most likely first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnToken:
    """A drawn token. ``finish_reason`` is set if the generation ends with this token."""

    token_id: int
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceResult:
    """Results of a slice. ``drawn`` has the valid draws (`accepted`); it is empty if the slice did not sample.

    ``prompt_logprobs[i]`` belongs to the prompt token at ``start + 1 + i``. If ``params.embeds`` is set, the last slice
    draws nothing. Its ``embedding`` is the last token's hidden state after the last norm, in little-endian float32.
    """

    drawn: tuple[DrawnToken, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()
    embedding: bytes = b""

    @property
    def token_id(self) -> int | None:
        """The first drawn token; None if the step drew none."""
        return self.drawn[0].token_id if self.drawn else None

    @property
    def logprobs(self) -> Logprobs | None:
        """Log-probabilities of the first drawn token; None without a token, or if they were not requested."""
        return self.drawn[0].logprobs if self.drawn else None


#: Callback with a layer's number after the layer's KV is written, on the engine's thread, before later layers are
#: computed. A device may not have executed the write yet: from the hook, `KvStore.when_written` reports when it has.
LayerHook = Callable[[int], None]


@dataclass(slots=True)
class StepFlight:
    """Passage of a step through an engine of several stages.

    If ``waits`` is set, the layer hook may block. Each layer's attention then begins after its hook returns, and later
    steps wait, too. ``on_begin`` is called on the caller's thread when the first stage begins. ``queued_s`` is
    increased by the part of the step's time spent waiting for stages.
    """

    waits: bool = False
    on_begin: Callable[[], object] = lambda: None
    queued_s: float = 0.0


class Engine(Protocol):
    """Executor of steps over a paged KV cache."""

    @property
    def kv(self) -> KvStore: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def compute_path(self) -> ComputePath: ...

    @property
    def arithmetic(self) -> str:
        """Arithmetic class, as in `pdmesh.model.InstanceProfile`."""
        ...

    @property
    def weights(self) -> str:
        """Identity of the loaded weights (`pdmesh.engine.identity`)."""
        ...

    @property
    def num_stages(self) -> int:
        """Number of stages that a step passes one after the other. As many threads may each execute a step.

        Steps enter in the order of the `execute` calls: a caller waits until the step before has begun.
        """
        ...

    def execute(
        self, batch: Sequence[SequenceSlice], *, on_layer: LayerHook | None = None, flight: StepFlight | None = None
    ) -> list[SliceResult]:
        """Compute one forward pass, and return the results in the order of ``batch``.

        Sequences are unchanged except their guides. An exception means a bug or a broken device. The runtime then fails
        the batch's requests and stops the instance.
        """
        ...

    def prepare(self, grammar: str) -> None:
        """Compile a grammar, so that no step waits for it. Blocking; safe on any thread."""
        ...

    def attend_part(self, number: int, block_ids: Sequence[int], question: RangeQuestion) -> bytes:
        """Attend to range ``number`` of another instance's sequence, whose KV is in blocks ``block_ids`` here.

        Safe on any thread. See `RemoteKv`. Raise ValueError if ``question`` does not fit this range.
        """
        ...

    def settle(self) -> None:
        """Return when the device has computed everything submitted so far.

        A layer hook is called before that, and can settle first to time only its own work.
        """
        ...


def with_draft(part: SequenceSlice) -> list[EngineSequence]:
    """Return the sequence of a sampling slice as each draw sees it: with no draft token, with one, up to all."""
    sequence, draft = part.sequence, array.array("i", part.draft)
    drafted = [replace(sequence, token_ids=sequence.token_ids + draft[:num]) for num in range(1, len(draft) + 1)]
    return [sequence, *drafted]


def accepted(draft: Sequence[int], drawn: Iterable[DrawnToken]) -> tuple[DrawnToken, ...]:
    """Return the valid draws: those equal to the next draft token, and the first that is not. None follows an end.

    Later draws depend on draft tokens that were rejected.
    """
    result: list[DrawnToken] = []
    for expected, each in zip((*draft, None), drawn, strict=False):
        result.append(each)
        if each.token_id != expected or each.finish_reason is not None:
            break
    return tuple(result)


def finish_reason(
    params: SamplingParams, num_output_tokens: int, token_id: int
) -> tuple[FinishReason | None, int | None]:
    """Return how the generation ends with this token: (reason, stop token id), or (None, None) if it continues."""
    if num_output_tokens > params.min_tokens:
        if token_id in params.eos_token_ids:
            return FinishReason.STOP, None
        if token_id in params.stop_token_ids:
            return FinishReason.STOP, token_id
    if num_output_tokens >= params.max_tokens:
        return FinishReason.LENGTH, None
    return None, None
