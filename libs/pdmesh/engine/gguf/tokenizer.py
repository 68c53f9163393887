"""The tokenizer of a GGUF file, as Hugging Face's ``tokenizer.json`` and ``tokenizer_config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from pdmesh.errors import ConfigError

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: How a text is split before it is tokenized, by GGUF's names of it. None: as GPT-2 did.
_SPLITS: Mapping[str, str | None] = {
    "llama-bpe": _LLAMA3,
    "qwen2": _LLAMA3.replace("{1,3}", ""),
    "gpt-2": None,
    "default": None,
    "smollm": None,
}
_DIGITS_APART = ("smollm",)
_COMPOSED = ("qwen2",)  # NFC first
_BEGINS = ("llama-bpe",)  # texts begin with a token of their own, unless the file says otherwise
_CONTROL, _USER_DEFINED = 3, 4


def write_tokenizer(directory: Path, metadata: Mapping[str, Any], where: str) -> None:
    """Write both files. Raises ConfigError for a kind that is not served, or a damaged one."""

    def field(name: str) -> Any:
        return metadata.get(f"tokenizer.ggml.{name}")

    kind, split = field("model"), field("pre") or "default"
    if kind != "gpt2" or not isinstance(split, str) or split not in _SPLITS:
        what = (
            f"a {str(kind)[:64]!r} tokenizer"
            if kind != "gpt2"
            else f"a tokenizer that splits texts by {str(split)[:64]!r}"
        )
        served = ", ".join(_SPLITS)
        raise ConfigError(
            f"{where} has {what}, which is not served from GGUF; served are 'gpt2' tokenizers that split by {served}, "
            "or give the model's safetensors directory"
        )
    tokens, merges, types = field("tokens"), field("merges"), field("token_type")
    if not _are_strings(tokens) or not _are_strings(merges) or len(set(tokens)) != len(tokens):
        raise ConfigError(f"{where}: the tokens or merges of its tokenizer are missing or damaged; download it again")
    types = types if isinstance(types, list) and len(types) == len(tokens) else [1] * len(tokens)
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    try:
        model = BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=[(pair[0], pair[1]) for pair in pairs if len(pair) == 2],
            ignore_merges=split in _BEGINS,
        )
    except Exception as error:  # tokenizers has no class of its own for it
        raise ConfigError(f"{where}: its tokenizer is damaged: {error}; download it again") from error
    tokenizer = Tokenizer(model)
    pattern = _SPLITS[split]
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split in _DIGITS_APART else []
    if pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if split in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    for token, token_type in zip(tokens, types, strict=True):
        if token_type == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    specials = {name: _token(tokens, field(f"{name}_id")) for name in ("bos_token", "eos_token")}
    begins = field("add_bos_token")
    first = specials["bos_token"]
    if first is not None and (begins if isinstance(begins, bool) else split in _BEGINS):
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single=f"{first}:0 $A:0",
                    pair=f"{first}:0 $A:0 {first}:1 $B:1",
                    special_tokens=[(first, tokens.index(first))],
                ),
            ]
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    template = metadata.get("tokenizer.chat_template")
    config = {
        **{name: token for name, token in specials.items() if token is not None},
        **({"chat_template": template} if isinstance(template, str) else {}),
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def _are_strings(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _token(tokens: list[str], number: object) -> str | None:
    return tokens[number] if isinstance(number, int) and 0 <= number < len(tokens) else None
