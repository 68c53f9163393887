"""Local prefill by cost beside fixed rules: `pdmesh` where prompts queue, and decodes have time to spare.

Usage: python benchmarks/local_prefill.py [--requests 600] [--seeds 3] [--first-seed 0] [--load NAME ...]

Simulated, the same core: two instances that prefill and two that decode, and requests as fast as 0.7 and 1.2 times what
the former can compute. Under the fixed rules a prompt up to a length is computed where it decodes as soon as no
instance that prefills takes it; 0: never. `pdmesh` compares predicted first tokens, for all prompts that are not long.
The loads are those of a chat; short prompts with long ones among them; and the same beside decodes that leave little
time, because they want a token every 15 ms.

Prints goodput (requests that kept their targets, a second), its ratio to that of the best fixed rule of the load, and
the ratio of the mean times to first token. Exits 1 if `pdmesh` has less than 0.95 of the best goodput of some load.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product

from report import heading
from simulated import layout, table

from pdmesh.core.config import CoreConfig, KvReservation
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.metrics import Slo
from pdmesh.model import Request
from pdmesh.policy.bundle import Bundle
from pdmesh.policy.bundles import make_bundle
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LLAMA_3_8B, PROFILES, ChunkShape, StepShape
from pdmesh.policy.local_prefill import LocalPrefill
from pdmesh.policy.views import InstanceView
from pdmesh_lab.sim.mesh import MeshShape
from pdmesh_lab.sim.report import report
from pdmesh_lab.sim.simulator import Simulator
from pdmesh_lab.sim.workload import Arrival, Synthetic, synthetic

WANTED = 0.95
MODEL = PROFILES["h100-llama3-8b"]
NUM_PREFILL, NUM_DECODE = 2, 2
LIMITS = (0, 512, 1024, 2048, 4096, 8191)

#: Of what the instances that prefill can compute.
SHARES = (0.7, 1.2)

TTFT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    lengths: Synthetic
    tpot_s: float


CHAT = Synthetic(max_prompt_tokens=6000, max_output_tokens=600)
WITH_LONG = Synthetic(
    median_prompt_tokens=300,
    sigma_prompt=0.6,
    max_prompt_tokens=1500,
    max_output_tokens=600,
    long_share=0.15,
    long_range=(3000, 8000),
)
LOADS: Mapping[str, Load] = {
    "chat": Load(lengths=CHAT, tpot_s=0.05),
    "short and long": Load(lengths=WITH_LONG, tpot_s=0.05),
    "little time": Load(lengths=WITH_LONG, tpot_s=0.015),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UpTo(LocalPrefill):
    """Whatever is predicted, by the length of the prompt."""

    limit: int

    def pays(
        self,
        request: Request,
        decode: InstanceView,
        prefill: InstanceView | None,
        last_layer_bytes: float,
        num_reused_tokens: int = 0,
        num_reused_there: int = 0,
    ) -> bool:
        return request.num_prompt_tokens <= self.limit


def settings(policy: PolicyConfig) -> Mapping[str, Bundle]:
    bundle = make_bundle("pdmesh", policy)
    by_cost = bundle.local_prefill
    assert by_cost is not None
    fields = {name: getattr(by_cost, name) for name in LocalPrefill.__dataclass_fields__}
    fixed = {
        f"always up to {limit}" if limit else "never": replace(bundle, local_prefill=UpTo(**fields, limit=limit))
        for limit in LIMITS
    }
    return {"pdmesh": bundle} | fixed


def arrivals(load: Load, share: float, num_requests: int, seed: int) -> list[Arrival]:
    """Requests that ask the instances that prefill for ``share`` of their time."""
    drawn = synthetic(replace(load.lengths, num_requests=num_requests, requests_per_s=1.0), random.Random(seed))
    work_s = statistics.fmean(MODEL.step_s(StepShape((ChunkShape(each.num_prompt_tokens, 0),), 0, 0)) for each in drawn)
    rate = share * NUM_PREFILL / work_s
    return [
        replace(each, arrival_s=each.arrival_s / rate, max_tokens=600, slo_ttft_s=TTFT_S, slo_tpot_s=load.tpot_s)
        for each in drawn
    ]


def run(bundle: Bundle, policy: PolicyConfig, load: Load, requests: list[Arrival], seed: int) -> tuple[float, float]:
    """Goodput, and the mean time to first token in seconds."""
    mesh = MeshShape(
        num_prefill=NUM_PREFILL,
        num_decode=NUM_DECODE,
        num_mixed=0,
        kv_layout=layout(LLAMA_3_8B),
        num_kv_tokens=200_000,
        max_num_seqs=128,
    )
    limit = 10**15
    config = CoreConfig(
        max_queue_entries=limit,
        max_queue_tokens=limit,
        max_queue_s=float(limit),
        kv_reservation=KvReservation.ON_DEMAND,
        policy=policy,
    )
    core = SchedulerCore(config, bundle, random.Random(seed))
    result = Simulator(core, mesh.instances(MODEL), requests).run()
    slo = Slo(ttft_s=TTFT_S, tpot_s=load.tpot_s)
    figures = report(result, long_tokens=policy.long_prompt_tokens, slo=slo)
    ttft_s = statistics.fmean(each.ttft_s for each in result.requests if each.ttft_s is not None)
    return figures.goodput_per_s or 0.0, ttft_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--load", action="append", choices=sorted(LOADS), help="by default all")
    options = parser.parse_args()
    print(heading("local prefill"))
    holds = True
    names = list(settings(PolicyConfig(latency=MODEL)))
    rows: dict[str, list[str]] = {name: [name] for name in names}
    cells = list(product(options.load or list(LOADS), SHARES))
    for name, share in cells:
        load = LOADS[name]
        policy = PolicyConfig(latency=MODEL, slo_ttft_s=TTFT_S, slo_tpot_s=load.tpot_s)
        goodput: dict[str, float] = {}
        ttft_s: dict[str, float] = {}
        for setting, bundle in settings(policy).items():
            found = [
                run(bundle, policy, load, arrivals(load, share, options.requests, seed), seed)
                for seed in range(options.first_seed, options.first_seed + options.seeds)
            ]
            goodput[setting], ttft_s[setting] = (statistics.fmean(column) for column in zip(*found, strict=True))
            rows[setting].append(f"{goodput[setting]:.1f}, {1e3 * ttft_s[setting]:.0f} ms")
        fixed = [setting for setting in names if setting != "pdmesh"]
        best, soonest = max(fixed, key=lambda each: goodput[each]), min(fixed, key=lambda each: ttft_s[each])
        ratio, sooner = goodput["pdmesh"] / goodput[best], ttft_s["pdmesh"] / ttft_s[soonest]
        print(
            f"{name}, {share:g}: goodput {ratio:.3f} of the best ({best}), {goodput['pdmesh'] / goodput['never']:.2f} "
            f"of never; TTFT {sooner:.2f} of the shortest ({soonest})",
            flush=True,
        )
        holds &= ratio >= WANTED
    print(table(["setting", *(f"{name}, {share:g}" for name, share in cells)], [*rows.values()]))
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
