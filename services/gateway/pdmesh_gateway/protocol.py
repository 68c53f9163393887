"""The HTTP edge's vocabulary: what OpenAI's and vLLM's clients send, as msgspec structs.

Fields that we honour are here, and those that change nothing. What becomes of others says
`pdmesh_gateway.http.unknown`. Ranges are checked in `pdmesh_gateway.sampling`, so that every refusal names its field.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

#: vLLM's and OpenAI's default for completions; a chat goes on to the end of the context.
DEFAULT_COMPLETION_TOKENS = 16


class StreamOptions(msgspec.Struct, kw_only=True):
    """``stream_options``: what a stream tells beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM: usage so far in every chunk
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


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/completions``."""

    prompt: str | list[str | int | list[int]] | None = None
    max_tokens: int | msgspec.UnsetType | None = msgspec.UNSET  # null: up to the end of the context
    max_completion_tokens: int | None = None  # a chat's name for it; wins over `max_tokens`, as there
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None

    @property
    def asked_tokens(self) -> int | msgspec.UnsetType | None:
        """The longest completion that is asked for, by whichever name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message's content; types other than ``text`` are refused by name."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One message; what a template may look at."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, under its other name
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/chat/completions``."""

    messages: list[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    best_of: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    # Accepted; they change nothing here.
    echo: bool | None = None
    include_reasoning: bool | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    reasoning_effort: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    verbosity: str | None = None


class EmbeddingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/embeddings``: one or several inputs, as text or token ids."""

    model: str | None = None
    input: str | list[str | int | list[int]] | None = None
    encoding_format: str | None = None  # float, or base64 of little-endian float32
    dimensions: int | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None  # left, which keeps the end, or right
    add_special_tokens: bool | None = None
    priority: int | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    slo_ttft_ms: float | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /tokenize``: a text, or a chat to be rendered first. Shapes are vLLM's."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /detokenize``: token ids to text."""

    model: str | None = None
    tokens: list[int]


# --- responses ---------------------------------------------------------------------------------------------------


class TokenizeResponse(msgspec.Struct, kw_only=True):
    """``count`` is of the tokens; ``token_strs`` only where asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct):
    """The text, under vLLM's name for it."""

    prompt: str


class PromptTokensDetails(msgspec.Struct):
    """Number of a prompt's tokens whose KV was there before."""

    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    """Number of an answer's tokens that came before the answer proper."""

    reasoning_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of a whole HTTP request: a prompt counts once, each of its choices' outputs by itself."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = msgspec.field(default_factory=PromptTokensDetails)
    completion_tokens_details: CompletionTokensDetails = msgspec.field(default_factory=CompletionTokensDetails)


class ChatTopLogprob(msgspec.Struct):
    """A token that could have been drawn. Log-probabilities are natural; ``bytes`` are those of its UTF-8."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(msgspec.Struct):
    """A token that was drawn, and the most likely ones at its place."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct):
    """An entry for each token of a choice, or of a chunk of one."""

    content: list[ChatTokenLogprob]


class CompletionLogprobs(msgspec.Struct):
    """An entry for each token; offsets are characters of the text. A prompt's first token has no probability."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class FunctionCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A called function's name and JSON arguments; a piece of these in a chunk."""

    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that the answer makes."""

    id: str
    type: str = "function"
    function: FunctionCall


class ToolCallDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is new of a call; its first one has id, type and name."""

    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionCall


class ChatDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is new of an answer."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, under its other name
    tool_calls: list[ToolCallDelta] | None = None


class ResponseMessage(msgspec.Struct, kw_only=True):
    """The answer. It is never a refusal; its content is null where it only calls tools."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, under its other name
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer. ``finish_reason`` is ``stop``, ``tool_calls`` or ``length``; ``stop_reason`` the string or token id
    that ended it.
    """

    index: int
    message: ResponseMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class PromptLogprob(msgspec.Struct, kw_only=True):
    """A token at a place of a prompt, by vLLM's shape; the ``rank`` of one that is not among the likeliest is null."""

    logprob: float
    rank: int | None
    decoded_token: str


#: By position and token id; the first token has none.
PromptLogprobList = list[dict[str, PromptLogprob] | None]


class ChatResponse(msgspec.Struct, kw_only=True):
    """A whole answer to ``POST /v1/chat/completions``; ``created`` is Unix time in seconds."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobList | None = None
    prompt_token_ids: list[int] | None = None


class CompletionChoice(msgspec.Struct, kw_only=True):
    """A choice of a completion, like `ChatChoice`; with several prompts, choices of the first come first."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobList | None = None
    prompt_token_ids: list[int] | None = None


class CompletionResponse(msgspec.Struct, kw_only=True):
    """A whole answer to ``POST /v1/completions``."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class EmbeddingObject(msgspec.Struct, kw_only=True):
    """One input's embedding: a list of numbers, or their bytes in base64."""

    object: str = "embedding"
    index: int
    embedding: msgspec.Raw


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(msgspec.Struct, kw_only=True):
    """The answer to ``POST /v1/embeddings``, in the order of the inputs."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[EmbeddingObject]
    usage: EmbeddingUsage


class ModelCard(msgspec.Struct, kw_only=True):
    """A model; ``max_model_len`` is in tokens of prompt and answer together."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "pdmesh"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    """The answer to ``GET /v1/models``."""

    object: str = "list"
    data: list[ModelCard]


class ErrorBody(msgspec.Struct, kw_only=True):
    """What went wrong, in a sentence; ``param`` names the field, ``code`` the case for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorResponse(msgspec.Struct):
    """The body of every response of 400 and more, and the last event of a stream that failed."""

    error: ErrorBody
