"""Published models in meshes of real processes: in fp32 they say what transformers says of the same file."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import anyio
import pytest

from pdmesh.errors import PdmeshError
from pdmesh.operations import OperationKind
from pdmesh_testing.exactness import Reference, complete, mismatches, reference, streamed_while
from pdmesh_testing.mesh import PATIENT, RunningMesh, running_mesh
from pdmesh_testing.operating import operator_of
from pdmesh_testing.real_models import real_model, recorded, token_ids

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.ucx, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]

#: Two logits that rounding may swap; log-probabilities differ by less in fp32.
_TIE, _TOLERANCE = 1e-3, 1e-3

#: Tokens of a prompt in a step, so that chunks end at odd places.
CHUNK_TOKENS = 97


@pytest.mark.always
async def test_a_real_model_says_what_transformers_says(tmp_path: Path) -> None:
    model = real_model("smollm2")
    settings = {"WORKER_DTYPE": "float32", "POLICY_CHUNK_TOKENS": "7", "SCHEDULER_BUNDLE": "fcfs"}
    with running_mesh(tmp_path, model=model, settings=settings) as mesh:
        async with mesh.client() as client:
            for each in recorded("smollm2"):
                answer = await complete(client, mesh.model, each.prompt_ids, len(each.token_ids))
                assert answer.token_ids == each.token_ids, each.prompt


# --- the rest takes longer ---


@dataclass(frozen=True)
class Served:
    name: str
    model: Path
    mesh: RunningMesh

    def reference(self, text: str, max_tokens: int, *, num_tokens: int | None = None) -> Reference:
        """The answer to a text, or to so many of its first tokens."""
        return reference(self.model, token_ids(self.model, text)[:num_tokens], max_tokens)


@pytest.fixture(scope="module", params=["smollm2", "gemma3-270m"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[Served]:
    model = real_model(request.param)
    settings = {
        **PATIENT,
        "WORKER_DTYPE": "float32",
        "POLICY_CHUNK_TOKENS": str(CHUNK_TOKENS),
        "SCHEDULER_BUNDLE": "fcfs",
        "SCHEDULER_MAX_QUEUE_S": "600",
    }
    with running_mesh(tmp_path_factory.mktemp("mesh"), model=model, decode=2, settings=settings) as mesh:
        yield Served(request.param, model, mesh)
        mesh.wait_until_idle(60.0)


#: A text that never changes: which tokens are nearly as good as each other does not either.
LICENSE = (ROOT / "LICENSE").read_text()


def texts(served: Served) -> list[Reference]:
    """Answers to parts of a text, without those in which two tokens are as good as each other."""
    lengths = [1, 33, 200, 433, CHUNK_TOKENS]
    found = [served.reference(LICENSE[900 * number :], 24, num_tokens=length) for number, length in enumerate(lengths)]
    return [each for each in found if each.smallest_margin > _TIE]


@pytest.mark.slow
async def test_recorded_answers_are_those_of_transformers(served: Served) -> None:
    for each in recorded(served.name):
        assert tuple(token_ids(served.model, each.prompt)) == each.prompt_ids
        found = reference(served.model, each.prompt_ids, len(each.token_ids))
        assert found.token_ids == each.token_ids
        assert found.smallest_margin > _TIE


@pytest.mark.slow
async def test_chunks_and_handovers_change_no_token(served: Served) -> None:
    """Alone, in a crowd, and again with what is kept of them."""
    references = texts(served)
    assert len(references) >= 3
    mesh = served.mesh
    async with mesh.client() as client:
        alone = await mismatches(client, mesh.model, references, concurrency=1, tolerance=_TOLERANCE)
        crowd = await mismatches(client, mesh.model, references * 2, concurrency=8, tolerance=_TOLERANCE)
    assert alone + crowd == []
    assert mesh.peer_read_bytes() > 0
    assert mesh.total("num_stale_prefixes") == 0


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["decode-0", "prefill-0", "scheduler"])
async def test_a_killed_process_changes_no_stream(served: Served, victim: str) -> None:
    mesh = served.mesh
    references = [served.reference(LICENSE[500 * number :], 60, num_tokens=40) for number in range(4)]
    pid = mesh.pids()[victim]
    async with mesh.client() as client:
        got = await streamed_while(client, mesh.model, references, lambda: os.kill(pid, signal.SIGKILL), num_begun=2)
    for index, expected in enumerate(references):
        if expected.smallest_margin > _TIE:
            assert tuple(got[index]) == expected.token_ids, f"stream {index}"
    await anyio.to_thread.run_sync(mesh.wait_until_replaced, victim, pid)
    await anyio.to_thread.run_sync(mesh.wait_until_idle, 60.0)


@pytest.mark.slow
async def test_moves_change_no_stream(served: Served) -> None:
    mesh = served.mesh
    references = [each for each in texts(served) if len(each.prompt) < 250]
    operator = operator_of(mesh)
    num_moved, found = operator.operations["done"], list[str]()

    async def move() -> None:
        for target in cycle(("decode-0", "decode-1")):
            for request_id in await operator.running():
                with suppress(PdmeshError):  # the request has ended meanwhile, or is there already
                    await operator.operate(OperationKind.MOVE, target, request_id)
            await anyio.sleep(0.02)

    async with mesh.client() as client, anyio.create_task_group() as tasks:
        tasks.start_soon(move)
        for _ in range(3):
            found += await mismatches(client, mesh.model, references, concurrency=4, tolerance=_TOLERANCE)
        tasks.cancel_scope.cancel()
    assert found == []
    assert operator.operations["done"] > num_moved
    await anyio.to_thread.run_sync(mesh.wait_until_idle, 60.0)


@pytest.mark.slow
async def test_a_document_of_6k_tokens_is_read_as_transformers_reads_it(served: Served) -> None:
    expected = served.reference(3 * LICENSE, 12, num_tokens=6_000)
    assert len(expected.prompt) == 6_000
    assert expected.smallest_margin > _TIE
    mesh = served.mesh
    async with mesh.client() as client:
        answer = await complete(client, mesh.model, expected.prompt, 12)
    assert answer.token_ids == expected.token_ids
