"""The tokenizer of a GGUF file, as Hugging Face's ``tokenizer.json`` and ``tokenizer_config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from pdmesh.errors import ConfigError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
#: Words in which capitals come first.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    _TEKKEN.replace(f"{_LOWER}+|", f"{_LOWER}+{_CONTRACTIONS}?|")
    .replace(f"{_LOWER}*|", f"{_LOWER}*{_CONTRACTIONS}?|")
    .replace(r"|\p{N}|", r"|\p{N}{1,3}|")
)
#: How a text is split before it is tokenized, by GGUF's names of it. None: as GPT-2 did.
_SPLITS: Mapping[str, str | None] = {
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "dbrx": _LLAMA3,
    "glm4": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "gpt-4o": _GPT4O,
    "tekken": _TEKKEN,
    "gpt-2": None,
    "olmo": None,
    "default": None,
    "smollm": None,
    "starcoder": None,
    "refact": None,
}
_DIGITS_APART = ("smollm", "starcoder", "refact")
_COMPOSED = ("qwen2", "deepseek-r1-qwen")  # NFC first
_BEGINS = ("llama-bpe", "falcon3", "pixtral", "tekken")  # texts begin with a token, unless the file says otherwise
_KEEPS_WORDS = (*_BEGINS, "glm4")  # a word that is a token is not made by merging
#: What ends an answer is known by its text: a file names one token only.
_ENDS = frozenset(
    {
        "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<|return|>",
        "<|call|>", "<end_of_turn>", "<eos>", "</s>", "<|observation|>",
    }
)  # fmt: skip
#: Tokens of Phi-3 that keep the spaces behind them; others with a purpose do not.
_KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6
_UNMERGED = (_CONTROL, _USER_DEFINED, _BYTE)  # what text is not merged into
_MAX_TOKEN = 1024  # characters: each place where a token may be cut is tried
_SPACE = "\u2581"  # how SentencePiece spells a space


class _Fields:
    """What a file says of its tokenizer."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self._metadata = metadata
        self.where = where
        tokens, types = self.of("tokens"), self.of("token_type")
        if not tokens or not _are_strings(tokens) or len(set(tokens)) != len(tokens):
            raise self.damaged("the tokens")
        self.tokens: list[str] = tokens
        self.types = types if isinstance(types, list) and len(types) == len(tokens) else [1] * len(tokens)

    def of(self, name: str) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}")

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.of(name)
        return value if isinstance(value, bool) else default

    def of_type(self, token_type: int) -> list[str]:
        """The tokens of a type."""
        return [token for token, each in zip(self.tokens, self.types, strict=True) if each == token_type]

    def token(self, name: str) -> str | None:
        """The token of a purpose."""
        number = self.of(f"{name}_id")
        return self.tokens[number] if isinstance(number, int) and 0 <= number < len(self.tokens) else None

    def damaged(self, what: str) -> ConfigError:
        return ConfigError(f"{self.where}: {what} of its tokenizer are missing or damaged; download it again")


def write_tokenizer(directory: Path, metadata: Mapping[str, Any], where: str) -> None:
    """Write both files. Raises ConfigError for a kind that is not served, or a damaged one."""
    kind = metadata.get("tokenizer.ggml.model")
    split = metadata.get("tokenizer.ggml.pre") or "default"
    if kind not in ("gpt2", "llama") or (kind == "gpt2" and (not isinstance(split, str) or split not in _SPLITS)):
        what = (
            f"a {str(kind)[:64]!r} tokenizer"
            if kind not in ("gpt2", "llama")
            else f"a tokenizer that splits texts by {str(split)[:64]!r}"
        )
        served = ", ".join(_SPLITS)
        raise ConfigError(
            f"{where} has {what}, which is not served from GGUF; served are 'llama' tokenizers, and 'gpt2' ones that "
            f"split by {served}, or give the model's safetensors directory"
        )
    fields = _Fields(metadata, where)
    try:
        tokenizer = _sentence_piece(fields) if kind == "llama" else _byte_level(fields, split)
    except ConfigError:
        raise
    except Exception as error:  # tokenizers has no class of its own for it
        reason = " ".join(str(error).split())
        raise ConfigError(f"{where}: its tokenizer is damaged: {reason}; download it again") from error
    drops_spaces = metadata.get("general.architecture") == "phi3" and kind == "llama"
    tokenizer.add_special_tokens(  # all at once: each call goes through those that are there
        [
            AddedToken(token, special=True, normalized=False, rstrip=drops_spaces and token not in _KEEPS_SPACES)
            for token in fields.of_type(_CONTROL)
        ]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in fields.of_type(_USER_DEFINED)])
    tokenizer.save(str(directory / "tokenizer.json"))
    specials = {name: fields.token(name) for name in ("bos_token", "eos_token")}
    template = metadata.get("tokenizer.chat_template")
    config = {
        **{name: token for name, token in specials.items() if token is not None},
        **({"chat_template": template} if isinstance(template, str) else {}),
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def end_tokens(metadata: Mapping[str, Any]) -> list[int]:
    """Tokens that end an answer."""
    numbers = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, list):
        ends = {
            token: number
            for number, (token, token_type) in enumerate(zip(tokens, types, strict=False))
            if token_type in (_CONTROL, _USER_DEFINED) and token in _ENDS
        }
        if "<|return|>" in ends:  # of gpt-oss: there, it ends a message of several
            ends.pop("<|end|>", None)
        numbers += ends.values()
    return list(dict.fromkeys(number for number in numbers if isinstance(number, int)))


def _byte_level(fields: _Fields, split: str) -> Tokenizer:
    """BPE of bytes, as GPT-2 had it."""
    merges = fields.of("merges")
    if not _are_strings(merges):
        raise fields.damaged("the merges")
    known = set(fields.tokens)
    pairs = [(pair[0], pair[1]) for merge in merges if len(pair := merge.split(" ", 1)) == 2]
    if not all(known.issuperset((first, second, first + second)) for first, second in pairs):
        raise fields.damaged("the merges")  # else `tokenizers` panics
    model = BPE(
        vocab={token: number for number, token in enumerate(fields.tokens)},
        merges=pairs,
        ignore_merges=split in _KEEPS_WORDS,
    )
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
    first = _first(fields, default=split in _BEGINS)
    if first is not None:
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), first])
    return tokenizer


def _sentence_piece(fields: _Fields) -> Tokenizer:
    """SentencePiece's BPE, of Llama 2 and Mistral: a pair is merged by the score of what it makes, highest first.

    What no token spells is bytes. Text begins with a space, also behind a token with a purpose of its own.
    """
    tokens, scores = fields.tokens, fields.of("scores")
    if (
        not isinstance(scores, list)
        or len(scores) != len(tokens)
        or not all(isinstance(score, float) for score in scores)
    ):
        raise fields.damaged("the scores")
    if max(map(len, tokens)) > _MAX_TOKEN:
        raise fields.damaged("some tokens")
    unknown = fields.token("unknown_token") or tokens[0]
    model = BPE(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=_merges(tokens, scores, fields.types),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    spaces: list[Any] = [normalizers.Replace(" ", _SPACE)]
    parts: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.flag("add_space_prefix", default=True):
        spaces.insert(0, normalizers.Prepend(_SPACE))
        parts.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(parts)
    if (first := _first(fields, default=True)) is not None:
        tokenizer.post_processor = first
    return tokenizer


def _merges(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Every way in which a token is made of two others: highest score first, then the longest beginning.

    SentencePiece goes from left to right where scores are equal; the longest beginning comes closest to that.
    """
    known = set(tokens)
    by_score = sorted(
        (number for number in range(len(tokens)) if types[number] not in _UNMERGED), key=lambda number: -scores[number]
    )
    return [
        (token[:cut], token[cut:])
        for token in map(tokens.__getitem__, by_score)
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in known and token[cut:] in known
    ]


def _first(fields: _Fields, *, default: bool) -> processors.TemplateProcessing | None:
    """What begins a text with a token of its own, if the file wants it."""
    first = fields.token("bos_token")
    if first is None or not fields.flag("add_bos_token", default=default):
        return None
    return processors.TemplateProcessing(
        single=f"{first}:0 $A:0",
        pair=f"{first}:0 $A:0 {first}:1 $B:1",
        special_tokens=[(first, fields.tokens.index(first))],
    )


def _are_strings(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)
