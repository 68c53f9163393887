"""``/v1/embeddings``: what clients send and get."""

from __future__ import annotations

import msgspec


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
