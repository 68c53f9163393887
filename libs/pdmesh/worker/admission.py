"""Requests that an instance is asked to hold: whether they can be, which raises ProtocolError, and their groups."""

from __future__ import annotations

import array

from pdmesh.errors import ProtocolError
from pdmesh.kv.exchange import MAX_MEMBERS
from pdmesh.kv.groups import KvGroups
from pdmesh.kv.presence import Bell
from pdmesh.model import InstanceId, PrefillGroup, num_blocks_for
from pdmesh.wire.messages import Admit, Generation, Regroup, unpack_token_ids
from pdmesh.worker.sequences import Hold


def transcript(generation: Generation) -> array.array[int]:
    """Prompt and output so far."""
    try:
        return unpack_token_ids(generation.token_ids)
    except ValueError as error:
        raise ProtocolError(f"a transcript of {len(generation.token_ids)} bytes is not whole tokens") from error


def check_request(
    generation: Generation,
    num_tokens: int,
    *,
    num_blocks: int,
    max_kv_tokens: int,
    block_size: int,
    max_model_len: int,
) -> None:
    """A transcript of ``num_tokens``, to be held in so many blocks, may come to hold ``max_kv_tokens`` of KV."""
    if not 1 <= generation.num_prompt_tokens <= num_tokens <= max_model_len:
        raise ProtocolError(f"a transcript of {num_tokens} tokens, {generation.num_prompt_tokens} of them prompt")
    if generation.params.max_tokens <= num_tokens - generation.num_prompt_tokens:
        raise ProtocolError(f"no output tokens are left of {generation.params.max_tokens}")
    if max_kv_tokens > max_model_len:
        raise ProtocolError(f"{max_kv_tokens} tokens are more than the {max_model_len} of the model")
    if num_blocks < num_blocks_for(num_tokens, block_size):
        raise ProtocolError(f"{num_blocks} blocks of {block_size} cannot hold {num_tokens} tokens")


def check_group(message: Admit, instance_id: InstanceId) -> None:
    """A group's admission, if it is one."""
    group = message.command.group
    if group is None:
        return
    if instance_id not in group.member_ids:
        raise ProtocolError("the instance is no member of the request's group")
    if len(message.member_addresses) != len(group.member_ids):
        raise ProtocolError(f"{len(message.member_addresses)} addresses of {len(group.member_ids)} members")
    if len(group.member_ids) > MAX_MEMBERS:
        raise ProtocolError(f"a group of {len(group.member_ids)} members; {MAX_MEMBERS} are the most")
    if message.command.transfer is not None and not message.command.leads:
        raise ProtocolError("a transfer from a member that does not lead its group")


def check_members(message: Regroup, instance_id: InstanceId) -> int:
    """Which of the group's members this instance is."""
    member_ids = message.command.group.member_ids
    if instance_id not in member_ids:
        raise ProtocolError("the instance is no member of the request's group")
    if len(message.member_addresses) != len(member_ids):
        raise ProtocolError(f"{len(message.member_addresses)} addresses of {len(member_ids)} members")
    return member_ids.index(instance_id)


def join_group(hold: Hold, group: PrefillGroup, groups: KvGroups, bell: Bell) -> None:
    """Let the rest of a request's prompt be computed together with others."""
    num_blocks = num_blocks_for(len(hold.sequence.token_ids), hold.block_size)
    hold.exchange = exchange = groups.open(
        hold.request_id,
        hold.epoch,
        capability=group.capability,
        block_ids=hold.sequence.block_table[:num_blocks],
        bell=bell,
        on_landed=None if hold.sender is None else hold.sender.blocks_landed,
    )
    exchange.reserve(0, num_blocks_for(hold.num_begun_tokens, hold.block_size))
    exchange.add_computed(0, hold.num_computed_tokens // hold.block_size)
