"""Reading of a checkpoint's JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pdmesh.errors import ConfigError


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raise ConfigError, which names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing, so {path.parent} is not a Hugging Face model directory") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return value
