"""A gateway out of its mind, on the stream that its own requests use too."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from pdmesh.model import Epoch, SamplingParams, request_id_of
from pdmesh.wire.messages import Generation, Submit, pack_token_ids
from pdmesh_testing.dst.process import Process
from pdmesh_testing.dst.services import Gateway


def meddle(process: Process, others: Iterable[Process]) -> None:
    """Submit what cannot be; cancel requests of other gateways, and submit them under their own ids."""
    gateway: Gateway | None = process.parts.get("gateway")
    if gateway is None or not gateway.link.is_connected:
        return
    link = gateway.link
    generation = Generation(
        request_id=request_id_of(gateway.generator._gateway_id, "nonsense"),
        epoch=Epoch(0),
        gateway_id=gateway.generator._gateway_id,
        token_address="127.0.0.1:1",
        token_ids=pack_token_ids([1, 2, 3]),
        num_prompt_tokens=3,
        params=SamplingParams(max_tokens=1),
    )
    link.submit(Submit(generation=generation, slo_ttft_s=0.0))
    link.submit(Submit(generation=msgspec.structs.replace(generation, num_prompt_tokens=4)))
    for other in others:
        victim: Gateway | None = other.parts.get("gateway")
        if victim is None:
            continue
        for transcript in victim.transcripts._by_id.values():
            link.cancel(transcript.request_id, transcript.epoch, num_output_tokens=9)
            stolen = msgspec.structs.replace(
                generation, request_id=transcript.request_id, epoch=Epoch(transcript.epoch + 1)
            )
            link.submit(Submit(generation=stolen))
