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
