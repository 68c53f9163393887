"""The attention function that transformers' modules call. It forwards to the step that is running."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import transformers
from torch import Tensor

#: Name under which this attention is registered.
IMPLEMENTATION = "pdmesh"


@dataclass(frozen=True, slots=True)
class Attended:
    """Arguments of one layer's attention. Dimension 1 of the tensors is heads, dimension 2 tokens.

    ``has_more`` marks a mask or sinks, which are not applied.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    has_more: bool
    scale: float
    window: int | None
    score_cap: float | None


class ModulePass(Protocol):
    """A pass through a model's layers."""

    def attend(self, call: Attended) -> Tensor:
        """Return the layer's attention: (1, tokens, heads, head_dim)."""
        ...


_PASS: ContextVar[ModulePass] = ContextVar("pass through a model's layers")


@contextmanager
def passing(through: ModulePass) -> Iterator[None]:
    """Route the attention of modules to ``through`` inside the block. Blocks may be nested."""
    token = _PASS.set(through)
    try:
        yield
    finally:
        _PASS.reset(token)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attend with the arguments of transformers' own attention functions. The second result is None: no weights."""
    call = Attended(
        query,
        key,
        value,
        has_more=attention_mask is not None or s_aux is not None,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        score_cap=softcap,
    )
    return _PASS.get().attend(call), None


def register() -> None:
    """Register this attention with transformers."""
    hf: Any = transformers  # only partly typed
    hf.AttentionInterface.register(IMPLEMENTATION, _attend)
