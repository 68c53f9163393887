"""Encodings, versions, half-closed connections, keys and ids: what clients and proxies do with HTTP itself."""

from __future__ import annotations

import gzip
import json
import re
import socket
import zlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import httpx
import pytest

from pdmesh.apikeys import ApiKey, entry_of, hash_key
from pdmesh.config import GatewayConfig, SecurityConfig
from pdmesh.errors import ConfigError
from pdmesh.model import Epoch
from pdmesh.wire.messages import Generation, TokenOut
from pdmesh_gateway.auth import ApiKeys
from pdmesh_testing.gateway import BODIES, GENERATING, ready_gateway
from pdmesh_testing.running_gateway import RunningGateway, running_gateway
from pdmesh_testing.scripted_mesh import ScriptedMesh, echo_prompt, scripted_mesh

pytestmark = pytest.mark.anyio


def raw_deflate(data: bytes) -> bytes:
    deflate = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return deflate.compress(data) + deflate.flush()


def message_of(response: httpx.Response) -> str:
    return str(response.json()["error"]["message"])


async def test_compressed_bodies_are_read(model: Path) -> None:
    async with ready_gateway(model) as (client, _mesh, _running):
        for path, fields in BODIES.items():
            body = json.dumps(fields).encode()
            half = len(body) // 2
            for encoding, compressed in (
                ("gzip", gzip.compress(body)),
                ("GZIP", gzip.compress(body, 1)),
                ("Gzip", gzip.compress(body, 9)),
                ("x-gzip", gzip.compress(body)),
                ("gzip", gzip.compress(body[:half]) + gzip.compress(body[half:])),
                ("gzip", gzip.compress(body + b" " * 300_000)),
                ("deflate", zlib.compress(body)),
                ("deflate", zlib.compress(body, 0)),
                ("deflate", raw_deflate(body)),
                ("identity", body),
                ("", body),
            ):
                response = await client.post(path, content=compressed, headers={"Content-Encoding": encoding})
                assert response.status_code == 200, (path, encoding, response.text)


async def test_a_compressed_body_may_come_byte_by_byte(model: Path) -> None:
    body = json.dumps(BODIES["/tokenize"]).encode()
    for compressed in (gzip.compress(body), zlib.compress(body), raw_deflate(body)):
        encoding = "gzip" if compressed[0] == 0x1F else "deflate"

        async def bytewise(data: bytes = compressed) -> AsyncGenerator[bytes]:
            for byte in data:
                yield bytes([byte])

        async with ready_gateway(model) as (client, _mesh, _running):
            response = await client.post("/tokenize", content=bytewise(), headers={"Content-Encoding": encoding})
            assert response.status_code == 200, response.text


async def test_other_encodings_are_a_415_that_names_the_header(model: Path) -> None:
    async with ready_gateway(model) as (client, mesh, _running):
        for path, fields in BODIES.items():
            body = json.dumps(fields).encode()
            for encoding in ("br", "zstd", "compress", "gzip, gzip", "deflate, gzip", "x", "gzip;q=1", "*", "a" * 999):
                response = await client.post(path, content=body, headers={"Content-Encoding": encoding})
                assert (response.status_code, response.headers["accept-encoding"]) == (415, "gzip, deflate")
                assert "Content-Encoding" in message_of(response)
        assert mesh.submitted == []


async def test_a_damaged_or_huge_compressed_body_is_refused(model: Path) -> None:
    body = json.dumps(BODIES["/v1/completions"]).encode()
    whole = gzip.compress(body)
    config = GatewayConfig(max_body_bytes=100_000)
    async with ready_gateway(model, gateway=config) as (client, mesh, _running):
        cases: list[tuple[str, bytes, int, str]] = [
            ("gzip", body, 400, "is damaged: it does not match its Content-Encoding, gzip"),
            ("gzip", whole[:-4], 400, "ends too early"),
            ("gzip", whole[:5], 400, "ends too early"),
            ("gzip", whole[:-8] + bytes(8), 400, "is damaged"),
            ("gzip", whole + b"more", 400, "is damaged"),
            ("gzip", whole[:15] + b"?????" + whole[20:], 400, "is damaged"),
            ("deflate", zlib.compress(body)[:-1], 400, "ends too early"),
            ("deflate", zlib.compress(body) + b"more", 400, "has bytes after its end"),
            ("deflate", b"\xff" * 20, 400, "is damaged"),
            ("gzip", b"", 400, "could not parse the JSON"),
            ("gzip", gzip.compress(b"not json"), 400, "could not parse the JSON"),
            ("gzip", gzip.compress(bytes(100_001)), 413, "larger than 100000 bytes"),
            ("gzip", gzip.compress(bytes(60_000_000)), 413, "larger than 100000 bytes"),
            ("deflate", zlib.compress(bytes(60_000_000)), 413, "larger than 100000 bytes"),
            ("gzip", gzip.compress(bytes(60_000)) * 100, 413, "larger than 100000 bytes"),
        ]
        for encoding, content, status, message in cases:
            response = await client.post("/v1/completions", content=content, headers={"Content-Encoding": encoding})
            assert (response.status_code, message in message_of(response)) == (status, True), response.text
        assert mesh.submitted == []


async def test_a_byte_order_mark_is_skipped_and_other_encodings_are_named(model: Path) -> None:
    async with ready_gateway(model) as (client, _mesh, _running):
        for path, fields in [*BODIES.items(), ("/invocations", BODIES["/v1/completions"])]:
            text = json.dumps(fields)
            for sent in (text.encode("utf-8-sig"), gzip.compress(text.encode("utf-8-sig"))):
                headers = {"Content-Encoding": "gzip"} if sent[0] == 0x1F else {}
                response = await client.post(path, content=sent, headers=headers)
                assert response.status_code == 200, response.text
            for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"):
                response = await client.post(path, content=text.encode(encoding))
                assert (response.status_code, "send JSON in UTF-8" in message_of(response)) == (400, True)
        for body in (b"\xef\xbb\xbf", b"\xef\xbb", b"\xef\xbb\xbf{", b"\xef\xbb\xbf\xef\xbb\xbf{}"):
            assert (await client.post("/v1/completions", content=body)).status_code == 400


def raw(running: RunningGateway, path: str, *, version: str = "1.1", head: str = "", **fields: Any) -> bytes:
    body = json.dumps({**BODIES[path], **fields}).encode()
    host = running.facts["http_address"]
    return f"POST {path} HTTP/{version}\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n{head}\r\n".encode() + body


@asynccontextmanager
async def connected(running: RunningGateway) -> AsyncGenerator[anyio.abc.SocketStream]:
    host, port = running.facts["http_address"].split(":")
    async with await anyio.connect_tcp(host, int(port)) as stream:
        yield stream


async def to_the_end(stream: anyio.abc.SocketStream, *, version: str = "1.1") -> tuple[bytes, bytes]:
    """Everything that comes before the server closes, as head and body, without interim responses to HTTP/1.1."""
    received = b""
    with anyio.fail_after(20):
        while True:
            try:
                received += await stream.receive()
            except anyio.EndOfStream:
                break
    while version == "1.1" and received.startswith(b"HTTP/1.1 100 "):
        received = received.partition(b"\r\n\r\n")[2]
    head, _, body = received.partition(b"\r\n\r\n")
    return head.lower(), body


def unchunked(body: bytes) -> bytes:
    whole = b""
    while True:
        size, _, body = body.partition(b"\r\n")
        if not int(size, 16):
            assert body == b"\r\n"
            return whole
        whole += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]


async def test_an_http_1_0_client_gets_no_chunks_and_the_end_by_closing(model: Path) -> None:
    async with ready_gateway(model) as (client, _mesh, running):
        for path in GENERATING:
            for head in ("", "Connection: keep-alive\r\n", "Expect: 100-continue\r\n"):
                async with connected(running) as stream:
                    await stream.send(raw(running, path, version="1.0", head=head, stream=True))
                    answer, body = await to_the_end(stream, version="1.0")
                assert answer.startswith(b"http/1.1 200"), answer
                assert b"transfer-encoding" not in answer
                assert b"\r\nconnection: close" in answer
                events = [line[6:] for line in body.decode().split("\n") if line.startswith("data: {")]
                assert events
                assert all(json.loads(event) for event in events)
                if path.endswith("completions"):
                    assert body.endswith(b"data: [DONE]\n\n")
        for path in BODIES:
            async with connected(running) as stream:
                await stream.send(raw(running, path, version="1.0"))
                answer, body = await to_the_end(stream, version="1.0")
            assert f"content-length: {len(body)}".encode() in answer
            assert json.loads(body)
        for method, target, status in (("HEAD", "/health", 200), ("GET", "/v1/models", 200), ("POST", "/v1/x", 404)):
            async with connected(running) as stream:
                await stream.send(f"{method} {target} HTTP/1.0\r\n\r\n".encode())
                answer, body = await to_the_end(stream, version="1.0")
            assert answer.startswith(f"http/1.1 {status}".encode())
            assert (body == b"") == (method == "HEAD")
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_a_client_that_closes_its_sending_half_gets_its_answer(model: Path, version: str) -> None:
    async with ready_gateway(model) as (_client, mesh, running):
        for path in GENERATING:
            for stream_it in (False, True):
                async with connected(running) as stream:
                    await stream.send(raw(running, path, version=version, stream=stream_it))
                    await stream.send_eof()
                    head, body = await to_the_end(stream, version=version)
                assert head.startswith(b"http/1.1 200"), (path, head)
                assert b"connection: close" in head
                if stream_it and version == "1.1":
                    body = unchunked(body)
                assert b"user" in body or b"hello" in body
        assert mesh.cancelled == []
        for sent in (b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n", raw(running, "/tokenize")):
            async with connected(running) as stream:
                await stream.send(sent)
                await stream.send_eof()
                assert (await to_the_end(stream))[0].startswith(b"http/1.1 200")


async def test_a_request_that_ends_in_the_middle_gets_no_answer(model: Path) -> None:
    async with ready_gateway(model) as (_client, mesh, running):
        whole = raw(running, "/v1/completions")
        for sent in (b"", whole[:5], whole[:-1], whole.partition(b"\r\n\r\n")[0]):
            async with connected(running) as stream:
                await stream.send(sent)
                await stream.send_eof()
                assert await to_the_end(stream) == (b"", b"")
        assert mesh.submitted == []


def first_tokens(generation: Generation, count: int) -> list[TokenOut]:
    return [message for message in echo_prompt(generation) if isinstance(message, TokenOut)][:count]


def silence(_generation: Generation) -> list[TokenOut]:
    return []


@asynccontextmanager
async def silent_gateway(model: Path) -> AsyncGenerator[tuple[ScriptedMesh, RunningGateway]]:
    async with scripted_mesh(silence) as mesh, running_gateway(model, mesh.address) as running:
        await mesh.until(lambda: len(mesh.registrations) == 1)
        async with httpx.AsyncClient(base_url=running.url) as client:
            while (await client.get("/ready")).status_code != 200:
                pass
        yield mesh, running


async def test_a_slow_answer_to_a_half_closed_client_comes_behind_interim_responses(model: Path) -> None:
    async with silent_gateway(model) as (mesh, running):
        async with connected(running) as client:
            await client.send(raw(running, "/v1/completions"))
            await client.send_eof()
            submit = await mesh.next_submit(0)
            with anyio.fail_after(20):
                interim = await client.receive()
            mesh.send_tokens(*first_tokens(submit.generation, 6))
            head, body = await to_the_end(client)
        assert interim == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert head.startswith(b"http/1.1 200")
        assert json.loads(body)["choices"][0]["text"] == "hello, "
        assert mesh.cancelled == []


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_a_request_that_takes_too_long_ends_with_the_cause(model: Path, path: str, num_tokens: int) -> None:
    limit = GatewayConfig(request_timeout_s=0.2)
    cause = "for 0.2 s, this server's limit (`gateway.request_timeout_s`)"
    begun = partial(first_tokens, count=num_tokens)
    async with ready_gateway(model, begun, gateway=limit) as (client, mesh, _running):
        whole = await client.post(path, json=BODIES[path])
        assert (whole.status_code, cause in message_of(whole)) == (504, True)
        streamed = await client.post(path, json={**BODIES[path], "stream": True})
        if num_tokens:
            assert streamed.status_code == 200
            assert cause in streamed.text.split("data: ")[-1] + streamed.text.split("data: ")[-2]
        await mesh.until(lambda: len(mesh.cancelled) == 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_may_take_longer_than_the_wait_for_a_token(model: Path, stream: bool) -> None:
    limit = GatewayConfig(request_timeout_s=2.0)
    begun = partial(first_tokens, count=1)
    body = {**BODIES["/v1/completions"], "stream": stream}
    async with ready_gateway(model, begun, gateway=limit) as (client, mesh, _running):

        async def go_on() -> None:
            submit = await mesh.next_submit(0)
            for tokens in first_tokens(submit.generation, 6)[1:]:
                await anyio.sleep(0.5)
                mesh.send_tokens(tokens)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(go_on)
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200
            assert "".join(re.findall(r'"text":"([^"]*)"', answer.text)) == "hello, "


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize(("stream", "num_tokens"), [(False, 0), (False, 2), (True, 0), (True, 2)])
async def test_a_client_that_closes_both_halves_one_after_the_other_frees_its_request(
    model: Path, path: str, stream: bool, num_tokens: int
) -> None:
    async with silent_gateway(model) as (mesh, running):
        async with connected(running) as client:
            await client.send(raw(running, path, stream=stream))
            await client.send_eof()
            submit = await mesh.next_submit(0)
            mesh.send_tokens(*first_tokens(submit.generation, num_tokens))
            if stream and num_tokens:
                while b"data: " not in await client.receive():
                    pass
            assert mesh.cancelled == []
        await mesh.until(lambda: len(mesh.cancelled) == 1)
        assert mesh.cancelled == [(submit.generation.request_id, Epoch(0))]


async def test_an_http_1_0_client_that_is_gone_is_found_by_tcps_own_probes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdmesh_gateway.http.half_closed.KEEP_ALIVE_S", 1)
    async with silent_gateway(model) as (mesh, running):
        async with connected(running) as client:
            # The client's host forgets the connection after a second instead of a minute.
            raw_socket = client.extra(anyio.abc.SocketAttribute.raw_socket)
            raw_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_LINGER2, 1)
            await client.send(raw(running, "/v1/completions", version="1.0"))
            await mesh.next_submit(0)
        await mesh.until(lambda: len(mesh.cancelled) == 1)


KEYS = ["schlüssel", "é", "clé-à-molette", "鍵", "ключ", "🔑", "a b", "key\u00a0key", "ÿ", "naïve" * 20]


@pytest.mark.parametrize("key", KEYS)
async def test_keys_are_matched_by_their_bytes(model: Path, key: str, tmp_path: Path) -> None:
    (keys := tmp_path / "keys").write_text(f"other\n{key}\n")
    (hashes := tmp_path / "keys.toml").write_text(entry_of(ApiKey(name="a", hash=hash_key(key))))
    for security in (
        SecurityConfig(api_key=key),
        SecurityConfig(api_key=f" {key}\n"),
        SecurityConfig(api_keys_file=keys),
        SecurityConfig(api_keys_file=hashes),
    ):
        async with ready_gateway(model, security=security) as (client, _mesh, _running):
            sent = [key.encode()]
            if max(key) <= "\xff":
                sent.append(key.encode("latin-1"))  # as Python's http.client and others send it
            for value in sent:
                for headers in ({b"authorization": b"Bearer " + value}, {b"x-api-key": value}):
                    assert (await client.get("/v1/models", headers=headers)).status_code == 200
            for wrong in (key.encode() + b"!", b"!" + key.encode(), b"\xff\xfe"):
                refused = await client.get("/v1/models", headers={b"authorization": b"Bearer " + wrong})
                assert refused.status_code in (400, 401)


def test_a_key_of_raw_bytes_is_matched() -> None:
    """As a shell hands it over that is not set to UTF-8."""
    keys = ApiKeys(SecurityConfig(api_key=b"cl\xe9".decode("utf-8", "surrogateescape")))
    assert keys.check("Bearer clé").name == "api_key"


@pytest.mark.parametrize("key", [" ", "\n", "a\nb", "a\r\nb", "a\x00b", "a\x7fb", "\x1b[0m"])
def test_a_key_that_no_header_carries_stops_the_start(key: str) -> None:
    with pytest.raises(
        ConfigError, match=r"security\.api_key has a key with characters that HTTP headers cannot carry"
    ):
        ApiKeys(SecurityConfig(api_key=key))


@pytest.mark.parametrize(
    ("sent", "label"),
    [
        (b"plain-1.2:3@a/b+c=d", "plain-1.2:3@a/b+c=d"),
        (b"with blanks in it", "with_blanks_in_it"),
        (b"Root=1-67891233-abcdef012345678912345678;Self=1-6", "Root=1-67891233-abcdef012345678912345678_Self=1-6"),
        (b"{3F2504E0-4F89-11D3-9A0C-0305E82C3301}", "_3F2504E0-4F89-11D3-9A0C-0305E82C3301_"),
        (b"a,b", "a_b"),
        (b'"quoted"', "_quoted_"),
        (b"x" * 128, "x" * 128),
        (b"x" * 129, "x" * 128),
        (b"y" * 4000, "y" * 128),
        ("é".encode(), "__"),
        (b"\xff", "_"),
        (b"<script>", "_script_"),
        (b"a\tb", "a_b"),
    ],
)
async def test_any_id_that_a_proxy_sets_becomes_a_label(model: Path, sent: bytes, label: str) -> None:
    async with ready_gateway(model) as (client, mesh, _running):
        for path, body in BODIES.items():
            response = await client.post(path, json=body, headers={b"X-Request-Id": sent})
            assert (response.status_code, response.headers["x-request-id"]) == (200, label)
        assert {submit.generation.label for submit in mesh.submitted} == {label}


async def test_an_empty_id_is_none(model: Path) -> None:
    async with ready_gateway(model) as (client, mesh, _running):
        body, empty = BODIES["/v1/completions"], {"X-Request-Id": ""}
        named = await client.post("/v1/completions", json={**body, "request_id": "mine"}, headers=empty)
        unnamed = await client.post("/v1/completions", json=body, headers=empty)
        assert named.headers["x-request-id"] == "mine"
        assert unnamed.headers["x-request-id"] == mesh.submitted[1].generation.request_id
        assert [submit.generation.label for submit in mesh.submitted] == ["mine", ""]


async def test_the_smallest_nucleus_reaches_the_workers(model: Path) -> None:
    async with ready_gateway(model) as (client, mesh, _running):
        for path in GENERATING:
            for value in (0, 0.0, 1e-9):
                assert (await client.post(path, json={**BODIES[path], "top_p": value})).status_code == 200
                assert mesh.submitted[-1].generation.params.top_p == value
            for value in (-0.1, 1.1):
                assert (await client.post(path, json={**BODIES[path], "top_p": value})).status_code == 400
