"""A SentencePiece tokenizer of a GGUF file splits texts as SentencePiece does: by scores, with bytes for the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pdmesh.engine.gguf.gguf_tokenizer import write_tokenizer
from pdmesh.errors import ConfigError
from pdmesh_testing.examples import examples

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
CHARACTERS = "abcd▁é"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def metadata_of(pieces: list[str], **fields: Any) -> dict[str, Any]:
    """A Llama 2's tokenizer: specials, bytes, pieces that are merged, and characters; scores fall."""
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *pieces, *CHARACTERS, "<|tool|>"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(pieces) + len(CHARACTERS)), USER_DEFINED]
    ranks = range(len(pieces) + len(CHARACTERS))
    values = {
        "model": "llama",
        "tokens": tokens,
        "token_type": types,
        "scores": [0.0] * 259 + [-float(rank) for rank in ranks] + [0.0],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **fields,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def written(folder: Path, metadata: dict[str, Any]) -> Tokenizer:
    write_tokenizer(folder, metadata, "model.gguf")
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def by_definition(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """SentencePiece's way: of all neighbours that make a token, merge those of the highest score, the first ones."""
    number_of = {token: number for number, token in enumerate(tokens)}
    symbols = list(text.replace(" ", "▁"))
    while True:
        found = [
            (-scores[number_of[pair]], place)
            for place in range(len(symbols) - 1)
            if (pair := symbols[place] + symbols[place + 1]) in number_of
        ]
        if not found:
            break
        _, place = min(found)
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
    ids: list[int] = []
    for symbol in symbols:
        known = number_of.get(symbol)
        ids += [known] if known is not None else [3 + byte for byte in symbol.encode()]
    return ids


@st.composite
def pieces(draw: Any) -> list[str]:
    """Tokens that are each made of two earlier ones, in any order of scores."""
    made = list(CHARACTERS)
    for _ in range(draw(st.integers(0, 25))):
        one, other = draw(st.sampled_from(made)), draw(st.sampled_from(made))
        if one + other not in made and len(one + other) < 9:
            made.append(one + other)
    ordered: list[str] = draw(st.permutations(made[len(CHARACTERS) :]))
    return ordered


@settings(deadline=None, max_examples=examples(150))
@given(pieces=pieces(), text=st.text("abcd é\n漢", min_size=1, max_size=30), has_prefix=st.booleans())
def test_neighbours_are_merged_by_score(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[str], text: str, has_prefix: bool
) -> None:
    metadata = metadata_of(pieces, add_space_prefix=has_prefix)
    tokenizer = written(tmp_path_factory.mktemp("model"), metadata)
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    expected = by_definition(f" {text}" if has_prefix else text, tokens, scores)
    found = tokenizer.encode(text).ids
    assert found[0] == 1
    spelt = [tokens[number] for number in found[1:]]
    assert spelt == [tokens[number] for number in expected]
    assert tokenizer.decode(found) == text


def test_specials_are_told_apart_and_begin_a_text_anew(tmp_path: Path) -> None:
    metadata = metadata_of(["ab", "▁ab"], **{"add_bos_token": False})
    metadata["tokenizer.chat_template"] = "{{ bos_token }}"
    tokenizer = written(tmp_path, metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    spelt = [tokens[number] for number in tokenizer.encode("ab</s>ab<|tool|>c").ids]
    assert spelt == ["▁ab", "</s>", "▁ab", "<|tool|>", "▁", "c"]
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["chat_template"]) == ("<s>", "{{ bos_token }}")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"scores": [1.0]}, "the scores"),
        ({"scores": "none"}, "the scores"),
        ({"tokens": ["a", "a"]}, "the tokens"),
        ({"tokens": []}, "the tokens"),
        ({"tokens": ["a" * 5000], "scores": [0.0]}, "some tokens"),
    ],
)
def test_damaged_ones_are_refused_in_a_sentence(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=f"model.gguf: {what} of its tokenizer are missing or damaged"):
        write_tokenizer(tmp_path, metadata_of([], **changes), "model.gguf")
