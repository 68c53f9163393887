"""The step from a batch to hidden states: the interface between the engine and the code that computes layers."""

from __future__ import annotations

import array
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdmesh.engine.attention import AttentionBackend, AttentionOutput, AttentionPlan, QuerySpan
from pdmesh.engine.base import EngineSequence, LayerHook, SequenceSlice
from pdmesh.engine.sampler import sample
from pdmesh.engine.states import state_slices
from pdmesh.engine.transformer_model import Places, StepInputs
from pdmesh.kv.frames import FrameMap
from pdmesh.kv_layout import KvLayout, num_blocks_for

Ints = npt.NDArray[np.int64]
_NONE: Ints = np.empty(0, dtype=np.int64)

#: Rows of a step.
Rows = Sequence[int]


class Decoder(Protocol):
    """A model's layers, and the computation of scores from their results."""

    def forward(
        self, inputs: StepInputs, caches: Sequence[Tensor], attention: AttentionPlan, on_layer: LayerHook | None
    ) -> Tensor:
        """Return hidden states (num_tokens, hidden_size), and write the tokens' keys and values."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return scores of the next token in fp32, (rows, vocab_size), for chosen rows of the result of `forward`."""
        ...

    def last_norm(self, hidden: Tensor) -> Tensor:
        """Return chosen rows of the result of `forward` after the last norm."""
        ...


class StepOutput(Protocol):
    """Results of a step, computed on request unless the step did so. They are valid inside the step's block only."""

    def logits(self, rows: Rows) -> Tensor:
        """Return scores of the next token in fp32, (len(rows), vocab_size)."""
        ...

    def embeddings(self, rows: Rows) -> Tensor:
        """Return hidden states after the last norm in fp32, (len(rows), hidden_size)."""
        ...

    def draw(self, rows: Rows, sequences: Sequence[EngineSequence]) -> list[int]:
        """Return each row's next token. Call at most once per step. A device prepares the next step meanwhile."""
        ...


class HiddenOutput:
    """`StepOutput` of hidden states (num_tokens, hidden_size)."""

    def __init__(self, decoder: Decoder, hidden: Tensor) -> None:
        self._decoder = decoder
        self._hidden = hidden
        self._last: tuple[Rows, Tensor] | None = None

    def logits(self, rows: Rows) -> Tensor:
        if self._last is None or self._last[0] != rows:
            self._last = rows, self._decoder.logits(take_rows(self._hidden, rows))
        return self._last[1]

    def embeddings(self, rows: Rows) -> Tensor:
        return self._decoder.last_norm(take_rows(self._hidden, rows)).float()

    def draw(self, rows: Rows, sequences: Sequence[EngineSequence]) -> list[int]:
        return sample(self.logits(rows), sequences)


def take_rows(values: Tensor, rows: Rows) -> Tensor:
    """Return the rows. Neighbours are taken by a slice, because an index would be sent to the device."""
    first, last = rows[0], rows[-1]
    if list(rows) == list(range(first, last + 1)):
        return values[first : last + 1]
    return values[list(rows)]


class Forward(Protocol):
    """Runner of a model's forward pass over batches. A layer hook may run another step inside."""

    def step(
        self, batch: Sequence[SequenceSlice], spans: Sequence[QuerySpan], on_layer: LayerHook | None
    ) -> AbstractContextManager[StepOutput]:
        """Return a context manager that yields the step's output. The block ends when all computation has."""
        ...

    def settle(self) -> None:
        """Return when everything given to the device so far has been computed."""
        ...


class DirectForward:
    """`Forward` with immediate execution: on CPU, and with the torch reference on any device."""

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend,
        caches: Sequence[Tensor],
        *,
        layout: KvLayout,
        device: torch.device,
        frames: FrameMap | None = None,
        any_num_threads: bool = False,
        max_taps: int = 0,
        has_states: bool = False,
    ) -> None:
        """``frames`` has the frames of KV in layers with a window; None means that these layers use blocks.

        ``any_num_threads``: the bits of the results do not depend on the number of threads. ``max_taps`` is the largest
        number of taps of a convolution; 0 without convolutions. ``has_states``: some layers have states instead of KV.
        """
        self.any_num_threads = any_num_threads
        self.decoder = decoder
        self.attention = attention
        self.caches = caches
        self._layout = layout
        self._device = device
        self._frames = frames
        self._max_taps = max_taps
        self._has_states = has_states

    @contextlib.contextmanager
    def step(
        self, batch: Sequence[SequenceSlice], spans: Sequence[QuerySpan], on_layer: LayerHook | None
    ) -> Iterator[StepOutput]:
        inputs, plan = self.planned(batch, spans)
        yield HiddenOutput(self.decoder, self.decoder.forward(inputs, self.caches, plan, on_layer))
        self.settle()

    def planned(self, batch: Sequence[SequenceSlice], spans: Sequence[QuerySpan]) -> tuple[StepInputs, AttentionPlan]:
        """Return a step's tokens on the device, and its attention."""
        inputs, plan = self.inputs(batch), self.attention.plan(spans)
        if self._frames is None:
            return inputs, plan
        seen = [replace(span, block_table=self._seen(span, self._frames)) for span in spans]
        inputs = replace(inputs, windowed=self._frame_places(batch, inputs, self._frames))
        return inputs, _WindowedPlan(plan, self.attention.plan(seen))

    def inputs(self, batch: Sequence[SequenceSlice]) -> StepInputs:
        """Return a step's tokens on the device."""
        tensors = (torch.from_numpy(values).to(self._device) for values in step_arrays(batch, self._layout))
        token_ids, positions, num_prompt_tokens, slots = tensors
        rests = self._rests(begun_blocks(batch, self._layout))
        earlier = self._earlier(batch, None) if self._frames is None else None
        slices = state_slices(batch, self._layout.block_size, self._frames) if self._has_states else ()
        return StepInputs(token_ids, positions, num_prompt_tokens, slots, rests, earlier=earlier, slices=slices)

    def _rests(self, begun: Sequence[BegunBlock]) -> Mapping[int, Tensor]:
        """Return the unfilled rows of blocks that a step begins, by the number of a layer's heads."""
        return {
            page.num_kv_heads: torch.from_numpy(unfilled_rows(begun, self._layout, page.num_kv_heads)).to(self._device)
            for page in self._layout.distinct_pages
        }

    def _seen(self, span: QuerySpan, frames: FrameMap) -> list[int]:
        """Return the frames of a span's blocks, with zeros for blocks before the window.

        The frames of blocks before the window may belong to other sequences by now.
        """
        end, first = num_blocks_for(span.end, self._layout.block_size), self._layout.first_seen_block(span.start)
        seen: list[int] = frames.of_block[span.block_table[first:end]].tolist()
        return [frames.zeros] * first + seen

    def _frame_places(self, batch: Sequence[SequenceSlice], inputs: StepInputs, frames: FrameMap) -> Places:
        """Return the slots and rests of a step's keys and values in layers with a window."""
        layout = self._layout
        begun = [block._replace(block_id=int(frames.of_block[block.block_id])) for block in begun_blocks(batch, layout)]
        blocks, offsets = np.divmod(inputs.slots.numpy(), layout.block_size)
        own = frames.of_block[blocks]
        is_missing = not self._has_states and bool((own == frames.zeros).any())
        assert not is_missing, "tokens are computed that have no frame in layers with a window"
        slots = own * layout.block_size + offsets
        return Places(torch.from_numpy(slots), self._rests(begun), self._earlier(batch, frames))

    def _earlier(self, batch: Sequence[SequenceSlice], frames: FrameMap | None) -> Tensor | None:
        if not self._max_taps:
            return None
        slots = earlier_slots(batch, self._layout.block_size, self._max_taps, frames)
        return torch.from_numpy(slots).to(self._device)

    def settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


@dataclass(frozen=True, slots=True)
class _WindowedPlan:
    """A step's attention in two plans: layers with a window keep their KV in frames."""

    whole: AttentionPlan
    windowed: AttentionPlan

    def attend(
        self, query: Tensor, cache: Tensor, *, window: int | None = None, with_lse: bool = False
    ) -> AttentionOutput:
        plan = self.whole if window is None else self.windowed
        return plan.attend(query, cache, window=window, with_lse=with_lse)


def draws(part: SequenceSlice) -> bool:
    """Return whether a slice draws tokens."""
    return part.sample and not part.sequence.params.embeds


def drawn_rows(batch: Sequence[SequenceSlice], spans: Sequence[QuerySpan]) -> list[int]:
    """Return the rows for drawing tokens: of each slice that draws, the row before its draft and the draft's."""
    rows: list[int] = []
    for part, span in zip(batch, spans, strict=True):
        if draws(part):
            end = span.row + span.num_tokens
            rows += range(end - 1 - len(part.draft), end)
    return rows


def step_spans(batch: Sequence[SequenceSlice]) -> list[QuerySpan]:
    """Return the rows of each slice in the batch, one slice after the other."""
    spans: list[QuerySpan] = []
    row = 0
    for part in batch:
        sequence = part.sequence
        span = QuerySpan(row, part.num_tokens, part.start, sequence.block_table, elsewhere=sequence.elsewhere)
        spans.append(span)
        row += part.num_tokens
    return spans


class StepArrays(NamedTuple):
    """A step's integers on the host, int64: fields of `StepInputs`."""

    token_ids: Ints
    positions: Ints
    num_prompt_tokens: Ints
    slots: Ints


def step_arrays(batch: Sequence[SequenceSlice], layout: KvLayout) -> StepArrays:
    """Lay out a step's tokens, positions and blocks, in the order of ``batch``."""
    token_ids = array.array("i")
    positions: list[Ints] = []
    blocks: list[Ints] = []
    block_size = layout.block_size
    for part in batch:
        end = part.start + part.num_tokens
        token_ids += part.token_ids
        positions.append(np.arange(part.start, end))
        first = part.sequence.num_remote_tokens
        used = part.sequence.block_table[: num_blocks_for(end - first, block_size)]
        blocks.append(np.asarray(used, dtype=np.int64)[(positions[-1] - first) // block_size])
    flat_positions = np.concatenate(positions)
    lengths = [part.num_tokens for part in batch]
    return StepArrays(
        token_ids=np.asarray(token_ids, dtype=np.int64),
        positions=flat_positions,
        num_prompt_tokens=np.repeat(np.asarray([part.sequence.num_prompt_tokens for part in batch]), lengths),
        slots=np.concatenate(blocks) * block_size + flat_positions % block_size,
    )


class BegunBlock(NamedTuple):
    """A block that a slice begins and does not fill. ``num_filled`` tokens are in the block."""

    block_id: int
    num_filled: int


def earlier_slots(
    batch: Sequence[SequenceSlice], block_size: int, num_taps: int, frames: FrameMap | None = None
) -> Ints:
    """Return the slots of each token of a step and of the tokens before, (num_tokens, num_taps).

    Slots before a sequence's first token are -1. With ``frames``, slots are in the blocks' frames.
    """
    slots: list[Ints] = []
    for part in batch:
        positions = np.arange(part.start, part.start + part.num_tokens)[:, None] - np.arange(num_taps)
        known = np.maximum(positions, 0)
        blocks = np.asarray(part.sequence.block_table, dtype=np.int64)[known // block_size]
        if frames is not None:
            blocks = frames.of_block[blocks]
        slots.append(np.where(positions < 0, -1, blocks * block_size + known % block_size))
    return np.concatenate(slots)


def begun_blocks(batch: Sequence[SequenceSlice], layout: KvLayout) -> list[BegunBlock]:
    """Return the blocks that the slices begin and do not fill."""
    begun: list[BegunBlock] = []
    for part in batch:
        end = part.start + part.num_tokens
        num_filled = end % layout.block_size
        if num_filled and part.start <= end - num_filled:
            number = num_blocks_for(end - part.sequence.num_remote_tokens, layout.block_size) - 1
            begun.append(BegunBlock(part.sequence.block_table[number], num_filled))
    return begun


def unfilled_rows(begun: Sequence[BegunBlock], layout: KvLayout, num_kv_heads: int) -> Ints:
    """Return the unfilled rows of blocks, in a layer's cache of ``num_kv_heads`` viewed as ``(rows, head_dim)``."""
    rows = [_NONE]
    for block_id, num_filled in begun:
        heads = (2 * block_id + np.arange(2))[:, None] * num_kv_heads + np.arange(num_kv_heads)
        rows.append((heads[..., None] * layout.block_size + np.arange(num_filled, layout.block_size)).ravel())
    return np.concatenate(rows)
