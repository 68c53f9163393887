"""Embeddings of the HTTP and gRPC edges: each prompt is a prefill without decoding."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING

from pdmesh.model import SamplingParams
from pdmesh_gateway.auth import Client
from pdmesh_gateway.choices import GenerationFailed
from pdmesh_gateway.jobs import GenerationJob
from pdmesh_gateway.sampling import invalid
from pdmesh_gateway.serving import Serving

# A gateway without embeddings needs no numpy.
if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: Limit of inputs, which is OpenAI's.
MAX_INPUTS = 2048

#: Sampling parameters that ask for the last token's hidden state.
EMBEDS = SamplingParams(max_tokens=1, temperature=0.0, embeds=True)


def check_inputs(number: int, *, what: str) -> None:
    """Raise RequestRejected naming the field if a request has too many inputs, or none."""
    if not 1 <= number <= MAX_INPUTS:
        raise invalid(what, f"`{what}` has {number} entries; 1 to {MAX_INPUTS} are allowed.")


async def embeddings(
    serving: Serving, client: Client, job: GenerationJob, dimensions: int | None
) -> AsyncIterator[npt.NDArray[np.float32]]:
    """Yield the embedding of each of a job's prompts, in order. Raises RequestRejected.

    At most as many prompts run at once as one request may have.
    """
    num_done = 0
    for part in serving.parts_of(job.prompts):
        request_id = job.request_id if len(part) == len(job.prompts) else f"{job.request_id}-{num_done}"
        for hidden in await _hidden(serving, client, replace(job, request_id=request_id, prompts=part)):
            yield serving.pooling.embedding(hidden, dimensions)
        num_done += len(part)


async def _hidden(serving: Serving, client: Client, job: GenerationJob) -> list[bytes]:
    """Return the hidden state of each prompt's last token. Raises GenerationFailed if an instance returns none."""
    found = [b""] * job.num_choices
    async with serving.generation(client, job) as generation:
        async for batch in generation.deltas():
            for delta in batch:
                found[delta.index] = delta.embedding
    if not all(found):
        raise GenerationFailed("An instance returned a token instead of an embedding.")
    return found
