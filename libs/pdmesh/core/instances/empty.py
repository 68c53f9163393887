"""What an instance could take if it were empty: what its profile and role alone decide."""

from __future__ import annotations

from pdmesh.core.instances.kv_growth import Growth
from pdmesh.model import InstanceProfile, Request, Role, num_blocks_for
from pdmesh.policy.on_demand import first_tokens

#: Of a prompt that is longer than an instance's whole room, so many ranges are held there at once, or half of the room
#: if that is less: one that is computed, and those that are on their way to where it decodes.
MOST_RANGES_HELD = 3


class EmptyInstance:
    """An instance without requests."""

    def __init__(self, profile: InstanceProfile, growth: Growth) -> None:
        """``growth`` says what requests are admitted with where they decode."""
        self.profile = profile
        self.instance_id = profile.instance_id
        # Looked up at each event, and a profile is no compiled class.
        self.block_size = profile.kv_layout.block_size
        self.num_blocks = profile.num_blocks
        self.max_model_len = profile.max_model_len
        self.max_num_seqs = profile.max_num_seqs
        self.max_kv_tokens = profile.max_kv_tokens
        self.part_blocks = profile.max_kv_tokens // self.block_size  # of a range of a context that is spread
        self.weights = profile.weights
        # KV moves only inside a group: equal layouts, and equal weights.
        self.kv_group = f"{profile.model} {profile.kv_layout} {profile.weights}"
        self._growth = growth
        self.prefills_locally = False  # a decode instance that may compute prompts of its own decodes
        self.decodes_locally = False  # a prefill instance that may decode its own prompts
        self._take_role(profile.role)

    def _take_role(self, role: Role) -> None:
        self.role = role
        # Looked up at each event, and a property of an enumeration's member takes ten times as long.
        self.role_prefills, self.role_decodes = role.can_prefill, role.can_decode

    @property
    def kind(self) -> tuple[object, ...]:
        """What decides what it could take if it were empty."""
        return self.role, self.decodes_locally, self.kv_group, self.num_blocks, self.max_model_len, self.max_kv_tokens

    def num_prefill_blocks(self, request: Request) -> int:
        return num_blocks_for(request.num_prompt_tokens, self.block_size)

    def gives_back(self, request: Request) -> bool:
        """Whether a prompt is longer than the room here: ranges of it are given back once they are where it decodes."""
        if not 0 < self.part_blocks <= self.num_blocks:
            return False
        return self.num_prefill_blocks(request) > self.num_blocks and self.num_parts(request) > 0

    def num_prompt_blocks(self, request: Request) -> int:
        """Return the blocks that a prompt holds at once where it is computed."""
        if not self.gives_back(request):
            return self.num_prefill_blocks(request)
        return min(MOST_RANGES_HELD * self.part_blocks, max(self.part_blocks, self.num_blocks // 2))

    def num_parts(self, request: Request) -> int:
        """Return how many other instances hold the first ranges of a request's prompt while it decodes, one each.

        The last range, full or not, and what is drawn are where it decodes.
        """
        if not self.max_kv_tokens or request.ends_with_prompt:
            return 0
        return (request.num_prompt_tokens - 1) // self.max_kv_tokens

    def most_parts(self, request: Request) -> int:
        """Return `num_parts` of a prompt that all of its output belongs to."""
        if not self.max_kv_tokens or request.ends_with_prompt:
            return 0
        return (request.max_total_tokens - 1) // self.max_kv_tokens

    def num_first_blocks(self, request: Request) -> int:
        """Return the blocks that a request is admitted with where it decodes."""
        if not self._growth.on_demand:
            return self.num_decode_blocks(request)
        num_blocks = num_blocks_for(first_tokens(request, self.block_size), self.block_size)
        return num_blocks - self.num_parts(request) * self.part_blocks

    def num_decode_blocks(self, request: Request) -> int:
        """Return the blocks that a request may come to hold where it decodes."""
        return self.num_home_blocks(request, self.num_parts(request))

    def num_home_blocks(self, request: Request, num_parts: int) -> int:
        """Return the same of a context whose first ranges others hold, so many.

        On demand no more than there are, if these are two ranges: one that is full is handed on as the next one grows.
        """
        num_blocks = num_blocks_for(request.max_total_tokens, self.block_size) - num_parts * self.part_blocks
        if self.part_blocks and self._growth.on_demand:
            return min(num_blocks, max(self.num_blocks, 2 * self.part_blocks))
        return num_blocks

    def may_serve(self, request: Request) -> bool:
        """Whether tokens that are drawn here may follow those that the request has."""
        return not request.weights or request.weights == self.weights

    def could_prefill(self, request: Request) -> bool:
        """Whether the prompt fits this instance when it is empty: all of it, or as much as it holds at once."""
        return (
            self.role_prefills
            and self.may_serve(request)
            and request.num_prompt_tokens + request.max_tokens <= self.max_model_len
            and self.num_prompt_blocks(request) <= self.num_blocks
        )

    def could_decode(self, request: Request) -> bool:
        """Whether prompt and output fit this instance when it is empty, and it takes KV of others."""
        return self.role_decodes and self._could_hold(request)

    def could_finish(self, request: Request) -> bool:
        """Return whether an empty instance could hold prompt and output, and may decode its own prompts."""
        return (self.role_decodes or self.decodes_locally) and self._could_hold(request)

    def _could_hold(self, request: Request) -> bool:
        return (
            self.may_serve(request)
            and request.num_prompt_tokens + request.max_tokens <= self.max_model_len
            and self.num_decode_blocks(request) <= self.num_blocks
        )

    def wanted_blocks(self, request: Request) -> tuple[int, bool]:
        """Return the free blocks that a request needs to decode here, and whether it may come to need more."""
        most = self.num_decode_blocks(request)
        if self._growth.on_demand:
            first = self.num_first_blocks(request)
            if (most - first) * self.block_size > self._growth.mean_tokens:
                return first, True
        return most, False
