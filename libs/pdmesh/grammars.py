"""Grammars that constrain answers, compiled by llguidance for a model's tokenizer.

A *grammar* is a string of llguidance's own: JSON that names a JSON schema, a regular expression or a Lark grammar.
Gateways make and check the grammar for a client's request; engines obey it. A matcher's state follows from the output
tokens alone, so a request that moves or restarts carries no matcher state.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from pdmesh.errors import ConfigError

#: Largest grammar that is accepted.
MAX_GRAMMAR_BYTES = 256 * 1024

#: Number of compiled grammars in the cache, which evicts the least recently used one.
MAX_KEPT = 64

#: Limits, a tenth of llguidance's defaults. An object of 5,000 optional properties compiled for 1.9 s and took 115 ms a
#: token before compilation failed (EPYC, 2026-11).
_MAX_GRAMMAR_SIZE, _STEP_MAX_ITEMS = 50_000, 5_000


class Grammars:
    """Compiler of grammars for the tokenizer in ``directory``, whose model has logits for ``vocab_size`` tokens.

    The tokenizer is read with the first grammar (0.5 s and 70 MB for 150,000 tokens). May be used by several threads.
    """

    def __init__(self, directory: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._path = directory / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._lock, self._loading = Lock(), Lock()
        self._tokenizer: LLTokenizer | None = None
        self._special_ids: dict[str, int] = {}
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def problem(self, grammar: str) -> str | None:
        """Return the fault of a grammar, in a sentence; None if it can be obeyed. Blocking."""
        matcher = self.matcher(grammar)
        if not matcher.is_error():
            matcher.compute_bitmask()  # some are found too complex only now
        return matcher.get_error().partition("\n")[0] if matcher.is_error() else None

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a matcher that has taken no token. Blocking; raises ConfigError without a tokenizer.

        The matcher of an impossible grammar has an error (`LLMatcher.is_error`).
        """
        with self._lock:
            found = self._compiled.get(grammar)
        if found is None:  # compiling may take long, so without the lock
            with self._loading:
                tokenizer = self._loaded()
            grammar_by_ids = _with_special_ids(grammar, self._special_ids)
            found = LLMatcher(tokenizer, grammar_by_ids, log_level=0, limits=_limits())
        with self._lock:
            self._compiled[grammar] = found
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > MAX_KEPT:
                self._compiled.popitem(last=False)
            return found.deep_copy()

    def token_bytes(self) -> list[bytes]:
        """Return the bytes of each token. Special tokens, which no text contains, have none. Blocking."""
        with self._loading:
            tokenizer = self._loaded()
        special_ids = set(self._special_ids.values())
        return [
            b"" if token_id in special_ids else tokenizer.decode_bytes([token_id])
            for token_id in range(self._vocab_size)
        ]

    def _loaded(self) -> LLTokenizer:
        if self._tokenizer is None:
            if not self._path.is_file():
                raise ConfigError(
                    f"{self._path.parent} has no tokenizer.json: save the checkpoint with its fast tokenizer"
                )
            text, self._special_ids = _without_special_texts(self._path.read_bytes())
            # Any end token is enough, or any special token: engines know the real ends.
            end_id = next(iter((*self._eos_token_ids, *self._special_ids.values())), None)
            self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=end_id)
        return self._tokenizer


#: Parts of a Lark grammar: a special token by name, or a string, pattern or comment, which may contain such a text.
#: Unclosed ones match to the end, too. Otherwise the search behind each of their characters takes quadratic time.
_NAMED = re.compile(
    r'"(?:\\.|[^"\\])*+(?:"|\\?\Z)|/(?:\\.|[^/\\\n])++(?:/|\\?$)|//[^\n]*|(?P<name><[^\s<>"/]++>)', re.MULTILINE
)


def _with_special_ids(grammar: str, ids: Mapping[str, int]) -> str:
    """Return a grammar with the numbers of special tokens in place of their names."""
    if "<" not in grammar:
        return grammar
    if not grammar.lstrip().startswith("{"):
        return _NAMED.sub(lambda found: f"<[{ids[name]}]>" if (name := found["name"]) in ids else found[0], grammar)
    content: dict[str, Any] = json.loads(grammar)
    for part in content.get("grammars", ()):
        if isinstance(lark := part.get("lark_grammar"), str):
            part["lark_grammar"] = _with_special_ids(lark, ids)
    return json.dumps(content)


def _without_special_texts(tokenizer_json: bytes) -> tuple[str, dict[str, int]]:
    """Return ``tokenizer.json`` with new names of special tokens that no text contains, and their ids by former name.

    llguidance tokenizes the texts that a grammar forces. A text that spells a special token is no such token.
    """
    content: dict[str, Any] = msgspec.json.decode(tokenizer_json)
    prefix = f"{secrets.token_hex(16)}:"
    ids: dict[str, int] = {}
    for token in content.get("added_tokens", ()):
        text = token["content"]
        if token["special"] or (text.startswith("<") and text.endswith(">")):
            ids[text] = token["id"]
            token |= {"content": prefix + text, "special": True}
    model = content["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        renamed = ids.keys() & vocabulary.keys()
        for text in renamed:
            vocabulary[prefix + text] = vocabulary.pop(text)
        if renamed:
            pairs = ((each, each if isinstance(each, list) else each.split(" ", 1)) for each in model["merges"])
            model["merges"] = [each for each, pair in pairs if not ids.keys() & {*pair, "".join(pair)}]
    else:  # a unigram model has pieces with scores
        model["vocab"] = [[prefix + piece if piece in ids else piece, score] for piece, score in vocabulary]
    if model.get("unk_token") in ids:
        model["unk_token"] = prefix + model["unk_token"]
    return msgspec.json.encode(content).decode(), ids


def schema_problem(schema: Any) -> str | None:
    """Return llguidance's objection to a JSON schema, without a tokenizer; None if it can be obeyed. Blocking."""
    try:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    except ValueError as error:
        return str(error)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=_limits())
    return messages[0] if is_error else None


def is_json(grammar: str) -> bool:
    """Return whether answers under a grammar are JSON, or contain JSON."""
    return re.search(r'"json_schema":\s*\{|%json', grammar) is not None


def _limits() -> LLParserLimits:
    return LLParserLimits(max_grammar_size=_MAX_GRAMMAR_SIZE, step_max_items=_STEP_MAX_ITEMS)
