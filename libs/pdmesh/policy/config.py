"""What the policies of any bundle are tuned by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pdmesh.plans import MAX_GROUP_MEMBERS
from pdmesh.policy.latency import PROFILES, LinearLatencyModel
from pdmesh.ranges import ANY_COUNT, COUNT, SHARE, Range
from pdmesh.settings import NO_SETTING, one_of

#: Of a group; with more than workers take, a prompt would begin again each time that one too many joined.
_MEMBERS = Range(1, MAX_GROUP_MEMBERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """What the policies of any bundle are tuned by: the ``[policy]`` of the configuration."""

    chunk_tokens: Annotated[int, COUNT, "tokens of prefill per step, where steps are static"] = 512
    #: Of an instance; from `scheduler.profile`, or measured.
    latency: Annotated[LinearLatencyModel, NO_SETTING] = PROFILES["a100-llama3-8b"]
    #: Of device classes of instances; those without one are as fast as ``latency`` says.
    latency_of_device_class: Annotated[Mapping[str, LinearLatencyModel], NO_SETTING] = field(
        default_factory=dict[str, LinearLatencyModel]
    )
    slo_ttft_s: Annotated[
        float, "a request that asks for no time to first token is due so long after its arrival..."
    ] = 1.0
    slo_ttft_stretch: Annotated[float, "...and so many times what its prompt is predicted to take alone"] = 2.0
    slo_tpot_s: Annotated[float, "time budget of an adaptive step beside decodes"] = 0.05
    prefill_step_s: Annotated[
        float, "time budget of an adaptive step without decodes: what an urgent request may wait"
    ] = 0.2
    max_chunk_tokens: Annotated[int, COUNT, "largest chunk of an adaptive step"] = 8192
    long_prompt_tokens: Annotated[int, COUNT, "a prompt as long as this is long: a step has at most one such"] = 8192
    max_shared: Annotated[float, SHARE, "the most of a step that a long prompt leaves to others"] = 0.4
    spare_slack: Annotated[float, "`pdmesh` serves the shortest first while everyone has this much relative slack"] = (
        0.25
    )
    min_share: Annotated[
        float, SHARE, "of an instance's time, that `pdmesh` leaves to a long prompt without a target of its own"
    ] = 0.125
    max_step_overhead: Annotated[
        float,
        Range(1e-3, 1),
        "long chunks that give way between layers are so long that a step's constant time is at most this share",
    ] = 0.05
    max_group_step_overhead: Annotated[
        float, Range(1e-3, 1), "the same of the shortest chunks of prompts that several instances compute"
    ] = 0.1
    give_way: Annotated[float, Range(1), "`pdmesh` interrupts a long prompt for one that is so many times shorter"] = (
        2.0
    )
    #: PecSched §5.2
    colocate_tokens: Annotated[int, "prompt tokens queued on an instance, up to which it takes more (`pecsched`)"] = (
        8192
    )
    max_group_members: Annotated[
        int, _MEMBERS, "`pdmesh` has up to so many instances compute a long prompt in turn, where others idle; 1: never"
    ] = 4
    group_improvement: Annotated[
        float | None,
        Range(0, 0.9),
        "...each more of them only if it brings the first token forward by this share; if not set, the best for the "
        "prompts of the last 30 s",
    ] = None
    link_bytes_per_s: Annotated[float, Range(1), "...at which an instance passes KV on to others"] = 1e9
    sequence_parallel: Annotated[
        str,
        one_of("pipelined", "parallel"),
        "...in turn (`pipelined`), or all at once with a slice each (`parallel`)",
    ] = "pipelined"
    group_size: Annotated[
        int,
        _MEMBERS,
        "`pecsched`, its ablations, `fcfs`, `short-first` and `reservation` have so many instances compute every long "
        "prompt together, none of them two at a time; 1: each is computed alone",
    ] = 1
    reserved_instances: Annotated[
        int, ANY_COUNT, "`reservation` keeps the first so many instances that join for long prompts; 0: none"
    ] = 0
    rebalances: Annotated[
        bool,
        "`pdmesh` moves running decodes from an instance that is short of memory, or too slow for them, to one that "
        "is neither, with their KV",
    ] = True
    waiting_kv_share: Annotated[
        float, SHARE, "of an instance's KV, that may wait there to move away: beyond it no new prompt begins (`pdmesh`)"
    ] = 0.5
    prefills_locally: Annotated[
        bool,
        "`pdmesh` computes prompts that are not long where they decode, where that pays while others are busy",
    ] = True
    local_step_share: Annotated[float, SHARE, "of the TPOT target, that a step with such a prompt may take"] = 0.6
    batching: Annotated[str, NO_SETTING] = ""  # of `scheduler.batching`; empty: the bundle's own
    eb_threshold: Annotated[
        float | None,
        Range(0.001, 0.999),
        "the share of idle seats at which `eb` ends a decode phase; if not set, the best in theory",
    ] = None
    max_stall_s: Annotated[
        float,
        "the longest prefill phase of `ebplus` while somebody decodes without a TPOT target of its own",
    ] = 0.2
