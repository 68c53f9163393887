"""Embeddings, whichever edge they are asked at: a prefill of each prompt, and nothing after it."""

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

if TYPE_CHECKING:  # a gateway without embeddings needs no numpy
    import numpy as np
    import numpy.typing as npt

#: As in OpenAI's API.
MAX_INPUTS = 2048

#: How the last token's hidden state is asked for.
EMBEDS = SamplingParams(max_tokens=1, temperature=0.0, embeds=True)


def check_inputs(number: int, *, what: str) -> None:
    """Raises RequestRejected naming the field if a request has too many inputs, or none."""
    if not 1 <= number <= MAX_INPUTS:
        raise invalid(what, f"`{what}` has {number} entries; 1 to {MAX_INPUTS} are allowed.")


async def embeddings(
    serving: Serving, client: Client, job: GenerationJob, dimensions: int | None
) -> AsyncIterator[npt.NDArray[np.float32]]:
    """Yield the embedding of each of a job's prompts, of which so many are under way at once as one request may have.

    Raises RequestRejected.
    """
    num_done = 0
    for part in serving.parts_of(job.prompts):
        request_id = job.request_id if len(part) == len(job.prompts) else f"{job.request_id}-{num_done}"
        for hidden in await _hidden(serving, client, replace(job, request_id=request_id, prompts=part)):
            yield serving.pooling.embedding(hidden, dimensions)
        num_done += len(part)


async def _hidden(serving: Serving, client: Client, job: GenerationJob) -> list[bytes]:
    """Return the hidden state of each prompt's last token."""
    found = [b""] * job.num_choices
    async with serving.generation(client, job) as generation:
        async for batch in generation.deltas():
            for delta in batch:
                found[delta.index] = delta.embedding
    if not all(found):
        raise GenerationFailed("An instance gave a token where an embedding was asked for.")
    return found
