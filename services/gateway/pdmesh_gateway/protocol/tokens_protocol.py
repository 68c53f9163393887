"""Requests and answers of ``/tokenize`` and ``/detokenize``, in vLLM's shapes."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from pdmesh_gateway.protocol.chat_protocol import ChatMessage, ChatTool
from pdmesh_gateway.protocol.fields import Inert, neutral, shaped


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /tokenize``: a text, or a chat that is rendered first."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: Annotated[bool | None, neutral(False)] = None
    add_generation_prompt: Annotated[bool | None, neutral(True)] = None
    continue_final_message: Annotated[bool | None, neutral(False)] = None
    chat_template: str | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, neutral({})] = None
    documents: Annotated[list[dict[str, Any]] | None, neutral([])] = None
    reasoning_effort: str | None = None
    tools: Annotated[list[dict[str, Any]] | None, shaped(ChatTool), neutral([])] = None
    mm_processor_kwargs: Inert[dict[str, Any] | None] = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /detokenize``: token ids to text."""

    model: str | None = None
    tokens: list[int]


class TokenizeResponse(msgspec.Struct, kw_only=True):
    """Token ids and their ``count``; ``token_strs`` only on request."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct):
    """The text, under vLLM's name."""

    prompt: str
