"""Drawing of tokens from logits, so that noise in logits changes few draws.

The order is vLLM's: logit bias, grammar and forbidden ends, penalties, temperature, min_p, top_k, top_p. Then each
token's score gets Gumbel noise that depends only on (seed, output index, token id). The token with the highest score is
drawn (Gumbel-max).

A token that rounding moves into or out of the filters therefore changes the draw only if it is itself drawn. Noise of ε
in the scores changes the draw with a probability of about ε, whatever the vocabulary. A walk along the cumulative
distribution has neither property: one token more or less shifts all later ones.

The filters cut scores in steps of `_STEP`, far coarser than the noise of any dtype's sums, with ties by id. Which
tokens remain depends on the number of tokens in each step, not on the order of nearly equal ones, and needs no sort.

On a CPU, compiled kernels draw (`pdmesh.engine.drawing`). The torch functions here are their reference. They draw on
devices, and where no kernels were compiled.
"""

from __future__ import annotations

import array
import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdmesh.engine.base import EngineSequence, Logprobs
from pdmesh.engine.drawing import draw_kernels

#: Number of logits that torch draws from at once: 64 rows of a vocabulary of 128K. Filters take some 20 bytes for each.
#: On a CPU, the smaller number stays in the cache.
_TILE_ELEMENTS, _CPU_TILE_ELEMENTS = 1 << 23, 1 << 18

#: Steps of the filters, in nats, and their number. Tokens less likely than the best by a factor of e^-32 count as
#: equally unlikely.
_STEP = 1 / 256
_NUM_STEPS = 32 * 256

#: Largest number of tokens whose scores fp32 might not distinguish. torch draws the best of these in fp64.
_NUM_CANDIDATES = 8

#: Largest number of most likely tokens that compiled kernels find. More are found by sorting.
_MOST_INSERTED = 64

_MASK_64 = (1 << 64) - 1
_MASK_31 = (1 << 31) - 1


def sample(logits: Tensor, sequences: Sequence[EngineSequence]) -> list[int]:
    """Return the next token of each sequence. ``logits`` (rows, vocab_size) in fp32 are not changed."""
    if logits.device.type == "cpu" and (kernels := draw_kernels()) is not None:
        rows = logits.contiguous().numpy()
        addresses = rows.ctypes.data + rows.strides[0] * np.arange(len(rows))
        changed = [row for row, sequence in enumerate(sequences) if changes_logits(sequence)]
        copies = rows[changed]
        for copy, row in zip(copies, changed, strict=True):
            process(copy, sequences[row])
            addresses[row] = copy.ctypes.data
        token_ids = kernels.draw(
            addresses,
            row_settings(sequences, rows.shape[-1]),
            _step_weights(),
            vocab_size=rows.shape[-1],
            num_threads=torch.get_num_threads(),
        )
        if -1 not in token_ids:
            return token_ids
    drawn: list[int] = draw(logits, sequences).tolist()
    return drawn


def draw(logits: Tensor, sequences: Sequence[EngineSequence]) -> Tensor:
    """Draw in torch: (rows,), int64, on the device of ``logits`` (rows, vocab_size, fp32), which are not changed.

    All settings of the rows go to a device in one copy. The host computes the tokens that grammars allow while the
    device works. Only rows whose logits are changed otherwise (penalties, biases, forbidden ends) are copied to the
    host and back, which waits for the device.
    """
    logits = _processed(_masked(logits, sequences), sequences)
    tile_elements = _CPU_TILE_ELEMENTS if logits.device.type == "cpu" else _TILE_ELEMENTS
    tile_rows = max(1, tile_elements // logits.shape[-1])
    tiles = [slice(first, first + tile_rows) for first in range(0, len(sequences), tile_rows)]
    return torch.cat([_draw_tile(logits[tile], sequences[tile]) for tile in tiles])


class DrawSettings(NamedTuple):
    """Settings of rows on the device of their logits. Each is (rows, 1) but the keys.

    ``temperature`` and ``top_p`` are fp64; a temperature of 1 stands for greedy rows. ``num_steps`` (int64) is the
    number of steps that min_p keeps. ``noise_keys`` are (rows, 2), int32.
    """

    temperature: Tensor
    num_steps: Tensor
    top_k: Tensor
    top_p: Tensor
    noise_keys: Tensor


def row_settings(sequences: Sequence[EngineSequence], vocab_size: int) -> npt.NDArray[np.float64]:
    """Return the fields of `DrawSettings`, a column each and two for the keys, with unchanged temperatures."""
    params = [sequence.params for sequence in sequences]
    values = np.empty((len(params), 6), dtype=np.float64)  # fp64 holds 32-bit integers exactly
    values[:, 0] = [p.temperature for p in params]
    steps = [1 + round(-math.log(p.min_p) / _STEP) if p.min_p > 0.0 else _NUM_STEPS for p in params]
    values[:, 1] = np.minimum(steps, _NUM_STEPS)
    values[:, 2] = [p.top_k or vocab_size for p in params]
    values[:, 3] = [min(p.top_p, 1.0) for p in params]
    values[:, 4:] = noise_keys([p.seed for p in params], [sequence.num_output_tokens for sequence in sequences])
    return values


def draw_settings(sequences: Sequence[EngineSequence], vocab_size: int, device: torch.device) -> DrawSettings:
    """Return settings for each row, sent to the device in one copy that does not wait for it."""
    values = row_settings(sequences, vocab_size)
    values[values[:, 0] <= 0, 0] = 1.0
    packed = torch.from_numpy(values).to(device, non_blocking=True)  # pyright: ignore[reportUnknownMemberType]
    whole = packed[:, 1:3].long()
    return DrawSettings(packed[:, :1], whole[:, :1], whole[:, 1:], packed[:, 3:4], packed[:, 4:].int())


def noise_keys(seeds: Sequence[int], indices: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return keys of `noise_bits`: 64 bits of a hash of seed and output index (SplitMix64), (rows, 2)."""
    golden = 0x9E3779B97F4A7C15
    hashed = (_mix(_mix(seed + golden) + (i + 1) * golden) for seed, i in zip(seeds, indices, strict=True))
    return np.array(list(hashed), dtype=np.uint64).view(np.int32).reshape(-1, 2)


def noise_bits(keys: Tensor, vocab_size: int) -> Tensor:
    """Return 31 random bits for each row of ``keys`` and token id (columns), int32.

    A key chooses one of 2^63 affine maps from ids to 32 bits. The result is mixed once more ("lowbias32" of Wellons'
    hash-prospector).
    """
    bits = torch.arange(vocab_size, dtype=torch.int32, device=keys.device) * (keys[:, :1] | 1)
    bits += keys[:, 1:]
    # Right shifts copy the sign, so the bits shifted in are masked.
    bits ^= (bits >> 16) & 0xFFFF
    bits *= 0x21F0AAAD
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= 0x735A2D97
    bits ^= (bits >> 15) & 0x1FFFF
    return bits & _MASK_31


def _mix(x: int) -> int:
    """Return the result of SplitMix64's finalizer (Steele, Lea, Flood 2014)."""
    x &= _MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return x ^ (x >> 31)


def takes_best(sequence: EngineSequence) -> bool:
    """Return whether the sequence's next token is the most likely one of the unchanged logits."""
    return sequence.params.temperature <= 0 and not changes_logits(sequence)


def changes_logits(sequence: EngineSequence) -> bool:
    """Return whether `process` changes the sequence's logits."""
    return sequence.guide is not None or changes_beside_grammar(sequence)


def changes_beside_grammar(sequence: EngineSequence) -> bool:
    """Return whether `process` does more than apply the sequence's grammar."""
    params = sequence.params
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or bool(params.logit_bias)
        or bool(params.allowed_token_ids)
        or bool(params.bad_token_sequences)
        or sequence.num_output_tokens < params.min_tokens
    )


def process(logits: npt.NDArray[np.float32], sequence: EngineSequence) -> None:
    """Apply bias, grammar, forbidden tokens and ends, and penalties to one row, in place."""
    params, vocab_size = sequence.params, len(logits)
    for token_id, bias in params.logit_bias:
        if 0 <= token_id < vocab_size:
            logits[token_id] += bias
    if sequence.guide is not None:
        allowed_bits = sequence.guide.allowed(vocab_size, params.eos_token_ids)
        if allowed_bits is not None:
            _keep_allowed(logits, allowed_bits)
    if params.allowed_token_ids:
        allowed = [token_id for token_id in params.allowed_token_ids if 0 <= token_id < vocab_size]
        kept = logits[allowed]
        logits.fill(-np.inf)
        logits[allowed] = kept
    if params.bad_token_sequences:
        _forbid(logits, _completing(params.bad_token_sequences, sequence.output_token_ids))
    if sequence.num_output_tokens < params.min_tokens:
        ends = [token_id for token_id in (*params.eos_token_ids, *params.stop_token_ids) if 0 <= token_id < vocab_size]
        _forbid(logits, ends)
    if params.repetition_penalty != 1.0:
        _penalize_repetition(logits, sequence.token_ids, params.repetition_penalty)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        _penalize_counts(logits, sequence.output_token_ids, params.frequency_penalty, params.presence_penalty)


def _keep_allowed(logits: npt.NDArray[np.float32], allowed: npt.NDArray[np.uint8]) -> None:
    """Set the logits of tokens without a bit in ``allowed`` to -inf, in place. The lowest bit is token 0."""
    if (kernels := draw_kernels()) is not None:
        kernels.keep_allowed(logits, allowed)
        return
    marks = np.unpackbits(allowed, count=len(logits), bitorder="little").view(np.bool_)
    logits[(~marks).nonzero()[0]] = -np.inf


def _penalize_repetition(logits: npt.NDArray[np.float32], token_ids: array.array[int], penalty: float) -> None:
    if (kernels := draw_kernels()) is not None:
        kernels.penalize_repetition(logits, token_ids, penalty)
        return
    seen = np.zeros(len(logits), dtype=np.bool_)
    seen[np.asarray(token_ids)] = True
    scores = logits[seen]
    logits[seen] = np.where(scores < 0, scores * penalty, scores / penalty)


def _penalize_counts(
    logits: npt.NDArray[np.float32], token_ids: array.array[int], frequency: float, presence: float
) -> None:
    if (kernels := draw_kernels()) is not None:
        kernels.penalize_counts(logits, token_ids, frequency=frequency, presence=presence)
        return
    counts = np.bincount(np.asarray(token_ids), minlength=len(logits))
    logits -= (frequency * counts + presence * (counts > 0)).astype(np.float32)


def _forbid(logits: npt.NDArray[np.float32], token_ids: list[int]) -> None:
    """Forbid ``token_ids``, unless no other token could be drawn."""
    before = logits[token_ids]
    logits[token_ids] = -np.inf
    if not np.isfinite(logits).any():
        logits[token_ids] = before


def _completing(sequences: Sequence[Sequence[int]], output: array.array[int]) -> list[int]:
    """Return the tokens that would complete one of ``sequences`` after ``output``."""
    return [last for *first, last in sequences if not first or output[-len(first) :].tolist() == first]


def _masked(logits: Tensor, sequences: Sequence[EngineSequence]) -> Tensor:
    """Forbid the tokens that a grammar does not allow, in rows that are changed only by a grammar."""
    vocab_size, device = logits.shape[-1], logits.device
    masks = {
        row: mask
        for row, sequence in enumerate(sequences)
        if sequence.guide is not None
        and not changes_beside_grammar(sequence)
        and (mask := sequence.guide.allowed(vocab_size, sequence.params.eos_token_ids)) is not None
    }
    if not masks:
        return logits
    packed = torch.from_numpy(np.stack([*masks.values()]))  # pyright: ignore[reportUnknownMemberType]
    if device.type == "cuda":
        packed = packed.pin_memory()  # a copy from other memory waits for the device
    bits = packed.to(device, non_blocking=True)[..., None] >> torch.arange(8, dtype=torch.uint8, device=device)
    is_forbidden = (bits & 1).flatten(1)[:, :vocab_size] == 0
    rows = torch.tensor([*masks]).to(device, non_blocking=True)
    return logits.index_copy(0, rows, logits[rows].masked_fill_(is_forbidden, -torch.inf))


def _processed(logits: Tensor, sequences: Sequence[EngineSequence]) -> Tensor:
    changed = [row for row, sequence in enumerate(sequences) if changes_beside_grammar(sequence)]
    if not changed:
        return logits
    rows = torch.tensor(changed).to(logits.device, non_blocking=True)
    values = logits[rows].cpu()
    for row, sequence_row in zip(values, changed, strict=True):
        process(row.numpy(), sequences[sequence_row])
    return logits.index_copy(0, rows, values.to(logits.device))


def _draw_tile(logits: Tensor, sequences: Sequence[EngineSequence]) -> Tensor:
    best = logits.argmax(dim=-1)  # the lowest id among equal logits
    if all(sequence.params.temperature <= 0 for sequence in sequences):
        return best
    settings = draw_settings(sequences, logits.shape[-1], logits.device)
    highest = logits.gather(1, best[:, None])
    scores = (logits - highest) / settings.temperature.float()
    if any(is_filtered(sequence) for sequence in sequences):
        scores.masked_fill_(~kept_tokens(scores, settings), -torch.inf)
    bits = noise_bits(settings.noise_keys, logits.shape[-1])
    keys, candidates = (scores + gumbel(bits.float())).topk(min(_NUM_CANDIDATES, logits.shape[-1]), dim=-1)
    exact = (logits.gather(1, candidates).double() - highest.double()) / settings.temperature
    exact += gumbel(bits.gather(1, candidates).double())
    drawn = candidates.gather(1, exact.masked_fill_(keys == -torch.inf, -torch.inf).argmax(dim=-1, keepdim=True))[:, 0]
    taken = torch.tensor([sequence.params.temperature <= 0 for sequence in sequences])
    return torch.where(taken.to(logits.device, non_blocking=True), best, drawn)


def gumbel(bits: Tensor) -> Tensor:
    """Convert 31 random bits in floats to Gumbel noise, in place: -log(-log(1 - v)).

    The noise is most exact where it is large (v near 0). A ``v`` that fp32 rounds to 1 becomes the float below, so that
    no noise is infinite.
    """
    least = torch.finfo(bits.dtype).eps / 2 - 1
    return bits.add_(0.5).mul_(-(2.0**-31)).clamp_(min=least).log1p_().neg_().log_().neg_()


def is_filtered(sequence: EngineSequence) -> bool:
    """Return whether `kept_tokens` may exclude any token: ``top_k``, ``top_p`` or ``min_p`` is set."""
    params = sequence.params
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def step_weights(device: torch.device) -> Tensor:
    """Return the weight of each step of `_STEP` nats relative to the most likely token, in fp64.

    That token alone is step 0, with weight 1. A token in step k has weight ``exp(-(k - 1) * _STEP)``.
    """
    return (torch.arange(_NUM_STEPS + 1, dtype=torch.float64, device=device) - 1).clamp_(min=0).mul_(-_STEP).exp_()


@cache
def _step_weights() -> npt.NDArray[np.float64]:
    return step_weights(torch.device("cpu")).numpy()


def kept_tokens(scores: Tensor, settings: DrawSettings) -> Tensor:
    """Mark the tokens that min_p, top_k and top_p keep, (rows, vocab_size). The most likely one is always kept.

    Tokens are ordered by step, then by id, the most likely one first. Each filter keeps a number of first tokens.
    """
    (rows, vocab_size), device = scores.shape, scores.device
    steps = (scores * (-1 / _STEP)).round_().clamp_(max=_NUM_STEPS - 1).long().clamp_(min=0) + 1
    steps.scatter_(1, scores.argmax(dim=-1, keepdim=True), 0)
    counts = torch.zeros(rows, _NUM_STEPS + 1, dtype=torch.int64, device=device)
    counts.scatter_add_(1, steps, torch.ones((1, 1), dtype=torch.int64, device=device).expand(rows, vocab_size))
    up_to = counts.cumsum(dim=-1)
    each = step_weights(device)
    weight_up_to = (counts * each).cumsum(dim=-1)

    num_cached = torch.minimum(up_to.gather(1, settings.num_steps), settings.top_k)

    # The weight of the first num_cached tokens, and then the number of them that reaches top_p of it.
    step = torch.searchsorted(up_to, num_cached)
    kept_weight = weight_up_to.gather(1, step) - (up_to.gather(1, step) - num_cached) * each[step]
    target = settings.top_p * kept_weight
    step = torch.searchsorted(weight_up_to, target).clamp_(max=_NUM_STEPS)
    surplus = ((weight_up_to.gather(1, step) - target) / each[step]).floor().long()
    reaching = up_to.gather(1, step) - surplus
    num_cached = torch.where(settings.top_p < 1.0, torch.minimum(num_cached, reaching), num_cached).clamp_(min=1)

    step = torch.searchsorted(up_to, num_cached)
    num_of_step = num_cached - up_to.gather(1, step) + counts.gather(1, step)
    at_edge = steps == step
    return (steps < step) | (at_edge & (at_edge.cumsum(dim=-1, dtype=torch.int32) <= num_of_step))


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[Logprobs]:
    """Return log-probabilities of each row's token and of its ``num_top`` most likely ones (ties by id)."""
    totals = torch.logsumexp(logits, dim=-1)
    chosen = logits.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0] - totals
    all_top, all_totals = _most_likely(logits, num_top), totals.tolist()
    return [
        Logprobs(logprob, tuple((token_id, value - total) for token_id, value in top))
        for logprob, top, total in zip(chosen.tolist(), all_top, all_totals, strict=True)
    ]


def _most_likely(logits: Tensor, num_top: Sequence[int]) -> list[list[tuple[int, float]]]:
    """Return each row's ``num_top`` most likely tokens with their logits. Of equal ones, lower ids come first."""
    most = max(num_top)
    if not most:
        return [[] for _ in num_top]
    kernels = draw_kernels() if logits.device.type == "cpu" else None
    if kernels is not None and most <= _MOST_INSERTED:
        found = kernels.top(logits.contiguous().numpy(), most, num_threads=torch.get_num_threads())
        return [top[:count] for top, count in zip(found, num_top, strict=True)]
    # One more than requested shows whether the last place is tied.
    values, candidates = logits.topk(min(most + 1, logits.shape[-1]), dim=-1)
    top_values, top_ids = values.tolist(), candidates.tolist()
    result: list[list[tuple[int, float]]] = []
    for row, count in enumerate(num_top):
        pairs = list(zip(top_ids[row], top_values[row], strict=True))
        if 0 < count < len(pairs) and pairs[count - 1][1] == pairs[count][1]:
            ordered, ids = logits[row].sort(descending=True, stable=True)
            pairs = list(zip(ids[:count].tolist(), ordered[:count].tolist(), strict=True))
        result.append(sorted(pairs[:count], key=lambda pair: (-pair[1], pair[0])))
    return result
