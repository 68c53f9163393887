"""Chat templates: Jinja with the conventions of Hugging Face's tokenizers.

The checkpoint's own template is trusted like the checkpoint, and is rendered here. A request's template is an untrusted
program: `pdmesh_gateway.template_process` renders it in a process with limits of time and memory.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import anyio
import anyio.to_thread
import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

from pdmesh.errors import RequestRejected

MAX_REQUEST_TEMPLATE_CHARS = 64 * 1024

#: Wall-clock limit of rendering a request's own template, including the start of its process.
RENDER_TIMEOUT_S = 10.0

#: Limits of the requests' templates that are rendered at once, and that wait for this.
MAX_RENDERING = 2
MAX_WAITING = 32

#: Limit of nested lists and objects in a template's input. No real tool call is deeper. Python's own recursion limit
#: differs between versions (1,000 on 3.11, ten times as much in C code from 3.12 on).
MAX_NESTING = 200


class TemplateFailed(Exception):
    """Error of a template that is broken, or that raised an exception for this conversation."""


class _GenerationTag(jinja2.ext.Extension):
    """The tag ``{% generation %}``, which marks the assistant's tokens for training.

    The tag's body is simply rendered.
    """

    tags = {"generation"}  # noqa: RUF012 (jinja2's own attribute)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str) -> Callable[[Mapping[str, Any]], str]:
    """Return a function from variables to text. The compilation and the function raise `TemplateFailed`."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        template = environment.from_string(source)
    except Exception as error:
        # Constant folding runs parts of the template.
        raise TemplateFailed(_describe(error)) from error

    def render(variables: Mapping[str, Any]) -> str:
        try:
            return template.render(variables)
        except Exception as error:
            # The template is a program and can raise anything.
            raise TemplateFailed(_describe(error)) from error

    return render


class RequestTemplates:
    """Renderer of templates from requests: few at a time, each in a process of its own.

    `subprocess` starts the process, which on Linux does not fork (`vfork` and `exec`). Handlers that libraries such as
    gRPC run in forked children would fail, because the parent's threads are missing there.
    """

    def __init__(self) -> None:
        self._running = anyio.CapacityLimiter(MAX_RENDERING)
        self._num_waiting = 0

    async def render(self, source: str, variables: Mapping[str, Any], *, tool_format: str = "hermes") -> str:
        """Return a conversation as text, as `pdmesh_gateway.histories.ChatTemplate.render` does.

        Raises RequestRejected if the template fails or exceeds a limit, or if too many wait.
        """
        if len(source) > MAX_REQUEST_TEMPLATE_CHARS:
            raise _refused(f"it is longer than {MAX_REQUEST_TEMPLATE_CHARS} characters")
        try:
            job = msgspec.json.encode({"source": source, "variables": variables, "tool_format": tool_format})
        except RecursionError:
            raise _refused("its input is nested too deeply") from None
        if self._num_waiting >= MAX_WAITING:
            raise RequestRejected(
                "The server is overloaded: too many chat templates are waiting. Try again later.",
                status=429,
                code="overloaded",
                retry_after_s=1,
            )
        self._num_waiting += 1
        try:
            async with self._running:
                output = await _run_template_process(job)
        finally:
            self._num_waiting -= 1
        try:
            result = msgspec.json.decode(output, type=dict[str, str])
        except msgspec.DecodeError:
            # The process was killed.
            raise _refused("it takes too much time or memory") from None
        if "error" in result:
            raise _refused(result["error"])
        return result["text"]


async def _run_template_process(job: bytes) -> bytes:
    """Return the process's output. Raises RequestRejected if it does not finish in time."""
    command = [sys.executable, "-m", "pdmesh_gateway.template_process"]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    process = await anyio.to_thread.run_sync(start)
    try:
        with anyio.fail_after(RENDER_TIMEOUT_S):
            output, _ = await anyio.to_thread.run_sync(process.communicate, job, abandon_on_cancel=True)
            return output
    except TimeoutError:
        raise _refused(f"it did not finish within {RENDER_TIMEOUT_S:g} s") from None
    finally:
        # Has no effect on a process that has ended. Otherwise the thread reads the end of its output and reaps it.
        process.kill()


def _refused(reason: str) -> RequestRejected:
    return RequestRejected(f"Invalid chat template: {reason}", param="chat_template", code="invalid_chat_template")


def _describe(error: Exception) -> str:
    message = str(error) or type(error).__name__
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"{message} (line {error.lineno})"
    return message


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def check_nesting(value: object, param: str) -> None:
    """Raise RequestRejected for values nested deeper than `MAX_NESTING`."""
    level: list[object] = [value]
    for _ in range(MAX_NESTING):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise nested_too_deep(param)


def nested_too_deep(param: str) -> RequestRejected:
    """Return the error (400) of values nested too deep for a template or for Python's own recursion."""
    return RequestRejected(
        f"`{param}` has values nested more than {MAX_NESTING} deep.", param=param, code="invalid_value"
    )
