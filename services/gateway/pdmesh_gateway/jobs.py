"""A client's request for a generation, checked and tokenized."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdmesh.metrics import NO_SLO, Slo
from pdmesh.model import SamplingParams, SessionName
from pdmesh_gateway.dialects import Dialect
from pdmesh_gateway.items import ItemParser, ItemWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """A client's request for a generation, checked and tokenized.

    ``request_id`` is the gateway's own and unique; ``label`` is the client's name for the request. ``shown_ids`` are
    special tokens that are shown even if special tokens are skipped. ``tenant`` and ``share`` are the name and the
    share of the client's key. Only prompts with the same ``cache_salt`` share KV. The job fails if no token comes for
    ``max_wait_s``. ``received_at`` is Unix time in seconds.
    """

    request_id: str
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    #: Makes the parser of an answer that may call tools. Stop strings do not apply within calls.
    call_parser: Callable[[ItemWriter], ItemParser] | None = None
    skip_special_tokens: bool = True
    shown_ids: frozenset[int] = frozenset()
    priority: int = 0
    slo: Slo = NO_SLO
    tenant: str = ""
    share: int = 1
    cache_salt: str = ""
    session: SessionName | None = None
    traceparent: str | None = None
    max_wait_s: float = 3600.0
    dialect: Dialect
    label: str = ""
    received_at: float = field(default_factory=time.time)

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))
