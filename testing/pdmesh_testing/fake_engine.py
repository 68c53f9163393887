"""An engine without a model, whose output proves that the right KV was in the right place.

The KV that `FakeEngine` writes depends on token, position, layer, and the previous layer's KV up to that position. That
KV is read back from the cache after the previous layer's hook, as with a real model. Each drawn token is a hash of the
whole context's KV, again as read back.

So the output changes if a chunk is computed out of order, if a layer does not wait for another instance's KV, if a
piece goes to the wrong block, or if one byte is lost. `reference_output` returns the right output. With
``checks_kv=False`` the cache is not touched and a step costs next to nothing, for benchmarks of everything else.

In `STATE_LAYOUT` a layer has states, by the rules of `pdmesh.engine.states`: a hash that is folded over the tokens, and
the latest token. So the output changes as well if a state is applied twice, dropped, stale or another sequence's.
"""

from __future__ import annotations

import array
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pdmesh.engine.base import (
    DrawnToken,
    EngineSequence,
    LayerHook,
    Logprobs,
    SequenceSlice,
    SliceResult,
    StepFlight,
    accepted,
    finish_reason,
    with_draft,
)
from pdmesh.engine.ranks.share import RankShare
from pdmesh.engine.states import StatePath, StateSlice, state_slices
from pdmesh.kv.frames import FrameMap
from pdmesh.kv.remote_kv import RangeQuestion, RemoteKv
from pdmesh.kv.sharing import HostCache
from pdmesh.kv.store import HostKvStore
from pdmesh.kv_layout import STATE_WINDOW, KvLayout, num_blocks_for
from pdmesh.model import ComputePath, RequestId, SamplingParams
from pdmesh.policy.latency import ChunkShape, LatencyModel, StepShape
from pdmesh_testing.turns import StageTurns

#: Small enough for tests with thousands of blocks; one token's keys are one 32-bit word.
FAKE_LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=1, block_size=4, dtype="float32")

#: The same, with a layer of states between the layers of KV.
STATE_LAYOUT = replace(FAKE_LAYOUT, num_layers=3, window=STATE_WINDOW, windowed_layers=(1,), has_states=True)

#: Words of a state: position, hash, latest token.
_POSITION, _HASH, _LATEST, _STATE_WORDS = 0, 1, 2, 3

#: DrawnToken tokens are printable ASCII in byte-level vocabularies, whether these count bytes from 0 or from "!".
FIRST_TOKEN_ID = 33
NUM_TOKEN_IDS = 60

_WORD_BYTES = 4
_MIX = 0x9E3779B1
_TIMEOUT_S = 30.0

Words = npt.NDArray[np.uint32]


class FakeKvStore(HostKvStore):
    """A paged cache of 32-bit words, all of them in use: ``words[layer, page, k or v, token, lane]``.

    Pages are blocks, and frames in layers with a window. ``num_frames`` is their number; None means one for each block.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, num_frames: int | None = None) -> None:
        lanes, rest = divmod(layout.max_page_bytes, 2 * layout.block_size * _WORD_BYTES)
        if rest:
            raise ValueError(f"a token of {layout} is not whole 32-bit words")
        self.layout = layout
        self.num_blocks = num_blocks
        self._frames: FrameMap | None = None
        num_pages = num_blocks
        if layout.windowed_layers:
            self._frames = FrameMap.shared_out(num_blocks, num_blocks if num_frames is None else num_frames)
            num_pages = max(num_blocks, self._frames.num_frames + 1)
        self.words: Words = np.zeros((layout.num_layers, num_pages, 2, layout.block_size, lanes), dtype=np.uint32)

    @property
    def frames(self) -> FrameMap | None:
        return self._frames

    @property
    def shared(self) -> HostCache:
        num_frames = 0 if self._frames is None else self._frames.num_frames
        addresses = [layer.ctypes.data for layer in self.words]
        return HostCache(self.layout, self.num_blocks, addresses, num_frames=num_frames)

    def gather(self, layer: int, block_ids: Sequence[int], out: memoryview) -> None:
        source = self.words[layer, [self.page(layer, block_id) for block_id in block_ids]]
        out.cast("B")[:] = source.tobytes()

    def scatter(self, layer: int, block_ids: Sequence[int], data: memoryview) -> None:
        values = np.frombuffer(data, dtype=np.uint32).reshape(len(block_ids), *self.words.shape[2:])
        pages = np.array([self.page(layer, block_id) for block_id in block_ids], dtype=np.int64)
        if self._frames is not None and layer in self.layout.windowed_layers:
            is_seen = pages != self._frames.zeros
            pages, values = pages[is_seen], values[is_seen]
        self.words[layer, pages] = values

    def page(self, layer: int, block_id: int) -> int:
        """Return the page of a block in a layer."""
        if self._frames is None or layer not in self.layout.windowed_layers:
            return block_id
        return int(self._frames.of_block[block_id])


class StepGate:
    """Lets a test stop an engine between layers: the engine waits at each layer until the test lets it through.

    `arrived` blocks and is for a worker thread; ``let_through`` and `open` never do.
    """

    def __init__(self) -> None:
        self._arrivals = threading.Semaphore(0)
        self._permits = threading.Semaphore(0)
        self._is_open = threading.Event()

    def arrived(self) -> None:
        """Wait until the engine has come to its next layer."""
        if not self._arrivals.acquire(timeout=_TIMEOUT_S):
            raise TimeoutError("the engine has not come to its next layer")

    def let_through(self, num_layers: int = 1) -> None:
        self._permits.release(num_layers)

    def open(self) -> None:
        """Hold nothing up from now on."""
        self._is_open.set()
        self._permits.release()

    def wait(self) -> None:
        """Called by the engine."""
        if self._is_open.is_set():
            return
        self._arrivals.release()
        if not self._permits.acquire(timeout=_TIMEOUT_S):
            raise TimeoutError("the test has not let the engine through")


def timed_by(model: LatencyModel) -> Callable[[Sequence[SequenceSlice]], float]:
    """Return a function for the seconds of a batch by ``model``.

    A sequence's last token counts as a decode, and so does each token of a draft.
    """

    def step_s(batch: Sequence[SequenceSlice]) -> float:
        chunks: list[ChunkShape] = []
        num_decodes = num_context_tokens = 0
        for part in batch:
            if part.num_tokens == 1 + len(part.draft) and part.start == len(part.sequence.token_ids) - 1:
                num_decodes += part.num_tokens
                num_context_tokens += part.num_tokens * (part.start + 1)
            else:
                chunks.append(ChunkShape(part.num_tokens, part.start))
        return model.step_s(StepShape(tuple(chunks), num_decodes, num_context_tokens))

    return step_s


@dataclass(slots=True)
class _FakeStep:
    """A step between two layers."""

    #: Hidden values of each slice.
    hidden: list[Words]
    #: Answers of shard holders to each slice, (layers, 2, tokens, lanes).
    elsewhere: list[Words]
    #: Seconds that the step should have taken so far, but has not.
    owed_s: float = 0.0


class FakeEngine:
    """Implements `pdmesh.engine.base.Engine`.

    ``step_s`` is the latency model: seconds that a batch takes, evenly over its layers (`timed_by`): most of each after
    its hook, as attention and all that follows are. ``fails`` makes a batch raise, as a broken device would. Steps of
    several threads pass ``num_stages``, of equally many layers. Engines of other ``weights`` draw other tokens.
    """

    def __init__(
        self,
        layout: KvLayout = FAKE_LAYOUT,
        *,
        num_blocks: int = 64,
        num_frames: int | None = None,
        max_model_len: int = 4096,
        checks_kv: bool = True,
        gate: StepGate | None = None,
        step_s: Callable[[Sequence[SequenceSlice]], float] | None = None,
        fails: Callable[[Sequence[SequenceSlice]], bool] | None = None,
        arithmetic: str = "stand-in",
        num_stages: int = 1,
        weights: str = "",
    ) -> None:
        self.arithmetic = arithmetic
        self.weights = weights
        self._salt = zlib.crc32(weights.encode()) & ~1
        self.kv = FakeKvStore(layout, num_blocks, num_frames)
        self.max_model_len = max_model_len
        self.compute_path = ComputePath(kernels="stand-in", dtype=layout.dtype)
        # Executed slices as (request, start, tokens); recorded only with ``checks_kv``.
        self.batches: list[tuple[tuple[RequestId, int, int], ...]] = []
        self._checks_kv = checks_kv
        self._gate = gate
        self._step_s = step_s
        self._fails = fails
        self._turns = StageTurns(num_stages)
        positions = np.arange(max_model_len, dtype=np.uint32)
        mixed = (positions * np.uint32(_MIX)) ^ (positions >> np.uint32(3)) ^ np.uint32(self._salt)
        self._weights: Words = mixed | np.uint32(1)
        self._state_layers = frozenset(layout.windowed_layers)
        self._kv_layers = [layer for layer in range(layout.num_layers) if layer not in self._state_layers]
        self._lanes: Words = np.arange(self.kv.words.shape[-1], dtype=np.uint32) * np.uint32(0x85EBCA6B)

    @property
    def num_stages(self) -> int:
        return self._turns.num_stages

    @property
    def _has_states(self) -> bool:
        return self._checks_kv and bool(self._state_layers)

    def execute(
        self, batch: Sequence[SequenceSlice], *, on_layer: LayerHook | None = None, flight: StepFlight | None = None
    ) -> list[SliceResult]:
        if self._fails is not None and self._fails(batch):
            raise RuntimeError("the fake device broke")
        flight = flight or StepFlight()
        if self._checks_kv:
            self.batches.append(tuple((s.sequence.request_id, s.start, s.num_tokens) for s in batch))
        step = _FakeStep(
            hidden=[np.zeros(part.num_tokens, dtype=np.uint32) for part in batch],
            elsewhere=[self._no_kv(part.sequence.num_remote_tokens) for part in batch],
        )
        number, num_stages, stage = self._turns.enter(), self._turns.num_stages, 0
        try:
            for stage in range(num_stages):
                with self._turns.stage(stage, number) as waited_s:
                    flight.queued_s += waited_s
                    if stage == 0:
                        flight.on_begin()
                    self._pass(batch, step, RankShare(stage=stage, num_stages=num_stages), on_layer)
        finally:
            self._turns.give_up(stage + 1, number)
        return [self._result(part, elsewhere) for part, elsewhere in zip(batch, step.elsewhere, strict=True)]

    def _pass(
        self, batch: Sequence[SequenceSlice], step: _FakeStep, share: RankShare, on_layer: LayerHook | None
    ) -> None:
        """Compute the layers of a stage."""
        num_layers = self.kv.layout.num_layers
        layer_s = 0.0 if self._step_s is None else self._step_s(batch) / num_layers
        layers = range(*share.layers(num_layers))
        slices = state_slices(batch, self.kv.layout.block_size, self.kv.frames) if self._has_states else ()
        for layer in layers:
            if self._gate is not None:
                self._gate.wait()
            queries: list[np.uint32] = []
            has_kv = self._checks_kv and layer not in self._state_layers
            if self._checks_kv and not has_kv:
                step.hidden = [self._fold(layer, *each) for each in zip(batch, slices, step.hidden, strict=True)]
            if has_kv:
                queries = [self._write(layer, *each) for each in zip(batch, step.hidden, strict=True)]
                for part, query in zip(batch, queries, strict=True):
                    if part.sequence.elsewhere is not None:
                        part.sequence.elsewhere.ask(RangeQuestion(layer, part.start, query.tobytes()))
            if on_layer is not None:
                on_layer(layer)
            if has_kv:
                for part, query, elsewhere in zip(batch, queries, step.elsewhere, strict=True):
                    if part.sequence.elsewhere is not None:
                        elsewhere[layer] = self._answered(part.sequence.elsewhere, query)
                step.hidden = [self._attend(layer, *each) for each in zip(batch, step.elsewhere, strict=True)]
            step.owed_s += layer_s
            if step.owed_s > 0 and (on_layer is not None or layer == layers[-1]):
                began_s = time.perf_counter()
                time.sleep(step.owed_s)
                step.owed_s -= time.perf_counter() - began_s

    def prepare(self, grammar: str) -> None:
        """Do nothing: the engine ignores grammars."""

    def settle(self) -> None:
        """Do nothing: steps compute as they are called."""

    def attend_part(self, number: int, block_ids: Sequence[int], question: RangeQuestion) -> bytes:
        """Answer with the range's KV, combined with the query: the answer is useless for any other query."""
        del number
        if len(question.query) != _WORD_BYTES:
            raise ValueError(f"a question of {len(question.query)} bytes")
        pages = self.kv.words[question.layer, list(block_ids)].swapaxes(0, 1)
        return (pages ^ np.frombuffer(question.query, dtype=np.uint32)).tobytes()

    def _answered(self, elsewhere: RemoteKv, query: np.uint32) -> Words:
        """Return a layer's KV on shard holders, from their answers in order: (2, num_tokens, lanes)."""
        ranges = [
            np.frombuffer(answer, dtype=np.uint32).reshape(2, -1, len(self._lanes)) for answer in elsewhere.answers()
        ]
        answered: Words = np.concatenate(ranges, axis=1) ^ query
        assert answered.shape[1] == elsewhere.num_tokens, "answers of other ranges than were asked about"
        return answered

    def _no_kv(self, num_tokens: int) -> Words:
        return np.zeros((self.kv.layout.num_layers, 2, num_tokens, len(self._lanes)), dtype=np.uint32)

    def _write(self, layer: int, part: SequenceSlice, hidden: Words) -> np.uint32:
        """Write the KV of ``part``. Return the query for the shard holders of earlier KV."""
        end = part.start + part.num_tokens
        block_size = self.kv.layout.block_size
        positions = np.arange(part.start, end)
        own = positions - part.sequence.num_remote_tokens
        blocks = np.asarray(part.sequence.block_table)[own // block_size]
        tokens = np.asarray(part.token_ids, dtype=np.uint32)
        keys = (tokens * np.uint32(_MIX) + np.uint32(layer))[:, None] + self._lanes
        values = hidden + keys[:, 0] * self._weights[part.start : end]
        self.kv.words[layer, blocks, 0, own % block_size] = keys
        self.kv.words[layer, blocks, 1, own % block_size] = values[:, None] ^ self._lanes
        query: np.uint32 = (values * self._weights[: part.num_tokens]).sum(dtype=np.uint32)
        return query

    def _attend(self, layer: int, part: SequenceSlice, elsewhere: Words) -> Words:
        """Return, for each token of ``part``, a mix of all tokens up to it in this layer: (num_tokens,)."""
        end = part.start + part.num_tokens
        keys, values = self._read(part.sequence, end, [layer], elsewhere)[0].sum(axis=2, dtype=np.uint32)
        mixed = (keys * np.uint32(31) + values) * self._weights[:end]
        attended: Words = np.cumsum(mixed, dtype=np.uint32)[part.start :]
        return attended

    def has_states(self, sequence: EngineSequence, num_tokens: int) -> bool:
        """Return whether all layers of states have the state behind the first ``num_tokens`` of a sequence."""
        if not self._state_layers:
            return True
        states = self.states_in(sequence.block_table[(num_tokens - 1) // self.kv.layout.block_size])
        return bool((states[..., _POSITION] == num_tokens).any(axis=1).all())

    def states_in(self, block_id: int) -> Words:
        """Return the states in a block's pages, (layers of states, 2, words). A state's first word is its position."""
        pages = [self.kv.words[layer, self.kv.page(layer, block_id)].reshape(2, -1) for layer in self._state_layers]
        states: Words = np.array(pages, dtype=np.uint32)
        return states.reshape(len(pages), 2, self.kv.words[0, 0].size // 2)[..., :_STATE_WORDS]

    def _fold(self, layer: int, part: SequenceSlice, rows: StateSlice, hidden: Words) -> Words:
        """Advance a sequence's state over ``part``, and write the states at the stops. Return the state of each token.

        Raise RuntimeError if the state before ``part`` is not in the cache.
        """
        layout, states = self.kv.layout, self.kv.words[layer].reshape(self.kv.words.shape[1], 2, -1)
        path = StatePath.begun(rows, layout.block_size, states[:, :, _POSITION])
        folded = latest = 0
        if path.source is not None:
            folded, latest = (int(word) for word in states[path.source][_HASH:_STATE_WORDS])
        stops = {stop.num_tokens: stop.place for stop in path.stops}
        results: list[int] = []
        for number, (token, own) in enumerate(zip(part.token_ids, hidden.tolist(), strict=True), 1):
            folded = (folded * 0x01000193 + (token ^ latest * 31) * _MIX + own) & 0xFFFFFFFF
            latest = token
            results.append(folded)
            if number in stops:
                states[stops[number]][_HASH:_STATE_WORDS] = folded, latest
        path.end(part.start, states[:, :, _POSITION])
        return np.array(results, dtype=np.uint32)

    def _read(self, sequence: EngineSequence, num_tokens: int, layers: list[int], elsewhere: Words) -> Words:
        """Return the KV of a context: shard holders' answers, then the cache, as (layers, 2, num_tokens, lanes)."""
        block_size, num_own_tokens = self.kv.layout.block_size, num_tokens - elsewhere.shape[2]
        table = sequence.block_table[: num_blocks_for(num_own_tokens, block_size)]
        pages = self.kv.words[np.ix_(layers, table)]
        by_token = pages.swapaxes(1, 2)
        own = by_token.reshape(pages.shape[0], 2, len(table) * block_size, len(self._lanes))[:, :, :num_own_tokens]
        return np.concatenate((elsewhere[layers], own), axis=2) if elsewhere.size else own

    def _context_hash(self, sequence: EngineSequence, num_tokens: int, elsewhere: Words) -> int:
        if not self._checks_kv:
            return (sequence.token_ids[num_tokens - 1] + num_tokens + self._salt) * _MIX
        by_position = self._read(sequence, num_tokens, self._kv_layers, elsewhere).sum(axis=(0, 3), dtype=np.uint32)
        keys, values = (by_position * self._weights[:num_tokens]).sum(axis=1, dtype=np.uint32)
        return (int(keys) * 31 + int(values)) * _MIX

    def _result(self, part: SequenceSlice, elsewhere: Words) -> SliceResult:
        sequence, params = part.sequence, part.sequence.params
        prompt_logprobs: tuple[Logprobs, ...] = ()
        if part.prompt_logprobs:
            following = sequence.token_ids[part.start + 1 : part.start + part.num_tokens + 1]
            in_prompt = following[: max(0, sequence.num_prompt_tokens - part.start - 1)]
            prompt_logprobs = tuple(_logprobs(token, params.prompt_logprobs or 0) for token in in_prompt)
        if not part.sample:
            return SliceResult(prompt_logprobs=prompt_logprobs)
        if params.embeds:
            return SliceResult(
                embedding=_embedding(self._context_hash(sequence, part.start + part.num_tokens, elsewhere))
            )
        first = part.start + part.num_tokens - len(part.draft)
        drawn = (self._drawn(each, first + number, elsewhere) for number, each in enumerate(with_draft(part)))
        return SliceResult(drawn=accepted(part.draft, drawn), prompt_logprobs=prompt_logprobs)

    def _drawn(self, sequence: EngineSequence, num_tokens: int, elsewhere: Words) -> DrawnToken:
        """Draw the token that follows the first ``num_tokens`` tokens, from their KV in the cache."""
        params = sequence.params
        mixed = self._context_hash(sequence, num_tokens, elsewhere)
        if params.temperature > 0:
            mixed += params.seed * 0x27D4EB2F
        num_output_tokens = sequence.num_output_tokens + 1
        token_id = _draw(mixed, params, num_output_tokens)
        reason, stop_token_id = finish_reason(params, num_output_tokens, token_id)
        return DrawnToken(
            token_id=token_id,
            logprobs=None if params.logprobs is None else _logprobs(token_id, params.logprobs),
            finish_reason=reason,
            stop_token_id=stop_token_id,
        )


def _embedding(mixed: int) -> bytes:
    """Return eight numbers from 1 to 256 for a hash."""
    words = (mixed >> np.arange(0, 32, 4, dtype=np.int64)) % 256 + 1
    return words.astype("<f4").tobytes()


def _draw(mixed: int, params: SamplingParams, num_output_tokens: int) -> int:
    banned = (*params.eos_token_ids, *params.stop_token_ids) if num_output_tokens <= params.min_tokens else ()
    drawn = (mixed >> 8) % NUM_TOKEN_IDS
    while FIRST_TOKEN_ID + drawn in banned:
        drawn = (drawn + 1) % NUM_TOKEN_IDS
    return FIRST_TOKEN_ID + drawn


def _logprobs(token_id: int, num_top: int) -> Logprobs:
    own = -1.0 - (token_id % 97) / 128
    return Logprobs(logprob=own, top=tuple((token_id + rank, own - rank) for rank in range(num_top)))


def reference_output(
    prompt: Sequence[int], params: SamplingParams, *, layout: KvLayout = FAKE_LAYOUT, weights: str = ""
) -> list[int]:
    """Return the right output of fake engines with this layout: the prompt in one chunk, alone, in fresh blocks."""
    num_blocks = num_blocks_for(len(prompt) + params.max_tokens, layout.block_size)
    max_model_len = len(prompt) + params.max_tokens
    engine = FakeEngine(layout, num_blocks=num_blocks, max_model_len=max_model_len, weights=weights)
    sequence = EngineSequence(
        request_id=RequestId("reference"),
        params=params,
        token_ids=array.array("i", prompt),
        num_prompt_tokens=len(prompt),
        block_table=list(range(num_blocks)),
    )
    start = 0
    while True:
        num_tokens = len(sequence.token_ids) - start
        (result,) = engine.execute([SequenceSlice(sequence=sequence, start=start, num_tokens=num_tokens, sample=True)])
        assert result.token_id is not None
        start = len(sequence.token_ids)
        sequence.token_ids.append(result.token_id)
        if result.drawn[0].finish_reason is not None:
            return sequence.token_ids[len(prompt) :].tolist()
