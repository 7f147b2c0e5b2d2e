"""The files of a checkpoint: checks that they are regular, inside its folder, and unchanged while they are read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_IGNORED = (".*", "*.tmp", "*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt", "*.gguf")
"""Files of a folder that are neither read nor copied."""


class Files:
    """The files that a checkpoint is read from, with their status when it was opened.

    Attributes:
        stats: the status of each file by path, in order.
    """

    def __init__(self, path: Path, others: Iterable[Path] = ()) -> None:
        """
        Args:
            path: a folder, or one file.
            others: more files, each of which may be missing.

        Raises:
            ValueError: a file is not regular (a FIFO, a device), or is a link to a file outside of the folder.
        """
        if path.is_dir():
            found = [file for file in sorted(path.iterdir()) if not any(map(file.match, _IGNORED))]
        else:
            check_regular(path)
            found = [path]
        for file in (*found, *others):
            if os.path.lexists(file) and not file.is_dir() and file != path:
                check_regular(file)
                _check_inside(file)
        self.stats = {file: file.stat() for file in dict.fromkeys((*found, *others)) if file.is_file()}

    def identity(self) -> list[Any]:
        """Return the name, inode, size and time of each file, as JSON."""
        return [[file.name, *_identity(stat)] for file, stat in self.stats.items()]

    def check_unchanged(self) -> None:
        """
        Raises:
            ValueError: a file was written or replaced after the checkpoint was opened.
        """
        for file, stat in self.stats.items():
            check_same(file, stat, file.stat() if file.exists() else None)


def check_regular(file: Path) -> None:
    """Raise a ValueError for a FIFO or a device, which could be read forever, and for a broken link."""
    if not file.is_file():
        found = "something else" if file.exists() else "a broken link" if file.is_symlink() else "nothing"
        raise ValueError(f"{file}: expected a regular file, found {found}")


def check_same(file: Path, before: os.stat_result, after: os.stat_result | None) -> None:
    """Raise a ValueError if a file has changed."""
    if after is None or _identity(before) != _identity(after):
        raise ValueError(f"{file} changed while it was read: try again after it has been written")


def _identity(stat: os.stat_result) -> list[int]:
    return [stat.st_ino, stat.st_size, stat.st_mtime_ns]


def _check_inside(file: Path) -> None:
    """Raise a ValueError for a link out of the folder, because its target would be copied to the output."""
    if not file.is_symlink():
        return
    target, roots = file.resolve(), _roots(file.parent.resolve())
    if not any(target.is_relative_to(root) for root in roots):
        raise ValueError(
            f"{file} is a link to {target}, outside of its folder: copy that file here, or pass the folder that "
            "it is in"
        )


def _roots(folder: Path) -> list[Path]:
    """Return the folders that links may lead to: the folder itself, and the repository of a model in a Hugging Face
    cache.

    In the cache, ``models--<name>/snapshots/<revision>`` has links to ``models--<name>/blobs``.
    """
    for parent in folder.parents:
        if parent.name == "snapshots" and parent.parent.name.startswith("models--"):
            return [folder, parent.parent, (parent.parent / "blobs").resolve()]
    return [folder]
