"""The prompts of requests, kept for as long as an instance may need them.

The core knows only a prompt's length and hashes. The whole prompt is kept here until every instance that computes it
has received it. Afterwards only the fields that a receiver of the KV needs are kept.
"""

from __future__ import annotations

import msgspec

from pdmesh.core.commands import AdmitPrefill, ExpectCopy, ForgetRequest, InstanceCommand
from pdmesh.core.events import Event, InstanceLost, RequestArrived, StepDone, TransferLanded
from pdmesh.core.scheduler import SchedulerCore
from pdmesh.engine.base import needs_prompt_tokens
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import InstanceId, InstanceProfile, RequestKey
from pdmesh.wire.messages import Generation, Prompt


def _for_receiver(generation: Generation, *, with_prompt: bool) -> Prompt:
    """Return the prompt for a receiver of the request's KV, without tokens unless it needs them.

    Of a prompt with hashes, the tokens after the last hashed granule stay.
    """
    num_context_tokens = generation.num_tokens
    if with_prompt or needs_prompt_tokens(generation.params) or generation.num_output_tokens:
        return Prompt(generation=generation, num_context_tokens=num_context_tokens)
    return Prompt(
        generation=msgspec.structs.replace(generation, token_ids=b""),
        num_context_tokens=num_context_tokens,
        tail=generation.token_ids[4 * GRANULE_TOKENS * len(generation.prefix) :] if generation.prefix_root else b"",
    )


class Prompts:
    """Prompts of active requests, fed with every event and with the commands that send or end prompts, in order."""

    def __init__(self, core: SchedulerCore) -> None:
        self._core = core
        self._whole: dict[RequestKey, Generation] = {}  # prompts that instances may still have to compute
        self._moving: dict[RequestKey, Prompt] = {}  # kept until the KV has landed
        self._with_prompt: set[InstanceId] = set()  # decode instances that draft or may lose KV, and so need tokens

    @property
    def num_whole(self) -> int:
        """Number of prompts that instances may still have to compute."""
        return len(self._whole)

    def arrived(self, generation: Generation) -> None:
        """Keep the prompt of a request that the core is about to handle; ignore a second one of the same key."""
        self._whole.setdefault((generation.request_id, generation.epoch), generation)

    def joined(self, profile: InstanceProfile) -> None:
        """Note whether an instance that the core is about to handle needs the prompts of the requests it decodes."""
        if profile.drafts or profile.max_kv_tokens:
            self._with_prompt.add(profile.instance_id)

    def sent_with(self, command: InstanceCommand) -> Prompt | None:
        """Return the prompt that a command carries; None for commands without one."""
        match command:
            case AdmitPrefill():
                return self._admitted(command)
            case ExpectCopy() if command.transfer.is_hand_over:
                key = (command.request_id, command.epoch)
                return self._moving[key] if key in self._moving else self._to_move(self._with_user(key))
            case _:
                return None

    def _admitted(self, command: AdmitPrefill) -> Prompt:
        key = (command.request_id, command.epoch)
        generation = self._with_user(key)
        if command.instance_id == command.shards[-1].instance_id and not self._core.needs_prompt(key):
            del self._whole[key]
        if command.moves_on:
            self._moving[key] = self._to_move(generation)
        return Prompt(generation=generation, num_context_tokens=generation.num_tokens)

    def _with_user(self, key: RequestKey) -> Generation:
        """Return a whole prompt with its tenant and session, as far as it has them."""
        user = self._core.user_of(key)
        return self._whole[key] if user is None else msgspec.structs.replace(self._whole[key], user=user)

    def ended(self, command: ForgetRequest) -> None:
        """Drop an ended request's prompt."""
        self._whole.pop((command.request_id, command.epoch), None)
        self._moving.pop((command.request_id, command.epoch), None)

    def handled(self, event: Event) -> None:
        """Drop the prompts that no instance can need after an event that the core has handled."""
        match event:
            case RequestArrived():
                key = (event.request.request_id, event.request.epoch)
                if not self._core.is_active(key):
                    self._whole.pop(key, None)  # refused, or of an older epoch
            case StepDone():
                for key in [(chunk.request_id, chunk.epoch) for chunk in event.chunks if chunk.is_last]:
                    if not self._core.needs_prompt(key):  # no instance will join its prefill
                        self._whole.pop(key, None)
            case TransferLanded():
                key = (event.request_id, event.epoch)
                if key in self._moving and not self._core.may_change_receiver(key):
                    del self._moving[key]
            case InstanceLost():
                self._with_prompt.discard(event.instance_id)
            case _:
                pass

    def _to_move(self, generation: Generation) -> Prompt:
        return _for_receiver(generation, with_prompt=bool(self._with_prompt))
