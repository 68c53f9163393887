"""How an answer is drawn and what it is held to: what all requests for a generation may say."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec


class StreamOptions(msgspec.Struct, kw_only=True):
    """``stream_options``: what a stream tells beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM: with `include_usage`, usage so far in every chunk
    include_obfuscation: bool | None = None


class JsonSchema(msgspec.Struct, kw_only=True):
    """``response_format.json_schema``. Answers are held to the schema whether ``strict`` or not."""

    name: str | None = None
    description: str | None = None
    schema: Any = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """``response_format``: what an answer is to be. ``structures`` and ``triggers`` are those of a structural tag."""

    type: str
    json_schema: JsonSchema | None = None
    structures: list[Any] = []
    triggers: list[str] = []


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's ``structured_outputs``: one of `KINDS`."""

    KINDS: ClassVar[tuple[str, ...]] = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # GBNF or Lark
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool | None = None  # false allows blanks and line breaks in JSON
    disable_fallback: bool | None = None
    whitespace_pattern: str | None = None


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What chat and completions have in common."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None  # left, which keeps the end, or right
    add_special_tokens: bool | None = None
    priority: int | None = None
    request_id: str | None = None
    # Ours: service level targets, milliseconds. Headers of the same meaning win: x-slo-ttft-ms, x-slo-tpot-ms.
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: str | None = None
    # Accepted; they change nothing here.
    metadata: dict[str, Any] | None = None
    spaces_between_special_tokens: bool | None = None
    length_penalty: float | None = None
    early_stopping: Any = None
    vllm_xargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
