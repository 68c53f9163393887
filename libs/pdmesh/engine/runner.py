"""The engine in torch: it executes steps over a paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import structlog
import torch
from torch import Tensor

from pdmesh.engine.attention import QuerySpan
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
from pdmesh.engine.compute import ComputeOptions, PagedStore
from pdmesh.engine.devices import check_device_name
from pdmesh.engine.files import load_model_info
from pdmesh.engine.forward import DirectForward, Forward, StepOutput, drawn_rows, draws, step_spans
from pdmesh.engine.grammar_state import GrammarState
from pdmesh.engine.identity import unchanged_weights
from pdmesh.engine.json_bounds import JsonBounds
from pdmesh.engine.kv_cache import TorchKvStore, memory_bytes
from pdmesh.engine.lending import Cores, LentDecoder
from pdmesh.engine.model_config import ModelConfig
from pdmesh.engine.model_loading import LoadedModel, decided_dtype, load_model, plan_model
from pdmesh.engine.part_attention import PartAttention, part_attention
from pdmesh.engine.ranks.group import RankGroup
from pdmesh.engine.ranks.leading import Followers, LeadingForward
from pdmesh.engine.ranks.pipeline import Pipeline, Stages
from pdmesh.engine.ranks.rank_commands import Ready
from pdmesh.engine.ranks.rank_elsewhere import AskedRows
from pdmesh.engine.ranks.share import WHOLE, RankShare
from pdmesh.engine.sampler import token_logprobs
from pdmesh.errors import ConfigError
from pdmesh.grammars import Grammars, is_json
from pdmesh.kv.remote_kv import RangeQuestion
from pdmesh.kv_layout import KvLayout
from pdmesh.model import ComputePath, FinishReason

log = structlog.get_logger()

#: Number of logits that are computed at once for prompt log-probabilities. All rows of a chunk would take gigabytes.
_TILE_LOGITS = 1 << 22


LoadModel = Callable[[Path, ComputeOptions, RankShare, RankGroup | None], LoadedModel]


class TorchEngine:
    """`pdmesh.engine.base.Engine` for a Hugging Face checkpoint.

    ``num_blocks`` of the KV cache may be a function of its layout and of the device's free bytes after the weights
    (None on the host). ``max_num_seqs`` is the number of decodes per step that a device prepares for; more are computed
    more slowly. ``prefill_attention`` names FlashInfer's backend for chunks; "auto" chooses by their length.

    ``num_threads`` sets torch's threads for the whole process; 0 leaves them unchanged. ``native`` allows faster ways
    than plain torch: compiled kernels, reordered weights, and on CUDA FlashInfer and graphs. Without it, the engine is
    the reference. ``cpu_level`` is the highest level of compiled kernels to use, "auto" the processor's best.
    ``ordered`` allows only levels with the same bits on every processor. Raise ConfigError for a level that the
    processor lacks.

    ``has_random_weights`` draws weights on the device; only the checkpoint's ``config.json`` is read. ``deterministic``
    makes results bit-identical whatever the batch and chunk boundaries, and is refused on a device. ``lora`` is the
    directory of an adapter to merge. ``load`` reads the weights.

    ``range_tokens`` divides contexts into ranges, whose attention is merged (`pdmesh.engine.ranged_attention`); 0 means
    no division. ``max_frames`` limits the blocks in memory of layers with a window (`pdmesh.kv.frames`). None means no
    limit, as on a device and with ranges.

    ``followers`` are the other ranks, which compute together with this one. ``stages`` are ranks that compute instead
    of this one.
    """

    def __init__(
        self,
        checkpoint_dir: Path,
        *,
        num_blocks: int | Callable[[KvLayout, int | None], tuple[int, int]],
        block_size: int = 16,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        num_threads: int = 0,
        prefill_attention: str = "auto",
        deterministic: bool = False,
        native: bool = True,
        has_random_weights: bool = False,
        cpu_level: str = "auto",
        ordered: bool = False,
        lora: Path | None = None,
        range_tokens: int = 0,
        max_frames: int | None = None,
        followers: Followers | None = None,
        stages: Stages | None = None,
        load: LoadModel = load_model,
    ) -> None:
        if num_threads > 0:
            torch.set_num_threads(num_threads)
        self._device = torch_device(device)
        if deterministic and self._device.type == "cuda":
            raise ConfigError(
                "worker.deterministic is set, but on a GPU a result depends on the batch and on the chunks that it is "
                "computed in: set worker.device to cpu, or worker.deterministic to false"
            )
        on_cpu = self._device.type == "cpu"
        options = ComputeOptions(
            device=self._device,
            block_size=block_size,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            prefill_attention=prefill_attention,
            deterministic=deterministic,
            native=native,
            has_random_weights=has_random_weights,
            cpu_level=cpu_level,
            ordered=ordered,
            lora=lora,
            range_tokens=range_tokens,
            frees_windows=max_frames is not None and on_cpu and not range_tokens,
        )
        model = None
        plan_model(checkpoint_dir, options)  # refuses options before the weights are read
        with unchanged_weights(checkpoint_dir, lora=lora, has_random_weights=has_random_weights) as weights:
            if stages is None:
                share, group = (WHOLE, None) if followers is None else (followers.group.share, followers.group)
                model = load(checkpoint_dir, options, share, group)
            else:
                options = replace(options, dtype=decided_dtype(checkpoint_dir, options))
        planned = model or plan_model(checkpoint_dir, options)
        layout, self._max_model_len = planned.layout, planned.max_model_len
        self._vocab_size = planned.config.vocab_size
        self._eos_token_ids = load_model_info(checkpoint_dir).eos_token_ids
        self._grammars = Grammars(checkpoint_dir, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids)
        self._json_bounds: JsonBounds | None = None  # created with the first JSON grammar
        if not isinstance(num_blocks, int):
            num_blocks, most_frames = num_blocks(layout, _free_bytes(self._device))
            max_frames = None if max_frames is None else most_frames
        num_frames = min(num_blocks, max_frames) if max_frames is not None and layout.window else None
        size = memory_bytes(layout, num_blocks, num_frames), num_blocks, num_frames
        asked = AskedRows.of(planned.config, layout, range_tokens)
        self._forward: Forward | Pipeline
        if stages is not None:
            self._kv: PagedStore = TorchKvStore(layout, num_blocks, stages.open_cache(*size), num_frames)
            ready = stages.ready()
            self._forward = Pipeline(stages, asked, block_size=layout.block_size)
        else:
            assert model is not None
            memory = None if followers is None else followers.open_cache(*size)
            compute = model.compute(num_blocks, memory, num_frames)
            ready = Ready(compute.arithmetic, compute.name, compute.reason, weights)
            self._kv, self._forward = compute.kv, compute.forward
            if followers is not None:
                followers.check_ready(ready)
                self._forward = LeadingForward(compute.forward, followers, asked, block_size=layout.block_size)
        self._parts: PartAttention | None = None
        if range_tokens:
            assert isinstance(planned.config, ModelConfig), "contexts of other models are refused"
            self._parts = part_attention(planned.config, layout, options, self._kv.layers)
        self.compute_path = ComputePath(kernels=ready.kernels, dtype=layout.dtype, reason=ready.reason)
        self._arithmetic, self.weights = ready.arithmetic, ready.weights
        log.info("compute path chosen", kernels=ready.kernels, arithmetic=ready.arithmetic, reason=ready.reason)
        log.info("weights loaded", identity=self.weights)

    @property
    def kv(self) -> PagedStore:
        return self._kv

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def arithmetic(self) -> str:
        return self._arithmetic

    @property
    def num_stages(self) -> int:
        return self._forward.num_stages if isinstance(self._forward, Pipeline) else 1

    @torch.inference_mode()
    def execute(
        self, batch: Sequence[SequenceSlice], *, on_layer: LayerHook | None = None, flight: StepFlight | None = None
    ) -> list[SliceResult]:
        if not batch:
            return []
        spans = step_spans(batch)
        forward = self._forward
        step = (
            forward.step(batch, spans, on_layer, flight)
            if isinstance(forward, Pipeline)
            else forward.step(batch, spans, on_layer)
        )
        with step as output:
            drawn = self._sample(batch, spans, output)
            embeddings = _embeddings(batch, spans, output)
            prompts = [
                self._prompt_logprobs(part, span.row, output) if part.prompt_logprobs else ()
                for part, span in zip(batch, spans, strict=True)
            ]
        return [
            SliceResult(drawn=tokens, prompt_logprobs=prompt, embedding=embeddings.get(index, b""))
            for index, (tokens, prompt) in enumerate(zip(drawn, prompts, strict=True))
        ]

    @property
    def any_num_threads(self) -> bool:
        """Whether the bits of results are the same with any number of threads."""
        return isinstance(self._forward, DirectForward) and self._forward.any_num_threads

    def use(self, cores: Cores) -> None:
        """Compute layers with ``cores`` from now on. Allowed only if `any_num_threads`."""
        assert isinstance(self._forward, DirectForward)
        self._forward.decoder = LentDecoder(self._forward.decoder, cores)

    def prepare(self, grammar: str) -> None:
        self._grammars.matcher(grammar)
        self._bounds_of(grammar)

    @torch.inference_mode()
    def attend_part(self, number: int, block_ids: Sequence[int], question: RangeQuestion) -> bytes:
        assert self._parts is not None, "contexts are not divided"
        return self._parts.attend(number, block_ids, question)

    def settle(self) -> None:
        self._forward.settle()

    def _sample(
        self, batch: Sequence[SequenceSlice], spans: Sequence[QuerySpan], output: StepOutput
    ) -> list[tuple[DrawnToken, ...]]:
        rows = drawn_rows(batch, spans)
        sequences: list[EngineSequence] = []
        for part in filter(draws, batch):
            self._guide(part.sequence)
            sequences += with_draft(part)
        if not rows:
            return [()] * len(batch)
        num_top = {row: n for row, s in enumerate(sequences) if (n := s.params.logprobs) is not None}
        token_ids = output.draw(rows, sequences)
        listed = {row: sequences[row].params.logprob_token_ids for row in num_top}
        logprobs = _logprobs_of(output.logits(rows), token_ids, num_top, listed) if num_top else {}
        drawn: list[tuple[DrawnToken, ...]] = []
        first = 0
        for part in batch:
            end = first + (1 + len(part.draft) if draws(part) else 0)
            each = (_drawn(sequences[row], token_ids[row], logprobs.get(row)) for row in range(first, end))
            drawn.append(accepted(part.draft, each))
            first = end
        return drawn

    def _guide(self, sequence: EngineSequence) -> None:
        if not sequence.params.grammar:
            return
        if sequence.guide is None:
            grammar = sequence.params.grammar
            matcher = self._grammars.matcher(grammar)
            sequence.guide = GrammarState(matcher, self._eos_token_ids, self._bounds_of(grammar))
        sequence.guide.catch_up(sequence.output_token_ids)

    def _bounds_of(self, grammar: str) -> JsonBounds | None:
        if not is_json(grammar):
            return None
        if self._json_bounds is None:
            self._json_bounds = JsonBounds(self._grammars.token_bytes())
        return self._json_bounds

    def _prompt_logprobs(self, part: SequenceSlice, row: int, output: StepOutput) -> tuple[Logprobs, ...]:
        """Return log-probabilities of the prompt tokens that follow the slice's tokens. The slice begins at ``row``."""
        sequence = part.sequence
        targets = sequence.token_ids[part.start + 1 : min(part.start + part.num_tokens + 1, sequence.num_prompt_tokens)]
        num_top = sequence.params.prompt_logprobs or 0
        tile_rows = max(1, _TILE_LOGITS // self._vocab_size)
        result: list[Logprobs] = []
        for first in range(0, len(targets), tile_rows):
            tile = targets[first : first + tile_rows].tolist()
            logits = output.logits(range(row + first, row + first + len(tile)))
            result += token_logprobs(logits, tile, [num_top] * len(tile))
        return tuple(result)


def _embeddings(batch: Sequence[SequenceSlice], spans: Sequence[QuerySpan], output: StepOutput) -> dict[int, bytes]:
    """Return the requested embeddings by their slices' places in the batch."""
    wanted = [index for index, part in enumerate(batch) if part.sample and part.sequence.params.embeds]
    if not wanted:
        return {}
    rows = [spans[index].row + spans[index].num_tokens - 1 for index in wanted]
    values = output.embeddings(rows).cpu().numpy()
    return {index: row.astype("<f4").tobytes() for index, row in zip(wanted, values, strict=True)}


def torch_device(name: str) -> torch.device:
    """Return the device called ``name``, with a number if it is CUDA. "auto" means CUDA if available, else the CPU.

    Raise ConfigError for another name, or without such a device.
    """
    check_device_name(name)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but torch finds no CUDA device")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _free_bytes(device: torch.device) -> int | None:
    """Return the device's free memory in bytes, or None for the host."""
    if device.type == "cpu":
        return None
    torch.cuda.empty_cache()  # free temporary memory of loading
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return free_bytes


def _logprobs_of(
    logits: Tensor, token_ids: Sequence[int], num_top: Mapping[int, int], listed: Mapping[int, Sequence[int]]
) -> dict[int, Logprobs]:
    """Return log-probabilities by row, for the rows in ``num_top``.

    The ``top`` are the most likely tokens, or the ids in ``listed`` and the drawn token if a row lists any.
    """
    rows = list(num_top)
    wanted_logits = logits if len(rows) == len(logits) else logits[rows]
    found = token_logprobs(wanted_logits, [token_ids[row] for row in rows], list(num_top.values()))
    by_row = dict(zip(rows, found, strict=True))
    for row, ids in listed.items():
        if ids:
            wanted = [*dict.fromkeys((*ids, token_ids[row]))]
            values = (logits[row, wanted] - torch.logsumexp(logits[row], dim=-1)).tolist()
            by_row[row] = replace(by_row[row], top=tuple(zip(wanted, values, strict=True)))
    return by_row


def _drawn(sequence: EngineSequence, token_id: int, logprobs: Logprobs | None) -> DrawnToken:
    reason, stop_token_id = finish_reason(sequence.params, sequence.num_output_tokens + 1, token_id)
    if sequence.guide is not None:
        reason = _end_by_grammar(sequence.guide, token_id, reason)
    return DrawnToken(token_id=token_id, logprobs=logprobs, finish_reason=reason, stop_token_id=stop_token_id)


def _end_by_grammar(guide: GrammarState, token_id: int, reason: FinishReason | None) -> FinishReason | None:
    """Return how a sequence ends with a token: for ``reason``, or because of its grammar. None: it continues.

    The token is passed to the guide, unless it stands for the end. An output that violates the grammar is logged.
    """
    if reason is not FinishReason.STOP:  # an end token is not part of the grammar
        guide.take([token_id])
    if guide.error:
        log.warning("cannot enforce an answer's grammar; the answer ends", error=guide.error)
        return FinishReason.ERROR
    return FinishReason.STOP if guide.is_complete else reason
