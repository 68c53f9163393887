"""Chat templates: Jinja with the conventions of Hugging Face's tokenizers.

The checkpoint's own template is the operator's and is rendered here. One that comes with a request is a stranger's
program: it is rendered by `pdmesh_gateway.template_process`, in a process with limits of time and memory.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import anyio
import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

from pdmesh.errors import RequestRejected

MAX_REQUEST_TEMPLATE_CHARS = 64 * 1024

#: Wall-clock time for a request's own template, its process's start included.
RENDER_TIMEOUT_S = 10.0


class TemplateFailed(Exception):
    """The template is broken, or raised an exception for this conversation."""


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's tokens for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own attribute)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str) -> Callable[[Mapping[str, Any]], str]:
    """A function from variables to text. It and this raise `TemplateFailed`."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        template = environment.from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise TemplateFailed(_describe(error)) from error

    def render(variables: Mapping[str, Any]) -> str:
        try:
            return template.render(variables)
        except Exception as error:  # the template is a program: it can raise anything
            raise TemplateFailed(_describe(error)) from error

    return render


async def render_untrusted(source: str, variables: Mapping[str, Any]) -> str:
    """Render a request's own template in a process of its own. Raises RequestRejected."""
    if len(source) > MAX_REQUEST_TEMPLATE_CHARS:
        raise _refused(f"it is longer than {MAX_REQUEST_TEMPLATE_CHARS} characters")
    job = msgspec.json.encode({"source": source, "variables": variables})
    command = [sys.executable, "-m", "pdmesh_gateway.template_process"]
    try:
        with anyio.fail_after(RENDER_TIMEOUT_S):
            done = await anyio.run_process(command, input=job, check=False, stderr=subprocess.DEVNULL)
    except TimeoutError:
        raise _refused(f"it did not end within {RENDER_TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        raise _refused("it takes too much time or memory")
    result = msgspec.json.decode(done.stdout, type=dict[str, str])
    if "error" in result:
        raise _refused(result["error"])
    return result["text"]


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
