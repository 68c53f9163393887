"""The stand-in engine proves what it must: its output hangs on every token's KV and on nothing else."""

import array
import random
from collections.abc import Callable

import pytest

from pdmesh.engine.base import EngineSequence, SequenceSlice, SliceResult
from pdmesh.kv.remote_kv import RangeQuestion
from pdmesh.kv_layout import KvLayout
from pdmesh.model import FinishReason, RequestId, SamplingParams
from pdmesh_testing.fake_engine import FAKE_LAYOUT, FakeEngine, reference_output

GREEDY = SamplingParams(max_tokens=6, temperature=0)


def sequence_of(prompt: list[int], block_table: list[int], params: SamplingParams = GREEDY) -> EngineSequence:
    return EngineSequence(
        request_id=RequestId("r"),
        params=params,
        token_ids=array.array("i", prompt),
        num_prompt_tokens=len(prompt),
        block_table=block_table,
    )


def prefill(engine: FakeEngine, sequence: EngineSequence, sizes: list[int]) -> SliceResult:
    start, result = 0, SliceResult()
    for size in sizes:
        is_last = start + size == len(sequence.token_ids)
        (result,) = engine.execute([SequenceSlice(sequence=sequence, start=start, num_tokens=size, sample=is_last)])
        start += size
    return result


@pytest.mark.parametrize("seed", range(20))
def test_chunks_and_block_tables_do_not_matter(seed: int) -> None:
    rng = random.Random(seed)
    prompt = [rng.randrange(5000) for _ in range(rng.randint(1, 40))]
    sizes: list[int] = []
    while sum(sizes) < len(prompt):
        sizes.append(rng.randint(1, len(prompt) - sum(sizes)))
    engine = FakeEngine(num_blocks=32)
    result = prefill(engine, sequence_of(prompt, rng.sample(range(32), 12)), sizes)
    assert result.token_id == reference_output(prompt, GREEDY)[0]


def test_one_wrong_word_anywhere_changes_the_output() -> None:
    prompt = list(range(100, 111))
    expected = reference_output(prompt, GREEDY)
    num_same = 0
    for layer in range(FAKE_LAYOUT.num_layers):
        for position in range(len(prompt)):
            for slot in range(2):
                engine = FakeEngine()
                sequence = sequence_of(prompt, [7, 3, 5, 9])
                first = prefill(engine, sequence, [len(prompt)]).token_id
                assert first is not None
                assert first == expected[0]
                sequence.token_ids.append(first)
                engine.kv.words[layer, sequence.block_table[position // 4], slot, position % 4] ^= 1 << 9
                (result,) = engine.execute(
                    [SequenceSlice(sequence=sequence, start=len(prompt), num_tokens=1, sample=True)]
                )
                num_same += result.token_id == expected[1]
    assert num_same <= 3  # 44 corruptions, each draws the same one of 60 tokens by chance only


def test_chunks_out_of_order_change_the_output() -> None:
    prompt = list(range(12))
    engine = FakeEngine()
    sequence = sequence_of(prompt, [0, 1, 2, 3])
    engine.execute([SequenceSlice(sequence=sequence, start=4, num_tokens=4, sample=False)])
    engine.execute([SequenceSlice(sequence=sequence, start=0, num_tokens=4, sample=False)])
    (result,) = engine.execute([SequenceSlice(sequence=sequence, start=8, num_tokens=4, sample=True)])
    assert result.token_id != reference_output(prompt, GREEDY)[0]


def test_generation_ends_as_asked() -> None:
    expected = reference_output([1, 2, 3], GREEDY)
    assert len(expected) == 6
    stopped = SamplingParams(max_tokens=6, temperature=0, eos_token_ids=(expected[2],))
    assert reference_output([1, 2, 3], stopped) == expected[:3]
    engine = FakeEngine()
    prompt = [1, 2, 3]
    result = prefill(engine, sequence_of(prompt, [0], SamplingParams(max_tokens=1, temperature=0)), [3])
    assert result.drawn[0].finish_reason is FinishReason.LENGTH


def test_min_tokens_keeps_the_end_away() -> None:
    first = reference_output([1, 2, 3], GREEDY)[0]
    params = SamplingParams(max_tokens=6, temperature=0, eos_token_ids=(first,), min_tokens=3)
    output = reference_output([1, 2, 3], params)
    assert first not in output[:3]


def test_seeds_matter_only_when_sampling() -> None:
    def drawn(temperature: float, seed: int) -> list[int]:
        return reference_output([5, 6, 7], SamplingParams(max_tokens=8, temperature=temperature, seed=seed))

    assert drawn(0, 1) == drawn(0, 2)
    assert drawn(1, 1) == drawn(1, 1) != drawn(1, 2)


class Divided:
    """`RemoteKv` of the first tokens of a context, a block on each of some engines."""

    def __init__(self, members: list[FakeEngine]) -> None:
        self.members = members
        self.num_tokens = len(members) * FAKE_LAYOUT.block_size
        self.asked: list[RangeQuestion] = []
        self.wrong: Callable[[Divided, RangeQuestion], list[bytes]] = Divided.to

    def ask(self, question: RangeQuestion, *, more: bool = False) -> None:
        self.asked.append(question)

    def answers(self) -> list[bytes]:
        return self.wrong(self, self.asked[-1])

    def to(self, question: RangeQuestion) -> list[bytes]:
        return [member.attend_part(number, [2], question) for number, member in enumerate(self.members)]


def divided(prompt: list[int], num_members: int) -> tuple[FakeEngine, EngineSequence, Divided]:
    """An engine that has the end of a context, which others hold the first blocks of."""
    whole, table = FakeEngine(), [7, 3, 5, 9]
    prefill(whole, sequence_of(prompt, table), [len(prompt)])
    home, members = FakeEngine(), [FakeEngine() for _ in range(num_members)]
    for member, block in zip(members, table, strict=False):
        member.kv.words[:, 2] = whole.kv.words[:, block]
    elsewhere = Divided(members)
    home.kv.words[:, :4] = whole.kv.words[:, table[num_members:] + table[:num_members]]
    sequence = sequence_of(prompt, list(range(4 - num_members)))
    sequence.elsewhere = elsewhere
    return home, sequence, elsewhere


@pytest.mark.parametrize("num_members", [1, 2])
def test_a_context_that_is_divided_draws_as_one_engine_does(num_members: int) -> None:
    prompt = list(range(100, 111))
    expected = reference_output(prompt, GREEDY)
    home, sequence, elsewhere = divided(prompt, num_members)
    for token in expected[1:]:
        sequence.token_ids.append(expected[len(sequence.token_ids) - len(prompt)])
        start = len(sequence.token_ids) - 1
        (result,) = home.execute([SequenceSlice(sequence=sequence, start=start, num_tokens=1, sample=True)])
        assert result.token_id == token
    assert len({question.query for question in elsewhere.asked}) == len(elsewhere.asked)


def misordered(elsewhere: Divided, question: RangeQuestion) -> list[bytes]:
    return elsewhere.to(question)[::-1]


def with_a_wrong_bit(elsewhere: Divided, question: RangeQuestion) -> list[bytes]:
    first, *others = elsewhere.to(question)
    return [first[:-1] + bytes([first[-1] ^ 1]), *others]


def of_the_first_layer(elsewhere: Divided, question: RangeQuestion) -> list[bytes]:
    return elsewhere.to(question._replace(layer=0))


def to_another_question(elsewhere: Divided, question: RangeQuestion) -> list[bytes]:
    return elsewhere.to(question._replace(query=bytes(len(question.query))))


@pytest.mark.parametrize("wrong", [misordered, with_a_wrong_bit, of_the_first_layer, to_another_question])
def test_a_wrong_answer_changes_what_is_drawn(wrong: Callable[[Divided, RangeQuestion], list[bytes]]) -> None:
    num_same = 0
    for first in range(40):
        prompt = list(range(first, first + 11))
        expected = reference_output(prompt, GREEDY)
        home, sequence, elsewhere = divided(prompt, 2)
        elsewhere.wrong = wrong
        sequence.token_ids.append(expected[0])
        (result,) = home.execute([SequenceSlice(sequence=sequence, start=11, num_tokens=1, sample=True)])
        num_same += result.token_id == expected[1]
    assert num_same <= 4  # of 40, with 60 tokens to draw


def test_gather_and_scatter_are_inverse() -> None:
    layout = KvLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=8, dtype="bfloat16")
    source, target = FakeEngine(layout, num_blocks=8), FakeEngine(layout, num_blocks=8)
    prefill(source, sequence_of(list(range(20)), [6, 1, 4]), [20])
    for layer in range(3):
        data = bytearray(3 * layout.max_page_bytes)
        source.kv.gather(layer, [6, 1, 4], memoryview(data))
        target.kv.scatter(layer, [0, 7, 2], memoryview(data))
        assert (source.kv.words[layer, [6, 1, 4]] == target.kv.words[layer, [0, 7, 2]]).all()


def test_without_kv_checks_chunks_still_do_not_matter() -> None:
    prompt = list(range(9))
    engine = FakeEngine(checks_kv=False)
    whole = prefill(engine, sequence_of(prompt, [0, 1, 2]), [9]).token_id
    assert whole == prefill(engine, sequence_of(prompt, [0, 1, 2]), [2, 3, 4]).token_id
    assert not engine.kv.words.any()
