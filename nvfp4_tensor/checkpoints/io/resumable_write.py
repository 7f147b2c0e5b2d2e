"""What is being written: under another name until it is whole, by one process, and taken up after an interruption."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nvfp4_tensor.checkpoints.checkpoint import Checkpoint
from nvfp4_tensor.checkpoints.io.safetensors import read_json, write_json

try:
    import fcntl
except ImportError:  # Windows, where two processes are not kept apart
    fcntl = None  # type: ignore[assignment]

MANIFEST = "progress.json"


def check_is_new(path: Path, *, is_file: bool = False) -> None:
    """Raises a ValueError where something is already, but for an empty folder that what is written can replace."""
    if os.path.lexists(path) and (is_file or not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} is there already: remove it first, or write to another place")
    if path.is_dir():
        _check_replaceable(path)


def _check_replaceable(path: Path) -> None:
    """Raises a ValueError for an empty folder that has to stay, before hours of work: it is removed and made again."""
    try:
        if path.samefile(Path.cwd()) or os.path.ismount(path):
            raise OSError("it is in use")
        path.resolve().rmdir()
    except OSError as error:
        inside = path / "model"
        raise ValueError(
            f"{path} cannot be replaced by the folder that is written, as a mount point or the current folder cannot "
            f"({error.strerror or error}): write to a new folder in it, such as {inside}"
        ) from None
    path.resolve().mkdir(exist_ok=True)


@contextlib.contextmanager
def temporary(path: Path) -> Iterator[Path]:
    """``<path>.tmp``, for this process alone, to be written and renamed to ``path``; what is left of it is removed.

    Raises:
        ValueError: another process writes it, or has written ``path``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.with_name(path.name + ".tmp")
    with _alone(file, os.O_RDWR | os.O_CREAT) as lock, _named(file):
        check_is_new(path, is_file=True)
        try:
            yield file
        finally:
            if _is_at(lock, file):
                file.unlink()


@contextlib.contextmanager
def _alone(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """An open descriptor of a file or folder that no other process has here; the lock ends with the process."""
    lock = os.open(path, flags, 0o666)
    try:
        if not _locked(lock) or not _is_at(lock, path):
            raise ValueError(f"{path} is being written by another process: wait for it, or write to another place")
        yield lock
    finally:
        os.close(lock)


def _locked(descriptor: int) -> bool:
    """Whether nobody else had the lock; True where the file system knows no locks."""
    if fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether what was opened still has that name."""
    return path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors of the system, a full disk for one, say what was being written."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(f"{path}: could not be written: {error}") from error


class Progress:
    """The folder ``<path>.partial`` and its manifest, until :meth:`finish` gives it its name; a context manager.

    Attributes:
        path: the folder's name when it is whole.
        folder: the folder that is written to.
        factors: for the sidecar; with_nan: linears that hold NaN.
    """

    def __init__(self, path: Path, key: str | None) -> None:
        """key: what is written, from what; shards of an earlier run with the same key are kept. None keeps none.

        Raises:
            ValueError: a folder of that name is there that no such run made, or another process writes it.
        """
        self.path = path = path.resolve() if path.is_dir() else path  # an empty folder that a link leads to
        self.folder = path.with_name(path.name + ".partial")
        self._manifest: dict[str, Any] = {"key": key, "shards": {}}
        self.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_alone(self.folder))
            stack.enter_context(_named(self.folder))
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
        """Whether a shard is whole already."""
        shard, path = self._shards.get(file), self.folder / file
        return shard is not None and path.is_file() and path.stat().st_size == shard["bytes"]

    def done(self, file: str, nbytes: int, factors: dict[str, Any], with_nan: list[str]) -> None:
        """A shard is whole: the manifest says so from now on."""
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
        """The folder is whole, and gets its name; where it cannot, the manifest stays, for the next run."""
        if self.path.is_dir():
            self.path.rmdir()  # an empty one
        (self.folder / MANIFEST).unlink(missing_ok=True)
        try:
            self.folder.replace(self.path)
        except OSError:
            self._write_manifest()
            raise

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        """An unfinished folder stays, for the next run; one that nothing could take up again goes."""
        if self._manifest["key"] is None and self.folder.exists():
            shutil.rmtree(self.folder)
        self._open.__exit__(*exception)  # type: ignore[arg-type]


def _read_manifest(folder: Path) -> dict[str, Any]:
    """{} of an empty folder, or of one where the first manifest was not whole yet."""
    file = folder / MANIFEST
    if file.is_file():
        return read_json(file)
    if {each.name for each in folder.iterdir()} <= {file.with_suffix(".tmp").name}:
        return {}
    raise ValueError(f"{folder} is there already, and no interrupted run made it: move it away first")


def _empty(folder: Path) -> None:
    """Remove what is in it; the folder itself holds the lock."""
    for each in folder.iterdir():
        shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()


def fingerprint(format: str, checkpoint: Checkpoint, *settings: object) -> str | None:
    """A key of what is written from what; None for a model in memory, of which nobody knows whether it changed."""
    identity = checkpoint.identity()
    if identity is None:
        return None
    return hashlib.sha256(json.dumps([format, identity, *map(repr, settings)]).encode()).hexdigest()
