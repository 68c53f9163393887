"""Small parts of the gateway's edges: keys, limits, bodies, templates, ranges."""

import gzip
import math
import random
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
import pytest

from pdmesh.engine.files import DefaultSampling, ModelInfo
from pdmesh.errors import ConfigError, RequestRejected
from pdmesh_gateway.conversations import Conversation
from pdmesh_gateway.http.body import ClientGone, decode_body, may_hold_more_values, receive_body
from pdmesh_gateway.http.chat_endpoint import conversation_of
from pdmesh_gateway.http.unknown import header_value
from pdmesh_gateway.limits import SMALL_BODY_BYTES, RequestLimiter
from pdmesh_gateway.model_tokenizer import ModelTokenizer
from pdmesh_gateway.protocol.chat_protocol import ChatMessage, ChatRequest
from pdmesh_gateway.protocol.completions_protocol import CompletionRequest
from pdmesh_gateway.sampling import sampling_params, target_s
from pdmesh_gateway.templates import MAX_NESTING, RequestTemplates, TemplateFailed, check_nesting, compile_template
from pdmesh_testing.tokenizers import write_tokenizer

pytestmark = pytest.mark.anyio

INFO = ModelInfo(
    architecture="llama",
    max_model_len=100,
    vocab_size=300,
    eos_token_ids=(2,),
    default_sampling=DefaultSampling(temperature=0.6, top_k=20),
    fingerprint=b"",
)


def receiver(*parts: bytes, ends: bool = True) -> Callable[[], Awaitable[Any]]:
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]

    async def receive() -> Any:
        if messages:
            return messages.pop(0)
        if ends:
            return {"type": "http.request", "body": b"", "more_body": False}
        return await anyio.Event().wait()

    return receive


async def read(receive: Callable[[], Awaitable[Any]], **limits: Any) -> bytes:
    with RequestLimiter(max_requests=1, max_bytes=1_000_000).upload() as upload:
        return await receive_body(receive, upload, **limits)


async def test_a_body_is_read_within_its_limit() -> None:
    whole = await read(receiver(b"ab", b"cd"), content_length=None, max_bytes=4, timeout_s=10)
    assert whole == b"abcd"
    for content_length, parts in ((5, []), (None, [b"abc", b"de"])):
        with pytest.raises(RequestRejected, match="larger than 4 bytes") as refused:
            await read(receiver(*parts), content_length=content_length, max_bytes=4, timeout_s=10)
        assert refused.value.status == 413


async def test_a_body_that_never_ends_is_given_up() -> None:
    with pytest.raises(RequestRejected, match="did not arrive") as refused:
        await read(receiver(b"{", ends=False), content_length=None, max_bytes=100, timeout_s=0.01)
    assert refused.value.status == 408


async def test_a_client_that_leaves_while_sending_is_gone() -> None:
    async def receive() -> Any:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientGone):
        await read(receive, content_length=None, max_bytes=100, timeout_s=10)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (b"", None, "could not parse the JSON"),
        (b"{", None, "could not parse the JSON"),
        (b"\xff\xfe", None, "could not parse the JSON"),
        (b"", None, "it is empty"),
        (b" \r\n", None, "it is empty"),
        (b'{"prompt": "\xe9"}', None, "it is not UTF-8"),
        (b'{"prompt": "a"}\xe9', None, "trailing characters"),
        (gzip.compress(b"{}", mtime=0), None, "it is compressed with gzip, but has no `Content-Encoding` header"),
        (b"\x28\xb5\x2f\xfd\x00", None, "it is compressed with zstd, but has no `Content-Encoding` header"),
        (b"[" * 100_000, None, "got `array`"),
        (b"[]", None, "got `array`"),
        (b'{"prompt": 5}', "prompt", "Invalid value for `prompt`"),
        (b'{"temperature": "hot"}', "temperature", "Expected `float | null`, got `str`"),
        (b'{"temperature": 1e999}', "temperature", "out of range"),
        (b'{"n": 1.5}', "n", "got `float`"),
        (b'{"n": true}', "n", "got `bool`"),
        (b'{"stop": [1]}', "stop", r"`stop\[0\]`"),
        (b'{"maxTokens": 1}', "maxTokens", "supplied: maxTokens. Did you mean `max_tokens`?"),
        (b'{"shape": null, "temprature": 1}', "temprature", "Did you mean `temperature`?"),
        (b'{"colour": null, "n": "many"}', "n", "Invalid value for `n`"),
        (b'{"colour": 1, "n": "many"}', "n", "Invalid value for `n`"),
        (b'{"colour": null, "prompt": "', None, "could not parse"),
        (b'{"colour": [' + b"[" * 100_000, None, "could not parse"),
        (b'{"mirostat": 2}', "mirostat", "`mirostat` is not supported by this server"),
        (b'{"max_new_tokens": 2}', "max_new_tokens", "Use `max_tokens`"),
        (b'{"messages": []}', "messages", "not supported"),
        (b"{" + b",".join(b'"a%d": 1' % i for i in range(65)) + b"}", "a64", "More than 64 fields are unknown"),
        (b'{"prompt": "\xff"}', None, "could not parse|Invalid"),
        (b'{"temperature": NaN, "regex": "a"}', "regex", "Use `structured_outputs`"),
        (b'{"temperature": NaN, "prompt": "\xed\xa0\x80"}', None, "could not parse"),
    ],
)
async def test_a_bad_body_is_refused_by_field(body: bytes, param: str | None, message: str) -> None:
    with pytest.raises(RequestRejected, match=message) as refused:
        await decode_body(CompletionRequest, body, max_values=1_000_000)
    assert refused.value.status == 400
    assert refused.value.param == param


async def test_a_missing_field_is_named() -> None:
    with pytest.raises(RequestRejected, match="messages") as refused:
        await decode_body(ChatRequest, b"{}", max_values=9)
    assert refused.value.param == "messages"


async def test_unknown_fields_that_are_null_ask_for_nothing() -> None:
    """As clients write that know more fields than we do; what is null and known keeps its meaning."""
    body = b'{"lora_path": null, "prompt": "a", "max_tokens": null, "ebnf": null}'
    request, ignored = await decode_body(CompletionRequest, body, max_values=9)
    assert (request.prompt, request.max_tokens, ignored) == ("a", None, ())


def test_a_header_holds_only_names_that_it_can() -> None:
    assert header_value(["a", "b-c.d"]) == b"a, b-c.d"
    assert header_value(["a\r\nset-cookie: x", "\u20ac", "b" * 65, "ok"]) == b"ok, 3 more"
    assert header_value(map(str, range(20))) == b"0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 4 more"


async def test_nan_is_read_so_that_its_field_can_be_named() -> None:
    request, _ = await decode_body(CompletionRequest, b'{"temperature": NaN}', max_values=9)
    assert request.temperature is not None
    assert math.isnan(request.temperature)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 2.1),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 3.0),
        ("frequency_penalty", -3.0),
        ("seed", 10**30),
        pytest.param("seed", 10**5000, id="seed-endless"),
        ("min_tokens", -1),
        ("min_tokens", 11),
        ("priority", 2**40),
        ("stop_token_ids", [300]),
        ("logit_bias", {"x": 1.0}),
        ("logit_bias", {"300": 1.0}),
        ("logit_bias", {"1": 101.0}),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    request = CompletionRequest(prompt="a", **{field: value})
    with pytest.raises(RequestRejected, match=field) as refused:
        sampling_params(request, INFO, max_tokens=10, logprobs=None)
    assert (refused.value.status, refused.value.param) == (400, field)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "fast",
        "1s",
        "nan",
        "inf",
        "-inf",
        "-1",
        "0",
        "1e99",
        -1.0,
        0.0,
        5e-324,  # zero, in seconds
        pytest.param(math.nan, id="float-nan"),
        pytest.param(math.inf, id="float-inf"),
    ],
)
def test_a_target_that_is_none_is_refused_by_name(value: str | float) -> None:
    with pytest.raises(RequestRejected, match="x-slo-ttft-ms") as refused:
        target_s("x-slo-ttft-ms", value)
    assert (refused.value.status, refused.value.param) == (400, "x-slo-ttft-ms")


def test_targets_are_milliseconds() -> None:
    assert target_s("slo_ttft_ms", 250.0) == target_s("x-slo-ttft-ms", "250") == 0.25
    assert target_s("slo_ttft_ms", None) is None


def test_defaults_are_the_clients_then_the_checkpoints_then_neutral() -> None:
    params = sampling_params(CompletionRequest(prompt="a"), INFO, max_tokens=10, logprobs=None)
    assert (params.temperature, params.top_k, params.top_p, params.eos_token_ids) == (0.6, 20, 1.0, (2,))
    request = CompletionRequest(prompt="a", temperature=0, top_k=-1, ignore_eos=True, seed=-1)
    params = sampling_params(request, INFO, max_tokens=10, logprobs=None)
    assert (params.temperature, params.top_k, params.eos_token_ids, params.seed) == (0.0, 0, (), 2**63 - 1)


def test_random_seeds_differ() -> None:
    seeds = {sampling_params(CompletionRequest(), INFO, max_tokens=1, logprobs=None).seed for _ in range(10)}
    assert len(seeds) == 10


def test_admission_counts_and_gives_back() -> None:
    admission = RequestLimiter(max_requests=2, max_bytes=10)
    with admission.hold(num_requests=2, num_bytes=10):
        for more in ({"num_requests": 1}, {"num_bytes": 1}):
            with pytest.raises(RequestRejected, match="overloaded") as refused, admission.hold(**more):
                pass
            assert (refused.value.status, refused.value.retry_after_s) == (429, 1)
    assert (admission.num_requests, admission.num_bytes) == (0, 0)


def test_templates_follow_hugging_faces_conventions() -> None:
    source = (
        "{%- for m in messages %}\n    {%- if loop.index > 2 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}\n{%- endfor %}"
    )
    assert compile_template(source)({"messages": [{"a": "<é>"}, {}, {}]}) == '{"a": "<é>"}{}'
    with pytest.raises(TemplateFailed, match="roles must alternate"):
        compile_template("{{ raise_exception('roles must alternate') }}")({})
    with pytest.raises(TemplateFailed, match="line 1"):
        compile_template("{% for %}")
    with pytest.raises(TemplateFailed):
        compile_template("{{ ''.__class__.__mro__[1].__subclasses__() }}")({})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for %}", "Invalid chat template"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.append(1) }}", "Invalid chat template"),
        ("{{ 'a' * 10 ** 10 }}", "Invalid chat template"),
        ("x" * 100_000, "longer than"),
    ],
)
async def test_a_strangers_template_is_refused_with_a_reason(source: str, message: str) -> None:
    with pytest.raises(RequestRejected, match=message) as refused:
        await RequestTemplates().render(source, {"messages": []})
    assert (refused.value.status, refused.value.param) == (400, "chat_template")


async def test_a_strangers_template_renders() -> None:
    assert await RequestTemplates().render("{{ messages[0].content }}!", {"messages": [{"content": "hé"}]}) == "hé!"


async def test_a_final_message_is_continued(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, vocab_size=300, model_max_length=100)
    tokenizer = ModelTokenizer.load(tmp_path)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Well, "}]
    text = await tokenizer.render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("assistant\nWell, ")
    with pytest.raises(RequestRejected, match="continue_final_message"):
        await tokenizer.render_chat(messages, continue_final_message=True)


def test_a_broken_checkpoint_template_stops_the_start(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, vocab_size=300, model_max_length=100)
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ConfigError, match="chat template does not render"):
        ModelTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot read .*tokenizer\.json"):
        ModelTokenizer.load(tmp_path)


def test_values_are_counted_before_they_are_built() -> None:
    values: list[Any] = [list(range(1000)), [[]] * 1000, {str(i): i for i in range(500)}, [{"a": [1]}] * 250]
    for value in values:
        body = msgspec.json.encode(value)
        assert may_hold_more_values(body, 900)
        assert not may_hold_more_values(body, 5000)
    assert may_hold_more_values(b"[" + b"1," * 3_000_000 + b"1]", 2_999_999)


async def test_a_body_of_too_many_values_is_not_decoded() -> None:
    body = b'{"prompt": [' + b'"",' * 1_000_000 + b'""]}'
    with pytest.raises(RequestRejected, match="more than 1000 values") as refused:
        await decode_body(CompletionRequest, body, max_values=1000)
    assert refused.value.status == 413


async def test_large_bodies_on_their_way_never_keep_small_ones_out() -> None:
    admission = RequestLimiter(max_requests=1, max_bytes=10_000_000)
    with admission.upload() as slow, admission.upload() as small:
        slow.add(5_000_000)
        with pytest.raises(RequestRejected, match="large requests"):
            slow.add(100_000)
        small.add(SMALL_BODY_BYTES)
    assert admission.num_bytes == 0


async def test_the_oldest_large_body_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdmesh_gateway.limits.UPLOAD_GRACE_S", 0.0)
    admission = RequestLimiter(max_requests=1, max_bytes=2_000_000)
    texts: list[str] = []

    async def stand_still(ready: anyio.Event) -> None:
        with admission.upload() as upload:
            with pytest.raises(RequestRejected) as refused:
                await receive_body(sends_and_waits(ready), upload, content_length=None, max_bytes=10**7, timeout_s=60)
            texts.append(refused.value.message)

    def sends_and_waits(ready: anyio.Event) -> Callable[[], Awaitable[Any]]:
        async def receive() -> Any:
            if not ready.is_set():
                ready.set()
                return {"type": "http.request", "body": bytes(400_000), "more_body": True}
            return await anyio.sleep_forever()

        return receive

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                ready = anyio.Event()
                tasks.start_soon(stand_still, ready)
                await ready.wait()
            await anyio.wait_all_tasks_blocked()
            with admission.upload() as quick:
                quick.add(700_000)
                await anyio.wait_all_tasks_blocked()
                assert texts == [
                    "The request body did not arrive before the server needed its memory for other requests."
                ]
                quick.add(360_000)
    assert len(texts) == 2
    assert admission.num_bytes == 0


async def chat_of(messages: list[ChatMessage], *, most: int) -> Conversation:
    serving: Any = SimpleNamespace(config=SimpleNamespace(max_messages=most))
    return await conversation_of(ChatRequest(messages=messages), messages, serving)


@pytest.mark.parametrize("num_messages", [10, 1000])
@pytest.mark.parametrize("depth", [MAX_NESTING, 1990, 100_000])
async def test_messages_nested_too_deep_are_refused(num_messages: int, depth: int) -> None:
    """On every version of Python, whatever its own recursion would bear."""
    call = {"function": {"name": "f", "arguments": '{"a":' + "[" * depth + "]" * depth + "}"}}
    messages = [ChatMessage(role="user")] * (num_messages - 1) + [ChatMessage(role="assistant", tool_calls=[call])]
    with pytest.raises(RequestRejected, match="nested more than 200 deep") as refused:
        await chat_of(messages, most=1000)
    assert (refused.value.status, refused.value.param) == (400, "messages")


def test_as_much_nesting_as_anybody_needs() -> None:
    value: object = 1
    for _ in range(MAX_NESTING):
        value = {"a": value, "b": 0}
    check_nesting(value, "x")
    with pytest.raises(RequestRejected, match="`x` has values nested more than 200 deep"):
        check_nesting([value], "x")


async def test_there_are_so_many_messages_at_most() -> None:
    with pytest.raises(RequestRejected, match="has 11 messages; 10 are allowed"):
        await chat_of([ChatMessage(role="user")] * 11, most=10)


async def test_templates_are_rendered_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdmesh_gateway.templates.MAX_WAITING", 2)
    templates = RequestTemplates()
    results: list[str] = []

    async def render() -> None:
        try:
            results.append(await templates.render("{{ name }}", {"name": "hi"}))
        except RequestRejected as refused:
            results.append(str(refused.status))

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(render)
    assert sorted(results) == ["429", "429", "429", "hi", "hi"]


async def test_a_template_process_that_dies_is_the_templates_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")  # it reads nothing of its job
    with pytest.raises(RequestRejected, match="too much time or memory"):
        await RequestTemplates().render("a", {"messages": "x" * 10_000_000})


async def test_a_client_that_leaves_ends_its_template() -> None:
    with anyio.fail_after(30):
        with anyio.move_on_after(1):
            await RequestTemplates().render(
                "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", {}
            )
        assert await RequestTemplates().render("a", {}) == "a"


def damaged(data: bytes, rng: random.Random) -> bytes:
    """``data`` with a part cut out, doubled, overwritten or replaced by what JSON can hold and nobody expects."""
    start = rng.randrange(len(data))
    end = min(len(data), start + rng.choice((1, 2, 10, 100)))
    new = rng.choice(
        (b"", data[start:end] * 2, rng.randbytes(3), b"null", b"-1", b"1e999", b"[[", b'"\\ud800"', b"{}", b"0")
    )
    return data[:start] + new + data[end:]


def test_a_damaged_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, vocab_size=300, model_max_length=100)
    rng = random.Random(9)
    names = ["tokenizer.json", "tokenizer_config.json"]
    originals = {name: (tmp_path / name).read_bytes() for name in names}
    refusals: list[str] = []
    for _ in range(200):
        name = rng.choice(names)
        (tmp_path / name).write_bytes(damaged(originals[name], rng))
        with suppress_into(refusals):
            ModelTokenizer.load(tmp_path)
        (tmp_path / name).write_bytes(originals[name])
    assert len(refusals) > 50
    assert all(str(tmp_path) in refusal or "template" in refusal for refusal in refusals)


@contextmanager
def suppress_into(refusals: list[str]) -> Generator[None]:
    try:
        yield
    except ConfigError as error:
        refusals.append(str(error))
