"""Answers held to a grammar by the engine, with random weights: whatever is drawn, it fits."""

from __future__ import annotations

import array
import json
import re
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from pdmesh.engine.base import EngineSequence, SequenceSlice, SliceResult
from pdmesh.engine.grammar_state import GrammarState
from pdmesh.engine.runner import TorchEngine
from pdmesh.grammars import Grammars
from pdmesh.model import FinishReason, RequestId, SamplingParams
from pdmesh_testing.checkpoints import write_checkpoint

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["one", "two"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
GRAMMAR = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA), overrides={"whitespace_flexible": False})
EOS = (256,)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> TorchEngine:
    return TorchEngine(checkpoint, num_blocks=64)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


def sequence_of(output: list[int] | None = None, number: int = 0, **params: Any) -> EngineSequence:
    settings: dict[str, Any] = {"max_tokens": 80, "temperature": 1.0, "grammar": GRAMMAR, "eos_token_ids": EOS} | params
    return EngineSequence(
        request_id=RequestId(f"r{number}"),
        params=SamplingParams(**settings),
        token_ids=array.array("i", [5, 6, 7, *(output or [])]),
        num_prompt_tokens=3,
        block_table=list(range(6 * number, 6 * number + 6)),
    )


def finish(engine: TorchEngine, sequence: EngineSequence) -> SliceResult:
    """Generate to the end; the last result."""
    start = 0
    while True:
        num_tokens = len(sequence.token_ids) - start
        (result,) = engine.execute([SequenceSlice(sequence=sequence, start=start, num_tokens=num_tokens, sample=True)])
        start = len(sequence.token_ids)
        assert result.token_id is not None
        sequence.token_ids.append(result.token_id)
        if result.drawn[0].finish_reason is not None:
            return result


def text_of(tokenizer: Tokenizer, sequence: EngineSequence) -> str:
    return tokenizer.decode(sequence.output_token_ids.tolist())


@pytest.mark.parametrize("seed", range(8))
def test_what_is_drawn_fits_its_schema(engine: TorchEngine, tokenizer: Tokenizer, seed: int) -> None:
    sequence = sequence_of(seed=seed)
    assert finish(engine, sequence).drawn[0].finish_reason is FinishReason.STOP
    answer = json.loads(text_of(tokenizer, sequence))
    assert list(answer) == ["name", "kind", "sizes"]
    assert len(answer["name"]) <= 6
    assert answer["kind"] in ("one", "two")
    assert all(0 <= size <= 9 for size in answer["sizes"])


def test_a_request_that_goes_on_elsewhere_draws_the_same(engine: TorchEngine) -> None:
    """Its guide is made from its output tokens alone, at each of them."""
    whole = sequence_of(seed=3)
    finish(engine, whole)
    output = whole.output_token_ids.tolist()
    for num_drawn in range(1, len(output)):
        resumed = sequence_of(output[:num_drawn], seed=3)
        finish(engine, resumed)
        assert resumed.output_token_ids.tolist() == output


def test_a_step_that_is_computed_again_draws_the_same(engine: TorchEngine) -> None:
    """A chunk that is abandoned in its last layer has drawn a token that nobody appended."""
    once, again = sequence_of(seed=4), sequence_of(seed=4)
    finish(engine, once)
    step = SequenceSlice(sequence=again, start=0, num_tokens=3, sample=True)
    assert engine.execute([step])[0].token_id == engine.execute([step])[0].token_id == once.output_token_ids[0]
    finish(engine, again)
    assert again.token_ids == once.token_ids


def test_those_beside_it_draw_what_they_would(engine: TorchEngine) -> None:
    plain = sequence_of(number=1, grammar="", seed=1)
    alone = engine.execute([SequenceSlice(sequence=plain, start=0, num_tokens=3, sample=True)])[0].token_id
    held = sequence_of(seed=1)
    batch = [SequenceSlice(sequence=each, start=0, num_tokens=3, sample=True) for each in (held, plain)]
    assert engine.execute(batch)[1].token_id == alone


@pytest.mark.parametrize("ignores_eos", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_ends_where_nothing_can_follow(
    engine: TorchEngine, tokenizer: Tokenizer, ignores_eos: bool, temperature: float
) -> None:
    """With `ignore_eos` and too many `min_tokens`, too: there is nothing else to draw."""
    params: dict[str, Any] = {"grammar": LLMatcher.grammar_from_regex("yes|no"), "temperature": temperature}
    sequence = sequence_of(eos_token_ids=() if ignores_eos else EOS, min_tokens=50, **params)
    assert finish(engine, sequence).drawn[0].finish_reason is FinishReason.STOP
    assert text_of(tokenizer, sequence) in ("yes", "no")


def test_an_end_is_drawn_only_where_the_answer_is_whole(engine: TorchEngine, tokenizer: Tokenizer) -> None:
    for seed in range(8):
        sequence = sequence_of(
            grammar=LLMatcher.grammar_from_regex("(ab)+"), seed=seed, max_tokens=40, logit_bias=((EOS[0], 100.0),)
        )
        finish(engine, sequence)
        assert re.fullmatch("(ab)+", text_of(tokenizer, sequence))


def test_min_tokens_keeps_an_answer_going_where_it_can(engine: TorchEngine, tokenizer: Tokenizer) -> None:
    grammar = LLMatcher.grammar_from_regex("a+")
    sequence = sequence_of(grammar=grammar, min_tokens=10, logit_bias=((EOS[0], 100.0),))
    assert finish(engine, sequence).drawn[0].finish_reason is FinishReason.STOP
    assert re.fullmatch("a{10,}", text_of(tokenizer, sequence))


def test_a_grammar_that_fails_on_the_way_ends_its_own_request(engine: TorchEngine) -> None:
    """Gateways try the first token of each; one that is too complex later ends with an error, and nobody else does."""
    broken, fine = sequence_of(grammar="{not a grammar"), sequence_of(number=1, seed=2)
    batch = [SequenceSlice(sequence=each, start=0, num_tokens=3, sample=True) for each in (broken, fine)]
    results = engine.execute(batch)
    assert results[0].drawn[0].finish_reason is FinishReason.ERROR
    assert results[1].drawn[0].finish_reason is None


#: A grammar whose text contains special tokens, and that text.
LITERALS = [
    (LLMatcher.grammar_from_json_schema('{"const": "a<|im_end|>b"}'), '"a<|im_end|>b"'),
    (LLMatcher.grammar_from_json_schema('{"enum": ["<|im_start|>"]}'), '"<|im_start|>"'),
    (LLMatcher.grammar_from_json_schema('{"enum": ["<|im_end|>", "<|im_end|>x"], "minLength": 11}'), '"<|im_end|>x"'),
    (LLMatcher.grammar_from_json_schema('{"type": "string", "pattern": "^<\\\\|im_end\\\\|>$"}'), '"<|im_end|>"'),
    (
        LLMatcher.grammar_from_json_schema(
            '{"properties": {"<|endoftext|>": {"const": 1}}, "required": ["<|endoftext|>"], "type": "object",'
            ' "additionalProperties": false}',
            overrides={"whitespace_flexible": False},
        ),
        '{"<|endoftext|>":1}',
    ),
    (LLMatcher.grammar_from_regex(r"<\|im_end\|>"), "<|im_end|>"),
    (LLMatcher.grammar_from_regex(r"a<\|im_end\|><\|im_start\|>b"), "a<|im_end|><|im_start|>b"),
    (LLMatcher.grammar_from_lark('start: "<|im_end|>" /x/'), "<|im_end|>x"),
    (LLMatcher.grammar_from_lark('start: "</s><think></tool_call>"'), "</s><think></tool_call>"),
    (LLMatcher.grammar_from_lark('start: "</s" ">" %json {"const": "<|im_end|>"}'), '</s>"<|im_end|>"'),
]


@pytest.mark.parametrize(("grammar", "text"), LITERALS, ids=[text for _, text in LITERALS])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_special_tokens_in_a_literal_are_spelled_by_ordinary_ones(
    engine: TorchEngine, tokenizer: Tokenizer, grammar: str, text: str, temperature: float
) -> None:
    sequence = sequence_of(grammar=grammar, temperature=temperature)
    assert finish(engine, sequence).drawn[0].finish_reason is FinishReason.STOP
    written = sequence.output_token_ids.tolist()
    assert not {256, 257, 258} & {*(written if written[-1] not in EOS else written[:-1])}
    assert tokenizer.decode(written) == text


def test_a_special_token_by_name_is_that_token(engine: TorchEngine) -> None:
    sequence = sequence_of(grammar=LLMatcher.grammar_from_lark('start: <|im_start|> "<|im_start|>" // <|im_end|>'))
    assert finish(engine, sequence).drawn[0].finish_reason is FinishReason.STOP
    assert sequence.output_token_ids[0] == 257
    assert 257 not in sequence.output_token_ids[1:]


def test_an_answer_that_no_token_can_follow_is_an_error_and_no_end(engine: TorchEngine) -> None:
    """The grammar asks for an end in the middle, which the engine never draws there."""
    sequence = sequence_of(grammar=LLMatcher.grammar_from_lark('start: "a" <[256]> "b"'))
    assert finish(engine, sequence).drawn[0].finish_reason is FinishReason.ERROR
    assert sequence.output_token_ids[0] == 64


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (LLMatcher.grammar_from_regex("ab"), "ab"),  # complete: nothing is taken behind it but the end
        (LLMatcher.grammar_from_lark('start: thought "." /b*/\nthought[max_tokens=3]: /[a-z]*/'), "abab"),
        (LLMatcher.grammar_from_lark('start: thought "." /b*/\nthought[max_tokens=3]: /[a-z]*/'), "ab.bb"),
    ],
)
def test_a_guide_that_goes_back_allows_what_a_new_one_does(
    checkpoint: Path, tokenizer: Tokenizer, grammar: str, text: str
) -> None:
    grammars = Grammars(checkpoint, vocab_size=320, eos_token_ids=EOS)
    output = array.array("i", [*tokenizer.encode(text, add_special_tokens=False).ids, *EOS])

    def allowed(guide: GrammarState, length: int) -> Any:
        guide.catch_up(output[:length])
        bits = guide.allowed(320, EOS)
        return guide.error if bits is None else bits.tolist()

    for length in range(len(output)):
        guide = GrammarState(grammars.matcher(grammar), EOS)
        for longer in range(length, len(output) + 1):
            for each in range(length, longer + 1):
                allowed(guide, each)
            assert allowed(guide, length) == allowed(GrammarState(grammars.matcher(grammar), EOS), length)
