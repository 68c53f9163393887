"""The tokenizer of a GGUF file, as Hugging Face's ``tokenizer.json`` and ``tokenizer_config.json``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from pdmesh.engine.gguf.splits import SPLITS, Split
from pdmesh.errors import ConfigError

#: Texts of tokens that end an answer, whatever their type in the file, as in llama.cpp.
_ENDS = (
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
    "<end_of_turn>", "<turn|>", "<|tool_response>", "<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>", "</s>",
    "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
)  # fmt: skip
#: Texts of tokens for filling in code, by the field that may name the token.
_FILLING = {
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>", "<PRE>",
                "\u2581<PRE>", "<|code_prefix|>", "<|prefix|>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>", "<SUF>",
                "\u2581<SUF>", "<|code_suffix|>", "<|suffix|>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>", "<MID>",
                "\u2581<MID>", "<|code_middle|>", "<|middle|>"),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}  # fmt: skip
#: Fields of filling tokens that end an answer: another file would follow.
_FILLING_ENDS = ("fim_pad", "fim_rep", "fim_sep")
#: Tokens of Phi-3 that keep the spaces after them. Its other special tokens remove them.
_KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
#: Types of tokens that merging never makes.
_UNMERGED = (_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE)
#: Kinds of tokenizers: of bytes, SentencePiece's, and one that lists the pairs which SentencePiece merges.
_KINDS = ("gpt2", "llama", "gemma4")
#: Longest token in characters: every place is tried to cut a token in two.
_MAX_TOKEN = 1024
#: SentencePiece's spelling of a space.
_SPACE = "\u2581"


class _Fields:
    """A file's tokenizer fields. Types of end and filling tokens are corrected by their texts."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self._metadata = metadata
        self.where = where
        tokens, types = self.of("tokens"), self.of("token_type")
        if not tokens or not _are_strings(tokens):
            raise self.damaged("the tokens")
        self.tokens: list[str] = [token or f"[EMPTY_{number}]" for number, token in enumerate(tokens)]
        self.numbers = {token: number for number, token in enumerate(self.tokens)}
        if len(self.numbers) != len(self.tokens):
            raise self.damaged("the tokens")
        if types is None:
            types = [_NORMAL] * len(tokens)
        if not isinstance(types, list) or len(types) < len(tokens):
            raise self.damaged("the types of tokens")
        self.types: list[int] = types[: len(tokens)]
        self._filling = {field: self._filling_token(field) for field in _FILLING}
        self.ends = self._find_ends()
        for number in (*self._by_text(_ENDS), *self._filling.values()):
            if number is not None and self.types[number] != _USER_DEFINED and number not in self._no_ends:
                self.types[number] = _CONTROL

    def of(self, name: str) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}")

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.of(name)
        return value if isinstance(value, bool) else default

    def of_type(self, token_type: int) -> list[str]:
        """Return the tokens of a type."""
        return [token for token, each in zip(self.tokens, self.types, strict=True) if each == token_type]

    def token(self, name: str) -> str | None:
        """Return the token of a purpose, such as ``bos_token``, or None."""
        number = self._number(f"{name}_id")
        return None if number is None else self.tokens[number]

    def _number(self, name: str) -> int | None:
        number = self.of(name)
        return number if isinstance(number, int) and 0 <= number < len(self.tokens) else None

    def _by_text(self, texts: Iterable[str]) -> list[int]:
        return [self.numbers[text] for text in texts if text in self.numbers]

    def _filling_token(self, field: str) -> int | None:
        """Return the token of a filling mark: the file's choice, else the first with a usual text; None without one."""
        named = self._number(f"{field}_token_id")
        return named if named is not None else min(self._by_text(_FILLING[field]), default=None)

    def _find_ends(self) -> list[int]:
        """Return the tokens that end an answer. Tokens that the file names come first."""
        ends = [self._number(f"{name}_token_id") for name in ("eos", "eot", "eom")]
        ends += sorted(self._by_text(_ENDS))
        ends += [self._filling[field] for field in _FILLING_ENDS]
        self._no_ends: set[int] = set()
        if self._ends_messages_apart():
            self._no_ends.update(self._by_text(["<|end|>"]))
        if not {"<|tool_response>", "<|plamo:eos|>"}.isdisjoint(self.numbers):
            self._no_ends.update(self._by_text(["</s>"]))  # an ordinary word in these vocabularies
        return list(dict.fromkeys(number for number in ends if number is not None and number not in self._no_ends))

    def _ends_messages_apart(self) -> bool:
        """Return whether an answer has several messages that end with another token than the answer, as in gpt-oss."""
        has_call = "<|call|>" in self.numbers or "<|calls|>" in self.numbers
        return has_call and not {"<|return|>", "<|flush|>"}.isdisjoint(self.numbers)

    def damaged(self, what: str) -> ConfigError:
        return ConfigError(f"{self.where}: {what} of its tokenizer are missing or damaged; download it again")


def write_tokenizer(directory: Path, metadata: Mapping[str, Any], where: str) -> None:
    """Write both files. Raise ConfigError for a kind of tokenizer that is not served, or a damaged one."""
    kind = metadata.get("tokenizer.ggml.model")
    split = metadata.get("tokenizer.ggml.pre") or "default"
    if kind not in _KINDS or (kind == "gpt2" and (not isinstance(split, str) or split not in SPLITS)):
        what = (
            f"a {str(kind)[:64]!r} tokenizer"
            if kind not in _KINDS
            else f"a tokenizer that splits texts by {str(split)[:64]!r}"
        )
        served = ", ".join(SPLITS)
        raise ConfigError(
            f"{where} has {what}, which is not supported from GGUF; use a 'llama' or 'gemma4' tokenizer, a 'gpt2' "
            f"tokenizer that splits by one of {served}, or the model's safetensors directory"
        )
    fields = _Fields(metadata, where)
    try:
        tokenizer = _byte_level(fields, SPLITS[split]) if kind == "gpt2" else _sentence_piece(fields)
    except ConfigError:
        raise
    except Exception as error:  # tokenizers has no error class of its own
        reason = " ".join(str(error).split())
        raise ConfigError(f"{where}: its tokenizer is damaged: {reason}; download it again") from error
    drops_spaces = metadata.get("general.architecture") == "phi3" and kind == "llama"
    tokenizer.add_special_tokens(  # a single call, because each call scans all added tokens
        [
            AddedToken(token, special=True, normalized=False, rstrip=drops_spaces and token not in _KEEPS_SPACES)
            for token in (*fields.of_type(_UNKNOWN), *fields.of_type(_CONTROL))
        ]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in fields.of_type(_USER_DEFINED)])
    tokenizer.save(str(directory / "tokenizer.json"))
    specials = {name: fields.token(name) for name in ("bos_token", "eos_token")}
    config = {
        **{name: token for name, token in specials.items() if token is not None},
        **_templates(metadata),
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def _templates(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat template as in ``tokenizer_config.json``: a list if there are several named ones."""
    field = "tokenizer.chat_template"
    named = {"default": metadata.get(field)} | {
        name.removeprefix(f"{field}."): template for name, template in metadata.items() if name.startswith(f"{field}.")
    }
    templates = [{"name": name, "template": template} for name, template in named.items() if isinstance(template, str)]
    if not templates:
        return {}
    return {"chat_template": templates if len(templates) > 1 else templates[0]["template"]}


def end_tokens(metadata: Mapping[str, Any], where: str) -> list[int]:
    """Return the tokens that end an answer. Raise ConfigError for a damaged tokenizer."""
    return _Fields(metadata, where).ends


def _byte_level(fields: _Fields, split: Split) -> Tokenizer:
    """Return a BPE tokenizer of bytes, as GPT-2's."""
    model = BPE(vocab=fields.numbers, merges=_listed_merges(fields), ignore_merges=split.keeps_words)
    tokenizer = Tokenizer(model)
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if split.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    frame = _frame(fields, begins=split.begins)
    if frame is not None:
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), frame])
    return tokenizer


def _listed_merges(fields: _Fields) -> list[tuple[str, str]]:
    """Return the pairs that the file lists. Raise ConfigError if they are not of tokens."""
    merges = fields.of("merges")
    if not _are_strings(merges):
        raise fields.damaged("the merges")
    known = fields.numbers.keys()
    pairs = [(pair[0], pair[1]) for merge in merges if len(pair := merge.split(" ", 1)) == 2]
    if not all(known >= {first, second, first + second} for first, second in pairs):
        raise fields.damaged("the merges")  # `tokenizers` would panic
    return pairs


def _sentence_piece(fields: _Fields) -> Tokenizer:
    """Return SentencePiece's BPE tokenizer, as of Llama 2 and Mistral, or Gemma 4's.

    The pair whose result has the highest score is merged first; Gemma 4 lists the pairs. Text that no token spells
    becomes bytes. A space is put before the text and after special tokens, but not in Gemma 4.
    """
    lists_pairs = fields.of("model") == "gemma4"
    model = BPE(
        vocab=fields.numbers,
        merges=_listed_merges(fields) if lists_pairs else _merges(fields),
        unk_token=fields.token("unknown_token") or fields.tokens[0],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    spaces: list[Any] = [normalizers.Replace(" ", _SPACE)]
    parts: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.flag("add_space_prefix", default=not lists_pairs):
        spaces.insert(0, normalizers.Prepend(_SPACE))
        parts.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(parts)
    if (frame := _frame(fields, begins=True, always=lists_pairs)) is not None:
        tokenizer.post_processor = frame
    return tokenizer


def _merges(fields: _Fields) -> list[tuple[str, str]]:
    """Return every division of a token into two others: the highest score first, then the longest first part.

    SentencePiece merges from left to right where scores are equal. The longest first part is the closest equivalent.
    """
    tokens, types, scores = fields.tokens, fields.types, fields.of("scores") or [0.0] * len(fields.tokens)
    if (
        not isinstance(scores, list)
        or len(scores) != len(tokens)
        or not all(isinstance(score, float | int) for score in scores)
    ):
        raise fields.damaged("the scores")
    if max(map(len, tokens)) > _MAX_TOKEN:
        raise fields.damaged("some tokens")
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


def _frame(fields: _Fields, *, begins: bool, always: bool = False) -> processors.TemplateProcessing | None:
    """Return the processor that adds the tokens before and after a text, or None if none are added.

    The file's flags decide. Without a flag, ``begins`` decides about the first token, and no last one is added. With
    ``always``, the first token is added whatever the flag, as in llama.cpp: flags of some files are wrong.
    """
    first = fields.token("bos_token") if always or fields.flag("add_bos_token", default=begins) else None
    last = fields.token("eos_token") if fields.flag("add_eos_token", default=False) else None
    if first is None and last is None:
        return None

    def framed(text: str, number: int) -> list[str]:
        tokens = (first, text, last)
        return [f"{token}:{number}" for token in tokens if token is not None]

    return processors.TemplateProcessing(
        single=framed("$A", 0),
        pair=[*framed("$A", 0), *framed("$B", 1)],
        special_tokens=[(token, fields.numbers[token]) for token in {first, last} if token is not None],
    )


def _are_strings(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)
