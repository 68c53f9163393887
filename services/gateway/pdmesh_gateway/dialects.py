"""Dialects of the API: their names in metrics, their paths, and their shapes of errors.

An endpoint names its dialect. The dialect travels with the HTTP exchange (`Exchange.dialect`) and with the job
(`GenerationJob.dialect`).
"""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh_gateway.http.messages.anthropic_errors import ANTHROPIC_ERRORS
from pdmesh_gateway.http.openai_errors import OPENAI_ERRORS, ErrorShape


@dataclass(frozen=True, slots=True)
class Dialect:
    """A family of requests and answers, such as Anthropic's.

    ``operation`` is OpenTelemetry's `gen_ai.operation.name`. ``paths`` are HTTP paths, each with all paths below it, or
    methods of gRPC.
    """

    name: str
    operation: str
    paths: tuple[str, ...]
    errors: ErrorShape = OPENAI_ERRORS


CHAT = Dialect("chat", "chat", ("/v1/chat/completions",))
COMPLETIONS = Dialect("completions", "text_completion", ("/v1/completions",))
EMBEDDINGS = Dialect("embeddings", "embeddings", ("/v1/embeddings",))
MESSAGES = Dialect("messages", "chat", ("/v1/messages",), ANTHROPIC_ERRORS)
RESPONSES = Dialect("responses", "chat", ("/v1/responses",))
GRPC = Dialect("grpc", "text_completion", ("/pdmesh.api.v1.Inference/Generate",))
GRPC_EMBEDDINGS = Dialect("grpc_embeddings", "embeddings", ("/pdmesh.api.v1.Inference/Embed",))

DIALECTS = (CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES, GRPC, GRPC_EMBEDDINGS)

#: Dialect of probes, the web page, and unknown paths.
NO_DIALECT = Dialect("none", "", ())


def dialect_of(path: str) -> Dialect:
    """Return the dialect that owns ``path`` or a path above it; `NO_DIALECT` if there is none."""
    for dialect in DIALECTS:
        if any(path == own or path.startswith(own + "/") for own in dialect.paths):
            return dialect
    return NO_DIALECT
