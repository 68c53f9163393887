"""The tables of ``docs/configuration.md``, made from the settings' types.

python -m pdmesh.cli.reference docs/configuration.md
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path

from pdmesh.config import MeshConfig
from pdmesh.settings import HANDED_DOWN, TOP_TEN, Setting, settings_of

#: Everything behind this line of the page is replaced.
MARK = "<!-- From here on written by `make docs`, from the types in libs/pdmesh/config.py. -->\n"


def with_tables(page: str) -> str:
    """Return ``page`` with up-to-date tables. Raises ValueError if it has no place for them."""
    before, mark, _ = page.partition(MARK)
    if not mark:
        raise ValueError(f"the page has no line {MARK!r}")
    return before + mark + "\n" + "\n".join(_tables())


def _tables() -> Iterator[str]:
    hints = typing.get_type_hints(MeshConfig)
    sections = {item.name: hints[item.name] for item in dataclasses.fields(MeshConfig)}
    by_section: dict[str, list[Setting]] = {}
    for setting in settings_of(MeshConfig):
        if HANDED_DOWN in setting.marks:
            continue
        by_section.setdefault(setting.name.rpartition(".")[0], []).append(setting)
    yield "## The ten that most meshes need\n"
    yield from _table([each for each in settings_of(MeshConfig) if TOP_TEN in each.marks], by_key=False)
    for section, settings in by_section.items():
        yield f"## `[{section}]`\n" if section else "## Top level\n"
        if section:
            yield f"{inspect.getdoc(sections[section])}\n"
        yield from _table(settings, by_key=True)


def _table(settings: Iterable[Setting], *, by_key: bool) -> Iterator[str]:
    yield "| setting | value | default | meaning |"
    yield "|---|---|---|---|"
    for setting in settings:
        name = setting.name.rpartition(".")[2] if by_key else setting.name
        yield f"| `{name}` | {setting.wanted} | {_default(setting)} | {setting.meaning} |"
    yield ""


def _default(setting: Setting) -> str:
    value = setting.default
    if value is None or value == "":
        return "—"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(with_tables(file.read_text(encoding="utf-8")), encoding="utf-8")
