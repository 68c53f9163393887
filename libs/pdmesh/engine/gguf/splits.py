"""Patterns by which byte-level tokenizers split a text before they merge bytes, by GGUF's names. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
#: Words may contain combining marks.
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+")
#: Letters of words that begin with capitals.
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
_DIGIT, _DIGITS = r"\p{N}", r"\p{N}{1,3}"
#: Character classes of DeepSeek's first models: letters (Latin, Greek, Cyrillic and others), symbols with their wide
#: forms, and CJK.
_LETTERS = (
    r"\s?[A-Za-z\x{b5}\x{c0}-\x{d6}\x{d8}-\x{f6}\x{f8}-\x{1ba}\x{1bc}-\x{1bf}\x{1c4}-\x{293}\x{295}-\x{2af}"
    r"\x{370}-\x{373}\x{376}\x{377}\x{37b}-\x{37d}\x{37f}\x{386}\x{388}-\x{38a}\x{38c}\x{38e}-\x{3a1}\x{3a3}-"
    r"\x{3f5}\x{3f7}-\x{481}\x{48a}-\x{52f}\x{531}-\x{556}\x{10a0}-\x{10c5}\x{13a0}-\x{13f5}\x{13f8}-\x{13fd}"
    r"\x{1c90}-\x{1cba}\x{1cbd}-\x{1cbf}\x{1d00}-\x{1d2b}\x{1d6b}-\x{1d77}\x{1d79}-\x{1d9a}\x{1e00}-\x{1f15}"
    r"\x{1f18}-\x{1f1d}\x{1f20}-\x{1f45}\x{1f48}-\x{1f4d}\x{1f50}-\x{1f57}\x{1f59}\x{1f5b}\x{1f5d}\x{1f5f}-"
    r"\x{1f7d}\x{1f80}-\x{1fb4}\x{1fb6}-\x{1fbc}\x{1fbe}\x{1fc2}-\x{1fc4}\x{1fc6}-\x{1fcc}\x{1fd0}-\x{1fd3}"
    r"\x{1fd6}-\x{1fdb}\x{1fe0}-\x{1fec}\x{1ff2}-\x{1ff4}\x{1ff6}-\x{1ffc}\x{2102}\x{2107}\x{210a}-\x{2113}"
    r"\x{2115}\x{2119}-\x{211d}\x{2124}\x{2126}\x{2128}\x{212a}-\x{212d}\x{212f}-\x{2134}\x{2139}\x{213c}-\x{213f}"
    r"\x{2145}-\x{2149}\x{214e}\x{2183}\x{2184}\x{2c00}-\x{2c7b}\x{2c7e}-\x{2ce4}\x{2ceb}-\x{2cee}\x{2cf2}\x{2cf3}"
    r"\x{a640}-\x{a66d}\x{a680}-\x{a69b}\x{a722}-\x{a76f}\x{a771}-\x{a787}\x{a78b}-\x{a78e}\x{ab70}-\x{abbf}"
    r"\x{fb00}-\x{fb06}\x{fb13}-\x{fb17}\x{ff21}-\x{ff3a}\x{ff41}-\x{ff5a}\x{10400}-\x{1044f}\x{104b0}-\x{104d3}"
    r"\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}\x{118a0}-\x{118df}\x{1e900}-\x{1e943}]+"
)
_SYMBOLS = r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+"
_CJK = r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+"
_DEEPSEEK_V3 = (
    _DIGITS,
    r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_PUNCTUATED = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{ff0c}\x{3001}\x{964}\x{6d4}\x{60c})]+"


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Division of a text into words.

    Each of ``patterns`` splits the parts that the one before left whole. ``begins``: a text begins with a special
    token, unless the file says otherwise. ``keeps_words``: a word that is a token is taken whole, without merging.
    ``composes``: letters and accents are composed first (NFC).
    """

    patterns: tuple[str, ...]
    begins: bool = False
    keeps_words: bool = False
    composes: bool = False


def _alike(names: str, *patterns: str, begins: bool = False, keeps_words: bool = False) -> dict[str, Split]:
    split = Split(patterns=patterns, begins=begins, keeps_words=keeps_words)
    return dict.fromkeys(names.split(), split)


#: Splits by the value of ``tokenizer.ggml.pre``. The patterns are llama.cpp's.
SPLITS: Mapping[str, Split] = {
    **_alike(
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2", _LLAMA3, begins=True, keeps_words=True
    ),
    **_alike("dbrx smaug-bpe chatglm-bpe", _LLAMA3),
    **_alike("glm4 glm5", _LLAMA3, keeps_words=True),
    **_alike("minicpm5", _DIGITS, _LLAMA3.replace("{1,3}", "+"), keeps_words=True),
    **_alike("kormo f2llmv2 stablelm2 megrez hunyuan solar-open grok-2", _QWEN2),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), Split(patterns=(_QWEN2,), composes=True)),
    **_alike("qwen35", _QWEN35),
    **_alike("ufakzeka", _QWEN2.removeprefix(f"{_CONTRACTIONS}|")),
    **_alike("laguna", r"[^\n]+|[\n]+", _QWEN2),
    **_alike("seed-coder", _QWEN2.replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+")),
    **_alike(
        "bailingmoe bailingmoe2 llada-moe",
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    **_alike("gpt-4o llama4 kanana2 talkie minimax-m2", _GPT4O),
    **_alike("tekken", _TEKKEN, begins=True, keeps_words=True),
    **_alike("deepseek-llm", r"[\r\n]", _LETTERS, _SYMBOLS, r"\s+$", _CJK, r"\p{N}+"),
    **_alike("deepseek-coder", r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT),
    **_alike("deepseek-v3 hunyuan-dense joyai-llm hy_v4", *_DEEPSEEK_V3),
    **_alike("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", _DIGIT, _GPT2),
    **_alike(
        "gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo jais trillion granite-docling exaone4 jina-es jina-de jina-v2-es "
        "jina-v2-de",
        _GPT2,
    ),
    **_alike("poro-chat bloom gpt3-finnish", _PUNCTUATED),
    **_alike("viking", _PUNCTUATED, _DIGIT),
    **_alike("falcon", r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"),
    **_alike("default", r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
