"""Files that grow, kept bounded: ``path`` is the newest, ``path.1`` the one before it, and so on."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path


def set_aside(path: Path, keep: int) -> None:
    """Make room for a new file at ``path``: the one there becomes ``path.1``; beyond ``keep`` the oldest goes.

    Raises OSError.
    """
    if not path.exists():
        return
    if keep == 0:
        path.unlink()
        return
    _shift(path, keep)
    path.replace(_numbered(path, 1))


def cut_off(path: Path, *, max_bytes: int, keep: int) -> None:
    """Empty ``path``, which others have open to append to, once it is larger; what it held becomes ``path.1``.

    A line written in between is lost, and all of it where there is no room for the copy: a full disk is what this is
    for. Raises OSError if the file cannot be emptied.
    """
    try:
        if path.stat().st_size <= max_bytes:
            return
    except FileNotFoundError:
        return
    copy = path.with_name(f"{path.name}.part")
    try:
        if keep:
            shutil.copyfile(path, copy)
            _shift(path, keep)
            copy.replace(_numbered(path, 1))
    except OSError:
        pass  # emptying it is what matters
    with suppress(OSError):
        copy.unlink(missing_ok=True)
    os.truncate(path, 0)


def _shift(path: Path, keep: int) -> None:
    for number in range(keep, 1, -1):
        newer = _numbered(path, number - 1)
        if newer.exists():
            newer.replace(_numbered(path, number))


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
