"""A folder that is being written: under another name until it is whole, and taken up again after an interruption."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from nvfp4_tensor.checkpoints.common import Checkpoint
from nvfp4_tensor.checkpoints.shards import read_json, write_json

MANIFEST = "progress.json"


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
            ValueError: a folder of that name is there that no such run made.
        """
        self.path = path
        self.folder = path.with_name(path.name + ".partial")
        self._manifest: dict[str, Any] = {"key": key, "shards": {}}
        if self.folder.exists():
            earlier = _read_manifest(self.folder)
            if key is not None and earlier.get("key") == key:
                self._manifest = earlier
            else:
                shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write_manifest()

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
        manifest = self.folder / MANIFEST
        write_json(manifest.with_suffix(".tmp"), self._manifest)
        manifest.with_suffix(".tmp").replace(manifest)

    @property
    def factors(self) -> dict[str, Any]:
        return {name: value for shard in self._shards.values() for name, value in shard["factors"].items()}

    @property
    def with_nan(self) -> list[str]:
        return [name for shard in self._shards.values() for name in shard["with_nan"]]

    def finish(self) -> None:
        """The folder is whole, and gets its name."""
        (self.folder / MANIFEST).unlink(missing_ok=True)
        if self.path.is_dir():
            self.path.rmdir()  # an empty one
        self.folder.replace(self.path)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        """An unfinished folder stays, for the next run; one that nothing could take up again goes."""
        if self._manifest["key"] is None and self.folder.exists():
            shutil.rmtree(self.folder)


def _read_manifest(folder: Path) -> dict[str, Any]:
    file = folder / MANIFEST
    if not file.is_file():
        raise ValueError(f"{folder} is there already, and no interrupted run made it: move it away first")
    return read_json(file)


def fingerprint(format: str, checkpoint: Checkpoint, *settings: object) -> str | None:
    """A key of what is written from what; None for a model in memory, of which nobody knows whether it changed."""
    identity = checkpoint.identity()
    if identity is None:
        return None
    return hashlib.sha256(json.dumps([format, identity, *map(repr, settings)]).encode()).hexdigest()
