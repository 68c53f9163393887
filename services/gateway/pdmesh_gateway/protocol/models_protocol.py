"""``/v1/models``: what clients get."""

from __future__ import annotations

import msgspec


class ModelCard(msgspec.Struct, kw_only=True):
    """A model; ``max_model_len`` is in tokens of prompt and answer together.

    ``sampling_defaults`` are settings of requests that leave them out, if they are not OpenAI's.
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
