"""The results of a simulated run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdmesh import metrics
from pdmesh.core.commands import Outcome
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import Epoch, InstanceId, PrefixHashes, Request, Role
from pdmesh.plans import ChunkPlan


@dataclass(slots=True)
class StepSpan:
    """Span of a planned step, or of consecutive decode steps over the same number of residents.

    An urgent step lies inside the span, or inside the wait, of the step it interrupted. `nested_s` is the time of such
    urgent steps. `waited_s` is the time of further waits for KV from other members of a group.
    """

    start_s: float
    end_s: float
    chunks: tuple[ChunkPlan, ...]
    num_decodes: int
    num_steps: int = 1
    nested_s: float = 0.0
    waited_s: float = 0.0

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s - self.nested_s - self.waited_s


@dataclass(slots=True, eq=False)
class RequestRun:
    """History of one request, placed when an instance admits it, and started with the step of its first chunk.

    `granules` name its prompt's cached blocks, and its output's as far as known. `num_preemptions` counts how often
    another prompt overtook its running prefill. `resumed` is the request of the newest epoch if its KV was freed or
    lost. `granted_s` is the first grant of its KV transfer; None if it stayed. `num_reused_tokens` of its prompt were
    cached when it was first placed. The running decode moved `num_moves` times.
    """

    request: Request
    num_output_tokens: int
    granules: PrefixHashes = ()
    outcome: Outcome | None = None
    placed_s: float | None = None
    started_s: float | None = None
    token_times_s: Sequence[float] = ()
    num_preemptions: int = 0
    resumed: Request | None = None
    granted_s: float | None = None
    landed_s: float | None = None
    exposed_s: float | None = None
    prefill_id: InstanceId | None = None
    decode_id: InstanceId | None = None
    num_reused_tokens: int = 0
    num_moves: int = 0

    @property
    def current(self) -> Request:
        """The request of the newest epoch."""
        return self.resumed or self.request

    @property
    def drawn(self) -> PrefixHashes:
        """The granules behind the newest epoch's chain that the whole output completes."""
        num_tokens = self.request.num_prompt_tokens + self.num_output_tokens - 1
        return self.granules[len(self.current.chain) : num_tokens // GRANULE_TOKENS]

    @property
    def num_restarts(self) -> int:
        return self.current.epoch

    def resume(self, token_times_s: Sequence[float], now_s: float) -> Request:
        """Continue with the tokens drawn so far under the next epoch, as a gateway does. Return the new request."""
        self.token_times_s = token_times_s
        num_drawn = len(token_times_s)
        self.resumed = replace(
            self.request,
            epoch=Epoch(self.current.epoch + 1),
            num_prompt_tokens=self.request.num_prompt_tokens + num_drawn,
            max_tokens=self.request.max_tokens - num_drawn,
            prefix=self.granules[: (self.request.num_prompt_tokens + num_drawn) // GRANULE_TOKENS],
            arrival_s=now_s - (now_s - self.request.arrival_s),  # a gateway reports ages
        )
        return self.resumed

    @property
    def queueing_s(self) -> float | None:
        return None if self.started_s is None else metrics.queueing_s(self.request.arrival_s, self.started_s)

    @property
    def ttft_s(self) -> float | None:
        return metrics.ttft_s(self.request.arrival_s, self.token_times_s)

    @property
    def tpot_s(self) -> float | None:
        return metrics.tpot_s(self.token_times_s)

    @property
    def jct_s(self) -> float | None:
        return metrics.e2e_s(self.request.arrival_s, self.token_times_s)


@dataclass(frozen=True, slots=True)
class InstanceRun:
    """Timeline of one instance."""

    instance_id: InstanceId
    role: Role
    steps: Sequence[StepSpan]


@dataclass(frozen=True, slots=True)
class SimResult:
    """Requests in order of arrival, and instances in the order given."""

    requests: Sequence[RequestRun]
    instances: Sequence[InstanceRun]
    num_events: int
    num_commands: int
