"""Attributes of the span of a client's request: OpenTelemetry's names for generative AI if they exist, else ours.

The names come from semantic-conventions-genai, autumn 2026 (status: development). ``gen_ai.input.messages`` and
similar attributes are left out, because spans carry sizes, never text.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdmesh.telemetry.tracing import Attributes, AttributeValue
from pdmesh_gateway.jobs import GenerationJob

REQUEST = "request"
FIRST_TOKEN = "first token"


def request_attributes(job: GenerationJob, model: str) -> Attributes:
    """Return a request span's initial attributes, by OpenTelemetry's GenAI conventions and under ``pdmesh.``."""
    params = job.params
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": job.dialect.operation,
        "gen_ai.provider.name": "pdmesh",
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.choice.count": job.num_choices,
        "gen_ai.response.id": job.request_id,
        "gen_ai.response.model": model,
        "gen_ai.usage.input_tokens": job.num_prompt_tokens,
        "pdmesh.request_id": job.request_id,
    }
    if job.label:
        attributes["pdmesh.request_label"] = job.label
    if params.top_k > 0:
        attributes["gen_ai.request.top_k"] = params.top_k
    return attributes


def response_attributes(*, num_output_tokens: int, finish_reasons: Sequence[str], num_restarts: int) -> Attributes:
    """Return a request span's final attributes."""
    return {
        "gen_ai.usage.output_tokens": num_output_tokens,
        "gen_ai.response.finish_reasons": finish_reasons,
        "pdmesh.num_restarts": num_restarts,
    }
