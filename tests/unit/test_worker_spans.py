"""What instances trace of a request that is handed over, fails, or is given up."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pdmesh.config import TransferConfig
from pdmesh.core.events import KvReleased, TransferFailed
from pdmesh.model import Role, SamplingParams
from pdmesh.telemetry.tracing import Tracing, exporting
from pdmesh.wire.messages import Generation
from pdmesh_testing.fake_engine import FakeEngine
from pdmesh_testing.memory_transport import MemoryFabric, MemoryFaults, MemoryTransport
from pdmesh_testing.worker import RunningInstance, chunk_plans, hand_over, make_generation, running_instance

pytestmark = pytest.mark.anyio

CONFIG = TransferConfig(max_payload_bytes=4096, num_send_buffers=4, num_receive_buffers=4)
PARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


@dataclass
class Pair:
    prefill: RunningInstance
    decode: RunningInstance
    tracing: Tracing
    exporter: InMemorySpanExporter

    def spans(self) -> dict[str, ReadableSpan]:
        self.tracing.close()
        spans = self.exporter.get_finished_spans()
        assert all(span.parent is not None and f"{span.parent.span_id:016x}" == "b" * 16 for span in spans)
        assert len({span.name for span in spans}) == len(spans)
        return {span.name: span for span in spans}


@asynccontextmanager
async def pair(fabric: MemoryFabric | None = None) -> AsyncGenerator[Pair]:
    fabric = fabric or MemoryFabric()
    exporter = InMemorySpanExporter()
    tracing = exporting("worker", exporter)
    async with (
        MemoryTransport(CONFIG, fabric) as source,
        MemoryTransport(CONFIG, fabric) as target,
        running_instance(FakeEngine(), source, role=Role.PREFILL, config=CONFIG, tracing=tracing) as prefill,
        running_instance(FakeEngine(), target, role=Role.DECODE, config=CONFIG, tracing=tracing) as decode,
    ):
        yield Pair(prefill, decode, tracing, exporter)


def traced(max_tokens: int = 8) -> Generation:
    generation = make_generation("r", list(range(40, 57)), SamplingParams(max_tokens=max_tokens, temperature=0))
    return msgspec.structs.replace(generation, traceparent=PARENT)


def attributes(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


async def test_a_hand_over() -> None:
    async with pair() as both:
        await hand_over(traced(), both.prefill, both.decode, [5])
        await both.decode.reported(KvReleased, "r")
        await both.prefill.reported(KvReleased, "r")
        spans = both.spans()
    assert set(spans) == {"prefill", "kv transfer", "decode"}
    assert all(span.status.is_unset for span in spans.values())
    assert [event.name for event in spans["prefill"].events] == ["chunk"] * 4
    prefill, transfer, decode = (attributes(spans[name]) for name in ("prefill", "kv transfer", "decode"))
    assert (prefill["pdmesh.num_prompt_tokens"], prefill["pdmesh.num_chunks"]) == (17, 4)
    assert (prefill["pdmesh.instance_id"], decode["pdmesh.instance_id"]) == ("prefill", "decode")
    assert decode["pdmesh.num_output_tokens"] == 8
    assert isinstance(transfer["pdmesh.kv_transfer.bytes"], int)
    assert {one["pdmesh.outcome"] for one in (prefill, transfer, decode)} == {"done"}


async def test_a_first_token_that_ends_the_request_leaves_a_prefill_alone() -> None:
    async with pair() as both:
        generation = traced(max_tokens=1)
        await hand_over(generation, both.prefill, both.decode, [17])
        await both.prefill.reported(KvReleased, "r")
        both.decode.free(generation.request_id, generation.epoch)
        await both.decode.reported(KvReleased, "r")
        spans = both.spans()
    assert attributes(spans["prefill"])["pdmesh.outcome"] == "done"
    assert set(spans) <= {"prefill", "kv transfer"}  # the transfer, if its grant came before the token did


async def test_a_transfer_that_fails_is_an_error() -> None:
    async with pair(MemoryFabric(MemoryFaults(corrupt=lambda _piece: True))) as both:
        await hand_over(traced(), both.prefill, both.decode, [17])
        await both.prefill.reported(TransferFailed, "r")
        await both.decode.reported(KvReleased, "r")
        both.prefill.free("r")
        await both.prefill.reported(KvReleased, "r")
        spans = both.spans()
    assert attributes(spans["kv transfer"])["error.type"] == "failed"
    assert not spans["kv transfer"].status.is_ok
    assert "decode" not in spans


async def test_what_is_freed_early_is_no_error() -> None:
    async with pair() as both:
        generation = traced(max_tokens=150)
        await hand_over(generation, both.prefill, both.decode, [17])
        await both.prefill.reported(KvReleased, "r")
        await both.decode.until(lambda: len(both.decode.tokens_of("r")) > 2)
        both.decode.free(generation.request_id, generation.epoch)
        await both.decode.reported(KvReleased, "r")
        spans = both.spans()
    assert attributes(spans["decode"])["pdmesh.outcome"] == "freed"
    assert spans["decode"].status.is_unset


async def test_a_request_that_nobody_traces_leaves_nothing() -> None:
    async with pair() as both:
        await hand_over(msgspec.structs.replace(traced(), traceparent=None), both.prefill, both.decode, [5])
        await both.decode.reported(KvReleased, "r")
        assert both.spans() == {}


async def test_on_a_mixed_instance_the_decode_follows_the_prefill() -> None:
    exporter = InMemorySpanExporter()
    tracing = exporting("worker", exporter)
    async with (
        MemoryTransport(CONFIG, MemoryFabric()) as transport,
        running_instance(FakeEngine(), transport, config=CONFIG, tracing=tracing) as mixed,
    ):
        generation = traced()
        mixed.admit(generation, kv_moves=False)
        for chunk in chunk_plans(generation, [9]):
            mixed.run([chunk])
        await mixed.reported(KvReleased, "r")
    tracing.close()
    prefill, decode = exporter.get_finished_spans()
    assert (prefill.name, decode.name) == ("prefill", "decode")
    assert prefill.end_time is not None
    assert decode.start_time is not None
    assert prefill.end_time <= decode.start_time
