"""Capacity of an empty instance, as its profile and role alone decide it."""

from __future__ import annotations

from pdmesh.core.instances.kv_growth import Growth
from pdmesh.kv_layout import num_blocks_for
from pdmesh.model import InstanceProfile, Request, Role
from pdmesh.policy.on_demand import first_tokens

#: Most ranges that an instance holds at once of a prompt longer than its whole room, or half of the room if that is
#: less. One range is being computed, and the others are on their way to the decode instance.
MOST_RANGES_HELD = 3


class InstanceCapacity:
    """An instance without requests.

    KV moves only inside a ``kv_group``: equal layouts and equal weights. ``part_blocks``: blocks of one range of a
    spread context. ``prefills_locally``: a decode instance may compute prompts of its own decodes. ``decodes_locally``:
    a prefill instance may decode its own prompts.
    """

    def __init__(self, profile: InstanceProfile, growth: Growth) -> None:
        """``growth`` decides how many blocks a request is admitted with for its output."""
        self.profile = profile
        self.instance_id = profile.instance_id
        # Looked up at each event, and a profile is no compiled class.
        self.block_size = profile.kv_layout.block_size
        self.num_blocks = profile.num_blocks
        self.max_model_len = profile.max_model_len
        self.max_num_seqs = profile.max_num_seqs
        self.max_kv_tokens = profile.max_kv_tokens
        self.part_blocks = profile.max_kv_tokens // self.block_size
        self.weights = profile.weights
        self.kv_group = f"{profile.model} {profile.kv_layout} {profile.weights}"
        self._growth = growth
        self.prefills_locally = False
        self.decodes_locally = False
        self._take_role(profile.role)

    def _take_role(self, role: Role) -> None:
        self.role = role
        # Looked up at each event, and a property of an enumeration's member takes ten times as long.
        self.role_prefills, self.role_decodes = role.can_prefill, role.can_decode

    @property
    def kind(self) -> tuple[object, ...]:
        """Everything that decides which requests the empty instance could take. Equal for interchangeable instances."""
        return self.role, self.decodes_locally, self.kv_group, self.num_blocks, self.max_model_len, self.max_kv_tokens

    def num_prefill_blocks(self, request: Request) -> int:
        return num_blocks_for(request.num_prompt_tokens, self.block_size)

    def streams_out(self, request: Request) -> bool:
        """Whether the prompt is longer than the room here, so that its ranges are freed once they have moved away.

        False unless contexts are spread.
        """
        if not 0 < self.part_blocks <= self.num_blocks:
            return False
        return self.num_prefill_blocks(request) > self.num_blocks and self.num_parts(request) > 0

    def num_prompt_blocks(self, request: Request) -> int:
        """Return the most blocks that a prompt holds at once on the instance that computes it."""
        if not self.streams_out(request):
            return self.num_prefill_blocks(request)
        return min(MOST_RANGES_HELD * self.part_blocks, max(self.part_blocks, self.num_blocks // 2))

    def num_parts(self, request: Request) -> int:
        """Return how many shard holders a spread context has while it decodes, one for each of the first ranges.

        The last range, full or not, and the output are on the decode instance. 0 if contexts are not spread, or if the
        request ends with its prompt.
        """
        if not self.max_kv_tokens or request.ends_with_prompt:
            return 0
        return (request.num_prompt_tokens - 1) // self.max_kv_tokens

    def most_parts(self, request: Request) -> int:
        """Return `num_parts` of the request resumed with its whole output in the prompt."""
        if not self.max_kv_tokens or request.ends_with_prompt:
            return 0
        return (request.max_total_tokens - 1) // self.max_kv_tokens

    def num_first_blocks(self, request: Request) -> int:
        """Return how many blocks a request holds on its decode instance when it is admitted, without shard holders'
        ranges.

        With growth on demand these are the prompt's and a few more, otherwise `num_decode_blocks`.
        """
        if not self._growth.on_demand:
            return self.num_decode_blocks(request)
        num_blocks = num_blocks_for(first_tokens(request, self.block_size), self.block_size)
        return num_blocks - self.num_parts(request) * self.part_blocks

    def num_decode_blocks(self, request: Request) -> int:
        """Return the most blocks that a request may need on its decode instance."""
        return self.num_home_blocks(request, self.num_parts(request))

    def num_home_blocks(self, request: Request, num_parts: int) -> int:
        """Return `num_decode_blocks` of a context whose first ``num_parts`` ranges other instances hold.

        On demand at most the instance's blocks, or two ranges if these are more: a full range moves to another
        instance while the next one grows.
        """
        num_blocks = num_blocks_for(request.max_total_tokens, self.block_size) - num_parts * self.part_blocks
        if self.part_blocks and self._growth.on_demand:
            return min(num_blocks, max(self.num_blocks, 2 * self.part_blocks))
        return num_blocks

    def may_serve(self, request: Request) -> bool:
        """Whether tokens drawn with these weights may continue the request. Any weights may begin a new one."""
        return not request.weights or request.weights == self.weights

    def could_prefill(self, request: Request) -> bool:
        """Whether the empty instance could compute the prompt: all of it fits, or the ranges that it holds at once."""
        return (
            self.role_prefills
            and self.may_serve(request)
            and request.num_prompt_tokens + request.max_tokens <= self.max_model_len
            and self.num_prompt_blocks(request) <= self.num_blocks
        )

    def could_decode(self, request: Request) -> bool:
        """Whether the empty instance could decode the request, by role, weights, length and room."""
        return self.role_decodes and self._could_hold(request)

    def could_finish(self, request: Request) -> bool:
        """Whether prompt and output fit the empty instance, and it may decode them: by its role or by
        ``decodes_locally``.

        Whether it may compute the prompt does not count. False for a request that other weights began.
        """
        return (self.role_decodes or self.decodes_locally) and self._could_hold(request)

    def _could_hold(self, request: Request) -> bool:
        return (
            self.may_serve(request)
            and request.num_prompt_tokens + request.max_tokens <= self.max_model_len
            and self.num_decode_blocks(request) <= self.num_blocks
        )

    def wanted_blocks(self, request: Request) -> tuple[int, bool]:
        """Return the free blocks that a request needs to decode here, and whether it is open (`GrowthSums`)."""
        most = self.num_decode_blocks(request)
        if self._growth.on_demand:
            first = self.num_first_blocks(request)
            if (most - first) * self.block_size > self._growth.mean_tokens:
                return first, True
        return most, False
