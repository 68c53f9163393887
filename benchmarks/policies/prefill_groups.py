"""One long prompt on several prefill instances in turn: its time to first token against one instance's.

With the stand-in engine, whose steps sleep for what a latency model says, so that cores do not count: 2, 4 and 8
prefill instances. With the 82M-parameter model, bf16, an engine thread an instance: 2 instances, beside the ceiling
that they reach in the same run with a prompt each and no pipelined prefill. One decode instance, one prompt of 16K
tokens at a time, one output token, one HTTP client; the median of the rounds, after a prompt that warms up. Of
stand-ins, what all processes of the mesh spend of the cores is told too: where that is all there is, more members give
nothing.

The model takes 23 s for such a prompt alone on one core, so a round of it about a minute and a half, and what warms it
up has a quarter of the tokens. Everything is printed when it is known.

Each with members that take turns (pipelined prefill), and that compute at once (parallel step). The simulator foretells
stand-ins, too: with so many more cores than a machine has, it is how well the mesh does what was planned.

    python -m benchmarks.policies.prefill_groups [--rounds 3] [--only stand-in|model] [--members 2 4 8] [--tokens 16384]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import anyio

from benchmarks.harness.report import Limits, heading
from pdmesh.kv_layout import KvLayout
from pdmesh.policy.config import PolicyConfig
from pdmesh_lab.sim.mesh import MeshShape, study_core
from pdmesh_lab.sim.simulator import SimConfig, Simulator
from pdmesh_lab.sim.workload import Arrival
from pdmesh_testing.checkpoints import LLAMA_82M, TINY, write_checkpoint
from pdmesh_testing.configured_fake import parse_latency
from pdmesh_testing.exactness import complete, random_prompts
from pdmesh_testing.mesh import RunningMesh, running_mesh

#: Of the stand-in: 16K tokens take 8.6 s alone, in steps of 0.2 s.
STEPS = "a_s=0.004,b_s=4e-4,c_s=1.5e-8,d_s=7.5e-9"

#: How many times faster the stand-in is to be, by the number of members.
STAND_IN_TARGETS = {2: 1.8, 4: 3.5, 8: 6.5}

#: The model with two members, over one, and over what two independent engines reach.
MODEL_TARGET, CEILING_TARGET = 1.8, 0.95

#: How far what is foretold may be from what is measured, where the cores are not what counts.
FORETOLD_WITHIN, FORETOLD_MEMBERS = 0.1, 4

#: What a stand-in whose steps take time holds of a token (`pdmesh.worker.engines`).
LAYOUT = KvLayout(num_layers=16, num_kv_heads=2, head_dim=16, block_size=16, dtype="bfloat16")

ALONE = {"POLICY_MAX_GROUP_MEMBERS": "1"}

#: Each round computes its prompts, whoever asked for them before.
COLD = {"GATEWAY_PREFIX_REUSE": "off"}


class Seen(NamedTuple):
    """Of the prompts of a round."""

    ttft_s: float  # until all have their token, the median
    cpu_s: float  # of all processes of the mesh, the mean


@dataclass(frozen=True, slots=True)
class Load:
    mesh: RunningMesh
    num_tokens: int
    vocab_size: int
    num_rounds: int

    def warm_up(self, num_tokens: int) -> None:
        asyncio.run(self._round(random_prompts([num_tokens], self.vocab_size, seed=0)))

    def ask(self, num_prompts: int = 1) -> Seen:
        """So many prompts at once. Each round has other prompts."""
        seen_s: list[float] = []
        cpu_s = self._cpu_s()
        for index in range(self.num_rounds):
            prompts = random_prompts([self.num_tokens] * num_prompts, self.vocab_size, seed=1 + index)
            seen_s.append(asyncio.run(self._round(prompts)))
        return Seen(statistics.median(seen_s), (self._cpu_s() - cpu_s) / len(seen_s))

    async def _round(self, prompts: list[list[int]]) -> float:
        """Seconds until all have their token."""
        async with self.mesh.client() as client:
            began_s = time.monotonic()
            async with anyio.create_task_group() as tasks:
                for prompt in prompts:
                    tasks.start_soon(complete, client, self.mesh.model, prompt, 1)
            return time.monotonic() - began_s

    def _cpu_s(self) -> float:
        """What the mesh's processes have spent so far."""
        return sum(self.mesh.cpu_s().values())


def foretold_s(num_prefill: int, schedule: str, num_tokens: int) -> float:
    """Time to first token on modelled stand-ins, half a millisecond from the scheduler."""
    model = parse_latency(STEPS)
    shape = MeshShape(
        num_prefill=num_prefill,
        num_decode=1,
        num_mixed=0,
        kv_layout=LAYOUT,
        num_kv_tokens=4 * num_tokens,
        joins_groups=True,
    )
    policy = PolicyConfig(latency=model, max_group_members=num_prefill, sequence_parallel=schedule)
    arrival = Arrival(arrival_s=0.0, num_prompt_tokens=num_tokens, num_output_tokens=1)
    config = SimConfig(control_delay_s=0.0005)
    result = Simulator(study_core("pdmesh", policy, 0), shape.instances(model), [arrival], config).run()
    ttft_s = result.requests[0].ttft_s
    assert ttft_s is not None
    return ttft_s


def stand_in(members: list[int], schedules: list[str], num_tokens: int, num_rounds: int, limits: Limits) -> None:
    settings = {"WORKER_ENGINE": "fake", "WORKER_FAKE_LATENCY": STEPS, "WORKER_KV_CACHE_BYTES": str(256 << 20), **COLD}

    def ask(num_prefill: int, schedule: str = "pipelined") -> Seen:
        extra = {"POLICY_MAX_GROUP_MEMBERS": str(num_prefill), "POLICY_SEQUENCE_PARALLEL": schedule}
        with tempfile.TemporaryDirectory() as name:
            shape = replace(TINY, max_position_embeddings=2 * num_tokens)
            tokenizer = write_checkpoint(Path(name) / "model", shape=shape)
            with running_mesh(Path(name), model=tokenizer, prefill=num_prefill, settings=settings | extra) as mesh:
                load = Load(mesh, num_tokens, shape.vocab_size, num_rounds)
                load.warm_up(num_tokens)
                return load.ask()

    alone_s = ask(1).ttft_s
    num_cores = len(os.sched_getaffinity(0))
    print(f"stand-in ({STEPS}), alone: {alone_s:.2f} s", flush=True)
    for num_members, schedule in product(members, schedules):
        together_s, cpu_s = ask(num_members, schedule)
        gain, target = alone_s / together_s, STAND_IN_TARGETS.get(num_members, 1.0)
        stands = limits.at_least(f"{num_members} stand-ins, {schedule}", gain, target)
        print(f"  {num_members} instances, {schedule}: {together_s:.2f} s, {gain:.2f} x ({stands} of {target})")
        predicted_s = foretold_s(num_members, schedule, num_tokens)
        off, words = abs(together_s / predicted_s - 1), ""
        if num_members <= FORETOLD_MEMBERS:
            stands = limits.at_most(f"{num_members} stand-ins, {schedule}, as foretold", off, FORETOLD_WITHIN)
            words = f" ({stands} of {FORETOLD_WITHIN:.0%})"
        print(f"    simulated: {predicted_s:.2f} s, live {together_s / predicted_s - 1:+.1%}{words}", flush=True)
        used, most = cpu_s / together_s / num_cores, alone_s * num_cores / cpu_s
        print(f"    {cpu_s:.2f} s of CPU, {used:.0%} of {num_cores} cores, which end at {most:.1f} x", flush=True)


def model(schedules: list[str], num_tokens: int, num_rounds: int, limits: Limits) -> None:
    settings = {"WORKER_KV_CACHE_BYTES": str(1 << 30), **COLD}
    with tempfile.TemporaryDirectory() as name:
        checkpoint = write_checkpoint(Path(name) / "model", shape=LLAMA_82M, dtype="bfloat16")

        def warm(mesh: RunningMesh) -> Load:
            load = Load(mesh, num_tokens, LLAMA_82M.vocab_size, num_rounds)
            load.warm_up(num_tokens // 4)
            return load

        with running_mesh(Path(name) / "alone", model=checkpoint, prefill=2, settings=settings | ALONE) as mesh:
            load = warm(mesh)
            alone_s = load.ask().ttft_s
            print(f"82M bf16, alone: {alone_s:.2f} s", flush=True)
            side_by_side_s = load.ask(num_prompts=2).ttft_s
            ceiling = 2 * alone_s / side_by_side_s
            print(f"  two side by side: {side_by_side_s:.2f} s, a ceiling of {ceiling:.2f} x", flush=True)
        for schedule in schedules:
            extra = {"POLICY_SEQUENCE_PARALLEL": schedule}
            with running_mesh(Path(name) / schedule, model=checkpoint, prefill=2, settings=settings | extra) as mesh:
                together_s = warm(mesh).ask().ttft_s
            gain = alone_s / together_s
            stands = limits.at_least(f"the model, 2 instances, {schedule}", gain, MODEL_TARGET)
            print(f"  2 instances, {schedule}: {together_s:.2f} s, {gain:.2f} x ({stands} of {MODEL_TARGET})")
            stands = limits.at_least(f"of the ceiling, {schedule}", gain / ceiling, CEILING_TARGET)
            print(f"  {gain / ceiling:.1%} of the ceiling ({stands} of {CEILING_TARGET:.0%})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16 * 1024)
    parser.add_argument("--members", type=int, nargs="+", default=sorted(STAND_IN_TARGETS))
    parser.add_argument("--schedules", nargs="+", choices=["pipelined", "parallel"], default=["pipelined", "parallel"])
    parser.add_argument("--only", choices=["stand-in", "model"])
    options = parser.parse_args()
    print(heading(f"A prompt of {options.tokens} tokens on several prefill instances in turn"), flush=True)
    limits = Limits()
    if options.only != "model":
        stand_in(options.members, options.schedules, options.tokens, options.rounds, limits)
    if options.only != "stand-in":
        model(options.schedules, options.tokens, options.rounds, limits)
    limits.end()


if __name__ == "__main__":
    main()
