"""Requests and answers of ``/v1/embeddings``."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pdmesh_gateway.protocol.fields import Inert, neutral


class EmbeddingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/embeddings``: one or several inputs, as text or token ids.

    ``encoding_format`` is float, or base64 of little-endian float32. ``truncation_side`` is left, which keeps the end,
    or right.
    """

    model: str | None = None
    input: str | list[str | int | list[int]] | None = None
    encoding_format: Annotated[str | None, neutral("float")] = None
    dimensions: int | None = None
    user: Inert[str | None] = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    priority: Inert[int | None] = None
    request_id: Inert[str | None] = None
    cache_salt: str | None = None
    slo_ttft_ms: Inert[float | None] = None


class EmbeddingObject(msgspec.Struct, kw_only=True):
    """Embedding of one input: a list of numbers, or their bytes in base64."""

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
