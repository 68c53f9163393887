"""The engine's seam: what executes a step.

An engine is blocking and single-threaded: the worker runtime calls `Engine.execute` on one worker thread, never two
calls at a time, unless the engine has several stages. It decides nothing; it computes the batch it is given.
``pdmesh.engine`` has the real one (torch), and ``pdmesh_testing.fake_engine`` a stand-in of known speed.
"""

from __future__ import annotations

import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from pdmesh.model import ComputePath, FinishReason, RequestId, SamplingParams

if TYPE_CHECKING:  # numpy takes a third of a second to import
    from pdmesh.engine.guide import Guide
    from pdmesh.kv.elsewhere import KvElsewhere, PartQuestion
    from pdmesh.kv.store import KvStore


@dataclass(slots=True, weakref_slot=True, kw_only=True)
class EngineSequence:
    """A request's state on an instance, shared by the runtime (which owns it) and the engine (which reads it).

    ``token_ids`` is the transcript known here: prompt and output. On a decode instance the prompt part is zeros unless
    sampling needs it (`needs_prompt_tokens`); its length is right all the same. ``num_prompt_tokens`` counts the
    client's own prompt; what follows in ``token_ids`` are output tokens, wherever they were drawn. ``block_table`` may
    only grow. It has no blocks of tokens whose KV is ``elsewhere``.
    """

    request_id: RequestId
    params: SamplingParams
    token_ids: array.array[int]
    num_prompt_tokens: int
    block_table: list[int] = field(default_factory=list[int])
    guide: Guide | None = None  # the engine's own: made and kept up by it, from ``params.grammar`` and the output
    elsewhere: KvElsewhere | None = None  # set while it decodes, if its context is spread over several instances

    @property
    def num_elsewhere_tokens(self) -> int:
        """The first tokens, whose KV others hold: whole ranges."""
        return 0 if self.elsewhere is None else self.elsewhere.num_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> array.array[int]:
        return self.token_ids[self.num_prompt_tokens :]


def needs_prompt_tokens(params: SamplingParams) -> bool:
    """Whether drawing an output token looks at the prompt."""
    return params.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSlice:
    """Tokens ``start`` … ``start + num_tokens - 1`` of a sequence, computed in one step; their KV is written.

    A decode is a slice of the last token (``sample``). A chunk samples only if it is its prompt's last.
    ``draft`` are tokens that may come next: the slice's last ones, which the sequence does not have. The slice samples
    after each that proves right, and before the first. What is written of the others is nobody's. A sequence with a
    grammar has none.
    ``prompt_logprobs`` asks for the log-probabilities of the slice's *following* tokens that are prompt tokens.
    """

    sequence: EngineSequence
    start: int
    num_tokens: int
    sample: bool
    prompt_logprobs: bool = False
    draft: tuple[int, ...] = ()

    @property
    def token_ids(self) -> array.array[int]:
        """The tokens whose KV is written."""
        known = self.sequence.token_ids[self.start : self.start + self.num_tokens - len(self.draft)]
        return known + array.array("i", self.draft) if self.draft else known


@dataclass(frozen=True, slots=True)
class Logprobs:
    """``logprob`` of one token and the ``top`` most likely ones at its position, most likely first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnToken:
    """A drawn token, and how the generation ends with it, if it does."""

    token_id: int
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceResult:
    """What a slice gave: the next tokens if it sampled, one more than of its draft proved right.

    ``prompt_logprobs[i]`` belongs to the prompt token at ``start + 1 + i``. Where ``params.embeds``, the last slice
    draws nothing: ``embedding`` is the hidden state of its last token behind the last norm, little-endian float32.
    """

    drawn: tuple[DrawnToken, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()
    embedding: bytes = b""

    @property
    def token_id(self) -> int | None:
        """The first drawn token."""
        return self.drawn[0].token_id if self.drawn else None

    @property
    def logprobs(self) -> Logprobs | None:
        """What the first drawn token has."""
        return self.drawn[0].logprobs if self.drawn else None


#: Called on the engine's thread with a layer's number after its KV is written, while later layers are still to come.
#: A device may still be about to write it: `KvStore.when_written`, called from the hook, tells when it has.
LayerHook = Callable[[int], None]


@dataclass(slots=True)
class StepFlight:
    """How a step passes an engine of several stages: what its caller says of it, and hears of it."""

    waits: bool = False  # its layer hook may wait: each layer's attention comes after it, and no step behind this one
    on_begin: Callable[[], object] = lambda: None  # called on the caller's thread once the first stage computes it
    queued_s: float = 0.0  # that it has waited before stages, of the time that it took


class Engine(Protocol):
    """Executes steps over a paged KV cache."""

    @property
    def kv(self) -> KvStore: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def compute_path(self) -> ComputePath: ...

    @property
    def arithmetic(self) -> str:
        """Its arithmetic class, as in `pdmesh.model.InstanceProfile`."""
        ...

    @property
    def weights(self) -> str:
        """The identity of the weights that it loaded (`pdmesh.engine.identity`)."""
        ...

    @property
    def num_stages(self) -> int:
        """Stages that a step passes one after the other. With more than one, so many threads may execute a step each.

        Steps enter in the order in which `execute` is called: a caller waits until one has begun.
        """
        ...

    def execute(
        self, batch: Sequence[SequenceSlice], *, on_layer: LayerHook | None = None, flight: StepFlight | None = None
    ) -> list[SliceResult]:
        """One forward pass; results in the order of ``batch``. Changes nothing of the sequences but their guides.

        An exception means a bug or a broken device: the runtime fails the batch's requests and stops the instance.
        """
        ...

    def prepare(self, grammar: str) -> None:
        """Compile a grammar, so that no step waits for it. Blocking; any thread."""
        ...

    def attend_part(self, number: int, block_ids: Sequence[int], question: PartQuestion) -> bytes:
        """Attend to the range of this number of another instance's sequence, which lies in these blocks. Any thread.

        See `KvElsewhere`. Raises ValueError if the question is none about this range.
        """
        ...

    def settle(self) -> None:
        """Return when everything given to a device so far has been computed. For a layer hook, which comes before that.

        What a hook then times is its own work.
        """
        ...


def with_draft(part: SequenceSlice) -> list[EngineSequence]:
    """Return the sequence of a slice that samples as each of its draws finds it: with none of its draft, one, … all."""
    sequence, draft = part.sequence, array.array("i", part.draft)
    drafted = [replace(sequence, token_ids=sequence.token_ids + draft[:num]) for num in range(1, len(draft) + 1)]
    return [sequence, *drafted]


def accepted(draft: Sequence[int], drawn: Iterable[DrawnToken]) -> tuple[DrawnToken, ...]:
    """Return the draws that count: each that is what the draft says next, and the first that is not; none after an end.

    What follows was drawn after tokens that the sequence does not have.
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
    """How a generation ends with its ``num_output_tokens``-th token: (reason, stop token id), or (None, None)."""
    if num_output_tokens > params.min_tokens:
        if token_id in params.eos_token_ids:
            return FinishReason.STOP, None
        if token_id in params.stop_token_ids:
            return FinishReason.STOP, token_id
    if num_output_tokens >= params.max_tokens:
        return FinishReason.LENGTH, None
    return None, None
