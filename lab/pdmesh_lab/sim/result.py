"""What a simulated run gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdmesh import metrics
from pdmesh.core.commands import Outcome
from pdmesh.model import GRANULE_TOKENS, Epoch, InstanceId, PrefixHashes, Request, Role
from pdmesh.plans import ChunkPlan


@dataclass(slots=True)
class StepSpan:
    """One planned step, or consecutive decode steps over the same number of residents.

    An urgent step lies inside the span of the one that it interrupted, or in what that one waited.
    """

    start_s: float
    end_s: float
    chunks: tuple[ChunkPlan, ...]
    num_decodes: int
    num_steps: int = 1
    nested_s: float = 0.0  # of urgent steps inside
    waited_s: float = 0.0  # beside those, for KV that other members of a group send

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s - self.nested_s - self.waited_s


@dataclass(slots=True, eq=False)
class RequestRun:
    """One request's way. It is placed when an instance admits it, and started when the step with its first chunk is."""

    request: Request
    num_output_tokens: int
    granules: PrefixHashes = ()  # of its prompt, and as far as they are known of its output
    outcome: Outcome | None = None
    placed_s: float | None = None
    started_s: float | None = None
    token_times_s: Sequence[float] = ()
    num_preemptions: int = 0  # times its running prefill was passed over for another's
    resumed: Request | None = None  # as it goes on since its KV was last given up for others
    granted_s: float | None = None  # its KV transfer, first; None if it stayed
    landed_s: float | None = None
    exposed_s: float | None = None
    prefill_id: InstanceId | None = None
    decode_id: InstanceId | None = None
    num_reused_tokens: int = 0  # of its prompt, that were not computed when it was first placed
    num_moves: int = 0  # of its running decode, from one instance to another

    @property
    def current(self) -> Request:
        """The request of the newest epoch."""
        return self.resumed or self.request

    @property
    def drawn(self) -> PrefixHashes:
        """The granules behind its newest epoch's chain that all of its output completes."""
        num_tokens = self.request.num_prompt_tokens + self.num_output_tokens - 1
        return self.granules[len(self.current.chain) : num_tokens // GRANULE_TOKENS]

    @property
    def num_restarts(self) -> int:
        return self.current.epoch

    def resume(self, token_times_s: Sequence[float], now_s: float) -> Request:
        """Go on under the next epoch with what was drawn by then, as a gateway does; what it asks for."""
        self.token_times_s = token_times_s
        num_drawn = len(token_times_s)
        self.resumed = replace(
            self.request,
            epoch=Epoch(self.current.epoch + 1),
            num_prompt_tokens=self.request.num_prompt_tokens + num_drawn,
            max_tokens=self.request.max_tokens - num_drawn,
            prefix=self.granules[: (self.request.num_prompt_tokens + num_drawn) // GRANULE_TOKENS],
            arrival_s=now_s - (now_s - self.request.arrival_s),  # gateways tell ages
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
    """One instance's timeline."""

    instance_id: InstanceId
    role: Role
    steps: Sequence[StepSpan]


@dataclass(frozen=True, slots=True)
class SimResult:
    """Requests in order of arrival, instances in the order given."""

    requests: Sequence[RequestRun]
    instances: Sequence[InstanceRun]
    num_events: int
    num_commands: int
