"""The files of a checkpoint: which are read or copied, whether they are regular, in its folder, and unchanged."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_SKIPPED = (".*", "*.tmp", "*.partial", "__pycache__")
"""Files and folders that are neither read nor copied: hidden ones, caches, and unfinished outputs."""
_WEIGHTS = ("*.safetensors", "*.gguf", "*.pt", "*.pth", "*.pkl", "*.ckpt", "*model*.bin", "*.h5", "*.msgpack", "*.onnx",
            "*.onnx_data", "*.index.json")  # fmt: skip
_READ = ("*.safetensors", "*.index.json")
"""Those of :data:`_WEIGHTS` that are read."""
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04")
"""The first bytes of files that torch.save and pickle write."""


class Files:
    """The files that a checkpoint is read from and those beside them, with their status when it was opened.

    Attributes:
        folder: the folder that they are in.
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
        self.folder = path if path.is_dir() else path.parent
        found = [path]
        if path.is_dir():
            found = [file for file in sorted(path.iterdir()) if not file.is_dir() and _is_kept(file, _READ)]
        for file in (*found, *others):
            if file == path:
                check_regular(file)
            elif os.path.lexists(file) and not file.is_dir():
                check_regular(file)
                if file.is_symlink() and not _is_inside(file, self.folder):  # its target would be copied to the output
                    raise ValueError(
                        f"{file} is a link to {file.resolve()}, outside of its folder: copy that file here, or pass "
                        "the folder that it is in"
                    )
        self.stats = {file: file.stat() for file in dict.fromkeys((*found, *others)) if file.is_file()}

    def beside(self, whole: Iterable[str] = ()) -> tuple[list[Path], list[Path]]:
        """Return the files that belong to the model beside its weights, subfolders included, and those left out.

        Left out are other copies of the weights, and links out of the folder. Hidden files and caches are neither.

        whole: subfolders that belong to the model with their weights.
        """
        kept, left_out = [file for file in self.stats if file.parent == self.folder], list[Path]()
        taken = {self.folder / name for name in whole}
        for each in sorted(self.folder.rglob("*")):
            parents = [self.folder / parent for parent in each.relative_to(self.folder).parents]
            is_behind_link = any(parent.is_symlink() for parent in parents[:-1])
            is_folder = each.is_dir() and not each.is_symlink()
            if each in self.stats or is_behind_link or is_folder or _is_skipped(each, self.folder):
                continue
            is_model = each.is_file() and (not taken.isdisjoint(parents) or _is_kept(each))
            (kept if is_model and _is_inside(each, self.folder) else left_out).append(each)
        return kept, left_out

    def identity(self) -> list[Any]:
        """Return the name, inode, size and times of each file, as JSON."""
        return [[os.path.relpath(file, self.folder), *_identity(stat)] for file, stat in self.stats.items()]

    def check_unchanged(self) -> None:
        """
        Raises:
            ValueError: a file was written or replaced after the checkpoint was opened.
        """
        for file, stat in self.stats.items():
            check_same(file, stat, file.stat() if file.exists() else None)


@contextlib.contextmanager
def naming(file: Path, tensor: str = "", others: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Add the names of the file and the tensor to a ValueError; ``others``, such as a library raises, become one."""
    errors: tuple[type[Exception], ...] = (ValueError, *others)
    try:
        yield
    except errors as error:
        if str(error).startswith(str(file)):
            raise
        said = error if isinstance(error, ValueError) else repr(error)
        raise ValueError(f"{file}: {f'tensor {tensor}: ' if tensor else ''}{said}") from error


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
    return [stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]  # a program can set mtime, but not ctime


def _is_skipped(path: Path, folder: Path) -> bool:
    """Return whether a file, or a folder that it is in, is hidden, a cache, or unfinished."""
    return any(Path(part).match(pattern) for part in path.relative_to(folder).parts for pattern in _SKIPPED)


def _is_kept(file: Path, read: tuple[str, ...] = ()) -> bool:
    """Return whether a file is none with weights; those that match ``read`` are kept too."""
    if _is_skipped(file, file.parent):
        return False
    if any(map(file.match, _WEIGHTS)):
        return any(map(file.match, read))
    if not file.match("*.bin") or not file.is_file():
        return True
    with file.open("rb") as opened:
        return not opened.read(4).startswith(_PICKLES)


def _is_inside(file: Path, folder: Path) -> bool:
    """Return whether a link leads to the folder itself, or to the repository of a model in a Hugging Face cache.

    In the cache, ``models--<name>/snapshots/<revision>`` has links to ``models--<name>/blobs``.
    """
    roots = [folder.resolve()]
    for parent in roots[0].parents:
        if parent.name == "snapshots" and parent.parent.name.startswith("models--"):
            roots += [parent.parent, (parent.parent / "blobs").resolve()]
    return any(file.resolve().is_relative_to(root) for root in roots)
