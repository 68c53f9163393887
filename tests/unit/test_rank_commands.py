"""Steps as they go to the other ranks: what is new, and nothing twice."""

import array
import gc
import random
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.engine.base import EngineSequence, SequenceSlice
from pdmesh.engine.ranks.rank_commands import Command, Deltas, Replicas, Step, frame
from pdmesh.errors import ProtocolError
from pdmesh.kv.remote_kv import RangeQuestion
from pdmesh.kv_layout import num_blocks_for
from pdmesh_testing.stepping import new_sequence

BLOCK_SIZE = 16


@dataclass
class SilentKv:
    """`RemoteKv` that has no holders to ask."""

    num_tokens: int

    def ask(self, question: RangeQuestion, *, more: bool = False) -> None:
        pass

    def answers(self) -> list[bytes]:
        return []


def silent_kv(_index: int, num_tokens: int) -> SilentKv:
    return SilentKv(num_tokens)


def sent(command: Step) -> Step:
    """The command as the others get it."""
    received = msgspec.msgpack.decode(frame(command)[4:], type=Command)
    assert isinstance(received, Step)
    return received


def decode_of(sequence: EngineSequence) -> SequenceSlice:
    return SequenceSlice(sequence=sequence, start=len(sequence.token_ids) - 1, num_tokens=1, sample=True)


def sequence_of(num_tokens: int) -> EngineSequence:
    return new_sequence(array.array("i", bytes(4 * num_tokens)), range(num_blocks_for(num_tokens + 64, BLOCK_SIZE)))


def test_the_size_of_a_step_does_not_depend_on_the_context() -> None:
    """A chunk of 256 tokens and 4 decodes: as many bytes at 1K tokens of context as at 1M."""
    sizes: list[int] = []
    for num_tokens in (1 << 10, 1 << 20):
        deltas = Deltas()
        decoding = [sequence_of(num_tokens) for _ in range(4)]
        prompt = sequence_of(num_tokens)
        deltas.step([decode_of(each) for each in decoding], BLOCK_SIZE, hooked=False)  # they came from elsewhere
        first = SequenceSlice(sequence=prompt, start=0, num_tokens=num_tokens - 512, sample=False)
        deltas.step([first], BLOCK_SIZE, hooked=False)
        for each in decoding:
            each.token_ids.append(5)
        chunk = SequenceSlice(sequence=prompt, start=num_tokens - 512, num_tokens=256, sample=False)
        step = deltas.step([chunk, *map(decode_of, decoding)], BLOCK_SIZE, hooked=True)
        sizes.append(len(frame(step)))
    assert sizes[0] == sizes[1] < 1500


@given(seed=st.integers(0, 1 << 30))
def test_the_others_know_of_each_sequence_what_its_steps_need(seed: int) -> None:
    rng = random.Random(seed)
    deltas, replicas = Deltas(), Replicas()
    sequences: list[EngineSequence] = []
    computed: dict[int, int] = {}
    for _ in range(30):
        if not sequences or rng.random() < 0.2:
            length = rng.randrange(1, 200)
            blocks = rng.sample(range(1000), num_blocks_for(length, BLOCK_SIZE))
            sequences.append(new_sequence([rng.randrange(300) for _ in range(length)], blocks))
            computed[id(sequences[-1])] = rng.choice([0, 0, length - 1])  # the rest of some came from elsewhere
        batch: list[SequenceSlice] = []
        for sequence in rng.sample(sequences, rng.randint(1, len(sequences))):
            start = computed[id(sequence)]
            if start == len(sequence.token_ids):
                sequence.token_ids.append(rng.randrange(300))
                num_here = len(sequence.token_ids) - sequence.num_remote_tokens
                if num_here > len(sequence.block_table) * BLOCK_SIZE:
                    sequence.block_table.append(rng.randrange(1000, 2000))
            num_tokens = rng.randint(1, len(sequence.token_ids) - start)
            batch.append(SequenceSlice(sequence=sequence, start=start, num_tokens=num_tokens, sample=False))
            if rng.random() < 0.9:  # else the step is given up, and comes again
                computed[id(sequence)] = start + num_tokens
        found = replicas.batch(sent(deltas.step(batch, BLOCK_SIZE, hooked=False)), silent_kv)
        for part, theirs in zip(batch, found, strict=True):
            end = part.start + part.num_tokens
            assert (theirs.start, theirs.num_tokens) == (part.start, part.num_tokens)
            assert theirs.sequence.token_ids[part.start :] == part.sequence.token_ids[part.start : end]
            assert theirs.sequence.num_prompt_tokens == part.sequence.num_prompt_tokens
            assert theirs.sequence.num_remote_tokens == part.sequence.num_remote_tokens
            used = num_blocks_for(end - part.sequence.num_remote_tokens, BLOCK_SIZE)
            assert theirs.sequence.block_table[:used] == part.sequence.block_table[:used]
        for sequence in sequences:
            num_full = (computed[id(sequence)] - sequence.num_remote_tokens) // BLOCK_SIZE
            if num_full > 0 and rng.random() < 0.3:  # others hold what is full by now, or some of it
                num_given_back = rng.randint(1, num_full)
                del sequence.block_table[:num_given_back]
                sequence.elsewhere = SilentKv(sequence.num_remote_tokens + num_given_back * BLOCK_SIZE)
        if rng.random() < 0.2:
            sequences.pop(rng.randrange(len(sequences)))


def test_ended_sequences_are_forgotten() -> None:
    deltas, replicas = Deltas(), Replicas()
    for _ in range(50):
        replicas.batch(sent(deltas.step([decode_of(sequence_of(40))], BLOCK_SIZE, hooked=False)), silent_kv)
    gc.collect()
    assert len(replicas) == 1  # the last one's end comes with the next step
    assert len(deltas._known) == 0


def test_a_step_that_does_not_follow_is_refused() -> None:
    deltas = Deltas()
    sequence = sequence_of(100)
    first = deltas.step([decode_of(sequence)], BLOCK_SIZE, hooked=False)
    second = deltas.step([decode_of(sequence)], BLOCK_SIZE, hooked=False)
    replicas = Replicas()
    with pytest.raises(ProtocolError, match="out of order"):
        replicas.batch(second, silent_kv)
    assert [part.sequence.token_ids for part in Replicas().batch(first, silent_kv)] == [sequence.token_ids]
