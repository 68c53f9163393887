"""Print what CHANGELOG.md says about a version: `python3 deploy/release_notes.py v0.1.0`.

Fails unless pyproject.toml has the same version and the section has a date: a tag that was pushed by mistake ends here.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class NotReady(Exception):
    """The sentence that the maintainer reads."""


def main() -> int:
    """0 if there are notes, else 1."""
    try:
        (tag,) = sys.argv[1:]
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        sys.stdout.write(notes(tag, project["version"], (ROOT / "CHANGELOG.md").read_text()))
    except NotReady as problem:
        sys.stderr.write(f"{problem}\n")
        return 1
    return 0


def notes(tag: str, version: str, changelog: str) -> str:
    """The section of the version that ``tag`` names.

    Raises:
        NotReady: Where `version` is another one, or has no section with a date.
    """
    if tag != f"v{version}":
        raise NotReady(f"the tag is {tag}, and pyproject.toml has version {version}")
    title = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n"
    parts = re.split(title, changelog, maxsplit=1, flags=re.MULTILINE)
    if len(parts) == 1:
        raise NotReady(f"CHANGELOG.md has no section '## [{version}] - YYYY-MM-DD'")
    return re.split(r"^## ", parts[1], maxsplit=1, flags=re.MULTILINE)[0].strip() + "\n"


if __name__ == "__main__":
    sys.exit(main())
