"""A long prompt that several instances compute, and a fault among them meanwhile, again and again.

    python benchmarks/relay_faults.py [--number 200] [--seed 0] [--small]

Faults: a member (leader or helper) is killed, or stopped for up to 3 s; the client hangs up; pieces of KV come damaged
or late for a while. Killed and stopped are only instances that hold the prompt, with others, as their metrics say right
before; when that is, is drawn anew for each from how long the prompt takes undisturbed. What hit nobody is repeated.
Every stream that is not hung up on must have the tokens of an undisturbed one, and all blocks must be free at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

import httpx
import msgspec
from report import Limits, heading

from pdmesh.cli.state import MeshRecord
from pdmesh.testing.checkpoints import LLAMA_82M, CheckpointShape, write_checkpoint
from pdmesh.testing.mesh import RunningMesh, running_mesh

NUM_TOKENS = 4 * 1024
OUTPUT_TOKENS = 8
SETTINGS = {
    "WORKER_NUM_THREADS": "1",
    "WORKER_KV_CACHE_BYTES": str(1 << 30),
    "POLICY_LONG_PROMPT_TOKENS": "1024",
    "POLICY_RELAY_IMPROVEMENT": "0",
    "TRANSFER_GROUP_NO_PROGRESS_S": "10",
}
SMALL = CheckpointShape(
    hidden_size=128, intermediate_size=512, num_layers=6, num_heads=8, max_position_embeddings=4 * NUM_TOKENS
)

#: A stream that is not at its end by then hangs.
HANGS_S = 180.0

#: Run by every process of the mesh. While the file is there, some pieces that are read come damaged, and some late.
DAMAGE = """
import ctypes, os, random, time
from pdmesh.transport import reading
read_memory, rng = reading.read_memory, random.Random(os.getpid())
def faulty(pid, address, num_bytes, out_address):
    read_memory(pid, address, num_bytes, out_address)
    if os.path.exists({flag!r}):
        drawn = rng.random()
        if drawn < 0.05:
            ctypes.c_ubyte.from_address(out_address + rng.randrange(num_bytes)).value ^= 1 << rng.randrange(8)
        elif drawn < 0.1:
            time.sleep(rng.uniform(0, 0.1))
reading.read_memory = faulty
"""


class Fault(StrEnum):
    KILL = "killed"
    STOP = "stopped"
    CANCEL = "cancelled"
    DAMAGE = "damaged"


WEIGHTS = {Fault.KILL: 3, Fault.STOP: 3, Fault.CANCEL: 1, Fault.DAMAGE: 2}


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 250) for _ in range(num_tokens)]


async def ask(client: httpx.AsyncClient, model: str, prompt: Sequence[int]) -> tuple[float, str]:
    """Seconds to the first token, and the whole text."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    began_s, first_s, lines = time.perf_counter(), 0.0, list[str]()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first_s = first_s or time.perf_counter() - began_s
                lines.append(line)
    texts = [match[1] for line in lines if (match := re.search(r'"text":\s*"((?:[^"\\]|\\.)*)"', line))]
    errors = [line for line in lines if '"error"' in line]
    if errors:
        raise RuntimeError(errors[0])
    return first_s, "".join(texts)


async def members(mesh: RunningMesh, client: httpx.AsyncClient) -> list[tuple[str, int]]:
    """Name and process of each instance that holds a prompt which is being computed."""
    record = msgspec.json.decode((mesh.folder / "mesh.json").read_bytes(), type=MeshRecord)
    services = [service for service in record.services if service.name.startswith("prefill")]

    async def holds(port: object) -> bool:
        try:
            text = (await client.get(f"http://127.0.0.1:{port}/metrics", timeout=5)).text
        except httpx.HTTPError:
            return False  # it is being started
        return re.search(r'^pdmesh:num_requests\{stage="prefilling"\} [1-9]', text, re.M) is not None

    found = await asyncio.gather(*(holds(service.facts.get("metrics_port")) for service in services))
    return [(service.name, service.process.pid) for service, held in zip(services, found, strict=True) if held]


def total(mesh: RunningMesh, name: str) -> float:
    text = "\n".join(mesh.metrics().values())
    return sum(float(value) for value in re.findall(rf"^{name} (\S+)$", text, re.M))


class Storm:
    """One fault after the other, each on a prompt of its own."""

    def __init__(self, mesh: RunningMesh, client: httpx.AsyncClient, flag: Path, seed: int) -> None:
        self._mesh = mesh
        self._client = client
        self._flag = flag
        self._rng = random.Random(seed)
        self._prompt = prompt_of(1, NUM_TOKENS)
        self._expected = ""
        self._takes_s = 0.0
        self.hits: Counter[Fault] = Counter()
        self.num_missed = 0
        self.differing: list[str] = []

    async def warm_up(self) -> None:
        await ask(self._client, self._mesh.model, self._prompt)
        self._takes_s, self._expected = await ask(self._client, self._mesh.model, self._prompt)
        print(f"undisturbed: first token after {self._takes_s:.2f} s", flush=True)

    async def strike(self) -> None:
        """One request and one fault; counted if it hit a group."""
        fault = self._rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        task = asyncio.create_task(ask(self._client, self._mesh.model, self._prompt))
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
        try:
            seconds, text = await asyncio.wait_for(task, HANGS_S)
        except asyncio.CancelledError:
            print(said, flush=True)
            return
        except Exception as error:  # whatever a stream ends with but its tokens
            seconds, text = 0.0, repr(error)
        if text != self._expected:
            self.differing.append(f"{said}: {text}")
        print(f"{said}, first token after {seconds:.2f} s{'' if text == self._expected else ', DIFFERS'}", flush=True)

    async def _cause(self, fault: Fault, pid: int, task: asyncio.Task[tuple[float, str]]) -> None:
        match fault:
            case Fault.KILL:
                os.kill(pid, signal.SIGKILL)
            case Fault.STOP:
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(self._rng.uniform(0.05, 3))
                os.kill(pid, signal.SIGCONT)
            case Fault.CANCEL:
                task.cancel()
            case Fault.DAMAGE:
                self._flag.touch()
                await asyncio.wait([task], timeout=self._rng.uniform(0, self._takes_s))
                self._flag.unlink()


async def storm(mesh: RunningMesh, flag: Path, number: int, seed: int) -> Storm:
    async with mesh.client() as client:
        faults = Storm(mesh, client, flag, seed)
        await faults.warm_up()
        while sum(faults.hits.values()) < number and faults.num_missed < 5 * number:
            await faults.strike()
    await asyncio.to_thread(mesh.wait_until_idle, 120.0)
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="a model of 6 layers in fp32, not the 82M one in bf16")
    options = parser.parse_args()
    print(
        heading(f"Faults among those who compute a prompt together, {'small model' if options.small else '82M, bf16'}")
    )
    limits = Limits()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        flag = folder / "damage"
        (folder / "sitecustomize.py").write_text(DAMAGE.format(flag=str(flag)))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [temporary, os.environ.get("PYTHONPATH")]))
        if options.small:
            model, more = write_checkpoint(folder / "model", shape=SMALL), {"POLICY_PREFILL_STEP_S": "0.1"}
        else:
            model, more = write_checkpoint(folder / "model", shape=LLAMA_82M, dtype="bfloat16"), {}
        with running_mesh(folder, model=model, prefill=3, decode=1, settings=SETTINGS | more) as mesh:
            faults = asyncio.run(storm(mesh, flag, options.number, options.seed))
            dropped = total(mesh, r'pdmesh:num_dropped_pieces_total\{reason="checksum"\}')
            restarts = total(mesh, r"pdmesh:request_restarts_total")
    num_hits = sum(faults.hits.values())
    print(", ".join(f"{count} {fault}" for fault, count in faults.hits.items()), f"({faults.num_missed} hit nobody)")
    print(f"{dropped:.0f} damaged pieces refused by those alive at the end, {restarts:.0f} restarts")
    limits.at_least("faults that hit a group", num_hits, options.number)
    num_right = num_hits - len(faults.differing)
    stands = limits.at_least("streams with the same tokens", num_right, num_hits)
    print(f"{num_right} of {num_hits} streams are as they should be ({stands}); all blocks are free")
    for line in faults.differing:
        print(line, file=sys.stderr)
    limits.end()


if __name__ == "__main__":
    main()
