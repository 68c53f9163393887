"""Settings of the policies of any bundle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from pdmesh.plans import MAX_GROUP_MEMBERS
from pdmesh.policy.latency import PROFILES, LinearLatencyModel
from pdmesh.policy.links import LinkRates
from pdmesh.ranges import Amount, AnyCount, Count, Duration, Rate, Share
from pdmesh.settings import one_of

#: Number of members of a group. With more than workers accept, a prompt would restart whenever one too many joined.
_Members = Annotated[int, Meta(ge=1, le=MAX_GROUP_MEMBERS)]
_Overhead = Annotated[float, Meta(ge=1e-3, le=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """Settings of the policies of any bundle: the ``[policy]`` table of the configuration."""

    chunk_tokens: Annotated[Count, "prompt tokens in a step, with static packing"] = 512
    #: Step times of an instance; from `scheduler.profile`, or measured.
    latency: LinearLatencyModel = PROFILES["a100-llama3-8b"]
    #: Pipeline stages of the instances whose times ``latency`` gives.
    num_stages: int = 1
    #: Whether steps take about the time that ``latency`` says.
    steps_are_predictable: bool = True
    #: Step times by device class; instances of other classes are as fast as ``latency`` says.
    latency_of_device_class: Mapping[str, LinearLatencyModel] = field(default_factory=dict[str, LinearLatencyModel])
    #: Rates of the links between instances; None: all links have ``link_bytes_per_s``.
    links: LinkRates | None = None
    slo_ttft_s: Annotated[Duration, "deadline of a request without a TTFT target: this long after its arrival..."] = 1.0
    slo_tpot_s: Annotated[
        Duration, "TPOT target of requests without one; the time budget of an adaptive step beside decodes"
    ] = 0.05
    prefill_step_s: Annotated[
        Duration, "time budget of an adaptive step without decodes; an urgent request may wait that long"
    ] = 0.2
    long_prompt_tokens: Annotated[
        Count, "length from which a prompt counts as long; an adaptive step has at most one long prompt"
    ] = 8192
    max_group_members: Annotated[
        _Members,
        "most instances that compute one long prompt, if others are idle (`pdmesh`, `tetris`); 1: no groups",
    ] = 16
    group_improvement: Annotated[
        Annotated[float, Meta(ge=0, le=0.9)] | None,
        "share by which each further member must bring the first token forward; if not set, the best for the "
        "prompts of the last 30 s",
    ] = None
    link_bytes_per_s: Annotated[Rate, "rate at which an instance is predicted to send KV to others"] = 1e9
    sequence_parallel: Annotated[
        str,
        one_of("auto", "pipelined", "parallel"),
        "how a prefill group computes: chunks in turn (`pipelined`), slices at once (`parallel`; `tetris` always), or "
        "at once while instances are spare and steps take the predicted time, else in turn by up to 4 members (`auto`)",
    ] = "auto"
    group_size: Annotated[
        _Members,
        "number of instances that compute every long prompt together, one prompt at a time (`pdmesh`, `pecsched`, its "
        "ablations, `fcfs`, `short-first`, `reservation`); 1: one instance and the helpers that it finds",
    ] = 1
    rebalances: Annotated[
        bool,
        "move running decodes with their KV away from an instance that is short of memory or too slow for their "
        "targets (`pdmesh`)",
    ] = True
    #: The value of `scheduler.batching`; empty: the bundle's own mode.
    batching: str = ""

    # Constants, which studies and tests vary.
    #: ...plus this many times the predicted time of its prompt alone
    slo_ttft_stretch: Amount = 2.0
    #: Largest chunk of an adaptive step
    max_chunk_tokens: Count = 8192
    #: Largest share of a step that a long prompt leaves to others
    max_shared: Share = 0.4
    #: `pdmesh` serves the shortest first while every request has this much relative slack
    spare_slack: Amount = 0.25
    #: Share of an instance's time promised to a long prompt without a target of its own (`pdmesh`)
    min_share: Share = 0.125
    #: Largest share of a step that its constant time may be; sets the shortest chunk
    max_step_overhead: _Overhead = 0.05
    #: The same for the shortest chunks in a prefill group
    max_group_step_overhead: _Overhead = 0.1
    #: `pdmesh` preempts a long prompt for one that is this many times shorter
    give_way: Annotated[float, Meta(ge=1)] = 2.0
    #: An instance with fewer queued prompt tokens takes more short prompts (PecSched §5.2)
    colocate_tokens: AnyCount = 8192
    #: Instances that `reservation` keeps for long prompts, the first to join
    reserved_instances: AnyCount = 0
    #: Share of an instance's KV that may wait to move away; beyond it no new prompt begins (`pdmesh`)
    waiting_kv_share: Share = 0.5
    #: Compute a short prompt on a decode instance if that is faster (`pdmesh`)
    prefills_locally: bool = True
    #: Share of the TPOT target that a step with such a prompt may take; tests with slow steps set more than 1
    local_step_share: Annotated[float, Meta(ge=0)] = 0.6
    #: Decode on a prefill instance if waiting for a decode instance costs more (`pdmesh`)
    decodes_locally: bool = True
    #: Share of idle seats at which `eb` ends a decode phase; None: the best in theory
    eb_threshold: Annotated[float, Meta(ge=0.001, le=0.999)] | None = None
    #: Longest prefill phase of `ebplus` while a resident without a TPOT target waits
    max_stall_s: Duration = 0.2
