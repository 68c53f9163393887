"""What transformers' modules call for attention: whatever computes the step that is running."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import transformers
from torch import Tensor

#: What our attention is registered as.
IMPLEMENTATION = "pdmesh"


@dataclass(frozen=True, slots=True)
class Attended:
    """A call of one layer's attention. Of the tensors, dimension 1 are heads, dimension 2 tokens."""

    query: Tensor
    key: Tensor
    value: Tensor
    has_more: bool  # a mask or sinks, which are not applied
    scale: float
    window: int | None
    score_cap: float | None


class ModulePass(Protocol):
    """A pass through a model's layers."""

    def attend(self, call: Attended) -> Tensor:
        """What the layer's attention gives: (1, tokens, heads, head_dim)."""
        ...


_PASS: ContextVar[ModulePass] = ContextVar("pass through a model's layers")


@contextmanager
def passing(through: ModulePass) -> Iterator[None]:
    """Send the attention of modules to ``through``; another pass may run inside."""
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
    """Compute as transformers' own attention functions do, which have these arguments."""
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
    """Make our attention known to transformers."""
    hf: Any = transformers  # only partly typed
    hf.AttentionInterface.register(IMPLEMENTATION, _attend)
