"""Common parts of `simulate` and `plan`: the workload, and the simulated instances."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path

from pdmesh.errors import ConfigError, PdmeshError
from pdmesh.kv_layout import KvLayout
from pdmesh.policy.bundles import make_bundle
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency_profile import Profile
from pdmesh.profiles import load_profile
from pdmesh_lab.cli.options import StudyOptions
from pdmesh_lab.sim.agents import AgentSession
from pdmesh_lab.sim.links import HostLink
from pdmesh_lab.sim.mesh import MeshShape, host_name
from pdmesh_lab.sim.simulator import PART_EXCHANGE_S, SimConfig
from pdmesh_lab.sim.workload import Arrival, Synthetic, synthetic, with_long_inputs, with_rate_scaled
from pdmesh_lab.traces import read_trace
from pdmesh_lab.weka_traces import read_weka_traces

SYNTHETIC = "synthetic"

#: Tokens in a KV block of simulated instances.
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The workload and instances that the options describe. The workload has arrivals or agent sessions.

    All instances have the same `profile`. Prompts from `long_tokens` on are long. `instances` is a shape without
    numbers of instances.
    """

    profile: Profile
    arrivals: Sequence[Arrival]
    sessions: Sequence[AgentSession]
    long_tokens: int
    policy: PolicyConfig
    config: SimConfig
    instances: MeshShape

    def mesh(self, *, prefill: int = 0, decode: int = 0, mixed: int = 0) -> MeshShape:
        return replace(self.instances, num_prefill=prefill, num_decode=decode, num_mixed=mixed)


def make_study(options: StudyOptions, bundles: Sequence[str]) -> Study:
    """Return the study that the options describe. Raises ConfigError for invalid options, TraceError for bad traces."""
    for name in bundles:
        make_bundle(name, PolicyConfig())
    for option, value in (("--slo-ttft", options.slo_ttft_s), ("--slo-tpot", options.slo_tpot_s)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{option} is {value}: must be a number of seconds above 0")
    for option, value in (
        ("--rate", options.rate),
        ("--rate-scale", options.rate_scale),
        ("--port-gbytes-per-s", options.port_gbytes_per_s),
        ("--host-gbytes-per-s", options.host_gbytes_per_s),
    ):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{option} is {value}: must be a number above 0")
    if options.max_kv_tokens % BLOCK_SIZE:
        raise ConfigError(f"--max-kv-tokens is {options.max_kv_tokens}: must be a multiple of {BLOCK_SIZE}, a block")
    if options.host_gbytes_per_s is not None and options.num_hosts < 2:
        raise ConfigError("--host-gbytes-per-s: needs --hosts 2 or more, between which it is the rate")
    long_range = _long_range(options.long_range)
    profile = load_profile(options.profile)
    policy = PolicyConfig(latency=profile.latency)
    has_sessions = Path(options.trace).is_dir()
    if options.chunk_tokens is not None:
        policy = replace(policy, chunk_tokens=options.chunk_tokens)
    return Study(
        profile=profile,
        arrivals=() if has_sessions else _workload(options, long_range),
        sessions=_sessions(options) if has_sessions else (),
        long_tokens=long_range[0],
        policy=policy,
        config=SimConfig(
            port_bytes_per_s=options.port_gbytes_per_s * 1e9,
            host_link_bytes_per_s=_host_links(options),
            control_delay_s=options.control_delay_ms / 1e3,
            part_exchange_s=part_exchange_s(options),
        ),
        instances=MeshShape(
            num_prefill=0,
            num_decode=0,
            num_mixed=0,
            kv_layout=KvLayout(
                num_layers=profile.subject.num_layers,
                num_kv_heads=profile.subject.num_kv_heads,
                head_dim=profile.subject.head_dim,
                block_size=BLOCK_SIZE,
                dtype=profile.subject.dtype or "bfloat16",
            ),
            num_kv_tokens=options.kv_tokens,
            max_kv_tokens=options.max_kv_tokens,
            num_transfer_backends=options.transfer_backends,
            num_hosts=options.num_hosts,
        ),
    )


def part_exchange_s(options: StudyOptions) -> float:
    """Return the seconds of one layer's exchange if a context is spread."""
    return PART_EXCHANGE_S if options.part_exchange_us is None else options.part_exchange_us / 1e6


def _host_links(options: StudyOptions) -> dict[HostLink, float]:
    """Return the rate of each link between two hosts; empty if no rate is set."""
    if options.host_gbytes_per_s is None:
        return {}
    names = [host_name(index) for index in range(options.num_hosts)]
    return dict.fromkeys(permutations(names, 2), options.host_gbytes_per_s * 1e9)


def described(profile: Profile) -> str:
    """Return a line that describes the instances of a study."""
    subject = profile.subject
    facts = ", ".join(str(fact) for fact in (subject.model, subject.dtype, subject.device_name) if fact)
    return f"instances: {profile.name}" + (f" ({facts})" if facts else "")


def _long_range(text: str) -> tuple[int, int]:
    low, comma, high = text.partition(",")
    try:
        long_range = int(low), int(high)
    except ValueError:
        raise ConfigError(f"--long-range {text!r}: must be LOW,HIGH, such as 100000,500000") from None
    if not comma or not 1 <= long_range[0] <= long_range[1]:
        raise ConfigError(f"--long-range {text!r}: must have 1 <= LOW <= HIGH")
    return long_range


def _workload(options: StudyOptions, long_range: tuple[int, int]) -> list[Arrival]:
    rng = random.Random(options.seed)
    if options.trace == SYNTHETIC:
        shape = Synthetic(
            num_requests=options.limit or Synthetic().num_requests,
            requests_per_s=options.rate,
            long_share=options.long_share,
            long_range=long_range,
        )
        arrivals = synthetic(shape, rng)
    else:
        arrivals = read_trace(Path(options.trace), limit=options.limit)
    if options.long_percentile is not None:
        arrivals = with_long_inputs(arrivals, options.long_percentile, long_range, rng)
    return with_rate_scaled(arrivals, options.rate_scale)


def _sessions(options: StudyOptions) -> list[AgentSession]:
    for option, is_given in (
        ("--rate-scale", options.rate_scale != 1),
        ("--long-percentile", options.long_percentile is not None),
    ):
        if is_given:
            raise ConfigError(f"{option} cannot be combined with agent sessions")
    return read_weka_traces(Path(options.trace), limit=options.limit)


def write_file(path: Path, content: bytes) -> None:
    """Write a file. Raises PdmeshError if that fails."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise PdmeshError(f"cannot write {path}: {error.strerror}") from error
