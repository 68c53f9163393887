"""A byte-level BPE tokenizer of any size from 272 up, with a ChatML template, made by rule instead of training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EOS_TOKEN = "<|im_end|>"
#: Their ids follow the 256 bytes'.
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", EOS_TOKEN)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

#: The same for conversations without tools; with tools, and their calls and results as Hermes and Qwen write them.
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n# Tools\n<tools>\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "</tools>\nA call is <tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}'
    "\n</tool_call><|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ 'user' if message['role'] == 'tool' else message['role'] }}\n"
    "{% if message['role'] == 'tool' %}<tool_response>\n{{ message['content'] }}\n</tool_response>"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% if message['content'] or not loop.first %}{{ '\n' }}{% endif %}<tool_call>\n"
    "{\"name\": {{ call['function']['name'] | tojson }}, "
    "\"arguments\": {{ call['function']['arguments'] | tojson }}}"
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

#: Ġ is the space of the byte-level alphabet.
_COMMON_MERGES = "Ġ t|h e|i n|Ġ a|e r|o n|Ġt he|r e|a t|Ġ s|e n|Ġ w|o u"
_LETTERS = "etaoinshrdlcumwfgypbvkjxqz"


def write_tokenizer(directory: Path, *, vocab_size: int, model_max_length: int, template: str = CHAT_TEMPLATE) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``. The vocabulary has exactly ``vocab_size`` entries."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: token_id for token_id, token in enumerate([*alphabet, *SPECIAL_TOKENS])}
    merges: list[tuple[str, str]] = []
    for left, right in islice(_merges(), vocab_size - len(vocab)):
        merges.append((left, right))
        vocab[left + right] = len(vocab)
    if len(vocab) != vocab_size:
        raise ValueError(f"a vocabulary of {vocab_size} cannot be made: {len(vocab)} is the nearest")

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model_max_length,
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": EOS_TOKEN,
        "pad_token": SPECIAL_TOKENS[0],
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def add_special_tokens(directory: Path, *tokens: str) -> Tokenizer:
    """Add special tokens to the tokenizer in a folder, and return it."""
    path = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    tokenizer.save(path)
    return tokenizer


def _merges() -> Iterator[tuple[str, str]]:
    """Distinct merges whose parts exist before them: some common ones, then letter pairs, pairs with a letter and
    pairs of pairs.
    """
    made: set[str] = set()

    def candidates() -> Iterator[tuple[str, str]]:
        for merge in _COMMON_MERGES.split("|"):
            left, right = merge.split(" ")
            yield left, right
        pairs = [(left, right) for left in _LETTERS for right in _LETTERS]
        yield from pairs
        for left, right in pairs:
            yield "Ġ", left + right
        for left, right in pairs:
            for letter in _LETTERS:
                yield left + right, letter
        for first, second in pairs:
            for third, fourth in pairs:
                yield first + second, third + fourth

    for left, right in candidates():
        if left + right not in made:
            made.add(left + right)
            yield left, right
