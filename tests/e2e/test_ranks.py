"""Instances of several processes in a mesh of real ones: exact whatever the degrees, and each rank may die."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import anyio
import pytest

from pdmesh.cli.process_id import process_id
from pdmesh.config import InstanceDegrees
from pdmesh.engine.files import load_model_config
from pdmesh.engine.runner import TorchEngine
from pdmesh.errors import PdmeshError
from pdmesh.model import Role
from pdmesh.operations import OperationKind
from pdmesh_testing.checkpoints import TINY, write_checkpoint
from pdmesh_testing.exactness import (
    Reference,
    complete,
    engine_reference,
    mismatches,
    random_prompts,
    reference,
    streamed_while,
)
from pdmesh_testing.mesh import RunningMesh, running_mesh
from pdmesh_testing.operating import operator_of
from pdmesh_testing.spread_meshes import until_ended
from pdmesh_testing.transformers_checkpoints import model_variants, write_transformers_checkpoint

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT_LENGTHS = [1, 15, 16, 17, 33, 100, 257, 700]
MAX_TOKENS = 120


class Layout(NamedTuple):
    """InstanceDegrees of the pools, tensor and pipeline; only one of them has several processes an instance."""

    prefill: InstanceDegrees = InstanceDegrees()
    decode: InstanceDegrees = InstanceDegrees()

    @property
    def num_processes(self) -> int:
        return max(self.prefill.num_processes, self.decode.num_processes)

    def __str__(self) -> str:
        return f"prefill-{'x'.join(map(str, self.prefill))}-decode-{'x'.join(map(str, self.decode))}"


LAYOUTS = [
    Layout(prefill=InstanceDegrees(2, 1)),
    Layout(decode=InstanceDegrees(2, 1)),
    Layout(prefill=InstanceDegrees(1, 2)),
    Layout(prefill=InstanceDegrees(2, 2)),
    Layout(decode=InstanceDegrees(1, 2)),
]


@dataclass(frozen=True)
class Served:
    mesh: RunningMesh
    references: list[Reference]
    layout: Layout


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), architecture="qwen3", seed=3)


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def served(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Served]:
    prompts = random_prompts(PROMPT_LENGTHS, TINY.vocab_size, seed=2)
    references = [reference(checkpoint, prompt, MAX_TOKENS) for prompt in prompts]
    settings = {
        f"{pool}_{setting}_PARALLEL_SIZE": str(size)
        for pool, degrees in zip(("PREFILL", "DECODE"), request.param, strict=True)
        for setting, size in zip(("TENSOR", "PIPELINE"), degrees, strict=True)
    }
    with running_mesh(tmp_path_factory.mktemp("mesh"), model=checkpoint, settings=settings) as mesh:
        yield Served(mesh, references, request.param)


def rank_pids(mesh: RunningMesh) -> list[int]:
    """The processes of the instance that has several."""
    (pids,) = [row.rank_pids for row in mesh.status().instances if row.rank_pids]
    return list(pids)


async def test_unlike_degrees_answer_as_the_reference(served: Served) -> None:
    mesh = served.mesh
    layout, pids = served.layout, rank_pids(mesh)
    assert len(pids) == layout.num_processes
    degrees = max(layout)
    name = "prefill-0" if degrees == layout.prefill else "decode-0"
    stages = f" in {degrees.stages} stages" if degrees.stages > 1 else ""
    assert f"ranks  {name}: {degrees.num_ranks}{stages} (pids" in mesh.pdmesh("status")
    async with mesh.client() as client:
        assert await mismatches(client, mesh.model, served.references, concurrency=4) == []
    await anyio.to_thread.run_sync(mesh.wait_until_idle)
    assert mesh.peer_read_bytes() > 0  # blocks are read where all ranks wrote them


@pytest.mark.parametrize("rank", [0, 1, -1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_rank_ends_its_instance_and_no_stream(served: Served, rank: int, number: signal.Signals) -> None:
    """Once a rank dies or stands still, nothing of its instance is left, and each answer is what it would have been."""
    mesh = served.mesh
    pids = rank_pids(mesh)
    if rank == -1 and len(pids) == 2:
        pytest.skip("it has two processes")
    if rank == 0 and number is signal.SIGSTOP:
        pytest.skip("a leader that stands still is a silent instance, as ever")
    got: list[list[int]] = []
    killed = anyio.Event()

    def kill() -> None:
        os.kill(pids[rank], number)
        killed.set()

    async def ask() -> None:
        async with mesh.client() as client:
            got.extend(await streamed_while(client, mesh.model, served.references, kill, num_begun=1))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await killed.wait()
        began_s = time.monotonic()
        await until_ended([pid for pid in pids if pid != pids[0]])
        assert time.monotonic() - began_s < 10  # a second, if the machine has one to spare
        await until_ended(pids)
    assert got == [list(each.token_ids) for each in served.references]
    await anyio.to_thread.run_sync(lambda: mesh.wait_until_idle(60.0))
    deadline_s = time.monotonic() + 120
    while not any(row.rank_pids and list(row.rank_pids) != pids for row in (await mesh.state()).instances):
        assert time.monotonic() < deadline_s, "no instance of ranks came back"
        await anyio.sleep(0.2)
    async with mesh.client() as client:
        short = served.references[0]
        assert (await complete(client, mesh.model, short.prompt, 8)).token_ids == short.token_ids[:8]


async def test_decodes_of_stages_move_and_their_instances_change_roles(checkpoint: Path, tmp_path: Path) -> None:
    """Streams move between instances of two stages and of one; one of stages prefills, and then does both."""
    prompts = random_prompts(PROMPT_LENGTHS, TINY.vocab_size, seed=4)
    references = [reference(checkpoint, prompt, 300) for prompt in prompts]
    settings = {"DECODE_PIPELINE_PARALLEL_SIZE": "2"}
    with running_mesh(tmp_path, model=checkpoint, prefill=2, decode=2, settings=settings) as mesh:
        operator = operator_of(mesh)

        async def change(instance: str, role: Role) -> None:
            done = await operator.operate(OperationKind.ROLE, instance, role=role)
            assert done.state == "done", done.detail

        async def answer_while_moving(*targets: str) -> None:
            num_moved, found = operator.operations["done"], list[str]()
            async with mesh.client() as client, anyio.create_task_group() as tasks:

                async def move() -> None:
                    for target in cycle(targets):
                        for request_id in await operator.running():
                            with suppress(PdmeshError):  # it has ended meanwhile, or is there already
                                await operator.operate(OperationKind.MOVE, target, request_id)
                        await anyio.sleep(0.01)

                tasks.start_soon(move)
                found += await mismatches(client, mesh.model, references, concurrency=8)
                tasks.cancel_scope.cancel()
            assert found == []
            assert operator.operations["done"] > num_moved
            await anyio.to_thread.run_sync(lambda: mesh.wait_until_idle(60.0))

        await answer_while_moving("decode-0", "decode-1")
        await change("prefill-1", Role.DECODE)
        await change("decode-1", Role.PREFILL)
        await answer_while_moving("decode-0", "prefill-1")
        await change("decode-1", Role.MIXED)
        await answer_while_moving("decode-0", "decode-1", "prefill-1")


@pytest.mark.parametrize(
    ("model_type", "setting"),
    [*[(each, "PIPELINE") for each in ("qwen3_5_text", "granitemoehybrid", "lfm2")], ("lfm2", "TENSOR")],
)
async def test_states_and_convolutions_pass_ranks_of_which_one_is_lost(
    model_type: str, setting: str, tmp_path: Path
) -> None:
    """Prefill and decode have two stages or ranks each. A killed one changes no stream."""
    options = model_variants()[model_type][0]
    checkpoint = write_transformers_checkpoint(tmp_path / "model", model_type, seed=1, **options)
    prompts = random_prompts([1, 100, 128, 129, 300, 700], load_model_config(checkpoint).vocab_size, seed=5)
    engine = TorchEngine(
        checkpoint,
        num_blocks=8,
        block_size=128,
        dtype="float32",
        device="cpu",
        num_threads=1,
        deterministic=True,
        ordered=True,
    )
    references = [engine_reference(engine, prompt, 100) for prompt in prompts]
    settings = {
        f"PREFILL_{setting}_PARALLEL_SIZE": "2",
        f"DECODE_{setting}_PARALLEL_SIZE": "2",
        "WORKER_DTYPE": "float32",
        "WORKER_DETERMINISTIC": "true",
        "WORKER_MAX_MODEL_LEN": "1024",
        "POLICY_CHUNK_TOKENS": "50",
    }
    with running_mesh(tmp_path, model=checkpoint, decode=2, settings=settings) as mesh:
        async with mesh.client() as client:
            assert await mismatches(client, mesh.model, references * 2, concurrency=6, tolerance=0.0) == []
            killed = next(row for row in mesh.status().instances if row.role is Role.DECODE)
            pid = killed.rank_pids[-1]
            got = await streamed_while(
                client, mesh.model, references, lambda: os.kill(pid, signal.SIGKILL), num_begun=len(references)
            )
        assert got == [list(each.token_ids) for each in references]
        await until_ended(killed.rank_pids)
        await anyio.to_thread.run_sync(lambda: mesh.wait_until_idle(60.0))


def test_a_mesh_that_is_stopped_leaves_no_rank(checkpoint: Path, tmp_path: Path) -> None:
    with running_mesh(
        tmp_path, model=checkpoint, prefill=0, decode=0, mixed=1, settings={"WORKER_TENSOR_PARALLEL_SIZE": "2"}
    ) as mesh:
        pids = rank_pids(mesh)
        assert all(process_id(pid) for pid in pids)
    assert not any(process_id(pid) for pid in pids)


def test_a_degree_that_does_not_divide_the_model_is_one_sentence(checkpoint: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pdmesh.cli", "up", "--model", str(checkpoint), "--prefill-tp", "3", "--port", "0"],
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    (sentence,) = done.stderr.splitlines()
    assert sentence == (
        "pdmesh: tensor_parallel_size is 3, but the model has 4 attention heads and 2 key-value heads, which divide "
        "among 1, 2, 4 ranks"
    )
