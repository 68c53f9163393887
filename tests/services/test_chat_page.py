"""The page to talk to the model in a real Chromium: a real gateway, and a mesh that says what a test wants."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from pdmesh.config import GatewayConfig, SecurityConfig
from pdmesh.model import FinishReason
from pdmesh.wire.messages import Generation, PromptLogprobs, TokenOut, unpack_token_ids
from pdmesh_testing.browser import Page, find_chromium, open_page
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.gateway import ready_gateway
from pdmesh_testing.scripted_mesh import ScriptedMesh, token_out
from pdmesh_testing.tokenizers import TOOL_TEMPLATE

CHROMIUM = find_chromium()

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")]

#: How a scripted answer ends; None: it goes on.
Reply = tuple[str, FinishReason | None]
STOP, LENGTH, ERROR = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR

END_ID = 258
ANSWER = "document.querySelector('article:last-child .answer')"
TEXT = f"{ANSWER}.querySelector('.text').innerText"
NOTES = "[...document.querySelectorAll('.failed, .cut')].map((note) => note.textContent).join(' ')"
ENDED = f"{ANSWER}.ariaBusy === 'false'"

HOSTILE = """# Title

<script>document.title = 'taken'</script> <img src=x onerror="document.title = 'taken'">

[one](javascript:document.title='taken') [two](data:text/html,<script>x</script>) [three](https://a.b@evil.example/)
[four](https://good.example/a_(b)) **bold *both*** `<b>code</b>` https://bare.example/x. snake_case_name

- outer
  1. inner
- last

| a | b |
|---|--:|
| 1 \\| 2 | <i>3</i> |

> quoted

```html
<script>document.title = 'taken'</script>
```
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose prompts end within its reasoning."""
    end = "<|im_start|>assistant\n"
    template = TOOL_TEMPLATE.replace(end, end + "<think>{% if enable_thinking is false %}</think>{% endif %}\n")
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny", template=template)


def tokenizer_of(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


@asynccontextmanager
async def chat(
    model: Path, *replies: Reply, security: SecurityConfig | None = None, **view: Any
) -> AsyncGenerator[tuple[Page, ScriptedMesh]]:
    """The page, in front of a mesh that gives ``replies`` in this order, one for each request."""
    assert CHROMIUM is not None
    waiting, tokenizer = list(replies), tokenizer_of(model)

    def answer(generation: Generation) -> list[TokenOut | PromptLogprobs]:
        text, end = waiting.pop(0)
        token_ids = [*tokenizer.encode(text).ids, *([END_ID] if end is STOP else [])]
        out: list[TokenOut | PromptLogprobs] = []
        for index, token_id in enumerate(token_ids):
            is_last = index == len(token_ids) - 1 and end is not ERROR
            out.append(token_out(generation, index, token_id, finish_reason=end if is_last else None))
        if end is ERROR:
            out.append(token_out(generation, len(token_ids), None, finish_reason=ERROR, error="the disk is on fire"))
        return out

    async with ready_gateway(model, answer, security=security) as (_, mesh, running), open_page(CHROMIUM) as page:
        await page.open(f"{running.url}/chat", **view)
        await page.until("document.getElementById('model').textContent === 'tiny'")
        yield page, mesh


async def press(page: Page, key: str) -> None:
    code, text = {"Enter": (13, "\r"), "Escape": (27, "")}[key]
    for kind in ("keyDown", "keyUp"):
        await page.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text=text)


async def ask(page: Page, question: str) -> None:
    """Type a question and press Enter."""
    await page.until("document.activeElement.id === 'question'")
    await page.call("Input.insertText", text=question)
    await press(page, "Enter")
    await page.until(f"[...document.querySelectorAll('.question')].at(-1)?.textContent === {json.dumps(question)}")


async def click(page: Page, selector: str, text: str = "") -> None:
    """Click the last element that a selector finds and that has this text."""
    found = f"[...document.querySelectorAll({json.dumps(selector)})].filter((e) => e.textContent.includes('{text}'))"
    await page.until(f"{found}.length")
    await page.run(f"{found}.at(-1).click()")


async def prompt_of(mesh: ScriptedMesh, model: Path, index: int) -> str:
    generation = (await mesh.next_submit(index)).generation
    token_ids = unpack_token_ids(generation.token_ids)[: generation.num_prompt_tokens]
    return tokenizer_of(model).decode(token_ids, skip_special_tokens=False)


async def test_markdown_of_a_hostile_answer_is_text_and_links_to_the_web(model: Path, tmp_path: Path) -> None:
    async with chat(model, (HOSTILE, STOP), width=1280, height=900) as (page, _):
        await ask(page, "<b>hello</b>")
        await page.until(ENDED)
        tags = await page.run(f"[...new Set([...{ANSWER}.querySelectorAll('.text *')].map((e) => e.tagName))].sort()")
        known = "A BLOCKQUOTE BUTTON CODE DIV EM H3 LI OL P PRE STRONG TABLE TBODY TD TH THEAD TR UL"
        assert " ".join(tags) == known
        links = await page.run(f"[...{ANSWER}.querySelectorAll('.text a')].map((a) => [a.href, a.rel, a.target])")
        assert [link[0] for link in links] == ["https://good.example/a_(b)", "https://bare.example/x"]
        assert all(link[1:] == ["noopener noreferrer", "_blank"] for link in links)
        text = await page.run(TEXT)
        assert "[one](javascript:document.title='taken')" in text
        assert "<img src=x" in text
        assert "snake_case_name" in text
        cells = await page.run(f"[...{ANSWER}.querySelectorAll('td')].map((cell) => cell.textContent)")
        assert cells == ["1 | 2", "<i>3</i>"]
        assert await page.run(f"{ANSWER}.querySelector('li ol li').textContent") == "inner"
        code = await page.run(f"{ANSWER}.querySelector('.code pre').textContent")
        assert code == "<script>document.title = 'taken'</script>"
        assert await page.run("document.title") == "<b>hello</b> · pdmesh"
        await click(page, ".code button", "copy")
        await page.until(f"{ANSWER}.querySelector('.code button').textContent !== 'copy'")
        await page.screenshot(tmp_path / "markdown.png")
        assert page.console == []


async def test_markdown_is_parsed_in_linear_time_and_at_any_depth(model: Path) -> None:
    """A parser that backtracks would take hours for each of these texts, or overflow its stack."""
    n = 20_000
    texts = ["*a " * n + "b* " * n, "[" * n, "[a](" * n, "`a``b" * n, "> " * n, "```" + "a" * n + "`"]
    texts += ["[" * 90 + "a" + "](b)" * 90]
    texts += ["\n".join(" " * depth + "- x" for depth in range(1000)), "|a" * n + "\n" + "|-" * n + "\n" + "|\n" * n]
    async with chat(model) as (page, _):
        for text in texts:
            script = "import('/ui/markdown.js').then(({ show }) => { const box = document.createElement('div');"
            shown = await page.run(f"{script} show(box, {json.dumps(text)}); return box.textContent.length; }})")
            assert shown > 0


async def test_a_stopped_answer_stays_and_goes_on(model: Path) -> None:
    replies: list[Reply] = [("One two", None), (" three", STOP), ("Other", STOP)]
    async with chat(model, *replies) as (page, mesh):
        await ask(page, "count")
        await page.until(f"{TEXT} === 'One two'")
        assert mesh.cancelled == []
        await press(page, "Escape")
        await page.until(ENDED)
        await mesh.until(lambda: len(mesh.cancelled) == 1)
        assert await page.run(f"[{TEXT}, {NOTES}]") == ["One two", "Stopped."]
        await click(page, ".foot button", "continue")
        await page.until(f"{TEXT} === 'One two three' && {ENDED}")
        assert (await prompt_of(mesh, model, 1)).endswith("count<|im_end|>\n<|im_start|>assistant\nOne two")
        await click(page, ".foot button", "regenerate")
        await page.until(f"{TEXT} === 'Other' && {ENDED}")
        assert await prompt_of(mesh, model, 2) == await prompt_of(mesh, model, 0)
        assert await page.run("document.querySelectorAll('article').length") == 1
        way = await page.run("document.querySelector('.foot a').href")
        assert "/ui#chatcmpl-" in way
        assert page.console == []


async def test_an_error_leaves_what_came(model: Path) -> None:
    async with chat(model, ("Half an", None), ("", ERROR), ("Whole", STOP)) as (page, mesh):
        await ask(page, "first")
        await page.until(f"{TEXT} === 'Half an'")
        generation = (await mesh.next_submit()).generation
        num_tokens = len(tokenizer_of(model).encode("Half an").ids)
        mesh.send_tokens(token_out(generation, num_tokens, None, finish_reason=ERROR, error="the disk is on fire"))
        await page.until(ENDED)
        assert await page.run(TEXT) == "Half an"
        assert "the disk is on fire" in await page.run(NOTES)
        await click(page, ".foot button", "regenerate")  # fails before anything came
        await mesh.next_submit(1)
        await page.until(ENDED)
        assert await page.run(TEXT) == "Half an"
        await ask(page, "second")
        await page.until(f"{TEXT} === 'Whole'")
        prompt = await prompt_of(mesh, model, 2)
        assert "Half an<|im_end|>\n<|im_start|>user\nsecond" in prompt


async def test_reasoning_and_calls_are_folded(thinking: Path) -> None:
    async with chat(thinking, ("Let me see.\n</think>\n\nYes.", STOP)) as (page, _):
        await ask(page, "sure?")
        await page.until(f"{TEXT} === 'Yes.' && {ENDED}")
        fold = f"{ANSWER}.querySelector('details')"
        assert await page.run(f"[{fold}.open, {fold}.querySelector('pre').textContent.trim()]") == [
            False,
            "Let me see.",
        ]
        call = {"index": 0, "id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
        chunk = {"id": "x", "choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": "tool_calls"}]}
        events = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        await page.run(f"window.fetch = async () => new Response({json.dumps(events)})")
        await ask(page, "look")
        await page.until(f"{ENDED} && {ANSWER}.textContent.includes('Call of look')")
        shown = await page.run(
            f"[...{ANSWER}.querySelectorAll('details:not([hidden])')].map((e) => [e.open, e.innerText])"
        )
        assert shown == [[False, "Call of look"]]


async def test_parameters_reach_the_mesh_and_a_cut_answer_says_so(model: Path) -> None:
    async with chat(model, ("One", LENGTH)) as (page, mesh):
        values = {"system": "Be brief.", "temperature": "0.25", "top_p": "0.5", "max_tokens": "3", "seed": "7"}
        for name, value in values.items():
            await page.run(f"document.querySelector('[name={name}]').value = {json.dumps(value)}")
        await page.run("document.getElementById('parameters').dispatchEvent(new Event('input'))")
        await ask(page, "hello")
        await page.until(ENDED)
        params = (await mesh.next_submit()).generation.params
        assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (0.25, 0.5, 3, 7)
        assert (await prompt_of(mesh, model, 0)).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
        assert await page.run(NOTES) == "Cut at its limit of tokens."
        await page.call("Page.reload")
        await page.until("document.querySelector('[name=seed]').value === '7'")


async def test_conversations_outlive_a_reload(model: Path) -> None:
    replies: list[Reply] = [("To one", STOP), ("To two", None), ("Again", STOP)]
    names = "[...document.querySelectorAll('#list .name')].map((name) => name.textContent)"
    async with chat(model, *replies) as (page, mesh):
        await ask(page, "one")
        await page.until(ENDED)
        await click(page, "#new")
        await ask(page, "two")
        await page.until(f"{TEXT} === 'To two'")
        await click(page, "#list .name", "one")  # the other goes on meanwhile
        await page.until(f"{TEXT} === 'To one'")
        assert await page.run("document.querySelectorAll('#list .running').length") == 1
        await page.call("Page.reload")
        await page.until(f"{TEXT} === 'To one'")
        await mesh.until(lambda: len(mesh.cancelled) == 1)
        assert await page.run(names) == ["two", "one"]
        await click(page, "#list .name", "two")
        await page.until(f"{TEXT} === 'To two'")
        assert await page.run(NOTES) == "Stopped."
        await ask(page, "three")
        await page.until(f"{TEXT} === 'Again'")
        assert "To two<|im_end|>\n<|im_start|>user\nthree" in await prompt_of(mesh, model, 2)
        await click(page, "#list [aria-label^=rename]")
        await page.call("Input.insertText", text="renamed")
        await press(page, "Enter")
        await page.until(f"{names}.includes('renamed')")
        for label in ("delete", "really delete"):
            await click(page, f"#list [aria-label='{label} two']")
        await page.call("Page.reload")
        await page.until(f"{TEXT} === 'To one'")
        assert await page.run(names) == ["renamed"]
        assert page.console == []


async def test_history_is_bounded(model: Path) -> None:
    async with chat(model) as (page, _):
        kept = await page.run(
            """import('/ui/conversations.js').then(({ Conversations }) => {
                const made = new Conversations(localStorage, 'test ');
                for (let number = 0; number < 130; number += 1) {
                    const conversation = made.create();
                    conversation.at = number;
                    conversation.turns.push({ text: 'x'.repeat(number < 100 ? 10 : 200_000) });
                    if (!made.save(conversation)) throw new Error('not kept');
                }
                const again = new Conversations(localStorage, 'test ').list();
                return [again.length, again[0].at, Object.values(localStorage).join('').length];
            })"""
        )
        assert kept[0] < 100
        assert kept[1] == 129
        assert kept[2] < 2_000_000


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_nothing_scrolls_sideways(thinking: Path, tmp_path: Path, dark: bool) -> None:
    async with chat(thinking, (f"Hm.</think>{HOSTILE}", STOP), width=1280, height=900, dark=dark) as (page, _):
        await ask(page, "Show me all of it.\n\nAnd " + "long" * 60)
        await page.until(ENDED)
        background = await page.run("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(15, 18, 22)" if dark else "rgb(255, 255, 255)")
        for width in (1280, 800, 390):
            await page.call(
                "Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=False
            )
            for part in ("document.documentElement", "document.getElementById('transcript')"):
                assert await page.run(f"{part}.scrollWidth <= {part}.clientWidth"), (width, part)
            assert await page.run("document.getElementById('ask').getBoundingClientRect().bottom <= innerHeight")
            await page.screenshot(tmp_path / f"{width}.png")
        await click(page, "#show-side")
        assert await page.run("document.getElementById('side').getBoundingClientRect().width") == 390
        await page.screenshot(tmp_path / "side.png")
        assert page.console == []


async def test_the_page_asks_for_a_key_and_lets_nothing_else_in(model: Path) -> None:
    assert CHROMIUM is not None
    security = SecurityConfig(api_key="secret")
    async with ready_gateway(model, security=security) as (client, _, running), open_page(CHROMIUM) as page:
        answer = await client.get("/chat")
        assert answer.headers["content-security-policy"].startswith("default-src 'self'")
        await page.open(f"{running.url}/chat")
        await page.until("document.getElementById('ask-key').open")
        await page.call("Input.insertText", text="secret")
        await press(page, "Enter")
        await page.until("document.getElementById('model').textContent === 'tiny'")
    async with ready_gateway(model, gateway=GatewayConfig(port=0, ui=False)) as (client, _, _):
        assert (await client.get("/chat")).status_code == httpx.codes.NOT_FOUND
