"""Incremental text equals the text of the whole."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pdmesh_gateway.byte_level import ByteLevelDetokenizer, ByteLevelVocabulary
from pdmesh_gateway.detokenizer import REPLACEMENT, Detokenizer, WindowDetokenizer
from pdmesh_gateway.model_tokenizer import ModelTokenizer
from pdmesh_testing.examples import examples
from pdmesh_testing.tokenizers import write_tokenizer

VOCAB_SIZE = 320


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path, vocab_size=VOCAB_SIZE, model_max_length=1024)
    return path


@pytest.fixture(scope="module")
def byte_level(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def id_of_byte(byte_level: Tokenizer) -> dict[int, int]:
    tokenizer = ModelTokenizer(byte_level)
    return {tokenizer.token_bytes(token_id)[0]: token_id for token_id in range(256)}


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """As in Llama 2: pieces with U+2581 for spaces, and <0xNN> for what is not in the vocabulary."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["\u2581", "a", "b", "c", "\u2581a", "\u2581b"]
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=[("\u2581", "a"), ("\u2581", "b")], byte_fallback=True, fuse_unk=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def windowed(tokenizer: Tokenizer, prompt: list[int]) -> Detokenizer:
    return WindowDetokenizer(tokenizer, prompt_tail=prompt)


def by_bytes(tokenizer: Tokenizer, prompt: list[int]) -> Detokenizer:
    return ByteLevelDetokenizer(ByteLevelVocabulary(tokenizer), prompt_tail=prompt)


KINDS = (windowed, by_bytes)
Kind = Callable[[Tokenizer, list[int]], Detokenizer]


def stream(tokenizer: Tokenizer, token_ids: list[int], kind: Kind = windowed, prompt: Sequence[int] = ()) -> list[str]:
    detokenizer = kind(tokenizer, list(prompt))
    deltas = [detokenizer.push(token_id) for token_id in token_ids]
    return [*deltas, detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(200), deadline=None)
@given(token_ids=st.lists(st.integers(0, VOCAB_SIZE + 1), max_size=200))
def test_any_tokens_stream_to_their_text(kind: Kind, byte_level: Tokenizer, token_ids: list[int]) -> None:
    text = "".join(stream(byte_level, token_ids, kind))
    assert text == byte_level.decode(token_ids, skip_special_tokens=False)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(200), deadline=None)
@given(data=st.lists(st.sampled_from([0x80, 0xBF, 0xC3, 0xE4, 0xF0, 0x9F, 0x98, 0x80, 0x41]), max_size=150))
def test_bytes_that_nearly_are_characters_stream_to_their_text(
    kind: Kind, byte_level: Tokenizer, id_of_byte: dict[int, int], data: list[int]
) -> None:
    token_ids = [id_of_byte[byte] for byte in data]
    deltas = stream(byte_level, token_ids, kind)
    assert "".join(deltas) == bytes(data).decode(errors="replace") == byte_level.decode(token_ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(200), deadline=None)
@given(text=st.text(max_size=60), num_prompt_bytes=st.integers(0, 20))
def test_text_goes_on_from_a_prompt_that_ends_anywhere(
    kind: Kind, byte_level: Tokenizer, id_of_byte: dict[int, int], text: str, num_prompt_bytes: int
) -> None:
    text = text.replace(REPLACEMENT, "")
    token_ids = [id_of_byte[byte] for byte in text.encode()]
    shown = text.encode()[:num_prompt_bytes].decode(errors="ignore")
    deltas = stream(byte_level, token_ids[num_prompt_bytes:], kind, token_ids[:num_prompt_bytes])
    assert shown + "".join(deltas) == text or not token_ids[num_prompt_bytes:]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(200), deadline=None)
@given(text=st.text(max_size=60))
def test_text_never_shows_half_a_character(kind: Kind, byte_level: Tokenizer, text: str) -> None:
    text = text.replace(REPLACEMENT, "")
    deltas = stream(byte_level, byte_level.encode(text).ids, kind)
    assert "".join(deltas) == text
    assert REPLACEMENT not in "".join(deltas)


@settings(max_examples=examples(200), deadline=None)
@given(text=st.text(alphabet="ab é你😀", max_size=80))
def test_byte_fallback_streams_to_its_text(byte_fallback: Tokenizer, text: str) -> None:
    token_ids = byte_fallback.encode(text).ids
    deltas = stream(byte_fallback, token_ids)
    assert "".join(deltas) == byte_fallback.decode(token_ids)
    assert REPLACEMENT not in "".join(deltas)


def test_a_wrong_byte_after_a_character_takes_nothing_back(byte_fallback: Tokenizer) -> None:
    char = list("你".encode())
    assert "".join(stream(byte_fallback, [*char, 0xFF, *char])).startswith("你")


def test_the_space_after_the_prompt_is_kept(byte_fallback: Tokenizer) -> None:
    prompt = byte_fallback.encode("a").ids
    detokenizer = WindowDetokenizer(byte_fallback, prompt_tail=prompt)
    token_id = byte_fallback.token_to_id("\u2581b")
    assert token_id is not None
    assert detokenizer.push(token_id) == " b"


def test_special_tokens_show_only_if_wanted(directory: Path) -> None:
    tokenizer = ModelTokenizer.load(directory)
    [special] = [token_id for token_id in tokenizer.special_ids if "im_end" in tokenizer.token_text(token_id)]
    hidden = tokenizer.detokenizer([], skip_special_tokens=True)
    shown = tokenizer.detokenizer([], skip_special_tokens=False)
    assert hidden.push(special) + hidden.flush() == ""
    assert shown.push(special) + shown.flush() == "<|im_end|>"


def test_token_bytes_are_exact(directory: Path, byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    tokenizer = ModelTokenizer.load(directory)
    text = "é 你😀 the"
    token_ids = byte_level.encode(text).ids
    assert b"".join(map(tokenizer.token_bytes, token_ids)) == text.encode()
    fallback = ModelTokenizer(byte_fallback)
    assert (
        b"".join(map(fallback.token_bytes, byte_fallback.encode(text).ids))
        == b" " + "é 你😀 ".encode() + b"\x74\x68\x65"
    )


def test_which_vocabularies_are_byte_level(directory: Path, byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    plain = ModelTokenizer.load(directory).detokenizer([], skip_special_tokens=True)
    assert isinstance(plain, ByteLevelDetokenizer)
    of_pieces = ModelTokenizer(byte_fallback).detokenizer([], skip_special_tokens=True)
    assert isinstance(of_pieces, WindowDetokenizer)
    mixed = Tokenizer.from_str(byte_level.to_str())
    mixed.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    assert isinstance(ModelTokenizer(mixed).detokenizer([], skip_special_tokens=True), WindowDetokenizer)


def test_added_tokens_stand_for_themselves(byte_level: Tokenizer) -> None:
    tokenizer = Tokenizer.from_str(byte_level.to_str())
    tokenizer.add_tokens(["a b", "\u0120x", "\u4f60"])
    token_ids = [*range(tokenizer.get_vocab_size() - 3, tokenizer.get_vocab_size()), 70]
    assert "".join(stream(tokenizer, token_ids, by_bytes)) == tokenizer.decode(token_ids)
    assert b"".join(map(ModelTokenizer(tokenizer).token_bytes, token_ids)).decode() == tokenizer.decode(token_ids)


def test_windows_stay_small(byte_level: Tokenizer, id_of_byte: dict[int, int]) -> None:
    detokenizer = WindowDetokenizer(byte_level)
    for _ in range(10_000):
        detokenizer.push(id_of_byte[0x80])
        assert len(detokenizer._window) <= 64
