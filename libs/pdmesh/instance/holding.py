"""The sequences of an instance and their blocks: free, owned, cached, and quarantined while copies touch them."""

from __future__ import annotations

from collections.abc import Callable

from pdmesh.core.commands import Hold, SendCopy
from pdmesh.core.events import CacheReported, KvReleased, LoadReported, MembersSet, RequestDropped
from pdmesh.core.instances.own_steps import OwnSteps
from pdmesh.instance.cache import BlockCache
from pdmesh.instance.effects import BeganToDecode, Effect, Refused, ResidentsChange, Stood
from pdmesh.instance.floor import MakesRoom, TakesBlocks
from pdmesh.instance.residents import Length, Residents
from pdmesh.instance.sequence import Sequence
from pdmesh.instance.sequence_phases import SeqPhase
from pdmesh.model import InstanceProfile, PartMember, PrefixHashes, RequestKey
from pdmesh.plans import TransferPlan


class Holding:
    """Counted blocks and residents: a `pdmesh.instance.floor.Floor`. ``length_of`` returns the length of a request.

    ``admits``: False while the instance is stopping.
    ``copies_run``: whether copies still use blocks that are freed, so that `end_copies` must free them.
    ``_num_own_blocks``: number of blocks that are not cached, including quarantined ones.
    """

    def __init__(self, profile: InstanceProfile, length_of: Callable[[RequestKey], Length]) -> None:
        self.profile = profile
        self.instance_id = profile.instance_id
        self.block_size = profile.kv_layout.block_size
        self.range_tokens = profile.max_kv_tokens
        self.length_of = length_of
        self.effects: list[Effect] = []
        self.admits = True
        self.sequences: dict[RequestKey, Sequence] = {}
        self.residents = Residents(profile.kv_layout.block_size, self._stood)
        self.own = OwnSteps()
        self.copies_run = False
        self.quarantined: dict[RequestKey, Sequence] = {}
        self.cache = BlockCache(
            profile.kv_layout.block_size, profile.num_offload_granules, has_states=profile.num_cached_states > 0
        )
        self._num_own_blocks = 0

    def _stood(self, key: RequestKey, joined_step: int) -> None:
        self.effects.append(Stood(key, joined_step))

    def residents_change(self) -> None:
        self.effects.append(ResidentsChange())

    # --- blocks ---

    @property
    def num_free_blocks(self) -> int:
        return self.profile.num_blocks - self._num_own_blocks - self.cache.num_blocks

    def make_room(self, command: MakesRoom) -> None:
        """Evict the cached blocks that a command names."""
        if lost := self.cache.make_room(command.room):
            self.effects.append(CacheReported(self.instance_id, lost=lost))

    def chain_of(self, key: RequestKey) -> PrefixHashes:
        """Return the cacheable blocks of a new request's prompt."""
        return self.length_of(key).chain

    def take(self, sequence: Sequence, command: TakesBlocks, num_reused: int) -> bool:
        """Give a sequence its blocks, some of them shared. Returns False if it is refused; then the effects say why."""
        if not isinstance(command, SendCopy):
            self.make_room(command)
        if not self.admits:
            self._drop_new(sequence, "the instance is stopping")
            return False
        if lost := self.cache.lost_of(sequence.prefix, num_reused):
            self.effects.append(CacheReported(self.instance_id, lost=lost))
            self._drop_new(sequence, "the offload tier lacks KV that is to be loaded")
            return False
        if sequence.key in self.sequences:
            return self.refuse(command, f"{self.instance_id} holds {sequence.key} already")
        computes = sequence.phase is SeqPhase.PREFILLING
        if missing := self.cache.missing(sequence.prefix, num_reused, computes=computes):
            return self.refuse(command, missing)
        num_blocks = sequence.num_blocks - self.cache.share(sequence.prefix, num_reused)
        self.sequences[sequence.key] = sequence
        if sequence.phase is SeqPhase.PREFILLING and sequence.leads:
            sequence.set_length(self.length_of(sequence.key))
        return self._take_blocks(command, num_blocks)

    def _take_blocks(self, command: TakesBlocks | Hold, num_blocks: int) -> bool:
        self._num_own_blocks += num_blocks
        if self.num_free_blocks < 0:
            return self.refuse(command, f"{self.instance_id} has no room for {num_blocks} blocks")
        return True

    def grow(self, sequence: Sequence, command: Hold) -> None:
        """Let a sequence hold as many blocks as a command says, if it has fewer."""
        num_more = command.num_blocks - sequence.num_blocks
        num_more += command.num_elsewhere_blocks - self.num_elsewhere_blocks(sequence)
        if num_more <= 0:
            return
        sequence.grow(num_more)
        if self._take_blocks(command, num_more) and self.residents.grow(
            sequence.key, self.num_context_blocks(sequence)
        ):
            self.residents_change()

    def keep(self, sequence: Sequence, command: Hold) -> bool:
        """Give a sequence the blocks to decode here. Return True."""
        self.grow(sequence, command)
        return True

    def land(self, sequence: Sequence, num_tokens: int) -> None:
        """Record that the whole KV of a sequence is here, and cache it."""
        sequence.land(num_tokens, self.length_of(sequence.key))
        self.computed(sequence, len(sequence.chain))

    def why_not_sent(self, sequence: Sequence, transfer: TransferPlan) -> str:
        """Return an empty text, because all KV can be sent."""
        return ""

    def num_kv_tokens(self, sequence: Sequence) -> int:
        """Return how many tokens of a context have their KV, here or on other instances."""
        if sequence.prompt.num_blocks_at_once:
            return sequence.prompt.num_computed_tokens
        if sequence.key in self.residents:
            return self.residents.num_tokens(sequence.key) - 1
        return sequence.num_tokens - 1

    def spread(self, sequence: Sequence, members: tuple[PartMember, ...], num_blocks: int, done: MembersSet) -> None:
        """Free the first blocks of a sequence, cached or not, whose KV ``members`` hold.

        The blocks of a prompt that exceeds the room are used again for the next tokens.
        """
        if done.of_prompt:
            sequence.grow(num_blocks)
        elif num_blocks:
            self._num_own_blocks -= num_blocks - self.cache.end(sequence.prefix, ())
        if sequence.key in self.residents:
            self.residents.spread(sequence.key, len(members) * self.range_tokens, self.full_at_tokens(len(members)))
        self.effects.append(done)

    def computed(self, sequence: Sequence, num_granules: int) -> None:
        """Cache the first granules of a sequence, whose KV is here."""
        self._num_own_blocks -= self.cache.computed(sequence.prefix, num_granules)

    def num_elsewhere_blocks(self, sequence: Sequence) -> int:
        """Return the number of blocks of a context on other instances."""
        return len(sequence.members) * self.profile.max_kv_tokens // self.profile.kv_layout.block_size

    def num_context_blocks(self, sequence: Sequence) -> int:
        """Return the number of blocks of a context, here and on other instances."""
        return sequence.num_blocks + self.num_elsewhere_blocks(sequence)

    def num_own_blocks(self, sequence: Sequence) -> int:
        """Return the number of blocks of a sequence that are not cached."""
        return sequence.num_blocks - self.cache.num_cached_blocks(sequence.prefix)

    # --- refusals ---

    def refuse(self, command: TakesBlocks | Hold, reason: str) -> bool:
        """Refuse a command that does not fit the state, and return False."""
        self.effects.append(Refused(command, reason))
        return False

    def _drop_new(self, sequence: Sequence, reason: str) -> None:
        self.effects.append(RequestDropped(self.instance_id, *sequence.key, reason))
        self.effects.append(KvReleased(self.instance_id, *sequence.key, sequence.received_by))

    # --- residents ---

    def decode(self, sequence: Sequence) -> None:
        """Let a sequence draw tokens from the next step on."""
        sequence.decode()
        assert sequence.length is not None, f"{sequence.key} decodes, and how long is not known"
        self.residents.join(
            sequence.key,
            sequence.length,
            sequence.num_tokens,
            self.num_context_blocks(sequence),
            num_saved_tokens=len(sequence.members) * self.profile.max_kv_tokens,
            full_at_tokens=self.full_at_tokens(len(sequence.members)),
        )
        self.effects.append(BeganToDecode(sequence))
        self.residents_change()

    def leave(self, sequence: Sequence) -> None:
        """Let a resident leave before the next step, unless the running step ends it; add `ResidentsChange`."""
        self.residents.leave(sequence.key)
        self.residents_change()

    def stay(self, sequence: Sequence) -> None:
        """Let a resident that was about to leave continue here."""
        self.residents.stay(sequence.key)

    def lose_range(self, sequence: Sequence, number: int) -> None:
        """Pause a resident before the next step, until another instance has computed range ``number`` again.

        Ignored unless the resident decodes and has all other ranges.
        """
        if sequence.is_decoding and not sequence.has_lost_range:
            sequence.lose_range(number)
            self.leave(sequence)

    def full_at_tokens(self, num_members: int) -> int:
        """Return the least number of tokens of a context with which one more range is complete here; 0: never.

        The last token has no KV.
        """
        limit = self.range_tokens
        return (num_members + 1) * limit + 2 if limit else 0

    # --- the end ---

    def release(self, sequence: Sequence) -> None:
        """Free a sequence and its blocks.

        A resident is in no step that begins from now on, and is released before the next one. Blocks that copies use
        are quarantined until `end_copies`.
        """
        sequence.free()
        if sequence.key in self.residents:
            self.residents.free(sequence.key)
            self.residents_change()
            return
        del self.sequences[sequence.key]
        if self.copies_run:
            self.quarantined[sequence.key] = sequence
        else:
            self._released(sequence)

    def end(self, sequence: Sequence) -> None:
        """Release a sequence that ended with the last step."""
        if sequence.key in self.residents:
            self.residents.end(sequence.key)
        self.release(sequence)

    def is_leaving(self, key: RequestKey) -> bool:
        """Whether a sequence is released, but its blocks are quarantined."""
        return key in self.quarantined

    def end_copies(self) -> None:
        """End every copy, and free quarantined blocks."""
        self.copies_run = False
        for sequence in self.quarantined.values():
            self._released(sequence)
        self.quarantined.clear()

    def _released(self, sequence: Sequence) -> None:
        drawn, num_known = self.cache.drawn(sequence.drawn)
        states = self.cache.end_states(sequence.prefix, drawn)
        self._num_own_blocks -= sequence.num_blocks - self.cache.end(sequence.prefix, drawn)
        self.effects.append(KvReleased(self.instance_id, *sequence.key, sequence.received_by, drawn, num_known, states))

    # --- reports ---

    def report_load(self) -> None:
        num_quarantined = sum([self.num_own_blocks(sequence) for sequence in self.quarantined.values()])
        num_idle = self.cache.num_idle_blocks
        self.effects.append(
            LoadReported(
                self.instance_id,
                self.num_free_blocks,
                self.profile.num_blocks - self.num_free_blocks - num_idle - num_quarantined,
                num_quarantined,
                sum([sequence.is_decoding for sequence in self.sequences.values()]),
                num_idle,
                len(self.cache.offloaded),
            )
        )

    def lose_offloaded(self, granules: PrefixHashes) -> None:
        """Lose granules of the offload tier, and report them."""
        self.cache.lose(granules)
        self.effects.append(CacheReported(self.instance_id, lost=granules))
