"""Fields that all requests for a generation share: sampling and constraints."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from pdmesh_gateway.protocol.fields import Inert, neutral


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``stream_options``: contents of a stream besides text.

    With ``continuous_usage_stats``, vLLM's extension of ``include_usage``, every chunk has the usage so far.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``response_format.json_schema``. With ``strict``, a constraint that cannot be obeyed is refused."""

    name: Inert[str | None] = None
    description: Inert[str | None] = None
    schema: Any = None
    strict: Inert[bool | None] = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``response_format``: the format of an answer. ``structures`` and ``triggers`` describe a structural tag.

    Other servers accept ``schema`` with the type ``json_object``, or in place of ``json_schema``.
    """

    #: Names of the field and of its schema, for errors.
    FIELD: ClassVar[str] = "response_format"
    SCHEMA: ClassVar[str] = "response_format.json_schema.schema"

    type: str
    json_schema: JsonSchema | None = None
    schema: Any = None
    structures: list[Any] = []
    triggers: list[str] = []


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's ``structured_outputs``: one of `KINDS`. An unknown field is a constraint, so it is refused.

    ``grammar`` is GBNF or Lark. ``disable_any_whitespace`` false allows blanks and line breaks in JSON.
    """

    CLOSED: ClassVar[bool] = True

    KINDS: ClassVar[tuple[str, ...]] = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None
    whitespace_pattern: str | None = None


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that chats and completions share. ``truncation_side`` is left, which keeps the end, or right."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: Annotated[float | None, neutral(0)] = None
    repetition_penalty: Annotated[float | None, neutral(1)] = None
    presence_penalty: Annotated[float | None, neutral(0)] = None
    frequency_penalty: Annotated[float | None, neutral(0)] = None
    logit_bias: Annotated[dict[str, float] | None, neutral({})] = None
    seed: int | None = None
    n: Annotated[int | None, neutral(1)] = None
    stop: Annotated[str | list[str] | None, neutral([])] = None
    stop_token_ids: Annotated[list[int] | None, neutral([])] = None
    include_stop_str_in_output: Annotated[bool | None, neutral(False)] = None
    ignore_eos: Annotated[bool | None, neutral(False)] = None
    min_tokens: Annotated[int | None, neutral(0)] = None
    skip_special_tokens: Annotated[bool | None, neutral(True)] = None
    stream: Annotated[bool | None, neutral(False)] = None
    stream_options: Inert[StreamOptions | None] = None
    return_token_ids: Annotated[bool | None, neutral(False)] = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    priority: Inert[int | None] = None
    request_id: Inert[str | None] = None
    # Latency targets of pdmesh, in milliseconds. The headers x-slo-ttft-ms and x-slo-tpot-ms take precedence.
    slo_ttft_ms: Inert[float | None] = None
    slo_tpot_ms: Inert[float | None] = None
    user: Inert[str | None] = None
    prompt_cache_key: Inert[str | None] = None
    cache_control: Inert[Any] = None
    response_format: Annotated[ResponseFormat | None, neutral({"type": "text"})] = None
    structured_outputs: Annotated[StructuredOutputs | None, neutral({})] = None
    allowed_token_ids: list[int] | None = None
    bad_words: Annotated[list[str] | None, neutral([])] = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Annotated[list[int] | None, neutral([])] = None
    return_tokens_as_token_ids: Annotated[bool | None, neutral(False)] = None
    cache_salt: str | None = None
    metadata: Inert[dict[str, Any] | None] = None
    spaces_between_special_tokens: Inert[bool | None] = None
    length_penalty: Inert[float | None] = None
    early_stopping: Inert[Any] = None
    vllm_xargs: Inert[dict[str, Any] | None] = None
    kv_transfer_params: Annotated[dict[str, Any] | None, neutral({})] = None


def sampling_fields_of(request: msgspec.Struct, **own: Any) -> SamplingFields:
    """Return the fields that a request of another dialect has by the same names, with ``own`` fields added."""
    names = set(request.__struct_fields__).intersection(SamplingFields.__struct_fields__)
    return SamplingFields(**{name: getattr(request, name) for name in names} | own)
