"""Write a file or folder under a temporary name, by one process at a time, and resume after an interruption."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nvfp4_tensor.checkpoints.checkpoint import Checkpoint
from nvfp4_tensor.checkpoints.io.safetensors import read_json, write_json

MANIFEST = ".progress.json"  # hidden files of a source are not copied, and cannot replace it


def check_is_new(path: Path, source: Checkpoint | None = None, *, is_file: bool = False) -> None:
    """Raise a ValueError if ``path`` exists, unless it is an empty folder that can be replaced.

    source: a checkpoint of which nothing may be read from the file or folder that ``path`` has until it is complete.
    """
    if os.path.lexists(path) and (is_file or not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} already exists: remove it, or choose another path")
    if path.is_dir():
        _check_replaceable(path)
    if source is None or source.path is None:
        return
    temporary = path.with_name(path.name + (".tmp" if is_file else ".partial"))
    read = [source.path, *(source.files.stats if source.files else ())]
    if temporary.exists() and any(file.exists() and temporary.samefile(file) for file in read):
        raise ValueError(f"{temporary} would be written, but it is read: choose another path for the output")


def _check_replaceable(path: Path) -> None:
    """Raise a ValueError for an empty folder that cannot be replaced, before hours of work. Removes and creates it."""
    try:
        if path.samefile(Path.cwd()) or os.path.ismount(path):
            raise OSError("it is in use")
        path.resolve().rmdir()
    except OSError as error:
        inside = path / "model"
        raise ValueError(
            f"{path} cannot be replaced by the output folder, because it is a mount point or in use "
            f"({error.strerror or error}): write to a new folder in it, such as {inside}"
        ) from None
    path.resolve().mkdir(exist_ok=True)


@contextlib.contextmanager
def temporary(path: Path) -> Iterator[Path]:
    """Lock ``<path>.tmp`` for writing. The caller renames it to ``path``; otherwise it is removed at the end.

    Raises:
        ValueError: another process is writing it, or has written ``path``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.with_name(path.name + ".tmp")
    with _locked_open(file, os.O_RDWR | os.O_CREAT) as lock, _naming_errors(file):
        check_is_new(path, is_file=True)
        try:
            yield file
        except KeyboardInterrupt as error:
            error.args = error.args or (f"{path} was not written, and nothing of it is left",)
            raise
        finally:
            if _is_at(lock, file):
                file.unlink()


@contextlib.contextmanager
def _locked_open(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open a file or folder and lock it against other processes that call this. The lock ends with the process."""
    lock = os.open(path, flags, 0o666)
    try:
        if not _lock(lock) or not _is_at(lock, path):
            raise ValueError(f"{path} is being written by another process: wait for it, or choose another path")
        yield lock
    finally:
        os.close(lock)


def _lock(descriptor: int) -> bool:
    """Lock a file. Return False if another process has the lock, True if the file system has no locks."""
    with contextlib.suppress(OSError):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether ``path`` is still the file that was opened."""
    return path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())


@contextlib.contextmanager
def _naming_errors(path: Path) -> Iterator[None]:
    """Add the path to operating system errors without a file name, such as a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(f"{path} could not be written: {error}") from error


class ResumableFolder:
    """The folder ``<path>.partial`` and its manifest, which :meth:`finish` renames to ``path``. It is a context
    manager.

    Attributes:
        path: the final path of the folder.
        folder: the temporary folder.
        factors: the content of the sidecar; with_nan: linears with NaN.
    """

    def __init__(self, path: Path, key: str | None) -> None:
        """key: identifies the output and its inputs. Shards of an earlier run with the same key are kept; None keeps
        none.

        Raises:
            ValueError: the temporary folder was not made by such a run, or another process is writing it.
        """
        self.path = path = path.resolve() if path.is_dir() else path  # the target, if it is a link to an empty folder
        self.folder = path.with_name(path.name + ".partial")
        self._manifest: dict[str, Any] = {"key": key, "shards": {}}
        self.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_locked_open(self.folder))
            stack.enter_context(_naming_errors(self.folder))
            check_is_new(path)
            earlier = _read_manifest(self.folder)
            if key is not None and earlier.get("key") == key:
                self._manifest = earlier
            else:
                _empty(self.folder)
            self._write_manifest()
            self._open = stack.pop_all()

    @property
    def _shards(self) -> dict[str, dict[str, Any]]:
        return self._manifest["shards"]

    def is_done(self, file: str) -> bool:
        """Return whether a shard is complete."""
        shard, path = self._shards.get(file), self.folder / file
        return shard is not None and path.is_file() and path.stat().st_size == shard["bytes"]

    def done(self, file: str, nbytes: int, factors: dict[str, Any], with_nan: list[str]) -> None:
        """Record in the manifest that a shard is complete."""
        self._shards[file] = {"bytes": nbytes, "factors": factors, "with_nan": with_nan}
        self._write_manifest()

    def _write_manifest(self) -> None:
        write_json(self.folder / MANIFEST, self._manifest)

    @property
    def factors(self) -> dict[str, Any]:
        return {name: value for shard in self._shards.values() for name, value in shard["factors"].items()}

    @property
    def with_nan(self) -> list[str]:
        return [name for shard in self._shards.values() for name in shard["with_nan"]]

    def finish(self) -> None:
        """Rename the folder to its final path. If that fails or is interrupted, keep the manifest for the next run."""
        if self.path.is_dir():
            self.path.rmdir()  # it is empty
        try:
            (self.folder / MANIFEST).unlink(missing_ok=True)
            self.folder.replace(self.path)
        except BaseException:
            if self.folder.exists():
                self._write_manifest()
            raise

    def __enter__(self) -> ResumableFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        """Keep an unfinished folder for the next run, unless it cannot be resumed: it has no key, or the source is
        damaged, and mended files have another key. An interrupt gets a message."""
        left = f"{self.path} was not written, and nothing of it is left"
        is_lost = self._manifest["key"] is None or isinstance(exception[1], ValueError)
        if is_lost and self.folder.exists():
            shutil.rmtree(self.folder)
        elif self.folder.exists():
            count = len(self._shards)
            left = (
                f"{self.folder} keeps {count} complete file{'s' * (count != 1)}: run the same again to "
                "resume there, or remove that folder"
            )
        if isinstance(exception[1], KeyboardInterrupt):
            exception[1].args = exception[1].args or (left,)
        self._open.__exit__(*exception)  # type: ignore[arg-type]


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest; {} if the folder is empty, or has only an incomplete manifest."""
    file = folder / MANIFEST
    if file.is_file():
        return read_json(file)
    if {each.name for each in folder.iterdir()} <= {file.with_suffix(".tmp").name}:
        return {}
    raise ValueError(f"{folder} already exists, and was not made by an interrupted run: remove it first")


def _empty(folder: Path) -> None:
    """Remove the content of a folder. The folder itself stays, because it is locked."""
    for each in folder.iterdir():
        shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()


def fingerprint(format: str, checkpoint: Checkpoint, *settings: object) -> str | None:
    """Return a key of the output and its inputs; None for a model in memory, whose changes cannot be detected."""
    identity = checkpoint.identity()
    if identity is None:
        return None
    return hashlib.sha256(json.dumps([format, identity, *map(repr, settings)]).encode()).hexdigest()
