"""What a client asked for, checked and tokenized."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdmesh.metrics import NO_SLO, Slo
from pdmesh.model import SamplingParams
from pdmesh_gateway.dialects import Dialect
from pdmesh_gateway.items import ItemParser, ItemWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """What a client asked for, checked and tokenized."""

    request_id: str  # ours: never a client's, never used again
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    #: What reads an answer that may call tools: stop strings do not act within calls.
    call_parser: Callable[[ItemWriter], ItemParser] | None = None
    skip_special_tokens: bool = True
    shown_ids: frozenset[int] = frozenset()  # special tokens that are shown all the same
    priority: int = 0
    slo: Slo = NO_SLO
    tenant: str = ""  # the name of the client's key
    share: int = 1  # of that key
    cache_salt: str = ""  # only prompts with the same one share KV
    traceparent: str | None = None
    max_wait_s: float = 3600.0  # the job ends if no token comes for this time
    dialect: Dialect
    label: str = ""  # what its client calls it
    received_at: float = field(default_factory=time.time)  # Unix time, seconds

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))
