"""A long prompt that several instances compute, and a fault among them meanwhile, again and again.

    python -m benchmarks.faults.group_faults [--number 200] [--seed 0] [--small] [--minutes 60]
        [--longest-stop-s 3] [--turns]

Faults: a member (leader or helper) is killed, or stopped for up to 3 s; the client hangs up; pieces of KV come damaged
or late for a while. Killed and stopped are only instances that hold the prompt, with others, as their metrics say right
before; when that is, is drawn anew for each from how long the prompt takes undisturbed. What hit nobody is repeated.
Every stream that is not hung up on must have the tokens of an undisturbed one, every damaged piece must be refused
(`bad_pieces`), what a client hung up on must be free on all instances within a second, and all blocks at the end. Of a
prompt that takes long the record is printed. With ``--turns`` the prompt's first half is asked for before each fault,
with a salt of its own, so that its KV is reused and a group computes the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

import httpx
import msgspec

from benchmarks.faults import bad_pieces
from benchmarks.harness.report import Limits, heading, quantile
from pdmesh.cli.state_folder import MeshRecord
from pdmesh_testing.checkpoints import LLAMA_82M, CheckpointShape, write_checkpoint
from pdmesh_testing.mesh import RunningMesh, running_mesh
from pdmesh_testing.streaming import Answer, ask

NUM_TOKENS = 4 * 1024
OUTPUT_TOKENS = 8
NUM_PREFILL = 3
SETTINGS = {
    "GATEWAY_PREFIX_REUSE": "off",  # the same prompts are computed again and again
    "WORKER_NUM_THREADS": "1",
    "WORKER_KV_CACHE_BYTES": str(1 << 30),
    "POLICY_LONG_PROMPT_TOKENS": "1024",
    "POLICY_GROUP_IMPROVEMENT": "0",
    "TRANSFER_NO_PROGRESS_S": "3.3",
}
SMALL = CheckpointShape(
    hidden_size=128, intermediate_size=512, num_layers=6, num_heads=8, max_position_embeddings=4 * NUM_TOKENS
)

#: A stream that is not at its end by then hangs.
HANGS_S = 180.0

#: Of a prompt that takes longer the record is printed: several times as long as two restarts take.
LONG_S = 12.0

#: How long all members may hold what its client hung up on.
FREED_S = 1.0


class Fault(StrEnum):
    KILL = "killed"
    STOP = "stopped"
    CANCEL = "cancelled"
    DAMAGE = "damaged"


WEIGHTS = {Fault.KILL: 3, Fault.STOP: 3, Fault.CANCEL: 1, Fault.DAMAGE: 2}


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 250) for _ in range(num_tokens)]


async def prefill_metrics(mesh: RunningMesh, client: httpx.AsyncClient) -> dict[tuple[str, int], str]:
    """What each prefill instance that answers serves, by its name and process."""
    record = msgspec.json.decode((mesh.folder / "mesh.json").read_bytes(), type=MeshRecord)
    services = [service for service in record.services if service.name.startswith("prefill")]

    async def text_of(port: object) -> str:
        try:
            return (await client.get(f"http://127.0.0.1:{port}/metrics", timeout=5)).text
        except httpx.HTTPError:
            return ""  # it is being started

    found = await asyncio.gather(*(text_of(service.facts.get("metrics_port")) for service in services))
    return {(service.name, service.process.pid): text for service, text in zip(services, found, strict=True) if text}


async def members(mesh: RunningMesh, client: httpx.AsyncClient) -> list[tuple[str, int]]:
    """Name and process of each instance that holds a prompt which is being computed."""
    holds = re.compile(r'^pdmesh:num_requests\{stage="prefilling"\} [1-9]', re.M)
    return [key for key, text in (await prefill_metrics(mesh, client)).items() if holds.search(text)]


async def until_free(mesh: RunningMesh, client: httpx.AsyncClient) -> float:
    """Wait until no prefill instance has blocks that are not free; how long that took."""
    taken = re.compile(r'^pdmesh:kv_blocks\{state="(held|quarantined)"\} [1-9]', re.M)
    began_s = time.perf_counter()
    while any(taken.search(text) for text in (await prefill_metrics(mesh, client)).values()):
        if time.perf_counter() - began_s > HANGS_S:
            raise TimeoutError("blocks are not free")
        await asyncio.sleep(0.01)
    return time.perf_counter() - began_s


async def until_all_answer(mesh: RunningMesh, client: httpx.AsyncClient) -> None:
    """Wait until those that were killed have been started again."""
    began_s = time.perf_counter()
    while len(await prefill_metrics(mesh, client)) < NUM_PREFILL:
        if time.perf_counter() - began_s > HANGS_S:
            raise TimeoutError("an instance was not started again")
        await asyncio.sleep(0.1)


class Storm:
    """One fault after the other, each on a prompt of its own."""

    def __init__(
        self, mesh: RunningMesh, client: httpx.AsyncClient, bad: Path, seed: int, longest_stop_s: float, *, turns: bool
    ) -> None:
        self._mesh = mesh
        self._client = client
        self._bad = bad
        self._longest_stop_s = longest_stop_s
        self._turns = turns
        self._rng = random.Random(seed)
        self._prompt = prompt_of(1, NUM_TOKENS)
        self._expected = list[int]()
        self._takes_s = 0.0
        self._num_asked = self._num_turns = 0
        self.hits: Counter[Fault] = Counter()
        self.num_missed = 0
        self.differing: list[str] = []
        self.ttft_s: list[float] = []
        self.freed_s: list[float] = []

    async def warm_up(self) -> None:
        await self._begin_turns()
        await self._ask()
        await self._begin_turns()
        undisturbed = await self._ask()
        self._takes_s, self._expected = undisturbed.ttft_s, undisturbed.token_ids
        print(f"undisturbed: first token after {self._takes_s:.2f} s", flush=True)

    async def strike(self) -> None:
        """One request and one fault; counted if it hit a group."""
        fault = self._rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        await self._begin_turns()
        task = asyncio.create_task(self._ask())
        at_s = self._rng.uniform(0, self._takes_s)
        await asyncio.sleep(at_s)
        found = await members(self._mesh, self._client)
        if len(found) < 2 or task.done():
            self.num_missed += 1
            await asyncio.wait_for(task, HANGS_S)
            return
        name, pid = self._rng.choice(found)
        try:
            await self._cause(fault, pid, task)
        except ProcessLookupError:
            self.num_missed += 1
        else:
            self.hits[fault] += 1
        said = f"{sum(self.hits.values())}: {fault} {name} of {len(found)} at {at_s:.2f} s"
        await asyncio.wait([task], timeout=HANGS_S)
        if task.cancelled():
            self.freed_s.append(await until_free(self._mesh, self._client))
            print(f"{said}, all is free after {self.freed_s[-1]:.2f} s", flush=True)
            return
        try:
            answer = await asyncio.wait_for(task, 0)
            seconds, came = answer.ttft_s, str(answer.token_ids)
        except Exception as error:  # whatever a stream ends with but its tokens
            seconds, came = 0.0, repr(error)
        self.ttft_s.append(seconds)
        differs = came != str(self._expected)
        if differs:
            self.differing.append(f"{said}: {came}")
        print(f"{said}, first token after {seconds:.2f} s{f', DIFFERS: {came[:200]}' * differs}", flush=True)
        if seconds > LONG_S:
            await asyncio.to_thread(self._show, f"fault-{self._num_asked}")

    async def _begin_turns(self) -> None:
        """Let the first half be kept, and nothing of earlier prompts be reused."""
        if self._turns:
            self._num_turns += 1
            half = self._prompt[: len(self._prompt) // 2]
            await self._ask_for(half, f"first-{self._num_turns}")

    async def _ask(self) -> Answer:
        self._num_asked += 1
        return await self._ask_for(self._prompt, f"fault-{self._num_asked}")

    async def _ask_for(self, prompt: Sequence[int], label: str) -> Answer:
        salt = {"cache_salt": f"turns-{self._num_turns}"} if self._turns else {}
        return await ask(self._client, prompt, OUTPUT_TOKENS, {"X-Request-Id": label}, **salt)

    def _show(self, label: str) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):  # forgotten: the scheduler has a bounded memory
            print(self._mesh.pdmesh("requests", "show", label), flush=True)

    async def _cause(self, fault: Fault, pid: int, task: asyncio.Task[Answer]) -> None:
        match fault:
            case Fault.KILL:
                os.kill(pid, signal.SIGKILL)
            case Fault.STOP:
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(self._rng.uniform(0.05, self._longest_stop_s))
                os.kill(pid, signal.SIGCONT)
            case Fault.CANCEL:
                task.cancel()
            case Fault.DAMAGE:
                (self._bad / "on").touch()
                await asyncio.wait([task], timeout=self._rng.uniform(0, self._takes_s))
                (self._bad / "on").unlink()


async def storm(mesh: RunningMesh, bad: Path, options: argparse.Namespace) -> Storm:
    number, ends_s = options.number, time.monotonic() + options.minutes * 60
    async with mesh.client() as client:
        faults = Storm(mesh, client, bad, options.seed, options.longest_stop_s, turns=options.turns)
        await faults.warm_up()
        while sum(faults.hits.values()) < number and faults.num_missed < 5 * number and time.monotonic() < ends_s:
            await faults.strike()
        await until_all_answer(mesh, client)
    await asyncio.to_thread(mesh.wait_until_idle, 120.0)
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="a model of 6 layers in fp32, not the 82M one in bf16")
    parser.add_argument("--minutes", type=float, default=120.0, help="no more faults after so long")
    parser.add_argument("--longest-stop-s", type=float, default=3.0)
    parser.add_argument("--turns", action="store_true", help="with prompts the first half of which is reused")
    options = parser.parse_args()
    print(
        heading(f"Faults among those who compute a prompt together, {'small model' if options.small else '82M, bf16'}")
    )
    limits = Limits()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        bad = folder / "bad"
        bad.mkdir()
        bad_pieces.write_sitecustomize(bad)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(bad), os.environ.get("PYTHONPATH")]))
        if options.small:
            model, more = write_checkpoint(folder / "model", shape=SMALL), {"POLICY_PREFILL_STEP_S": "0.1"}
        else:
            model, more = write_checkpoint(folder / "model", shape=LLAMA_82M, dtype="bfloat16"), {}
        if options.turns:
            more["GATEWAY_PREFIX_REUSE"] = "tenant"
        with running_mesh(folder, model=model, prefill=NUM_PREFILL, decode=1, settings=SETTINGS | more) as mesh:
            faults = asyncio.run(storm(mesh, bad, options))
            restarts = mesh.total("request_restarts")
            copied = mesh.total("prefix_cache_fetched_tokens")
            pieces = bad_pieces.counted(bad)
    num_hits = sum(faults.hits.values())
    print(", ".join(f"{count} {fault}" for fault, count in faults.hits.items()), f"({faults.num_missed} hit nobody)")
    print(f"{restarts:.0f} restarts; {copied:,.0f} tokens of prefixes copied between instances that still run")
    damaged, refused, unread = (pieces[what] for what in (bad_pieces.DAMAGED, bad_pieces.REFUSED, bad_pieces.UNREAD))
    stands = limits.at_least(
        "damaged pieces that were not taken", max(1, damaged) - pieces[bad_pieces.TAKEN], max(1, damaged)
    )
    print(f"{damaged} pieces damaged: {refused} refused for their checksum, {unread} not looked at, ", end="")
    print(f"{pieces[bad_pieces.TAKEN]} taken ({stands}); {pieces[bad_pieces.LATE]} late")
    limits.at_least("pieces refused for their checksum", refused, 1)
    if len(faults.ttft_s) > 1:
        p50, p99 = (quantile(faults.ttft_s, share) for share in (0.5, 0.99))
        print(
            f"first tokens of those with a fault after {p50:.2f} s p50, {p99:.2f} p99, {max(faults.ttft_s):.2f} at most"
        )
    if faults.freed_s:
        stands = limits.at_most("what was hung up on is free", max(faults.freed_s), FREED_S)
        print(f"what was hung up on is free on all instances after {max(faults.freed_s):.2f} s at most ({stands})")
    limits.at_least("faults that hit a group", num_hits, options.number)
    num_right = num_hits - len(faults.differing)
    stands = limits.at_least("streams with the same tokens", num_right, num_hits)
    print(f"{num_right} of {num_hits} streams are as they should be ({stands}); all blocks are free")
    for line in faults.differing:
        print(line, file=sys.stderr)
    limits.end()


if __name__ == "__main__":
    main()
