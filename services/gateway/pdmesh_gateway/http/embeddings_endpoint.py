"""``POST /v1/embeddings``: vectors of texts, by prefill alone."""

from __future__ import annotations

import base64
import time
from typing import TYPE_CHECKING

import anyio.lowlevel
import msgspec

from pdmesh_gateway.dialects import EMBEDDINGS
from pdmesh_gateway.embedding_vectors import EMBEDS, check_inputs, embeddings
from pdmesh_gateway.http.computing_endpoint import ComputingEndpoint
from pdmesh_gateway.http.http_exchange import Exchange
from pdmesh_gateway.prompt_inputs import prompt_ids_of, prompts_of
from pdmesh_gateway.protocol.embeddings_protocol import (
    EmbeddingObject,
    EmbeddingRequest,
    EmbeddingResponse,
    EmbeddingUsage,
)
from pdmesh_gateway.protocol.sampling_fields import SamplingFields
from pdmesh_gateway.request_jobs import job_of
from pdmesh_gateway.sampling import invalid
from pdmesh_gateway.serving import Serving

# A gateway without embeddings needs no numpy.
if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class EmbeddingsEndpoint(ComputingEndpoint[EmbeddingRequest]):
    """``POST /v1/embeddings``."""

    dialect = EMBEDDINGS

    def __init__(self, serving: Serving) -> None:
        super().__init__(serving, EmbeddingRequest)

    async def answer(self, request: EmbeddingRequest, exchange: Exchange) -> None:
        serving = self._serving
        serving.check_model(request.model)
        serving.pooling.check(request.dimensions)
        if request.encoding_format not in (None, "float", "base64"):
            raise invalid("encoding_format", "`encoding_format` must be float or base64.")
        given = prompts_of(request.input, what="input")
        check_inputs(len(given), what="input")
        prompts = await prompt_ids_of(serving, request, given, what="input")
        encode = _base64 if request.encoding_format == "base64" else _floats
        fields = SamplingFields(
            priority=request.priority,
            request_id=request.request_id,
            cache_salt=request.cache_salt,
            slo_ttft_ms=request.slo_ttft_ms,
        )
        job = job_of(serving, fields, self.caller(fields, exchange), prompts, EMBEDS)
        data: list[EmbeddingObject] = []
        async for vector in embeddings(serving, exchange.known_client, job, request.dimensions):
            data.append(EmbeddingObject(index=len(data), embedding=msgspec.Raw(encode(vector))))
            # Many large vectors must not delay other clients.
            await anyio.lowlevel.checkpoint()
        await exchange.respond_json(
            EmbeddingResponse(
                id=f"embd-{exchange.request_id}",
                created=int(time.time()),
                model=request.model or serving.model,
                data=data,
                usage=EmbeddingUsage(prompt_tokens=job.num_prompt_tokens, total_tokens=job.num_prompt_tokens),
            )
        )


def _base64(vector: npt.NDArray[np.float32]) -> bytes:
    return b'"' + base64.b64encode(vector.astype("<f4").tobytes()) + b'"'


def _floats(vector: npt.NDArray[np.float32]) -> bytes:
    return msgspec.json.encode(vector.tolist())
