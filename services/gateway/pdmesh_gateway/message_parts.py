"""Parts of messages as text, for every dialect."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pdmesh.errors import RequestRejected
from pdmesh_gateway.sampling import invalid

_TEXTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text")

#: Parts that cannot become text. They are refused, also in an answer.
_MEDIA = frozenset(
    {
        *("image", "image_url", "input_image", "output_image", "audio", "input_audio", "output_audio"),
        *("video", "video_url", "input_video", "file", "input_file", "container_upload"),
    }
)

#: Parts of an answer that hold reasoning.
REASONING = frozenset({"thinking", "reasoning", "redacted_thinking"})

#: Fields with the text of code that ran on a server.
_OUTPUTS = ("stdout", "stderr")

#: Depth to which a part is searched for text.
_MAX_DEPTH = 8


def text_of(content: Any, where: str, *, param: str, skipped: set[str] | None = None) -> str:
    """Return a message's content as text.

    Answers contain parts of other servers' own tools. With ``skipped``, only the text within such parts is kept, and
    their kinds are added to ``skipped``. Raises RequestRejected for other parts that are not text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(param, f"`{where}` must be a string or a list of parts.")
    texts = [_text_of_part(part, where, param, skipped) for part in content]
    return "\n".join(text for text in texts if text is not None)


def reasoning_of(part: Mapping[str, Any]) -> str:
    """Return the text of a part of a kind in `REASONING`; empty if the part is encrypted."""
    return "\n".join(
        text for key in ("thinking", "reasoning", "summary", "content", "text") for text in _texts_in(part.get(key))
    )


def skip_warnings(skipped: Collection[str], what: str) -> tuple[str, ...]:
    """Return a warning for each skipped kind of ``what``."""
    return tuple(f"{what} of type {kind[:64]} are skipped" for kind in sorted(skipped))


def _text_of_part(part: Any, where: str, param: str, skipped: set[str] | None) -> str | None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    text: Any = None
    if kind in _TEXTS:
        text = part.get("text")
    elif kind == "refusal":
        text = part.get("refusal")
    elif kind == "tool_reference":
        text = part.get("tool_name")
    elif kind == "document" and _is_text_source(part.get("source")):
        text = "\n".join(_texts_in(part["source"]))
    elif kind == "search_result":
        text = "\n".join([*_strings(part, ("title", "source")), *_texts_in(part.get("content"))])
    elif skipped is not None and isinstance(kind, str) and kind not in _MEDIA and kind != "document":
        skipped.add(kind)
        return "\n".join(_texts_in(part.get("content"))) or None
    if isinstance(text, str):
        return text
    raise RequestRejected(
        f"`{where}` has a part of type {str(kind)[:40]!r}; this model accepts text only.",
        param=param,
        code="unsupported_value",
    )


def _is_text_source(source: Any) -> bool:
    return isinstance(source, Mapping) and source.get("type") in ("text", "content")


def _texts_in(value: Any, depth: int = 0) -> Iterator[str]:
    """Yield the texts within a part's value: of parts, of documents, and of a program's output."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list) and depth < _MAX_DEPTH:
        for each in value:
            if isinstance(each, Mapping):
                yield from _texts_in(each, depth + 1)
    elif isinstance(value, Mapping) and depth < _MAX_DEPTH:
        yield from _strings(value, ("text", *_OUTPUTS))
        # The source of a document.
        if value.get("type") == "text":
            yield from _strings(value, ("data",))
        for key in ("content", "source"):
            inner = value.get(key)
            # A source may also be an address.
            if key == "content" or not isinstance(inner, str):
                yield from _texts_in(inner, depth + 1)


def _strings(value: Mapping[str, Any], keys: Collection[str]) -> Iterator[str]:
    for key in keys:
        if isinstance(text := value.get(key), str) and text:
            yield text
