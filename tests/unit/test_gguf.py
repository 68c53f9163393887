"""A GGUF file is served as the model that it was made from, with its tokenizer and template."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from pdmesh.engine.files import load_model_info, resolve_model
from pdmesh.engine.gguf.gguf_blocks import values_of
from pdmesh.engine.gguf.gguf_reader import TYPES
from pdmesh.engine.gguf.gguf_tokenizer import end_tokens, write_tokenizer
from pdmesh.engine.runner import TorchEngine
from pdmesh.errors import ConfigError
from pdmesh.model import SamplingParams
from pdmesh_gateway.model_tokenizer import ModelTokenizer
from pdmesh_testing.architectures import assert_computes_as_transformers, references_of
from pdmesh_testing.checkpoints import Family, write_checkpoint
from pdmesh_testing.gguf_files import MODELS, GgufType, content_of, encoded, write_gguf
from pdmesh_testing.stepping import generate
from pdmesh_testing.transformers_checkpoints import write_transformers_checkpoint

PARAMS = SamplingParams(max_tokens=8, temperature=0.0, logprobs=0)
PROMPT = [number * 37 % 300 for number in range(30)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("architecture", "gguf_type"),
    [("llama", "F32"), ("llama", "Q8_0"), ("qwen2", "Q8_0"), ("qwen3", "F16"), ("qwen3", "Q4_0")],
)
def test_a_file_is_the_model_that_it_was_made_from(tmp_path: Path, architecture: Family, gguf_type: GgufType) -> None:
    source = write_checkpoint(tmp_path / "source", architecture=architecture, tie_word_embeddings=gguf_type == "F16")
    meanings = write_gguf(source, tmp_path / "model.gguf", gguf_type)
    save_file(meanings, source / "model.safetensors", metadata={"format": "pt"})
    directory = resolve_model(str(tmp_path / "model.gguf"))
    assert resolve_model(str(tmp_path / "model.gguf")) == directory  # made once
    expected, found = (
        generate(TorchEngine(path, num_blocks=4, num_threads=1, dtype="float32"), PROMPT, 8, params=PARAMS)
        for path in (source, directory)
    )
    assert found.output_ids == expected.output_ids
    for one, other in zip(found.results, expected.results, strict=True):
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-4)


@pytest.mark.parametrize("gguf_type", ["F32", "Q8_0"])
@pytest.mark.parametrize(
    ("model_type", "options"), [(name, each) for name, options in MODELS.items() for each in options], ids=str
)
def test_each_architecture_is_computed_as_by_transformers(
    tmp_path: Path, model_type: str, options: dict[str, Any], gguf_type: GgufType
) -> None:
    source = write_transformers_checkpoint(tmp_path / "source", model_type, **options)
    meanings = write_gguf(source, tmp_path / "model.gguf", gguf_type)
    save_file(meanings, source / "model.safetensors", metadata={"format": "pt"})
    directory = resolve_model(str(tmp_path / "model.gguf"))
    assert_computes_as_transformers(directory, references_of(source), dtype="float32")


@pytest.mark.parametrize(("model_type", "gguf_type"), [("gpt_oss", "MXFP4"), ("qwen3_moe", "Q4_0")])
def test_experts_are_of_types_of_four_bits(tmp_path: Path, model_type: str, gguf_type: GgufType) -> None:
    source = write_transformers_checkpoint(tmp_path / "source", model_type, **MODELS[model_type][0])
    meanings = write_gguf(source, tmp_path / "model.gguf", gguf_type)
    save_file(meanings, source / "model.safetensors", metadata={"format": "pt"})
    directory = resolve_model(str(tmp_path / "model.gguf"))
    assert_computes_as_transformers(directory, references_of(source), dtype="float32")


def test_its_tokenizer_and_template_come_with_it(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    write_gguf(source, tmp_path / "model.gguf")
    directory = resolve_model(str(tmp_path / "model.gguf"))
    expected, found = (Tokenizer.from_file(str(path / "tokenizer.json")) for path in (source, directory))
    text = "The mesh's  prefill,\n\n12345 tokens; déjà vu <|im_end|>"
    assert found.encode(text).ids == expected.encode(text).ids
    assert found.decode(found.encode(text).ids, skip_special_tokens=False) == text
    ModelTokenizer.load(directory)
    configs = [json.loads((path / "tokenizer_config.json").read_text()) for path in (source, directory)]
    assert configs[0]["chat_template"] == configs[1]["chat_template"]
    assert load_model_info(directory).eos_token_ids == (258, 256)  # and what else ends answers


@pytest.mark.parametrize(
    ("split", "pieces"),
    [
        ("gpt-4o", ["Camel", "Case", "WORDS", " don't", " ", "123", "45", " //\n", "  ", " déjà"]),
        ("tekken", ["Camel", "Case", "WORDS", " don", "'t", " ", "1", "2", "3", "4", "5", " //\n", "  ", " déjà"]),
        ("dbrx", ["CamelCaseWORDS", " don", "'t", " ", "123", "45", " //\n", "  ", " déjà"]),
        ("refact", ["CamelCaseWORDS", " don", "'t", " ", "1", "2", "3", "4", "5", " //", "\n  ", " déjà"]),
        ("olmo", ["CamelCaseWORDS", " don", "'t", " 12345", " //", "\n  ", " déjà"]),
        ("default", ["CamelCaseWORDS", " don", "'", "t", " ", "123", "45", " ", "//", "\n  ", " déjà"]),
        ("seed-coder", ["CamelCaseWORDS", " don", "'t", " ", "1", "2", "3", "4", "5", " //", "\n", "  ", " déjà"]),
        ("ufakzeka", ["CamelCaseWORDS", " don", "'t", " ", "1", "2", "3", "4", "5", " //\n", "  ", " déjà"]),
        ("deepseek-llm", ["CamelCaseWORDS", " don", "'", "t", " ", "12345", " //", "\n", "  ", " d", "é", "j", "à"]),
        (
            "deepseek-coder",
            ["CamelCaseWORDS", " don", "'", "t", " ", "1", "2", "3", "4", "5", " //", "\n", "  ", " déjà"],
        ),
        ("deepseek-v3", ["CamelCaseWORDS", " don", "'t", " ", "123", "45", " //\n", "  ", " déjà"]),
        ("viking", ["CamelCaseWORDS", " don't", " ", "1", "2", "3", "4", "5", " //", "\n  ", " déjà"]),
    ],
)
def test_texts_are_split_as_llama_cpp_splits_them(tmp_path: Path, split: str, pieces: list[str]) -> None:
    """Splits of 4,200 texts gave llama.cpp's tokens when these were written down, but for qwen2's composed accents."""
    tokens = [chr(code) for code in range(33, 127)]
    metadata = {"model": "gpt2", "pre": split, "tokens": tokens, "merges": []}
    write_tokenizer(tmp_path, {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}, "model.gguf")
    splitter = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).pre_tokenizer
    assert splitter is not None
    found = splitter.pre_tokenize_str("CamelCaseWORDS don't 12345 //\n   déjà")
    assert [bytes_of(piece) for piece, _ in found] == [piece.encode() for piece in pieces]


@pytest.mark.parametrize("merge", ["a bb", "a c", "a b"])
def test_merges_of_what_is_no_token_are_refused(tmp_path: Path, merge: str) -> None:
    """The library panics otherwise, with what is no exception."""
    metadata = {"model": "gpt2", "tokens": ["a", "b", "bb"], "merges": [merge]}
    with pytest.raises(ConfigError, match="the merges of its tokenizer are missing or damaged"):
        write_tokenizer(tmp_path, {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}, "model.gguf")


def test_a_file_may_have_the_longest_name(tmp_path: Path) -> None:
    write_gguf(write_checkpoint(tmp_path / "source"), file := tmp_path / f"{'x' * 250}.gguf")
    assert load_model_info(resolve_model(str(file))).vocab_size


def bytes_of(piece: str) -> bytes:
    """What a byte-level piece spells: bytes that no character shows are those from 256 on."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return bytes(code if (code := ord(letter)) < 256 else hidden[code - 256] for letter in piece)


def fields_of(**metadata: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{name}": value for name, value in {"model": "gpt2", "merges": [], **metadata}.items()}


def test_answers_end_with_what_llama_cpp_ends_them_with() -> None:
    """Checked against llama.cpp's own lists: what is known by its text ends an answer whatever its type."""
    tokens = ["<|end|>", "<|return|>", "<|call|>", "<|endoftext|>", "a", "</s>"]
    fields = fields_of(tokens=tokens, token_type=[3, 3, 3, 3, 1, 1], eos_token_id=1, eot_token_id=4)
    assert end_tokens(fields, "file") == [1, 4, 2, 3, 5]  # of gpt-oss, whose messages end without an answer's end
    fields["tokenizer.ggml.tokens"] = ["<|end|>", "<|im_end|>", "b", "c", "a", "</s>"]
    assert end_tokens(fields, "file") == [1, 4, 0, 5]
    fields["tokenizer.ggml.tokens"] = ["<|tool_response>", "<|im_end|>", "b", "c", "<|file_sep|>", "</s>"]
    assert end_tokens(fields, "file") == [1, 4, 0]  # Gemma 4's word </s> is an ordinary one


@pytest.mark.parametrize("types", [None, [1, 1, 1, 1, 1, 1]])
def test_ends_are_tokens_of_their_own_whatever_their_type(tmp_path: Path, types: list[int] | None) -> None:
    tokens = ["a", "b", "<|im_end|>", "<", "|", "<|fim_prefix|>"]
    write_tokenizer(tmp_path, fields_of(tokens=tokens, token_type=types), "model.gguf")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("a<|im_end|>b<|fim_prefix|>").ids == [0, 2, 1, 5]
    assert tokenizer.decode([0, 2, 1]) == "ab"


#: Ends of published models that are in files as ordinary tokens.
ENDS = [
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
    *("</s>", "<eos>", "<EOT>", "[EOS]", "<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
]


@pytest.mark.parametrize("end", ENDS)
def test_an_end_of_another_type_and_name_still_ends_answers(tmp_path: Path, end: str) -> None:
    fields = fields_of(tokens=["a", "b", end, "<x>"], token_type=[1, 1, 1, 3], eos_token_id=3)
    write_tokenizer(tmp_path, fields, "model.gguf")
    assert end_tokens(fields, "model.gguf") == [3, 2]
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(f"a{end}b<x>").ids == [0, 2, 1, 3]


@pytest.mark.parametrize(("flags", "ids"), [((None, None), [1]), ((True, False), [0, 1]), ((False, True), [1, 2])])
def test_a_text_begins_and_ends_with_the_tokens_that_a_file_wants(
    tmp_path: Path, flags: tuple[bool | None, bool | None], ids: list[int]
) -> None:
    given = dict(zip(("add_bos_token", "add_eos_token"), flags, strict=True))
    fields = fields_of(tokens=["<s>", "a", "</s>"], token_type=[3, 1, 3], bos_token_id=0, eos_token_id=2, **given)
    write_tokenizer(tmp_path, fields, "model.gguf")
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("a").ids == ids


def test_types_of_too_few_tokens_are_damage(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the types of tokens of its tokenizer are missing or damaged"):
        write_tokenizer(tmp_path, fields_of(tokens=["a", "b"], token_type=[1]), "model.gguf")


def test_blocks_stand_for_what_ggml_says() -> None:
    """Digests of the ``gguf`` package's values of these bytes (Q1_0's and Q2_0's are by their definition).

    Values were equal bit by bit when the digests were taken.
    """
    digests = {}
    for number, stored in TYPES.items():
        data = np.random.default_rng(number).integers(0, 256, (64, stored.num_bytes), dtype=np.uint8)
        if stored.name == "MXFP4":
            data[:, 0] %= 255  # which is no exponent
        values = values_of(number, torch.from_numpy(data)).numpy()
        assert values.shape == (64, stored.num_values)
        digests[stored.name] = hashlib.sha256(np.nan_to_num(values).tobytes()).hexdigest()[:12]
    assert digests == DIGESTS


DIGESTS = {
    "F32": "e575764b485e",
    "F16": "e9cfc41b9f0d",
    "Q4_0": "50dc1637df90",
    "Q4_1": "5d75c0541661",
    "Q5_0": "43992a8f2b20",
    "Q5_1": "e4668ef1cfb1",
    "Q8_0": "b5a02f868190",
    "Q2_K": "95d37432b0d4",
    "Q3_K": "a746eed0f92a",
    "Q4_K": "ed04b9216820",
    "Q5_K": "978bc23709a6",
    "Q6_K": "3d57dc3a170f",
    "IQ2_XXS": "21264a7cca02",
    "IQ2_XS": "4349e447ed05",
    "IQ3_XXS": "a94745e112a4",
    "IQ1_S": "1af0ad6c7bf7",
    "IQ4_NL": "7316ebf36e3e",
    "IQ3_S": "2d776760a5d8",
    "IQ2_S": "a2531c8f4a78",
    "IQ4_XS": "b15fce075bcf",
    "IQ1_M": "65a64f0fd2c0",
    "BF16": "099b912bafa7",
    "TQ1_0": "e9324c30ed35",
    "TQ2_0": "7ebed792988c",
    "MXFP4": "26978122ce46",
    "NVFP4": "06e3417c991a",
    "Q1_0": "fb238d32165d",
    "Q2_0": "54d161e57d7a",
}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "cannot be read"),
        (b"GGML" + bytes(40), "is not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "is a GGUF file of version 1; supported are 2 and 3"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "it is shorter than its header says"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 62), "it is shorter than its header says"),
        (
            encoded({"general.architecture": "mamba"}, {}),
            "architecture is 'mamba', which is not supported; give one of",
        ),
        (encoded({"general.architecture": "llama"}, {}), "tensor 'token_embd.weight' is missing"),
        (encoded({}, {"x": ((1 << 40, 32), 8, b"")}), "tensor 'x' reaches beyond the file"),
        (encoded({}, {"x": ((2, 33), 8, b"")}), "tensor 'x' has rows of 33 values in blocks of 32"),
        (encoded({}, {"x": ((2, 32), 31, b"")}), "GGML's type Q4_0_4_4, which is not supported; use one of F32"),
        (encoded({}, {"x": ((2, 32), 77, b"")}), "GGML's type number 77, which is not supported; use one of F32"),
    ],
)
def test_damaged_and_foreign_files_are_refused_in_a_sentence(tmp_path: Path, content: bytes, sentence: str) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=sentence) as error:
        resolve_model(str(file))
    assert "\n" not in str(error.value)
    assert str(file) in str(error.value)


def test_experts_of_other_kinds_are_refused(tmp_path: Path) -> None:
    embedding: dict[str, tuple[tuple[int, ...], int, bytes]] = {"token_embd.weight": ((4, 8), 0, bytes(128))}
    for name, field, sentence in (
        ("qwen2", "expert_used_count", "experts of 'qwen2' are not supported from GGUF; give one of llama"),
        ("qwen3moe", "expert_shared_count", "experts with expert_shared_count are not supported"),
        ("lfm2moe", "expert_shared_count", "experts with expert_shared_count are not supported"),
    ):
        metadata = {"general.architecture": name, f"{name}.expert_count": 4, f"{name}.{field}": 2}
        (tmp_path / "model.gguf").write_bytes(encoded(metadata, embedding))
        with pytest.raises(ConfigError, match=sentence):
            resolve_model(str(tmp_path / "model.gguf"))


def test_a_tensor_that_lacks_experts_is_refused(tmp_path: Path) -> None:
    source = write_transformers_checkpoint(
        tmp_path / "source", "mixtral", num_local_experts=5, num_experts_per_tok=2, sliding_window=None
    )
    file = tmp_path / "model.gguf"
    write_gguf(source, file)
    metadata, tensors = content_of(file)
    shape, number, content = tensors["blk.2.ffn_up_exps.weight"]
    tensors["blk.2.ffn_up_exps.weight"] = ((4, *shape[1:]), number, content[: len(content) * 4 // 5])
    file.write_bytes(encoded(metadata, tensors))
    with pytest.raises(ConfigError, match=r"'blk.2.ffn_up_exps.weight' has shape \(4, 96, 64\), without part 4"):
        TorchEngine(resolve_model(str(file)), num_blocks=1, num_threads=1)


def test_nothing_is_listed_for_more_heads_than_any_model_has(tmp_path: Path) -> None:
    source, file = write_checkpoint(tmp_path / "source"), tmp_path / "model.gguf"
    write_gguf(source, file)
    metadata, tensors = content_of(file)
    file.write_bytes(encoded({**metadata, "llama.attention.head_count": 1 << 31}, tensors))
    with pytest.raises(ConfigError, match="there are 2147483648 attention heads of 16; at most 4096 of"):
        TorchEngine(resolve_model(str(file)), num_blocks=1, num_threads=1)


def test_a_vector_is_not_quantised(tmp_path: Path) -> None:
    """Read as rows of blocks it would be empty, and the kernels would read what lies behind it in memory."""
    source, file = write_checkpoint(tmp_path / "source"), tmp_path / "model.gguf"
    write_gguf(source, file)
    metadata, tensors = content_of(file)
    shape, _, content = tensors["output_norm.weight"]
    tensors["output_norm.weight"] = (shape, 8, content)
    file.write_bytes(encoded(metadata, tensors))
    with pytest.raises(ConfigError, match=r"'model.norm.weight' is a vector in Q8_0; only matrices are quantised"):
        TorchEngine(resolve_model(str(file)), num_blocks=1, num_threads=1)


def test_a_tokenizer_that_is_not_served_is_named(tmp_path: Path) -> None:
    source, file = write_checkpoint(tmp_path / "source"), tmp_path / "model.gguf"
    write_gguf(source, file)
    metadata, tensors = content_of(file)
    file.write_bytes(encoded({**metadata, "tokenizer.ggml.model": "bert"}, tensors))
    with pytest.raises(ConfigError, match="has a 'bert' tokenizer, which is not supported from GGUF; use a 'llama'"):
        resolve_model(str(file))
