"""Conversion of a client's fields to `SamplingParams`: ranges, defaults, and lengths."""

from __future__ import annotations

import math
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdmesh.engine.files import ModelInfo
from pdmesh.errors import RequestRejected
from pdmesh.model import SamplingParams
from pdmesh_gateway.protocol.sampling_fields import SamplingFields

#: Limit of one request's stop strings: each costs a search per token.
MAX_STOPS = 64
MAX_STOP_CHARS = 4096
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
#: Limit of a field's wrong entries that an error names.
MAX_SHOWN = 8
MAX_ALLOWED_TOKEN_IDS = 1 << 16
MAX_LOGPROB_TOKEN_IDS = 128
#: vLLM's limit. OpenAI's own limits are 5 (completions) and 20 (chat).
MAX_LOGPROBS = 20

MAX_SEED = 2**63 - 1

#: Limits of a latency target. A smaller one could vanish in seconds; a target of more than a day is none.
MIN_TARGET_MS = 0.001
MAX_TARGET_MS = 86_400_000


def check_stream_options(fields: SamplingFields) -> None:
    """Raise RequestRejected if a request has options of streams and does not stream."""
    if fields.stream_options is not None and not fields.stream:
        raise invalid("stream_options", "`stream_options` is only allowed when `stream` is true.")


def number(
    name: str,
    value: float | None,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    above: float = -math.inf,
) -> None:
    """Check that ``value`` is None, or a finite number in ``[low, high]`` and greater than ``above``.

    Raises RequestRejected naming the field.
    """
    if value is None:
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise invalid(name, f"`{name}` must be a finite number, got {value}.")
    if value <= above:
        raise invalid(name, f"`{name}` must be greater than {_limit(above)}, got {_show(value)}.")
    if value < low:
        raise invalid(name, f"`{name}` must be at least {_limit(low)}, got {_show(value)}.")
    if value > high:
        raise invalid(name, f"`{name}` must be at most {_limit(high)}, got {_show(value)}.")


def target_s(name: str, given: float | str | None) -> float | None:
    """Return a latency target in seconds from milliseconds in a field or header; None without one.

    Raises RequestRejected naming the field.
    """
    if given is None:
        return None
    try:
        target_ms = float(given)
    except ValueError:
        raise invalid(name, f"`{name}` must be a number of milliseconds, got {str(given)[:40]!r}.") from None
    number(name, target_ms, low=MIN_TARGET_MS, high=MAX_TARGET_MS)
    return target_ms / 1e3


def invalid(name: str, message: str) -> RequestRejected:
    """Return the error (400) of a field's value, for the caller to raise."""
    return RequestRejected(message, param=name, code="invalid_value")


def _show(value: float) -> str:
    # Python refuses to print a very long integer.
    if isinstance(value, int) and abs(value) >= 2**64:
        return "a huge number"
    return str(value)


def _limit(value: float) -> str:
    """Return a limit as text, as short as possible; a whole number in full."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def stop_strings(fields: SamplingFields) -> tuple[str, ...]:
    """Return a request's stop strings, each once, in order.

    Raises RequestRejected if they are too many or too long in total, or if one is empty.
    """
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"`stop` has {len(stops)} strings; {MAX_STOPS} are allowed.")
    if sum(map(len, stops)) > MAX_STOP_CHARS:
        raise invalid("stop", f"`stop` is longer than {MAX_STOP_CHARS} characters in total.")
    if "" in stops:
        raise invalid("stop", "`stop` must not contain an empty string.")
    return tuple(dict.fromkeys(stops))


@dataclass(frozen=True, slots=True)
class Truncation:
    """Cut of prompts to ``num_tokens``, keeping the end or the beginning. -1 keeps as many tokens as fit."""

    num_tokens: int
    keeps_end: bool

    def cut(self, token_ids: Sequence[int], *, max_model_len: int) -> Sequence[int]:
        """Return the tokens that remain. Raise RequestRejected if ``num_tokens`` is out of range."""
        number = self.num_tokens
        if number < -1 or number == 0 or number > max_model_len:
            raise invalid(
                "truncate_prompt_tokens",
                f"`truncate_prompt_tokens` must be -1 or from 1 to {max_model_len}, got {_show(number)}.",
            )
        most = max_model_len - 1 if number == -1 else number
        return token_ids[-most:] if self.keeps_end else token_ids[:most]


def truncation_of(num_tokens: int | None, side: str | None) -> Truncation | None:
    """Return a request's truncation; None if prompts are not cut. Raise RequestRejected for an unknown ``side``."""
    if side not in (None, "left", "right"):
        raise invalid("truncation_side", f"`truncation_side` must be left or right, got {side[:40]!r}.")
    return None if num_tokens is None else Truncation(num_tokens, keeps_end=side != "right")


def cache_salt(salt: str | None) -> str:
    """Return the salt of a client's prompts, which share KV only with prompts of the same salt; empty without one.

    Raises RequestRejected if the given salt is empty.
    """
    if salt == "":
        raise invalid("cache_salt", "`cache_salt` must be a non-empty string if it is set.")
    return salt or ""


def num_choices(fields: SamplingFields, *, best_of: int | None, max_n: int) -> int:
    """Return the number of requested answers, 1 by default.

    Raises RequestRejected if ``n`` is not from 1 to ``max_n``, or if ``best_of`` is set and differs from ``n``.
    """
    number("n", fields.n, low=1, high=max_n)
    n = 1 if fields.n is None else fields.n
    if best_of is not None and best_of != n:
        raise invalid("best_of", "`best_of` must equal `n`: this server does not rank candidates.")
    return n


def sampling_params(
    fields: SamplingFields,
    info: ModelInfo,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    grammar: str = "",
    bad_token_sequences: tuple[tuple[int, ...], ...] = (),
) -> SamplingParams:
    """Check all ranges and fill in defaults: the client's value, else the checkpoint's, else OpenAI's.

    Without a seed a random one is drawn. Raises RequestRejected naming the field.
    """
    number("temperature", fields.temperature, low=0, high=2)
    number("top_p", fields.top_p, low=0, high=1)
    number("top_k", fields.top_k, low=-1, high=2**31 - 1)
    number("min_p", fields.min_p, low=0, high=1)
    number("repetition_penalty", fields.repetition_penalty, above=0, high=100)
    number("presence_penalty", fields.presence_penalty, low=-2, high=2)
    number("frequency_penalty", fields.frequency_penalty, low=-2, high=2)
    number("seed", fields.seed, low=-(2**63), high=MAX_SEED)
    number("min_tokens", fields.min_tokens, low=0)
    number("logprobs", logprobs, low=0, high=MAX_LOGPROBS)
    number("prompt_logprobs", fields.prompt_logprobs, low=0, high=MAX_LOGPROBS)
    if fields.prompt_logprobs is not None:
        if fields.stream:
            raise invalid("prompt_logprobs", "`prompt_logprobs` are not available with `stream`.")
        prompt_logprobs = max(prompt_logprobs or 0, fields.prompt_logprobs)
    if fields.logprob_token_ids and logprobs is None:
        raise invalid("logprob_token_ids", "`logprob_token_ids` needs `logprobs`.")
    if fields.allowed_token_ids is not None and not fields.allowed_token_ids:
        raise invalid("allowed_token_ids", "`allowed_token_ids` must not be empty.")
    if fields.allowed_token_ids and grammar:
        raise invalid("allowed_token_ids", "`allowed_token_ids` cannot be combined with structured output or tools.")
    number("priority", fields.priority, low=-(2**31), high=2**31 - 1)
    if fields.min_tokens is not None and fields.min_tokens > max_tokens:
        raise invalid(
            "min_tokens", f"`min_tokens` must be at most `max_tokens` ({max_tokens}), got {_show(fields.min_tokens)}."
        )
    defaults = info.default_sampling
    top_k = _first(fields.top_k, defaults.top_k, 0)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=float(_first(fields.temperature, defaults.temperature, 1.0)),
        top_p=float(_first(fields.top_p, defaults.top_p, 1.0)),
        # In vLLM's API -1 means all tokens.
        top_k=max(0, int(top_k)),
        min_p=float(_first(fields.min_p, defaults.min_p, 0.0)),
        repetition_penalty=float(_first(fields.repetition_penalty, defaults.repetition_penalty, 1.0)),
        presence_penalty=float(fields.presence_penalty or 0.0),
        frequency_penalty=float(fields.frequency_penalty or 0.0),
        logit_bias=_logit_bias(fields.logit_bias or {}, info.vocab_size),
        seed=secrets.randbits(63) if fields.seed is None else fields.seed % 2**63,
        min_tokens=fields.min_tokens or 0,
        stop_token_ids=_token_ids("stop_token_ids", fields.stop_token_ids, info.vocab_size, most=MAX_STOP_TOKEN_IDS),
        eos_token_ids=() if fields.ignore_eos else info.eos_token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
        allowed_token_ids=_token_ids(
            "allowed_token_ids", fields.allowed_token_ids, info.vocab_size, most=MAX_ALLOWED_TOKEN_IDS
        ),
        bad_token_sequences=bad_token_sequences,
        logprob_token_ids=_token_ids(
            "logprob_token_ids", fields.logprob_token_ids, info.vocab_size, most=MAX_LOGPROB_TOKEN_IDS
        ),
    )


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _logit_bias(biases: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    if len(biases) > MAX_LOGIT_BIAS:
        raise invalid("logit_bias", f"`logit_bias` has {len(biases)} entries; {MAX_LOGIT_BIAS} are allowed.")
    wrong = [
        key[:40] for key in biases if not (key.isascii() and key.isdecimal()) or len(key) > 10 or int(key) >= vocab_size
    ]
    if wrong:
        shown = ", ".join(map(repr, wrong[:MAX_SHOWN])) + (", …" if len(wrong) > MAX_SHOWN else "")
        keys = "key" if len(wrong) == 1 else "keys"
        raise invalid("logit_bias", f"`logit_bias` has the {keys} {shown}; keys are token ids below {vocab_size}.")
    result: list[tuple[int, float]] = []
    for key, bias in biases.items():
        number("logit_bias", bias, low=-100, high=100)
        result.append((int(key), float(bias)))
    return tuple(result)


def _token_ids(name: str, token_ids: list[int] | None, vocab_size: int, *, most: int) -> tuple[int, ...]:
    if token_ids is None:
        return ()
    if len(token_ids) > most:
        raise invalid(name, f"`{name}` has more than {most} entries.")
    for token_id in token_ids:
        number(name, token_id, low=0, high=vocab_size - 1)
    return tuple(token_ids)


async def bad_token_sequences(
    words: Sequence[str] | None, encode: Callable[[str], Awaitable[Sequence[int]]]
) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word of ``bad_words``, alone and after a blank.

    Raise RequestRejected if the words are too many, too long or blank.
    """
    if not words:
        return ()
    if len(words) > MAX_BAD_WORDS or sum(map(len, words)) > MAX_STOP_CHARS:
        raise invalid(
            "bad_words", f"`bad_words` may have at most {MAX_BAD_WORDS} words and {MAX_STOP_CHARS} characters."
        )
    if not all(map(str.strip, words)):
        raise invalid("bad_words", "`bad_words` must not contain blank words.")
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            sequences[tuple(await encode(text))] = None
    return tuple(filter(None, sequences))


def fit_max_tokens(
    asked: int | None, *, num_prompt_tokens: int, max_model_len: int, default: int | None, what: str
) -> int:
    """Return the limit of output tokens: ``asked``, or else ``default`` or the rest of the context, whichever is less.

    Raises RequestRejected naming both lengths if they do not fit.
    """
    if num_prompt_tokens >= max_model_len:
        raise too_long(num_prompt_tokens, max_model_len, what=what)
    left = max_model_len - num_prompt_tokens
    if asked is None:
        return left if default is None else min(left, default)
    if asked > left:
        raise RequestRejected(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{num_prompt_tokens + asked} tokens ({num_prompt_tokens} in the {what}, {asked} in the completion). "
            f"Please reduce the length of the {what} or completion.",
            param=what,
            code="context_length_exceeded",
        )
    return asked


def too_long(num_prompt_tokens: int, max_model_len: int, *, what: str, at_least: bool = False) -> RequestRejected:
    """Return the error (400) of a prompt that leaves no room for an answer.

    ``at_least``: the prompt was not counted to its end.
    """
    qualifier = "at least " if at_least else ""
    return RequestRejected(
        f"This model's maximum context length is {max_model_len} tokens. However, your {what} resulted in "
        f"{qualifier}{num_prompt_tokens} tokens. Please reduce the length of the {what}.",
        param=what,
        code="context_length_exceeded",
    )
