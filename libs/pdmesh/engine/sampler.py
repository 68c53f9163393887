"""Drawing tokens from logits.

The order is vLLM's: logit bias and forbidden ends, penalties, temperature, min_p, top_k, top_p. Each token takes one
uniform number that depends on (seed, output index) alone, and finds its place in the cumulative distribution of the
kept tokens *in the order of their ids*: an order by probability would swap nearly equal tokens, and so change draws,
whenever rounding differs by one bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdmesh.engine.base import EngineSequence, Logprobs
from pdmesh.model import SamplingParams

#: Elements of one fp64 tile while drawing: a batch times a large vocabulary is worked off in pieces.
_TILE_ELEMENTS = 1 << 20

_MASK_64 = (1 << 64) - 1


def sample(logits: Tensor, sequences: Sequence[EngineSequence]) -> list[int]:
    """The next token of each sequence; ``logits`` (rows, vocab_size) in fp32 are left as they are."""
    changed = [row for row, sequence in enumerate(sequences) if _changes_logits(sequence)]
    if changed:
        logits = logits.cpu().clone()
        for row in changed:
            _process(logits[row].numpy(), sequences[row])
    token_ids: list[int] = logits.argmax(dim=-1).tolist()  # of equal logits, the lowest id
    drawn = [row for row, sequence in enumerate(sequences) if sequence.params.temperature > 0]
    tile_rows = max(1, _TILE_ELEMENTS // logits.shape[-1])
    for first in range(0, len(drawn), tile_rows):
        rows = drawn[first : first + tile_rows]
        for row, token_id in zip(rows, _draw(logits[rows], [sequences[row] for row in rows]), strict=True):
            token_ids[row] = token_id
    return token_ids


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) for the ``index``-th output token: SplitMix64 at a stream chosen by the hashed seed."""
    golden = 0x9E3779B97F4A7C15
    return (_mix(_mix(seed + golden) + (index + 1) * golden) >> 11) * 2.0**-53


def _mix(x: int) -> int:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014)."""
    x &= _MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return x ^ (x >> 31)


def _changes_logits(sequence: EngineSequence) -> bool:
    params = sequence.params
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or bool(params.logit_bias)
        or sequence.num_output_tokens < params.min_tokens
    )


def _process(logits: npt.NDArray[np.float32], sequence: EngineSequence) -> None:
    """Apply bias, forbidden ends and penalties to one row, in place."""
    params, vocab_size = sequence.params, len(logits)
    for token_id, bias in params.logit_bias:
        if 0 <= token_id < vocab_size:
            logits[token_id] += bias
    if sequence.num_output_tokens < params.min_tokens:
        for token_id in (*params.eos_token_ids, *params.stop_token_ids):
            if 0 <= token_id < vocab_size:
                logits[token_id] = -np.inf
    token_ids = np.array(sequence.token_ids, dtype=np.int64)
    if params.repetition_penalty != 1.0:
        seen = np.zeros(vocab_size, dtype=np.bool_)
        seen[token_ids] = True
        scores = logits[seen]
        logits[seen] = np.where(scores < 0, scores * params.repetition_penalty, scores / params.repetition_penalty)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        counts = np.bincount(token_ids[sequence.num_prompt_tokens :], minlength=vocab_size)
        logits -= (params.frequency_penalty * counts + params.presence_penalty * (counts > 0)).astype(np.float32)


def _draw(logits: Tensor, sequences: Sequence[EngineSequence]) -> list[int]:
    params, device = [sequence.params for sequence in sequences], logits.device
    temperatures = torch.tensor([p.temperature for p in params], dtype=torch.float64, device=device)[:, None]
    scores = logits.double()
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / temperatures
    weights = scores.exp()
    filtered = [row for row, p in enumerate(params) if p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0]
    if filtered:
        weights[filtered] *= _kept(scores[filtered], [params[row] for row in filtered])
    cumulative = weights.cumsum(dim=-1)
    draws = [uniform(sequence.params.seed, sequence.num_output_tokens) for sequence in sequences]
    targets = torch.tensor(draws, dtype=torch.float64, device=device)[:, None] * cumulative[:, -1:]
    # the first token whose cumulative weight is above the target: never one of weight 0
    token_ids = torch.searchsorted(cumulative, targets, right=True).clamp(max=logits.shape[-1] - 1)
    return token_ids[:, 0].tolist()


def _kept(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Which tokens min_p, top_k and top_p leave, (rows, vocab_size); the most likely one always stays."""
    (rows, vocab_size), device = scores.shape, scores.device
    min_p = torch.tensor([p.min_p for p in params], dtype=torch.float64, device=device)[:, None]
    top_k = torch.tensor([p.top_k or vocab_size for p in params], device=device)[:, None]
    limits = [p.top_p if p.top_p < 1.0 else 2.0 for p in params]
    top_p = torch.tensor(limits, dtype=torch.float64, device=device)[:, None]
    ordered, token_ids = scores.sort(dim=-1, descending=True, stable=True)  # of equal ones, the lower id first
    keep = (ordered >= min_p.log()) & (torch.arange(vocab_size, device=device) < top_k)
    weights = ordered.exp() * keep
    cumulative = weights.cumsum(dim=-1)
    keep &= cumulative - weights < top_p * cumulative[:, -1:]
    keep[:, 0] = True
    return torch.zeros(rows, vocab_size, dtype=torch.bool, device=device).scatter_(1, token_ids, keep)


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[Logprobs]:
    """Log-softmax of the raw logits at each row's token, and at its ``num_top`` most likely ones (ties by id)."""
    totals = torch.logsumexp(logits, dim=-1)
    chosen = logits.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0] - totals
    # one more than asked for shows whether the last place is tied
    values, candidates = logits.topk(min(max(num_top) + 1, logits.shape[-1]), dim=-1)
    top_values, top_ids, all_totals = values.tolist(), candidates.tolist(), totals.tolist()
    result: list[Logprobs] = []
    for row, (logprob, count) in enumerate(zip(chosen.tolist(), num_top, strict=True)):
        pairs = list(zip(top_values[row], top_ids[row], strict=True))
        if 0 < count < len(pairs) and pairs[count - 1][0] == pairs[count][0]:
            ordered, ids = logits[row].sort(descending=True, stable=True)
            pairs = list(zip(ordered[:count].tolist(), ids[:count].tolist(), strict=True))
        best = sorted(pairs[:count], key=lambda pair: (-pair[0], pair[1]))
        result.append(Logprobs(logprob, tuple((token_id, value - all_totals[row]) for value, token_id in best)))
    return result
