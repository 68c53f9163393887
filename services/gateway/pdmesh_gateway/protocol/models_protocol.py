"""Answers of ``/v1/models``."""

from __future__ import annotations

import msgspec


class ModelCard(msgspec.Struct, kw_only=True):
    """A model; ``max_model_len`` is in tokens of prompt and answer together.

    ``sampling_defaults`` apply to requests without these fields, where they differ from OpenAI's defaults.
    """

    id: str
    object: str = "model"
    created: int
    owned_by: str = "pdmesh"
    root: str
    parent: None = None
    max_model_len: int
    sampling_defaults: dict[str, float]


class ModelList(msgspec.Struct, kw_only=True):
    """The answer to ``GET /v1/models``."""

    object: str = "list"
    data: list[ModelCard]
