"""Instances that compute prompts together, without a scheduler: for tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from pdmesh.config import TransferConfig
from pdmesh.core.commands import AdmitPrefill, SetPlaces
from pdmesh.engine.base import Engine
from pdmesh.kv_layout import num_blocks_for
from pdmesh.model import Role
from pdmesh.plans import ChunkPlan, PrefillGroup
from pdmesh.transport.kv_transport import KvTransport
from pdmesh.wire.messages import Generation
from pdmesh_testing.worker import RunningInstance, a_transfer, chunk_plans, introduce, prompt_of, running_instance

#: Of all groups here.
GROUP_CAPABILITY = 0x6E0B5


@asynccontextmanager
async def running_members(
    engines: Iterable[Engine], transports: Iterable[KvTransport], *, config: TransferConfig | None = None
) -> AsyncGenerator[list[RunningInstance]]:
    """Run instances member-0, member-1, … on open transports."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                running_instance(engine, transport, role=Role.MIXED, config=config, instance_id=f"member-{number}")
            )
            for number, (engine, transport) in enumerate(zip(engines, transports, strict=True))
        ]


def group_of(
    members: Sequence[RunningInstance],
    capability: int = GROUP_CAPABILITY,
    lost: Collection[RunningInstance] = (),
) -> PrefillGroup:
    return PrefillGroup(
        member_ids=tuple(member.instance.instance_id for member in members),
        capability=capability,
        lost_ids=tuple(member.instance.instance_id for member in members if member in lost),
    )


def admit_member(
    member: RunningInstance,
    generation: Generation,
    members: Sequence[RunningInstance],
    *,
    decode: RunningInstance | None = None,
    capability: int = GROUP_CAPABILITY,
    num_reused: int = 0,
    keeps_prefix: bool = False,
) -> None:
    """Admit the request on one of ``members``, and send it the group's membership.

    The leader, the first member, hands the request over to ``decode``; with None it decodes by itself. ``num_reused``
    granules of the prompt are cached on ``member``.
    """
    leads = member is members[0]
    num_cached = generation.max_tokens_left - 1 if leads and decode is None else 0
    shard = member.shard(num_blocks_for(generation.num_tokens + num_cached, member.block_size))
    num_blocks = num_blocks_for(generation.num_tokens, member.block_size)
    command = AdmitPrefill(
        instance_id=member.instance.instance_id,
        request_id=generation.request_id,
        epoch=generation.epoch,
        shards=(shard,),
        transfer=a_transfer(shard, decode.shard(num_blocks)) if leads and decode is not None else None,
        group=group_of(members, capability),
        num_reused_granules=num_reused,
        keeps_prefix=keeps_prefix,
    )
    introduce(*members)
    member.instance.handle(command, prompt_of(generation))
    if not leads:
        regroup(member, generation, members, capability=capability)


def regroup(
    member: RunningInstance,
    generation: Generation,
    members: Sequence[RunningInstance],
    *,
    capability: int = GROUP_CAPABILITY,
    lost: Collection[RunningInstance] = (),
) -> None:
    """Send one member the membership of its group, with the lost members."""
    command = SetPlaces(
        instance_id=member.instance.instance_id,
        request_id=generation.request_id,
        epoch=generation.epoch,
        places=group_of(members, capability, lost),
    )
    introduce(*members)
    member.instance.handle(command)


def block_chunks(generation: Generation, block_size: int, sizes: Sequence[int], start: int = 0) -> list[ChunkPlan]:
    """Return the prompt from ``start`` on in chunks of ``sizes`` blocks. The last size is repeated to the end."""
    return chunk_plans(generation, [size * block_size for size in sizes], start)
