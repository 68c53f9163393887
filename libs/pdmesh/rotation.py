"""Files that grow, kept bounded: ``path`` is the newest, ``path.1`` the one before it, and so on."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path


def set_aside(path: Path, keep: int) -> None:
    """Rename the file at ``path`` to ``path.1``, and older ones upwards; remove the oldest beyond ``keep``.

    Nothing happens without a file at ``path``. Raise OSError if a file cannot be renamed or removed.
    """
    if not path.exists():
        return
    if keep == 0:
        path.unlink()
        return
    _shift(path, keep)
    path.replace(_numbered(path, 1))


def cut_off(path: Path, *, max_bytes: int, keep: int) -> None:
    """Empty ``path``, which other processes append to, once it is larger than ``max_bytes``; copy it to ``path.1``.

    With ``keep`` 0, nothing is copied. A line written during the copy is lost. So is the whole content if there is no
    room for the copy: the purpose is to free a full disk. Raises OSError if the file cannot be emptied.
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
        pass  # emptying the file is more important
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
