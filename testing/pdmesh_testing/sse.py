"""Server-sent events, read as a client would."""

from __future__ import annotations

import json
from typing import Any


def named_events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Name and data of each event, which must be all there is but for comments. The data names its event, too."""
    assert text.endswith("\n\n")
    events: list[tuple[str, dict[str, Any]]] = []
    for block in text[:-2].split("\n\n"):
        if block.startswith(":"):
            continue
        first, second = block.split("\n")
        assert first.startswith("event: ")
        assert second.startswith("data: ")
        data = json.loads(second[6:])
        assert data["type"] == first[7:]
        events.append((first[7:], data))
    return events


def data_events(text: str) -> list[dict[str, Any]]:
    """The data of each event of OpenAI's older streams, which end with ``[DONE]``."""
    *blocks, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(block.removeprefix("data: ")) for block in blocks if not block.startswith(":")]
