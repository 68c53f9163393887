"""Clients of a simulated mesh, and the laws for a client: only its own tokens, complete, in order, and one end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import anyio

from pdmesh.errors import RequestRejected
from pdmesh.kv_layout import KvLayout
from pdmesh.model import SamplingParams
from pdmesh_gateway.dialects import COMPLETIONS
from pdmesh_gateway.jobs import GenerationJob
from pdmesh_testing.dst.plan import Ask
from pdmesh_testing.dst.services import Gateway
from pdmesh_testing.dst.timeline import Timeline
from pdmesh_testing.fake_engine import FAKE_LAYOUT, reference_output

TOKENS = "tokens as if undisturbed"
ONE_END = "each request ends once, with a right end"
STREAM_KEPT = "no fault ends a stream"

#: What a client may be answered before its first token, if there are faults: all of them say that it may try again.
TOO_MANY = 429
MAY_REFUSE = frozenset({TOO_MANY, 503})


@dataclass(slots=True, eq=False)
class SimulatedClient:
    """A request with its tokens and its end."""

    name: str
    ask: Ask
    layout: KvLayout
    timeline: Timeline
    tokens: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    ends: dict[int, str] = field(default_factory=dict[int, str])
    error: Exception | None = None
    has_ended: bool = False
    #: The client's gateway died.
    connection_lost: bool = False
    hung_up: bool = False

    async def run(self, gateway: Gateway) -> None:
        """Ask, and take all that comes. Runs in the gateway's process, as the handler of the client's connection."""
        self.timeline.note(self.name, f"asks {self.ask}")
        params = _params(self.ask)
        with anyio.CancelScope() as connection:
            if self.ask.hangs_up_s is not None:
                connection.deadline = anyio.current_time() + self.ask.hangs_up_s
            try:
                job = GenerationJob(
                    dialect=COMPLETIONS,
                    request_id=gateway.generator.new_request_id(),
                    label=self.ask.label,
                    prompts=[list(self.ask.prompt)],
                    params=params,
                    n=self.ask.n,
                    priority=self.ask.priority,
                )
                async with gateway.generator.open(job) as generation:
                    async for deltas in generation.deltas():
                        for delta in deltas:
                            self._take(delta.index, delta.token_ids, delta.finish_reason)
            except Exception as error:
                self.error = error
        if not self.connection_lost:
            # No message of a dead gateway arrives.
            self.hung_up = connection.cancelled_caught
            self._end()

    def lose_connection(self) -> None:
        """End the request, because the gateway has died."""
        if not self.has_ended:
            self.connection_lost = True
            self._end()

    def _take(self, index: int, token_ids: Sequence[int], finish_reason: str | None) -> None:
        if index in self.ends:
            self.timeline.broke(ONE_END, f"{self.name}: {token_ids} after the end of choice {index}")
        tokens = self.tokens.setdefault(index, [])
        tokens += token_ids
        self.timeline.note(self.name, f"choice {index}: {list(token_ids)} {finish_reason or ''}")
        expected, _ = expectation(self.ask, index, self.layout)
        if tokens != expected[: len(tokens)]:
            self.timeline.broke(TOKENS, f"{self.name}, choice {index}: {tokens} instead of {expected}")
        if finish_reason is not None:
            self.ends[index] = finish_reason

    def _end(self) -> None:
        if self.has_ended:
            self.timeline.broke(ONE_END, f"{self.name} ended twice")
        self.has_ended = True
        how = (
            "connection lost"
            if self.connection_lost
            else "hung up"
            if self.hung_up
            else repr(self.error)
            if self.error
            else f"finished: {self.ends}"
        )
        self.timeline.note(self.name, how)

    def judge(self, allows: Callable[[RequestRejected], bool]) -> None:
        """Check the end, once it is there. ``allows`` says whether the plan's faults explain an error."""
        if self.connection_lost or self.hung_up:
            return
        if self.error is None:
            for index in range(self.ask.n):
                expected, end = expectation(self.ask, index, self.layout)
                got = self.tokens.get(index), self.ends.get(index)
                if got != (expected, end):
                    self.timeline.broke(ONE_END, f"{self.name}, choice {index}: {got} instead of {(expected, end)}")
            return
        if not isinstance(self.error, RequestRejected):
            self.timeline.broke(ONE_END, f"{self.name}: {self.error!r}")
        elif not allows(self.error):
            self.timeline.broke(
                STREAM_KEPT,
                f"{self.name}, after {sum(map(len, self.tokens.values()))} tokens: {self.error.status} "
                f"{self.error.code}: {self.error}",
            )


def _params(ask: Ask) -> SamplingParams:
    return SamplingParams(
        max_tokens=ask.max_tokens, temperature=ask.temperature, seed=ask.seed, eos_token_ids=ask.eos_token_ids
    )


def expectation(ask: Ask, index: int, layout: KvLayout = FAKE_LAYOUT) -> tuple[list[int], str]:
    """Return tokens and finish reason of a choice in a mesh without faults, whose model has this layout."""
    params = _params(ask)
    seed = (params.seed + index) % 2**63 if params.temperature else 0
    return _reference(ask.prompt, replace(params, seed=seed), layout)


@lru_cache(maxsize=4096)
def _reference(prompt: tuple[int, ...], params: SamplingParams, layout: KvLayout) -> tuple[list[int], str]:
    tokens = reference_output(prompt, params, layout=layout)
    return tokens, "stop" if tokens[-1] in params.eos_token_ids else "length"
