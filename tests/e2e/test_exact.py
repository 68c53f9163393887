"""The promise: what comes out of a mesh of real processes is what `transformers` says, token for token."""

from collections import defaultdict
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import anyio
import openai
import pydantic
import pytest

from pdmesh_testing.checkpoints import CheckpointShape, Family, write_checkpoint
from pdmesh_testing.exactness import Reference, complete, mismatches, random_prompts, reference
from pdmesh_testing.examples import slow_beyond
from pdmesh_testing.mesh import RunningMesh, running_mesh

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.ucx]

SHAPE = CheckpointShape()
PROMPT_LENGTHS = [1, 2, 15, 16, 17, 31, 33, 64, 100, 257, 700]


@dataclass(frozen=True)
class Case:
    """One architecture, one topology, one policy: pairs chosen so that each value meets different others."""

    architecture: Family
    prefill: int
    decode: int
    mixed: int
    bundle: str
    chunk_tokens: int  # where steps are static
    over_ucx: bool = False  # as between hosts: no memory of another process is read
    batching: str = ""  # another than the bundle's
    drafts: bool = False  # tokens are guessed, and verified in one step


CASES = [
    # Long from 1,000 tokens on: the prompts of 4,000 are interrupted between layers, and preempted, by the others.
    Case("llama", 1, 1, 0, "pdmesh", 0),
    Case("qwen3", 0, 0, 2, "fcfs", 64, drafts=True),
    Case("llama", 1, 1, 0, "fcfs", 512, drafts=True),
    Case("qwen2", 2, 2, 0, "fcfs", 7, over_ucx=True),
    # Residents stand still in every prefill phase, and decode on after it.
    Case("qwen2", 0, 0, 1, "pdmesh", 0, batching="eb"),
]


@dataclass(frozen=True)
class Served:
    mesh: RunningMesh
    references: list[Reference]


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Path]:
    """The model of an architecture, the same in each case."""

    @cache
    def write(architecture: Family) -> Path:
        return write_checkpoint(tmp_path_factory.mktemp("model"), architecture=architecture, shape=SHAPE, seed=1)

    return write


@cache
def reference_of(checkpoint: Path, prompt: tuple[int, ...]) -> Reference:
    return reference(checkpoint, prompt, 24)


@pytest.fixture(
    scope="module",
    params=slow_beyond(1, CASES),
    ids=lambda case: f"{case.architecture}-{case.bundle}{case.batching}-{case.chunk_tokens}",
)
def served(
    request: pytest.FixtureRequest, checkpoint_of: Callable[[Family], Path], tmp_path_factory: pytest.TempPathFactory
) -> Generator[Served]:
    case: Case = request.param
    checkpoint = checkpoint_of(case.architecture)
    long = 1500 if 0 < case.chunk_tokens < 64 else 4000
    prompts = random_prompts([*PROMPT_LENGTHS, long], SHAPE.vocab_size, seed=7)
    references = [reference_of(checkpoint, tuple(prompt)) for prompt in prompts]
    settings = {
        "SCHEDULER_BUNDLE": case.bundle,
        "SCHEDULER_BATCHING": case.batching,
        "POLICY_CHUNK_TOKENS": str(case.chunk_tokens or 512),
        "POLICY_LONG_PROMPT_TOKENS": "1000",
        "SCHEDULER_MAX_QUEUE_S": "600",  # on a machine with other work 32 at once may be predicted to wait for long
    }
    if case.drafts:
        settings |= {"WORKER_SPECULATION": "ngram"}
    if case.over_ucx:
        settings |= {"TRANSFER_UCX_TLS": "tcp", "TRANSFER_UCX_NET_DEVICES": "lo"}
    with running_mesh(
        tmp_path_factory.mktemp(case.architecture),
        model=checkpoint,
        prefill=case.prefill,
        decode=case.decode,
        mixed=case.mixed,
        settings=settings,
    ) as mesh:
        yield Served(mesh, references)
        mesh.wait_until_idle()
        if case.over_ucx:
            assert mesh.peer_read_bytes() == 0
        elif case.prefill:
            assert mesh.peer_read_bytes() > 0  # mixed instances move what one of them has no room for, or nothing
        assert (mesh.num_accepted_tokens() > 0) == case.drafts


@pytest.mark.timeout(300)
async def test_greedy_tokens_and_logprobs_equal_transformers(served: Served) -> None:
    async with served.mesh.client() as client:
        alone = await mismatches(client, served.mesh.model, served.references, concurrency=1)
        crowd = await mismatches(client, served.mesh.model, served.references * 3, concurrency=32)
    assert alone + crowd == []


SAMPLING = {"temperature": 1.2, "top_p": 0.9, "top_k": 50, "seed": 11, "repetition_penalty": 1.1}


@pytest.mark.timeout(300)
async def test_a_seed_draws_the_same_tokens_alone_and_in_a_crowd(served: Served) -> None:
    prompt = served.references[6].prompt
    async with served.mesh.client() as client:
        alone = await complete(client, served.mesh.model, prompt, 24, **SAMPLING)
        again = await complete(client, served.mesh.model, prompt, 24, **SAMPLING)
        other = await complete(client, served.mesh.model, prompt, 24, **{**SAMPLING, "seed": 12})
    assert alone.token_ids == again.token_ids
    assert alone.token_ids != other.token_ids


class Answer(pydantic.BaseModel):
    """What a typed client asks for."""

    name: Annotated[str, pydantic.Field(max_length=8)]
    kind: Literal["one", "two"]
    sizes: Annotated[list[Annotated[int, pydantic.Field(ge=-9, le=999)]], pydantic.Field(max_length=3)]


@pytest.mark.timeout(300)
async def test_typed_answers_fit_their_type_whatever_runs_beside_them(served: Served) -> None:
    """The first token is drawn where the prompt is computed, the others elsewhere; seeds draw the same each time."""
    texts: dict[int, set[str | None]] = defaultdict(set)
    limiter = anyio.CapacityLimiter(16)

    async def ask(client: openai.AsyncOpenAI, seed: int) -> None:
        async with limiter:
            completion = await client.chat.completions.parse(
                model=served.mesh.model,
                messages=[{"role": "user", "content": "?" * (1 + seed)}],
                response_format=Answer,
                temperature=1.0,
                seed=seed,
                n=2,
                max_tokens=120,
            )
        for index, choice in enumerate(completion.choices):
            assert choice.message.parsed is not None
            texts[2 * seed + index].add(choice.message.content)

    async with (
        openai.AsyncOpenAI(base_url=f"{served.mesh.base_url}/v1", api_key="none") as client,
        anyio.create_task_group() as tasks,
    ):
        for seed in (*range(12), *range(12)):
            tasks.start_soon(ask, client, seed)
    assert len(texts) == 24
    assert all(len(same) == 1 for same in texts.values())
