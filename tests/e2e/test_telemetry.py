"""What a mesh of real processes tells about a request: its spans, its log lines, its record."""

import itertools
import json
import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from pdmesh_testing.collector import CollectedSpan, Collector, collecting
from pdmesh_testing.mesh import STAND_IN, RunningMesh, running_mesh

pytestmark = [pytest.mark.e2e, pytest.mark.ucx]

PROMPT = "Xylophone quarks juggle zephyrs. " * 4
CLIENT_TRACE, CLIENT_SPAN = "a1" * 16, "b2" * 8
SERVICES = {"pdmesh-gateway", "pdmesh-scheduler", "pdmesh-prefill", "pdmesh-decode"}


@dataclass(frozen=True)
class Observed:
    mesh: RunningMesh
    collector: Collector

    def complete(self, label: str, **fields: object) -> httpx.Response:
        body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **fields}
        headers = {"X-Request-Id": label, "traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"}
        response = httpx.post(f"{self.mesh.base_url}/v1/completions", json=body, headers=headers, timeout=60)
        assert response.status_code == 200, response.text
        return response

    def spans(self, request_id: str, count: int) -> list[CollectedSpan]:
        def of_request(spans: list[CollectedSpan]) -> list[CollectedSpan]:
            return [span for span in spans if span.attributes["pdmesh.request_id"] == request_id]

        return of_request(self.collector.wait_for(lambda spans: len(of_request(spans)) >= count))


def id_of(response: dict[str, Any]) -> str:
    """What the mesh calls the request of a response, or of a chunk of one."""
    return str(response["id"]).removeprefix("cmpl-")


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Generator[Observed]:
    folder = tmp_path_factory.mktemp("telemetry")
    settings = {
        **STAND_IN,
        "SCHEDULER_BUNDLE": "fcfs",
        "POLICY_CHUNK_TOKENS": "48",
        "TELEMETRY_LOG_LEVEL": "debug",
        "TELEMETRY_LOG_FORMAT": "json",
    }
    with collecting() as collector, pytest.MonkeyPatch.context() as environ:
        environ.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # milliseconds; the services' exporters read it
        settings["TELEMETRY_OTLP_ENDPOINT"] = collector.endpoint
        with running_mesh(folder, model=None, settings=settings) as mesh:
            yield Observed(mesh, collector)


def test_one_request_is_one_trace_through_all_four_services(observed: Observed) -> None:
    response = observed.complete("traced").json()
    usage = response["usage"]
    spans = observed.spans(id_of(response), 6)
    by_name = {span.name: span for span in spans}
    assert sorted(span.name for span in spans) == ["decode", "kv transfer", "placed", "prefill", "queued", "request"]
    assert {span.service for span in spans} == SERVICES
    assert {span.trace_id for span in spans} == {CLIENT_TRACE}
    assert not any(span.is_error for span in spans)

    request = by_name.pop("request")
    assert (request.service, request.parent_id) == ("pdmesh-gateway", CLIENT_SPAN)
    assert {span.parent_id for span in by_name.values()} == {request.span_id}
    assert request.events == ("first token",)
    assert request.attributes["pdmesh.request_label"] == "traced"
    assert request.attributes["gen_ai.operation.name"] == "text_completion"
    assert request.attributes["gen_ai.request.model"] == observed.mesh.model
    assert request.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert request.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 6
    assert request.attributes["gen_ai.response.finish_reasons"] == ["length"]

    num_chunks = -(-usage["prompt_tokens"] // 48)
    assert num_chunks > 1
    assert by_name["prefill"].events == ("chunk",) * num_chunks
    assert by_name["prefill"].attributes["pdmesh.num_prompt_tokens"] == usage["prompt_tokens"]
    transfer = by_name["kv transfer"].attributes
    assert transfer["pdmesh.kv_transfer.bytes"] > 0
    # One counts from the last layer, the other from the grant, and either may come first.
    assert transfer["pdmesh.kv_transfer.exposed_seconds"] > 0
    assert transfer["pdmesh.kv_transfer.seconds"] > 0
    assert by_name["decode"].attributes["pdmesh.num_output_tokens"] == 6
    assert by_name["placed"].attributes["pdmesh.prefill_instance_id"] == "prefill-0"
    assert by_name["placed"].attributes["pdmesh.decode_instance_id"] == "decode-0"
    assert request.start_ns <= by_name["queued"].start_ns <= by_name["queued"].end_ns <= by_name["placed"].end_ns
    assert by_name["prefill"].end_ns <= by_name["decode"].end_ns
    assert all(span.start_ns <= span.end_ns for span in spans)


def test_choices_share_the_requests_span_and_are_listed(observed: Observed) -> None:
    request_id = id_of(observed.complete("many", n=2).json())
    (request,) = observed.spans(request_id, 1)
    for index in range(2):
        spans = observed.spans(f"{request_id}-{index}", 5)
        assert {span.parent_id for span in spans} == {request.span_id}
    observed.mesh.wait_until_idle()
    for name in ("many", request_id, f"cmpl-{request_id}", request_id[:8]):
        listed = observed.mesh.pdmesh("requests", "show", name)
        assert "2 requests" in listed
        shown = [line.split()[0] for line in listed.splitlines() if line.startswith(f"{request_id}-")]
        assert shown == [f"{request_id}-{index}" for index in range(2)]
        records = json.loads(observed.mesh.pdmesh("requests", "show", name, "-o", "json"))["requests"]
        assert [record["state"] for record in records] == ["finished", "finished"]


def test_a_record_tells_when_the_tokens_came(observed: Observed) -> None:
    observed.complete("told")
    observed.mesh.wait_until_idle()
    record = observed.mesh.request_record("told")
    assert (record.state, record.num_output_tokens) == ("finished", 6)
    assert record.first_token_s is not None
    assert record.last_token_s is not None
    assert 0 < record.first_token_s <= record.last_token_s
    assert "finished, 6 output tokens, first token after" in observed.mesh.pdmesh("requests", "show", "told")


def test_a_cancelled_request_is_traced_and_told_as_such(observed: Observed) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    headers = {"X-Request-Id": "gone"}
    url = f"{observed.mesh.base_url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as response:
        chunks = (line for line in response.iter_lines() if line.startswith("data: "))
        # The first token is the prefill instance's, those after it the decode instance's.
        *_, chunk = itertools.islice(chunks, 3)
    observed.mesh.wait_until_idle()
    by_name = {span.name: span for span in observed.spans(id_of(json.loads(chunk.removeprefix("data: "))), 6)}
    assert by_name["request"].parent_id == ""
    assert by_name["request"].attributes["gen_ai.response.finish_reasons"] == ["cancelled"]
    assert by_name["decode"].attributes["pdmesh.outcome"] == "freed"
    assert by_name["placed"].attributes["pdmesh.outcome"] == "cancelled"
    record = observed.mesh.request_record("gone")
    whats = [entry.what for entry in record.entries]
    assert record.state == "cancelled"
    assert whats.index("cancelled") < whats.index("freed") < whats.index("ended")


def test_lines_about_a_request_carry_its_id_and_never_its_text(observed: Observed) -> None:
    response = observed.complete("logged", return_token_ids=True, logprobs=0).json()
    tokens = response["choices"][0]["prompt_token_ids"]
    observed.mesh.wait_until_idle()
    logs = {file.stem: file.read_text() for file in observed.mesh.folder.glob("*.log")}
    assert len(logs) == 6, sorted(logs)
    for name, text in logs.items():
        assert not re.search(r"xylophone|quarks|juggle|zephyrs", text, re.IGNORECASE), name
        assert not re.search(r"\b" + r"\W+".join(map(str, tokens[:4])) + r"\b", text), name
    for name in ("gateway", "scheduler", "prefill-0", "decode-0"):
        lines = [json.loads(line) for line in logs[name].splitlines() if line.startswith("{")]
        ours = [line for line in lines if line.get("request_id") == id_of(response)]
        assert ours, f"{name} says nothing of the request"
        assert all(line["epoch"] == 0 for line in ours)
