"""Drawing tokens on a device: as `pdmesh.engine.sampler` does, without waiting for what is computed.

Everything that rows are drawn by goes there in one copy, and the ids stay there. What grammars let follow is worked out
on the host while the device computes, and applied there. Only rows whose logits are changed otherwise first (penalties,
biases, forbidden ends) leave, and come back: this needs what a sequence holds, and waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pdmesh.engine.base import EngineSequence
from pdmesh.engine.sampler import (
    changes_beside_grammar,
    draw_settings,
    gumbel,
    is_filtered,
    kept_tokens,
    noise_bits,
    process,
)

#: Elements of one tile: 64 rows of a vocabulary of 128K. Filters take some 20 bytes for each.
_TILE_ELEMENTS = 1 << 23

#: Tokens whose scores fp32 might not tell apart, at most: the best of these in fp64 is drawn.
_NUM_CANDIDATES = 8


def draw(logits: Tensor, sequences: Sequence[EngineSequence]) -> Tensor:
    """The next token of each sequence, (rows,), int64; ``logits`` (rows, vocab_size) in fp32 are left as they are."""
    logits = _processed(_masked(logits, sequences), sequences)
    tile_rows = max(1, _TILE_ELEMENTS // logits.shape[-1])
    tiles = [slice(first, first + tile_rows) for first in range(0, len(sequences), tile_rows)]
    return torch.cat([_draw_tile(logits[tile], sequences[tile]) for tile in tiles])


def _masked(logits: Tensor, sequences: Sequence[EngineSequence]) -> Tensor:
    """Forbid what cannot follow in rows that are changed by a grammar alone."""
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
        packed = packed.pin_memory()  # else the copy of a large one would wait for the device
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
    best = logits.argmax(dim=-1)  # of equal logits, the lowest id
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
