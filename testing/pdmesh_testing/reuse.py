"""Prompts with equal beginnings, for tests of prefix caches in scheduling cores and workers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from pdmesh.core.commands import AdmitPrefill, ExpectCopy, RunStep, SendCopy
from pdmesh.core.events import KvReleased, RequestArrived
from pdmesh.kv_layout import GRANULE_TOKENS, KvLayout, blocks_of_granule
from pdmesh.model import (
    Epoch,
    InstanceProfile,
    PrefixHash,
    PrefixHashes,
    Request,
    RequestId,
    SamplingParams,
    Then,
    TransferId,
)
from pdmesh.plans import Evictions, TransferPlan
from pdmesh.wire.messages import Generation, pack_token_ids
from pdmesh_testing.core import CoreBench, a_request, named_profile, of
from pdmesh_testing.worker import (
    CAPABILITY,
    HASHER,
    RunningInstance,
    chunk_plans,
    introduce,
    make_generation,
    with_prefix,
)

#: A granule has four blocks.
LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=32, dtype="bfloat16")

GREEDY = SamplingParams(max_tokens=8, temperature=0)

# --- as a core knows them ---


def a_profile(name: str, num_blocks: int = 64) -> InstanceProfile:
    return replace(named_profile(name), kv_layout=LAYOUT, num_blocks=num_blocks, max_model_len=4096)


def hashes(number: int, name: int = 0) -> tuple[PrefixHash, ...]:
    """Return the hashes of the first ``number`` granules of the prompts called ``name``."""
    return tuple([PrefixHash(bytes([name, index]).ljust(16, b"-")) for index in range(number)])


def a_prompt(request_id: str, num_tokens: int, *, name: int = 0, output: int = 1) -> Request:
    prefix = hashes(num_tokens // GRANULE_TOKENS, name)
    return replace(a_request(request_id, num_tokens, output), prefix=prefix)


def serve(bench: CoreBench, request: Request, drawn: tuple[PrefixHash, ...] = ()) -> AdmitPrefill:
    """Compute and end a request on the instance that it is placed on."""
    commands = bench.feed(RequestArrived(request))
    (admit,), (step,) = of(AdmitPrefill, commands), of(RunStep, commands)
    bench.done(step.instance_id, step.plan)
    bench.finish(step.instance_id, request.request_id)
    bench.feed(KvReleased(step.instance_id, request.request_id, request.epoch, granules=drawn))
    return admit


# --- as workers know them ---


def random_tokens(num_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(33, 90) for _ in range(num_tokens)]


def a_generation(name: str, prompt: Sequence[int], params: SamplingParams = GREEDY, salt: bytes = b"") -> Generation:
    return with_prefix(make_generation(name, prompt, params), salt)


def granules_of(tokens: list[int]) -> PrefixHashes:
    return HASHER.granules(HASHER.root(b""), pack_token_ids(tokens))


async def run(
    instance: RunningInstance,
    generation: Generation,
    *,
    num_reused: int = 0,
    states: tuple[int, ...] = (),
    evicted_states: PrefixHashes = (),
) -> list[int]:
    """Compute and decode it there; the tokens that it draws."""
    instance.admit(generation, kv_moves=False, num_reused=num_reused, states=states, evicted_states=evicted_states)
    for chunk in chunk_plans(generation, [100], num_reused * GRANULE_TOKENS):
        instance.run([chunk])
    await instance.reported(KvReleased, generation.request_id)
    return output(instance, generation.request_id)


def output(instance: RunningInstance, name: str) -> list[int]:
    return [token.token_id for token in instance.tokens_of(name) if token.token_id is not None]


#: The request that `tell_of_fetch` names.
FETCH = RequestId("fetch-1")


def plan_of_fetch(
    source: RunningInstance, destination: RunningInstance, num_granules: int, num_there: int
) -> TransferPlan:
    """Return a fetch of ``num_granules`` granules. The destination has the first ``num_there`` already."""
    num_blocks = num_granules * blocks_of_granule(source.block_size)
    return TransferPlan(
        transfer_id=TransferId(7),
        then=Then.KEEP,
        sources=(source.shard(num_blocks),),
        destinations=(destination.shard(num_blocks),),
        capability=CAPABILITY,
        num_reused_granules=num_there,
    )


def tell_of_fetch(
    source: RunningInstance,
    destination: RunningInstance,
    chain: PrefixHashes,
    *,
    num_there: int = 0,
    drop: PrefixHashes = (),
) -> None:
    """Send both sides of a fetch the commands of a scheduler."""
    plan = plan_of_fetch(source, destination, len(chain), num_there)
    fetch = ExpectCopy(
        instance_id=destination.instance.instance_id,
        request_id=FETCH,
        epoch=Epoch(0),
        transfer=plan,
        chain=chain,
        wanted_by=(RequestId("second"), Epoch(0)),
        room=Evictions(drop=drop),
    )
    introduce(source, destination)
    destination.instance.handle(fetch)
    send = SendCopy(
        instance_id=source.instance.instance_id, request_id=FETCH, epoch=Epoch(0), transfer=plan, chain=chain
    )
    source.instance.handle(send)
