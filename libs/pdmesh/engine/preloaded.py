"""Weights that a process loads once and its forks share.

Pages of the weights stay shared, because no fork writes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pdmesh.engine.compute import ComputeOptions
from pdmesh.engine.model_loading import LoadedModel, load_model
from pdmesh.engine.ranks.group import RankGroup
from pdmesh.engine.ranks.share import WHOLE, RankShare


class FileVersion(NamedTuple):
    """Version of a file. A write or a replacement changes at least one field besides ``path``."""

    path: str
    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


def file_versions(*directories: Path | None) -> frozenset[FileVersion]:
    """Return the version of every entry of the directories. Raise OSError if one cannot be read."""
    found: set[FileVersion] = set()
    for path in (path for directory in directories if directory is not None for path in directory.iterdir()):
        stat = path.stat()
        found.add(
            FileVersion(
                str(path.absolute()), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
            )
        )
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class PreloadedModel:
    """A whole checkpoint in memory, with the directory, options and files that made it."""

    directory: Path
    options: ComputeOptions
    files: frozenset[FileVersion]
    model: LoadedModel

    @property
    def is_current(self) -> bool:
        """Whether no file of the checkpoint or the adapter has changed since the load."""
        try:
            return file_versions(self.directory, self.options.lora) == self.files
        except OSError:
            return False

    def load(self, directory: Path, options: ComputeOptions, share: RankShare, group: RankGroup | None) -> LoadedModel:
        """Return the preloaded model if it matches the arguments, else load the model. Raises ConfigError."""
        is_it = directory == self.directory and options == self.options and share == WHOLE and group is None
        return self.model if is_it and self.is_current else load_model(directory, options, share, group)


def preload_model(directory: Path, options: ComputeOptions) -> PreloadedModel | None:
    """Load a checkpoint for later forks; None if a file changed meanwhile. Raises ConfigError, OSError."""
    files = file_versions(directory, options.lora)
    preloaded = PreloadedModel(directory, options, files, load_model(directory, options))
    return preloaded if preloaded.is_current else None
