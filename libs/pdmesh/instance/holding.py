"""The sequences of an instance and their blocks: free, owned, cached, and quarantined while copies touch them."""

from __future__ import annotations

from collections.abc import Callable

from pdmesh.core.commands import AdmitPrefill, FetchKept, FreeKv, Hold, PlaceDecode, SendKept
from pdmesh.core.events import KvReleased, LoadReported, OffloadedLost, RequestDropped, RequestFinished
from pdmesh.core.instances.own_steps import OwnSteps
from pdmesh.instance.cache import BlockCache
from pdmesh.instance.effects import BeganToDecode, Effect, Forget, Refused, ResidentsChange, Stood
from pdmesh.instance.residents import Length, Residents
from pdmesh.instance.sequence import Sequence
from pdmesh.model import FinishReason, InstanceProfile, PrefixHashes, RequestKey

TakesBlocks = AdmitPrefill | PlaceDecode | FetchKept | SendKept
MakesRoom = AdmitPrefill | PlaceDecode | FetchKept | Hold


class Holding:
    """The holdings of one instance. ``length_of`` returns how long a request gets; effects are added to ``effects``."""

    def __init__(self, profile: InstanceProfile, length_of: Callable[[RequestKey], Length]) -> None:
        self.profile = profile
        self.instance_id = profile.instance_id
        self.length_of = length_of
        self.effects: list[Effect] = []
        self.admits = True  # False: it is stopping
        self.sequences: dict[RequestKey, Sequence] = {}
        self.residents = Residents(profile.kv_layout.block_size, self._stood)
        self.own = OwnSteps()
        self.copies_run = False  # blocks that are freed now are still touched, and quarantined until `end_copies`
        self.quarantined: dict[RequestKey, Sequence] = {}
        self.cache = BlockCache(profile.kv_layout.block_size, profile.num_offload_granules)
        self._num_own_blocks = 0  # blocks that are not cached, quarantined ones among them

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
            self.effects.append(OffloadedLost(self.instance_id, lost))

    def take(self, sequence: Sequence, command: TakesBlocks, num_reused: int) -> bool:
        """Give a sequence its blocks, some of them shared. False if it is not taken; the scheduler is told why."""
        if not isinstance(command, SendKept):
            self.make_room(command)
        if not self.admits:
            self._drop_new(sequence, "the instance is stopping")
            return False
        if lost := self.cache.lost_of(sequence.prefix, num_reused):
            self.effects.append(OffloadedLost(self.instance_id, lost))
            self._drop_new(sequence, "the tier lacks what is to be loaded")
            return False
        if sequence.key in self.sequences:
            return self.refuse(command, f"{self.instance_id} holds {sequence.key} already")
        if missing := self.cache.missing(sequence.prefix, num_reused):
            return self.refuse(command, missing)
        num_blocks = sequence.num_blocks - self.cache.share(sequence.prefix, num_reused)
        self.sequences[sequence.key] = sequence
        return self._take_blocks(command, num_blocks)

    def _take_blocks(self, command: TakesBlocks | Hold, num_blocks: int) -> bool:
        self._num_own_blocks += num_blocks
        if self.num_free_blocks < 0:
            return self.refuse(command, f"{self.instance_id} has no room for {num_blocks} blocks")
        return True

    def grow(self, sequence: Sequence, command: Hold) -> bool:
        """Let a sequence hold as many blocks as a command says. False if it has as many."""
        num_more = command.num_blocks - sequence.num_blocks
        num_more += command.num_elsewhere_blocks - self.num_elsewhere_blocks(sequence)
        if num_more <= 0:
            return False
        sequence.grow(num_more)
        return self._take_blocks(command, num_more)

    def keep(self, sequence: Sequence, command: Hold) -> bool:
        """Let a sequence hold the blocks that it needs to decode here."""
        self.grow(sequence, command)
        return True

    def land(self, sequence: Sequence, num_tokens: int) -> None:
        """Note that the whole KV of a sequence is here, and cache it."""
        sequence.land(num_tokens, self.length_of(sequence.key))
        self.computed(sequence, len(sequence.chain))

    def give_back(self, sequence: Sequence, num_blocks: int) -> None:
        """Free the first blocks of a sequence, cached or not."""
        self._num_own_blocks -= num_blocks - self.cache.end(sequence.prefix, ())

    def computed(self, sequence: Sequence, num_granules: int) -> None:
        """Cache the first granules of a sequence, whose KV is here."""
        self._num_own_blocks -= self.cache.computed(sequence.prefix, num_granules)

    def num_elsewhere_blocks(self, sequence: Sequence) -> int:
        """Return the blocks of a context that other instances hold."""
        return len(sequence.members) * self.profile.max_kv_tokens // self.profile.kv_layout.block_size

    def num_context_blocks(self, sequence: Sequence) -> int:
        """Return the blocks that a context has, here and elsewhere."""
        return sequence.num_blocks + self.num_elsewhere_blocks(sequence)

    def num_own_blocks(self, sequence: Sequence) -> int:
        """Return the blocks of a sequence that are not cached."""
        return sequence.num_blocks - self.cache.num_cached_blocks(sequence.prefix)

    # --- refusals ---

    def refuse(self, command: TakesBlocks | Hold, reason: str) -> bool:
        """Refuse a command that does not fit the state."""
        self.effects.append(Refused(command, reason))
        return False

    def _drop_new(self, sequence: Sequence, reason: str) -> None:
        self.effects.append(RequestDropped(self.instance_id, *sequence.key, reason))
        self.effects.append(KvReleased(self.instance_id, *sequence.key, sequence.received_by))

    # --- sequences begin to decode, and end ---

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
            full_at_tokens=self.full_at_tokens(sequence),
        )
        self.effects.append(BeganToDecode(sequence))
        self.residents_change()

    def leave(self, sequence: Sequence) -> None:
        """Let a resident draw no more from the next step on."""
        self.residents.leave(sequence.key)
        self.residents_change()

    def stay(self, sequence: Sequence) -> None:
        """Let a resident continue that was about to leave."""
        self.residents.stay(sequence.key)

    def lose_range(self, sequence: Sequence, number: int) -> None:
        """Let a resident draw no more until another instance has computed a range of its context."""
        if sequence.is_decoding and not sequence.has_lost_range:
            sequence.lose_range(number)
            self.leave(sequence)

    def full_at_tokens(self, sequence: Sequence) -> int:
        """Return with how many tokens one range more has its KV here; 0: never. The last token has none."""
        limit = self.profile.max_kv_tokens
        return (len(sequence.members) + 1) * limit + 2 if limit else 0

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        num_output_tokens: int | None = None,
        drawn: PrefixHashes | None = None,
    ) -> None:
        """End a generation, with all that it was to draw unless ``num_output_tokens`` or ``drawn`` say otherwise."""
        self.effects.append(Forget(sequence))
        if num_output_tokens is None:
            assert sequence.length is not None, f"{sequence.key} ends, and how long it is is not known"
            num_output_tokens = sequence.length.num_output_tokens
            sequence.end(sequence.length.drawn if drawn is None else drawn)
        own_steps = self.own.take()
        self.effects.append(RequestFinished(self.instance_id, *sequence.key, reason, num_output_tokens, own_steps))
        self._let_go(sequence)

    def drop(self, sequence: Sequence, reason: str) -> None:
        """Give up a sequence that cannot go on here."""
        self.effects.append(RequestDropped(self.instance_id, *sequence.key, reason))
        self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """End a sequence without a report."""
        self.effects.append(Forget(sequence))
        self._let_go(sequence)

    def _let_go(self, sequence: Sequence) -> None:
        if sequence.key in self.residents:
            self.residents.end(sequence.key)
        self.release(sequence)

    def free(self, command: FreeKv) -> None:
        """Free a sequence: now, or before the next step if a running step may compute it."""
        key = (command.request_id, command.epoch)
        sequence = self.sequences.get(key)
        if sequence is None:
            if key not in self.quarantined:
                self.effects.append(KvReleased(self.instance_id, *key, command.transfer_id))
            return
        self.effects.append(Forget(sequence))
        if key in self.residents:
            sequence.free()
            self.residents.free(key)
            self.residents_change()
        else:
            self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Give the blocks of a sequence back: at once, or when the copies that touch them have ended."""
        sequence.free()
        del self.sequences[sequence.key]
        if self.copies_run:
            self.quarantined[sequence.key] = sequence
        else:
            self._released(sequence)

    def end_copies(self) -> None:
        """End every copy: quarantined blocks are free."""
        self.copies_run = False
        for sequence in self.quarantined.values():
            self._released(sequence)
        self.quarantined.clear()

    def _released(self, sequence: Sequence) -> None:
        drawn, num_known = self.cache.drawn(sequence.drawn)
        self._num_own_blocks -= sequence.num_blocks - self.cache.end(sequence.prefix, drawn)
        self.effects.append(KvReleased(self.instance_id, *sequence.key, sequence.received_by, drawn, num_known))

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
        """Lose granules of the offload tier."""
        self.cache.lose(granules)
        self.effects.append(OffloadedLost(self.instance_id, granules))
