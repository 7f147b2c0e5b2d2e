"""Formats that are a folder of safetensors files and a config.json: what they share, reading and writing.

A format of this kind is a subclass of :class:`SafetensorsFormat` that says under which names the parts of a linear
stand (``encode``, ``decode``), which of a folder's tensors are linears (``entries``), and what goes into config.json.
"""

from __future__ import annotations

import abc
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from tqdm import tqdm

from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, Entry, Format
from nvfp4_tensor.checkpoints.io.files import Files
from nvfp4_tensor.checkpoints.io.resumable_write import Progress, check_is_new, fingerprint
from nvfp4_tensor.checkpoints.io.safetensors import ShardFile, Shards, read_json, write_json
from nvfp4_tensor.checkpoints.io.sidecar import (
    SIDECAR,
    lost_factors,
    read_factors,
    sidecars_of,
    with_factors,
    write_factors,
)
from nvfp4_tensor.checkpoints.names import joined_with, natural, some
from nvfp4_tensor.checkpoints.parts import LinearParts, check_scales, nan_blocks

SHARD_BYTES = 4 << 30
"""A shard that is written holds about so many bytes at most."""

_NOT_COPIED = ("*.safetensors", "*.safetensors.index.json", "hf_quant_config.json", "config.json", SIDECAR,
               "*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt", "*.gguf", "*.index.json", ".*", "*.tmp")  # fmt: skip
Plan: TypeAlias = "dict[str, dict[str, dict[str, Tensor]]]"
"""By file, by parameter: the tensors that will stand for it, on meta."""


class FolderCheckpoint(Checkpoint):
    """A folder of safetensors files in some format."""

    def __init__(self, format: SafetensorsFormat, path: Path) -> None:
        self.path: Path = path
        self.format = format.name
        folder = path if path.is_dir() else path.parent
        config = folder / "config.json"
        self.files: Files = Files(path, [config, *sidecars_of(path)])
        self.shards = Shards(path)
        self.config = read_json(config) if config.exists() else {}
        self._format = format
        self._factors = read_factors(path)
        try:
            self.quantization = format.quantization(folder, self.config)
            self.config.pop("quantization_config", None)
            entries = format.entries(self)
        except (AttributeError, IndexError, KeyError, TypeError) as error:  # JSON of other types than it should have
            raise ValueError(
                f"{path}: expected the configuration of {format.name}, found one that is damaged: {error!r}"
            ) from error
        order = {file.name: i for i, file in enumerate(self.shards.files)}
        self.entries = dict(sorted(entries.items(), key=lambda item: (order[str(item[1].shard)], natural(item[0]))))

    def linear(self, name: str) -> LinearParts:
        return self.decoded(name, self.shards)

    def per_tensor_scale(self, name: str) -> Tensor:
        return self.decoded(name, _Small(self.shards)).per_tensor_scale

    def decoded(self, name: str, tensors: Mapping[str, Tensor]) -> LinearParts:
        """The parts of a linear out of the tensors that it has in the files, wherever these are now."""
        entry = self.entries[name]
        try:
            parts = check_scales(self._format.decode(name, tensors, entry))
            return with_factors(parts, self._factors.get(name, {}))
        except ValueError as error:
            file = self.path / str(entry.shard) if self.path.is_dir() else self.path
            raise ValueError(f"{file}: tensor {name}: {error}") from None

    def dense(self, name: str) -> Tensor:
        return self.shards[self.stored_name(name)]

    def rows(self, name: str, first: int, last: int, buffer: Tensor | None = None) -> Tensor:
        """Some rows of a dense tensor, the leading dimensions flattened, in ``buffer`` (uint8) if there is one."""
        return self.shards.rows(self.stored_name(name), first, last, buffer)

    def chunks(self, name: str) -> Iterator[Tensor]:
        return self.shards.chunks(self.stored_name(name))

    def write_auxiliary_files(self, folder: Path) -> None:
        """The files of its folder that are neither weights nor what this package writes anew."""
        for file in self.files.stats if self.path.is_dir() else ():
            if not any(file.match(pattern) for pattern in _NOT_COPIED):
                shutil.copyfile(file, folder / file.name)

    def stored_name(self, name: str) -> str:
        """The name that a dense tensor has in the files."""
        return name

    def dtype(self) -> torch.dtype:
        """What quantized weights decode to, as config.json says; bfloat16 where it does not."""
        named = self.config.get("dtype", self.config.get("torch_dtype", "bfloat16"))
        dtype = getattr(torch, str(named).removeprefix("torch."), None)
        return dtype if dtype in (torch.bfloat16, torch.float16, torch.float32) else torch.bfloat16

    def expect(self, name: str, dtype: torch.dtype, shape: Sequence[int] | None, beside: str) -> None:
        """Raises a ValueError unless there is a tensor of that name, dtype and shape (None for any)."""
        wanted = f"{str(dtype).removeprefix('torch.')}{'' if shape is None else f' {list(shape)}'}"
        if name not in self.shards.info:
            where = self.shards.info[beside].file
            raise ValueError(f"{where}: tensor {name} ({wanted}) is missing, which belongs to {beside}")
        info = self.shards.info[name]
        if info.dtype != dtype or (shape is not None and info.shape != tuple(shape)):
            raise ValueError(f"{info.file}: tensor {name}: expected {wanted}, found {info}")

    def close(self) -> None:
        self.shards.close()


class _Small(Mapping[str, Tensor]):
    """The tensors of shards, but those of one byte an element (codes, block scales) without their values, on meta."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def __getitem__(self, name: str) -> Tensor:
        info = self._shards.info[name]
        return (
            torch.empty(info.shape, dtype=info.dtype, device="meta") if info.dtype.itemsize == 1 else self._shards[name]
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)


class SafetensorsFormat(Format):
    """What a format of safetensors folders fills in.

    Attributes:
        stores_divisors: whether per-tensor scales are written as what values are divided by.
        reserved: ends of names that are the format's own: no dense tensor may have such a name.
    """

    stores_divisors: ClassVar[bool] = False
    reserved: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def quantization(self, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
        """What the folder says about its quantization, for :meth:`entries`; ``config`` is config.json.

        Raises:
            ValueError: it is none of this format, or one of a kind that is not read.
        """

    @abc.abstractmethod
    def entries(self, checkpoint: FolderCheckpoint) -> dict[str, Entry]:
        """The parameters of a folder, checked: of each linear every part is there, in its dtype and shape."""

    @abc.abstractmethod
    def decode(self, name: str, tensors: Mapping[str, Tensor], entry: Entry) -> LinearParts:
        """The parts of the weight ``name`` out of the format's own tensors."""

    @abc.abstractmethod
    def encode(self, name: str, parts: LinearParts, entry: Entry) -> dict[str, Tensor]:
        """The format's own tensors of the weight ``name``; of parts on the meta device, tensors on it."""

    @abc.abstractmethod
    def config_of(self, checkpoint: Checkpoint) -> dict[str, Any] | None:
        """config.json's quantization_config for what ``checkpoint`` holds; None for no such key."""

    def check_names(self, checkpoint: Checkpoint) -> None:
        """Raises a ValueError for dense tensors that a reader would take for parts of quantized ones."""
        dense = [name for name, entry in checkpoint.entries.items() if not entry.quantized]
        if taken := [name for name in dense if self.reserved and name.endswith(self.reserved)]:
            raise ValueError(
                f"{self.name} has other tensors under such names, and {some(taken)} are dense: rename them"
            )

    def check(self, checkpoint: Checkpoint) -> None:
        """Raises a ValueError that names what this format cannot hold."""
        check_writable(checkpoint, self.name)

    def files_of(self, checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
        """More JSON files of the format, by name."""
        return {}

    def metadata(self, checkpoint: Checkpoint) -> dict[str, str]:
        """The metadata in the header of each shard."""
        return {"format": "pt"}

    def read(self, path: Path) -> FolderCheckpoint:
        return FolderCheckpoint(self, Path(path))

    def write(
        self, checkpoint: Checkpoint, path: Path, *, progress: bool = True, shard_bytes: int | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        """As :meth:`Format.write`. An interrupted run is taken up at its last whole shard, when the same call comes
        again and nothing has changed.

        Args:
            shard_bytes: how large a file may become; by default the files are those of the source, where it has
                several, and hold 4 GiB otherwise.
        """
        if options:
            raise ValueError(f"{self.name} has no option {', '.join(options)}")
        path = Path(path)
        self.check_names(checkpoint)
        self.check(checkpoint)
        check_is_new(path)
        plan = self._plan(checkpoint, shard_bytes)
        with Progress(path, fingerprint(self.name, checkpoint, shard_bytes)) as state:
            self._write_shards(checkpoint, plan, state, progress)
            self._write_rest(checkpoint, plan, state)
            checkpoint.check_unchanged()
            state.finish()

    def _plan(self, checkpoint: Checkpoint, shard_bytes: int | None) -> Plan:
        """Linears that servers join come behind each other, for they are quantized together."""
        names = list(
            dict.fromkeys(each for name in checkpoint.entries for each in joined_with(name, checkpoint.entries))
        )
        laid_out = {name: self._laid_out(checkpoint, name) for name in names}
        sources = {entry.shard for entry in checkpoint.entries.values()}
        if shard_bytes is None and len(sources) > 1 and all(str(each).endswith(".safetensors") for each in sources):
            return _by_source(checkpoint, laid_out)
        return _by_size(laid_out, SHARD_BYTES if shard_bytes is None else shard_bytes)

    def _laid_out(self, checkpoint: Checkpoint, name: str) -> dict[str, Tensor]:
        entry = checkpoint.entries[name]
        if entry.quantized:
            return self.encode(name, entry.meta(), entry)
        return {name: torch.empty(entry.shape, dtype=entry.dtype, device="meta")}

    def _write_shards(
        self, checkpoint: Checkpoint, plan: Plan, state: Progress,
        progress: bool,
    ) -> None:  # fmt: skip
        total = sum(_source_bytes(entry) for entry in checkpoint.entries.values())
        bar = tqdm(total=total, desc=f"writing {state.path.name}", unit="B", unit_scale=True, disable=not progress)
        with bar:
            for file, names in plan.items():
                if state.is_done(file):
                    bar.update(sum(_source_bytes(checkpoint.entries[name]) for name in names))
                else:
                    state.done(file, *self._write_shard(checkpoint, state.folder / file, names, bar))

    def _write_shard(
        self, checkpoint: Checkpoint, file: Path, names: Mapping[str, Mapping[str, Tensor]], bar: tqdm
    ) -> tuple[int, dict[str, Any], list[str]]:
        """(bytes of the file, the sidecar's factors, linears with NaN) of one shard."""
        tensors = {key: tensor for laid_out in names.values() for key, tensor in laid_out.items()}
        entries = {name: checkpoint.entries[name] for name in names}
        factors: dict[str, Any] = {}
        with_nan: list[str] = []
        with ShardFile(file, tensors, self.metadata(checkpoint)) as shard:
            for name, entry in entries.items():
                if entry.quantized:
                    parts = checkpoint.linear(name)
                    shard.write_later(self.encode(name, parts, entry))
                    if lost := lost_factors(parts, stores_divisors=self.stores_divisors):
                        factors[name] = lost
                    if nan_blocks(parts):
                        with_nan.append(name)
                else:
                    for piece in checkpoint.chunks(name):
                        shard.write(name, piece)
                bar.update(_source_bytes(entry))
            checkpoint.check_unchanged()
            shard.finish()
        return shard.nbytes, factors, with_nan

    def _write_rest(self, checkpoint: Checkpoint, plan: Plan, state: Progress) -> None:
        """Index, configs, sidecar, and the other files of the source's folder."""
        checkpoint.write_auxiliary_files(state.folder)
        where = {key: file for file, names in plan.items() for tensors in names.values() for key in tensors}
        if len(plan) > 1:
            tensors = [tensor for names in plan.values() for laid_out in names.values() for tensor in laid_out.values()]
            total = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
            write_json(state.folder / "model.safetensors.index.json", index)
        quantization = self.config_of(checkpoint)
        config = dict(checkpoint.config)
        if quantization is not None:
            config["quantization_config"] = quantization
        if config:
            write_json(state.folder / "config.json", config)
        for name, value in self.files_of(checkpoint).items():
            write_json(state.folder / name, value)
        write_factors(state.folder / SIDECAR, state.factors)
        warn_of_nan(state.with_nan)


def _by_source(checkpoint: Checkpoint, laid_out: Mapping[str, dict[str, Tensor]]) -> Plan:
    """A file for each file of the source, of the same name."""
    plan: Plan = {}
    for name, tensors in laid_out.items():
        plan.setdefault(str(checkpoint.entries[name].shard), {})[name] = tensors
    return dict(sorted(plan.items()))


def _by_size(laid_out: Mapping[str, dict[str, Tensor]], shard_bytes: int) -> Plan:
    """Files of about so many bytes, in the order of the entries."""
    shards: list[dict[str, dict[str, Tensor]]] = [{}]
    size = 0
    for name, tensors in laid_out.items():
        nbytes = sum(t.numel() * t.dtype.itemsize for t in tensors.values())
        if shards[-1] and size + nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensors
        size += nbytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)}


def warn_of_nan(names: Sequence[str]) -> None:
    """A warning that names the weights with blocks that are NaN, if there are any."""
    if names:
        warnings.warn(
            f"{len(names)} weights hold blocks that are NaN, {some(names)}: vLLM refuses such a checkpoint. Their "
            "source holds NaN or infinity there, or is damaged",
            stacklevel=3,
        )


def folder_says(path: Path, find: Callable[[dict[str, Any]], object]) -> bool:
    """Whether ``path`` is a folder in whose config.json ``find`` finds something."""
    file = path / "config.json"
    try:
        return path.is_dir() and file.is_file() and bool(find(read_json(file)))
    except (ValueError, OSError):
        return False


def check_writable(checkpoint: Checkpoint, format: str, *, rows: bool = False, padded: bool = False) -> None:
    """Raises a ValueError that names the linears that ``format`` cannot hold.

    Args:
        rows: whether it holds a per-tensor scale a row; padded: whether it holds columns that are no multiple of 16.
    """
    quantized = {name: entry for name, entry in checkpoint.entries.items() if entry.quantized}
    if not rows:
        many = [name for name, entry in quantized.items() if entry.scales and len(entry.shape) == 2]
        if many:
            raise ValueError(
                f"{format} has one per-tensor scale a weight, and {some(many)} have one a row, as linears that were "
                "joined have: save them apart, as they were before"
            )
    if not padded:
        odd = [f"{name} {list(entry.shape)}" for name, entry in quantized.items() if entry.shape[-1] % 16]
        if odd:
            raise ValueError(f"{format} takes columns that are a multiple of 16, not {some(odd)}: leave them dense")


def _source_bytes(entry: Entry) -> int:
    return torch.Size(entry.shape).numel() * entry.dtype.itemsize
