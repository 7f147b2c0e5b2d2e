"""The files of a checkpoint: regular ones inside its folder alone, and at the end the same as at the start."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_PASSED_BY = (".*", "*.tmp", "*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt", "*.gguf")
"""Files of a folder that are neither read nor copied."""


class Files:
    """The files that a checkpoint is read from, and what they were when it was opened.

    Attributes:
        stats: by path, in order.
    """

    def __init__(self, path: Path, beside: Iterable[Path] = ()) -> None:
        """
        Args:
            path: a folder, or one file.
            beside: more files, of which each may be missing.

        Raises:
            ValueError: a file that is none (a FIFO, a device), or a link to what lies outside of the folder.
        """
        if path.is_dir():
            found = [file for file in sorted(path.iterdir()) if not any(map(file.match, _PASSED_BY))]
        else:
            check_regular(path)
            found = [path]
        for file in (*found, *beside):
            if os.path.lexists(file) and not file.is_dir() and file != path:
                check_regular(file)
                _check_inside(file)
        self.stats = {file: file.stat() for file in dict.fromkeys((*found, *beside)) if file.is_file()}

    def identity(self) -> list[Any]:
        """What tells these files from others, as JSON."""
        return [[file.name, *_identity(stat)] for file, stat in self.stats.items()]

    def check_unchanged(self) -> None:
        """
        Raises:
            ValueError: a file has been written or replaced since.
        """
        for file, stat in self.stats.items():
            check_same(file, stat, file.stat() if file.exists() else None)


def check_regular(file: Path) -> None:
    """Raises a ValueError for a FIFO or a device, which could be read forever, and for a link to nothing."""
    if not file.is_file():
        found = "something else" if file.exists() else "a link to what is not there" if file.is_symlink() else "nothing"
        raise ValueError(f"{file}: expected a regular file, found {found}")


def check_same(file: Path, before: os.stat_result, after: os.stat_result | None) -> None:
    """Raises a ValueError where a file is not what it was."""
    if after is None or _identity(before) != _identity(after):
        raise ValueError(f"{file} changed while it was read: call again when nothing writes to it any more")


def _identity(stat: os.stat_result) -> list[int]:
    return [stat.st_ino, stat.st_size, stat.st_mtime_ns]


def _check_inside(file: Path) -> None:
    """Raises a ValueError for a link out of the folder: what it leads to would be copied to what is written."""
    if not file.is_symlink():
        return
    target, roots = file.resolve(), _roots(file.parent.resolve())
    if not any(target.is_relative_to(root) for root in roots):
        raise ValueError(
            f"{file} is a link to {target}, outside of its folder: copy that file to here, or name the folder that it "
            "is in"
        )


def _roots(folder: Path) -> list[Path]:
    """Where links may lead: within the folder, and in a cache of Hugging Face's hub within the model's repository.

    There ``models--<name>/snapshots/<revision>`` holds links to ``models--<name>/blobs``.
    """
    for parent in folder.parents:
        if parent.name == "snapshots" and parent.parent.name.startswith("models--"):
            return [folder, parent.parent, (parent.parent / "blobs").resolve()]
    return [folder]
