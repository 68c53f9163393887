"""Fields that no request type of ours has: which may be passed over, and which must be refused.

OpenAI's clients, and those of other servers, add fields every month. Most of them ask for bookkeeping: an answer is the
same without. What would change the answer, or its shape, is refused by name rather than ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pdmesh.errors import RequestRejected

#: The response header that names the fields that were passed over.
HEADER = b"x-ignored-fields"
MAX_NAMED = 16

#: More unknown fields than this are no client's next version.
MAX_UNKNOWN = 64

_PRINTABLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")

_STRUCTURED = "Use `structured_outputs`."
_TEMPLATE = "Use `chat_template_kwargs`."
_LENGTH = "Use `max_tokens`."

#: What to use instead, by field.
_INSTEAD = {
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex", "structural_tag"), _STRUCTURED),
    **dict.fromkeys(("ebnf", "regex", "grammar", "json_schema", "guideline"), _STRUCTURED),
    **dict.fromkeys(("enable_thinking", "thinking", "think", "thinking_budget"), _TEMPLATE),
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens", "max_length", "max_output_tokens"), _LENGTH),
    "stop_sequences": "Use `stop`.",
    "repeat_penalty": "Use `repetition_penalty`.",
    "functions": "Use `tools`.",
    "function_call": "Use `tool_choice`.",
}

#: Fields that change an answer, of OpenAI's API and other servers', with the values that ask for nothing. `null` never
#: asks for anything.
REFUSED: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "audio": (),
    "background": (False,),
    "conversation": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "suffix": ("",),
    "web_search_options": (),
    # vLLM
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "logits_processors": ([],),
    "prompt_embeds": (),
    "repetition_detection": (),
    "structural_tag": (),
    "thinking_token_budget": (),
    "use_beam_search": (False,),
    # SGLang
    "custom_logit_processor": (),
    "ebnf": (),
    "input_ids": (),
    "json_schema": (),
    "lora_path": (),
    "no_stop_trim": (False,),
    "regex": (),
    "return_hidden_states": (False,),
    "separate_reasoning": (True,),
    "session_params": (),
    "stop_regex": ([], ""),
    "stream_reasoning": (True,),
    # llama.cpp, Ollama, TGI and kin
    "banned_strings": ([],),
    "decoder_input_details": (False,),
    "do_sample": (True,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "embedding_bias": (),
    "enable_thinking": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "grammar": ("",),
    "guideline": (),
    "lora": ([],),
    "max_length": (),
    "max_new_tokens": (),
    "mirostat": (0,),
    "n_predict": (-1,),
    "n_probs": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "num_predict": (-1,),
    "num_return_sequences": (1,),
    "options": ({},),
    "raw": (False,),
    "repeat_penalty": (1,),
    "samplers": (),
    "smoothing_factor": (0,),
    "tfs": (1,),
    "tfs_z": (1,),
    "think": (),
    "thinking": (),
    "thinking_budget": (),
    "top_a": (0,),
    "top_n_sigma": (-1, 0),
    "typical": (1,),
    "typical_p": (1,),
    "watermark": (False,),
    "xtc_probability": (0,),
    # Of an endpoint of ours, sent to another.
    "add_generation_prompt": (True,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "input": (),
    "instructions": (),
    "max_output_tokens": (),
    "messages": (),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": (),
    "stop_sequences": ([],),
    "system": (),
    "text": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}


def without_unknown(fields: Mapping[str, Any], known: Iterable[str], *, strict: bool) -> dict[str, Any]:
    """The fields of ``known`` names. Raises RequestRejected for another one that asks for something that would change
    the answer, that looks like a misspelt one of ours or, if ``strict``, that asks for anything.
    """
    names = frozenset(known)
    asked = {name: value for name, value in fields.items() if name not in names and value is not None}
    if len(asked) > MAX_UNKNOWN:
        raise unrecognized(next(iter(asked)), f" {len(asked)} fields are unknown.")
    for name, value in asked.items():
        if name in REFUSED:
            if value not in REFUSED[name]:
                raise _unsupported(name)
        elif strict:
            raise unrecognized(name)
        elif (meant := _likely_meant(name, names)) is not None:
            raise unrecognized(name, f" Did you mean {meant}?")
    return {name: value for name, value in fields.items() if name in names}


def ignored_names(fields: Mapping[str, Any], known: Mapping[str, Any]) -> tuple[str, ...]:
    """What of ``fields`` is not in ``known`` and asked for something."""
    return tuple(
        name for name, value in fields.items() if value is not None and name not in known and name not in REFUSED
    )


def header_value(names: Iterable[str]) -> bytes:
    """Names as `HEADER` shows them; those that a header cannot hold are counted only."""
    every = list(names)
    shown = [name for name in every[:MAX_NAMED] if _PRINTABLE.fullmatch(name)]
    rest = [f"{len(every) - len(shown)} more"] if len(shown) < len(every) else []
    return ", ".join(shown + rest).encode()


def unrecognized(name: str, hint: str = "") -> RequestRejected:
    """A 400 in OpenAI's words, and what may be meant."""
    name = name[:100]
    message = f"Unrecognized request argument supplied: {name}{'.' if hint else ''}{hint}"
    return RequestRejected(message, param=name, code="unknown_parameter")


def _unsupported(name: str) -> RequestRejected:
    instead = f" {_INSTEAD[name]}" if name in _INSTEAD else ""
    return RequestRejected(f"`{name}` is not supported by this server.{instead}", param=name, code="unsupported_value")


def _likely_meant(name: str, known: frozenset[str]) -> str | None:
    """The known field that ``name`` is but for case, dashes or one letter."""
    key = _key(name)
    if not 4 <= len(key) <= 40:
        return None
    return next((f"`{each}`" for each in sorted(known) if _is_one_edit(key, _key(each))), None)


def _key(name: str) -> str:
    return name[:100].lower().replace("_", "").replace("-", "")


def _is_one_edit(one: str, other: str) -> bool:
    """Whether they are equal, or one letter is added, left out or another one."""
    if len(one) < len(other):
        one, other = other, one
    if len(one) - len(other) > 1:
        return False
    same = next((i for i, letter in enumerate(other) if letter != one[i]), len(other))
    return one[same + 1 :] == (other[same:] if len(one) > len(other) else other[same + 1 :])
