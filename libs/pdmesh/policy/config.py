"""What the policies of any bundle are tuned by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pdmesh.plans import MAX_GROUP_MEMBERS
from pdmesh.policy.latency import PROFILES, LinearLatencyModel
from pdmesh.policy.links import LinkRates
from pdmesh.ranges import ANY_COUNT, COUNT, SHARE, Range
from pdmesh.settings import NO_SETTING, one_of

#: Of a group; with more than workers take, a prompt would begin again each time that one too many joined.
_MEMBERS = Range(1, MAX_GROUP_MEMBERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """What the policies of any bundle are tuned by: the ``[policy]`` of the configuration."""

    chunk_tokens: Annotated[int, COUNT, "prompt tokens in a step, with static packing"] = 512
    #: Of an instance; from `scheduler.profile`, or measured.
    latency: Annotated[LinearLatencyModel, NO_SETTING] = PROFILES["a100-llama3-8b"]
    num_stages: Annotated[int, NO_SETTING] = 1  # of the instances that ``latency`` is of
    #: Of device classes of instances; those without one are as fast as ``latency`` says.
    latency_of_device_class: Annotated[Mapping[str, LinearLatencyModel], NO_SETTING] = field(
        default_factory=dict[str, LinearLatencyModel]
    )
    #: Between instances; without them all are as fast as ``link_bytes_per_s``.
    links: Annotated[LinkRates | None, NO_SETTING] = None
    slo_ttft_s: Annotated[float, "deadline of a request without a TTFT target: this long after its arrival..."] = 1.0
    slo_ttft_stretch: Annotated[float, "...plus this many times the predicted time of its prompt alone"] = 2.0
    slo_tpot_s: Annotated[
        float, "TPOT target of requests without one; the time budget of an adaptive step beside decodes"
    ] = 0.05
    prefill_step_s: Annotated[
        float, "time budget of an adaptive step without decodes; an urgent request may wait that long"
    ] = 0.2
    max_chunk_tokens: Annotated[int, COUNT, "largest chunk of an adaptive step"] = 8192
    long_prompt_tokens: Annotated[
        int, COUNT, "length from which a prompt counts as long; an adaptive step has at most one long prompt"
    ] = 8192
    max_shared: Annotated[float, SHARE, "most of a step that a long prompt leaves to others"] = 0.4
    spare_slack: Annotated[
        float, "`pdmesh` serves the shortest first while every request has this much relative slack"
    ] = 0.25
    min_share: Annotated[
        float, SHARE, "share of an instance's time that `pdmesh` promises to a long prompt without a target of its own"
    ] = 0.125
    max_step_overhead: Annotated[
        float,
        Range(1e-3, 1),
        "largest share of a step that its constant time may be; it gives the shortest chunk that can be interrupted",
    ] = 0.05
    max_group_step_overhead: Annotated[float, Range(1e-3, 1), "the same for the shortest chunks in a prefill group"] = (
        0.1
    )
    give_way: Annotated[float, Range(1), "`pdmesh` preempts a long prompt for one that is this many times shorter"] = (
        2.0
    )
    #: PecSched §5.2
    colocate_tokens: Annotated[
        int, "an instance with fewer queued prompt tokens takes more short prompts (`pecsched`, `pdmesh`)"
    ] = 8192
    max_group_members: Annotated[
        int,
        _MEMBERS,
        "most instances that compute one long prompt, if others are idle (`pdmesh`, `tetris`); 1: no groups",
    ] = 4
    group_improvement: Annotated[
        float | None,
        Range(0, 0.9),
        "share by which each further member must bring the first token forward; if not set, the best for the "
        "prompts of the last 30 s",
    ] = None
    link_bytes_per_s: Annotated[float, Range(1), "rate at which an instance is predicted to send KV to others"] = 1e9
    sequence_parallel: Annotated[
        str,
        one_of("pipelined", "parallel"),
        "how a prefill group computes: chunks in turn (`pipelined`), or slices at once (`parallel`)",
    ] = "pipelined"
    group_size: Annotated[
        int,
        _MEMBERS,
        "number of instances that compute every long prompt together, one prompt at a time (`pecsched`, its ablations, "
        "`fcfs`, `short-first`, `reservation`); 1: one instance computes it",
    ] = 1
    reserved_instances: Annotated[
        int, ANY_COUNT, "number of instances that `reservation` keeps for long prompts, the first to join; 0: none"
    ] = 0
    rebalances: Annotated[
        bool,
        "move running decodes with their KV away from an instance that is short of memory or too slow for their "
        "targets (`pdmesh`)",
    ] = True
    waiting_kv_share: Annotated[
        float, SHARE, "share of an instance's KV that may wait to move away; beyond it no new prompt begins (`pdmesh`)"
    ] = 0.5
    prefills_locally: Annotated[
        bool,
        "compute a short prompt on a decode instance if no prefill instance is free and it is faster (`pdmesh`)",
    ] = True
    local_step_share: Annotated[float, SHARE, "share of the TPOT target that a step with such a prompt may take"] = 0.6
    decodes_locally: Annotated[
        bool,
        "decode on a prefill instance if no decode instance is there, or if waiting for room is predicted to cost more "
        "(`pdmesh`)",
    ] = True
    batching: Annotated[str, NO_SETTING] = ""  # of `scheduler.batching`; empty: the bundle's own
    eb_threshold: Annotated[
        float | None,
        Range(0.001, 0.999),
        "share of idle seats at which `eb` ends a decode phase; if not set, the best in theory",
    ] = None
    max_stall_s: Annotated[
        float,
        "longest prefill phase of `ebplus` while a resident without a TPOT target waits",
    ] = 0.2
