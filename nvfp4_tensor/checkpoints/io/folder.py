"""The base class of formats that are a folder of safetensors files and a config.json.

A format is a subclass of :class:`SafetensorsFormat`. It defines the names of the tensors of a linear (``encode``,
``decode``), which tensors of a folder are linears (``entries``), and the content of config.json.
"""

from __future__ import annotations

import abc
import itertools
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from tqdm import tqdm

from nvfp4_tensor.checkpoints.architectures import is_mask
from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, Entry, Format
from nvfp4_tensor.checkpoints.io.files import Files, check_same
from nvfp4_tensor.checkpoints.io.resumable_write import ResumableFolder, check_is_new, fingerprint
from nvfp4_tensor.checkpoints.io.safetensors import ShardFile, Shards, parse_json, read_json, write_json
from nvfp4_tensor.checkpoints.io.sidecar import (
    SIDECAR,
    lost_factors,
    read_factors,
    sidecars_of,
    with_factors,
    write_factors,
)
from nvfp4_tensor.checkpoints.parts import LinearParts, check_scales, nan_blocks
from nvfp4_tensor.checkpoints.understood import check_understood
from nvfp4_tensor.quantization.names import joined_with, natural, some

SHARD_BYTES = 4 << 30
"""The approximate size of a shard, if the source has only one."""

_OWN = ("config.json", "hf_quant_config.json", SIDECAR)
"""Files that formats write themselves."""
Plan: TypeAlias = "dict[str, dict[str, dict[str, Tensor]]]"
"""The tensors of each parameter of each file, on the meta device."""


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
            entries = {name: e for name, e in format.entries(self).items() if not is_mask(name, e.shape)}
            check_understood(entries, path)
        except (AttributeError, IndexError, KeyError, TypeError) as error:  # JSON values of unexpected types
            raise ValueError(f"{path}: the configuration of {format.name} is invalid: {error!r}") from error
        order = {file.name: i for i, file in enumerate(self.shards.files)}
        self.entries = dict(sorted(entries.items(), key=lambda item: (order[str(item[1].shard)], natural(item[0]))))

    def linear(self, name: str) -> LinearParts:
        return self.decoded(name, self.shards)

    def per_tensor_scale(self, name: str) -> Tensor:
        return self.decoded(name, _WithoutBytes(self.shards)).per_tensor_scale

    def decoded(self, name: str, tensors: Mapping[str, Tensor]) -> LinearParts:
        """Return the parts of a linear, from its tensors in the files or elsewhere."""
        entry = self.quantized_entry(name)
        try:
            parts = check_scales(self._format.decode(name, tensors, entry))
            return with_factors(parts, self._factors.get(name, {}))
        except ValueError as error:
            file = self.path / str(entry.shard) if self.path.is_dir() else self.path
            raise ValueError(f"{file}: tensor {name}: {error}") from None

    def dense(self, name: str) -> Tensor:
        return self.shards[self.stored_name(name)]

    def chunks(self, name: str, rows: int = 0, buffer: Tensor | None = None) -> Iterator[Tensor]:
        return self.shards.chunks(self.stored_name(name), rows, buffer)

    def write_auxiliary_files(self, folder: Path) -> None:
        """Copy the other files of the folder and its subfolders, except those that this package writes."""
        if not self.path.is_dir():
            return
        read = {file.resolve() for file in self.shards.files}
        own = [self.path / name for name in _OWN] + list(self.path.glob("*.index.json"))
        kept, left_out = self.files.beside(_modules(self.path))
        for file in kept:
            if file in own or file.resolve() in read:
                continue
            if file.parent == self.path and file.suffix == ".safetensors":
                left_out.append(file)
                continue
            before = self.files.stats.get(file) or file.stat()
            copy = folder / file.relative_to(self.path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
            check_same(file, before, file.stat())
        if left_out:
            names = [str(file.relative_to(self.path)) for file in left_out]
            warnings.warn(
                f"{some(names)} of {self.path} are not copied, because they seem to be other copies of the weights: "
                "copy them to the output if the model needs them",
                stacklevel=5,
            )

    def stored_name(self, name: str) -> str:
        """Return the name of a dense tensor in the files."""
        return name

    def dtype(self) -> torch.dtype:
        """Return the dtype that quantized weights decode to: that of config.json, or bfloat16."""
        named = self.config.get("dtype", self.config.get("torch_dtype", "bfloat16"))
        dtype = getattr(torch, str(named).removeprefix("torch."), None)
        return dtype if dtype in (torch.bfloat16, torch.float16, torch.float32) else torch.bfloat16

    def expect(self, name: str, dtype: torch.dtype, shape: Sequence[int] | None, owner: str) -> None:
        """Raise a ValueError unless there is a tensor with this name, dtype and shape (None for any).

        owner: the weight that the tensor belongs to.
        """
        wanted = f"{str(dtype).removeprefix('torch.')}{'' if shape is None else f' {list(shape)}'}"
        if name not in self.shards.info:
            where = self.shards.info[owner].file
            raise ValueError(f"{where}: tensor {name} ({wanted}) is missing: {owner} needs it")
        info = self.shards.info[name]
        if info.dtype != dtype or (shape is not None and info.shape != tuple(shape)):
            raise ValueError(f"{info.file}: tensor {name}: expected {wanted}, found {info}")

    def close(self) -> None:
        self.shards.close()


def _modules(folder: Path) -> list[str]:
    """Return the subfolders with the modules of a sentence transformer."""
    file = folder / "modules.json"
    try:
        modules = parse_json(file.read_text(encoding="utf-8")) if file.is_file() else []
        return [str(module["path"]) for module in modules if module["path"]]
    except (ValueError, TypeError, KeyError):  # of another program
        return []


class _WithoutBytes(Mapping[str, Tensor]):
    """The tensors of shards, with those of one byte per element (codes, block scales) on the meta device."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def __getitem__(self, name: str) -> Tensor:
        info = self._shards.info[name]
        return (
            torch.empty(info.shape, dtype=info.dtype, device="meta") if info.dtype.itemsize == 1 else self._shards[name]
        )

    def __contains__(self, name: object) -> bool:
        return name in self._shards

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)


class SafetensorsFormat(Format):
    """The base class of formats that are folders of safetensors files.

    Attributes:
        stores_divisors: whether the format stores the inverse of per-tensor scales.
        reserved: suffixes of the format's own tensors, which no dense tensor may have.
    """

    stores_divisors: ClassVar[bool] = False
    reserved: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def quantization(self, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
        """Return the quantization settings of a folder, for :meth:`entries`; ``config`` is config.json.

        Raises:
            ValueError: the folder has another format, or a kind of quantization that is not supported.
        """

    @abc.abstractmethod
    def entries(self, checkpoint: FolderCheckpoint) -> dict[str, Entry]:
        """Return the parameters of a folder, and check that each linear has all tensors, with their dtypes and
        shapes."""

    @abc.abstractmethod
    def decode(self, name: str, tensors: Mapping[str, Tensor], entry: Entry) -> LinearParts:
        """Return the parts of the weight ``name`` from the format's tensors."""

    @abc.abstractmethod
    def encode(self, name: str, parts: LinearParts, entry: Entry) -> dict[str, Tensor]:
        """Return the format's tensors of the weight ``name``. Parts on the meta device give tensors on it."""

    @abc.abstractmethod
    def config_of(self, checkpoint: Checkpoint) -> dict[str, Any] | None:
        """Return the quantization_config of ``checkpoint`` for config.json, or None to omit it."""

    def check_names(self, checkpoint: Checkpoint) -> None:
        """Raise a ValueError for dense tensors whose names a reader would take for tensors of quantized weights."""
        dense = [name for name, entry in checkpoint.entries.items() if not entry.quantized]
        if reserved := [name for name in dense if self.reserved and name.endswith(self.reserved)]:
            raise ValueError(
                f"{self.name} reserves such names for quantized weights, but {some(reserved)} are dense: rename them"
            )

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise a ValueError with the names of tensors that this format cannot store."""
        check_writable(checkpoint, self.name)

    def files_of(self, checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
        """Return further JSON files of the format, by name."""
        return {}

    def metadata(self, checkpoint: Checkpoint) -> dict[str, str]:
        """Return the metadata for the header of each shard."""
        return {"format": "pt"}

    def read(self, path: Path) -> FolderCheckpoint:
        return FolderCheckpoint(self, Path(path))

    def write(
        self, checkpoint: Checkpoint, path: Path, *, progress: bool = True, shard_bytes: int | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        """See :meth:`Format.write`. If a call is interrupted, the same call with an unchanged source continues after
        its last complete shard.

        Args:
            shard_bytes: the maximum size of a file. By default, the files are those of the source if it has several,
                and have 4 GiB otherwise.
        """
        if options:
            renamed = {
                "to": "checkpoints.save calls it format",
                "format": "checkpoints.quantize and convert call it to",
            }
            hints = [f"; {renamed[name]}" for name in options if name in renamed]
            raise ValueError(f"{self.name} has no option {', '.join(options)}{''.join(hints)}")
        path = Path(path)
        self.check_names(checkpoint)
        self.check(checkpoint)
        check_understood(checkpoint.entries, checkpoint.path)
        check_is_new(path, checkpoint)
        plan = self._plan(checkpoint, shard_bytes)
        with ResumableFolder(path, fingerprint(self.name, checkpoint, shard_bytes)) as state:
            self._write_shards(checkpoint, plan, state, progress)
            self._write_rest(checkpoint, plan, state)
            checkpoint.check_unchanged()
            state.finish()

    def _plan(self, checkpoint: Checkpoint, shard_bytes: int | None) -> Plan:
        """Distribute parameters over files. Linears that servers join are adjacent, because they are quantized
        together."""
        entries, tensors_of = checkpoint.entries, {}
        for name in dict.fromkeys(itertools.chain.from_iterable(joined_with(each, entries) for each in entries)):
            tensors_of[name] = {name: torch.empty(entries[name].shape, dtype=entries[name].dtype, device="meta")}
            if entries[name].quantized:
                tensors_of[name] = self.encode(name, entries[name].meta(), entries[name])
        sources = {str(entry.shard) for entry in entries.values()}
        if shard_bytes is not None or len(sources) < 2 or not all(each.endswith(".safetensors") for each in sources):
            return _by_size(tensors_of, SHARD_BYTES if shard_bytes is None else shard_bytes)
        plan: Plan = {source: {} for source in sorted(sources)}
        for name, tensors in tensors_of.items():
            plan[str(entries[name].shard)][name] = tensors
        return plan

    def _write_shards(self, checkpoint: Checkpoint, plan: Plan, state: ResumableFolder, progress: bool) -> None:
        total = sum(entry.nbytes for entry in checkpoint.entries.values())
        bar = tqdm(total=total, desc=f"writing {state.path.name}", unit="B", unit_scale=True, disable=not progress)
        with bar:
            for file, names in plan.items():
                if state.is_done(file):
                    bar.update(sum(checkpoint.entries[name].nbytes for name in names))
                else:
                    state.done(file, *self._write_shard(checkpoint, state.folder / file, names, bar))

    def _write_shard(
        self, checkpoint: Checkpoint, file: Path, names: Mapping[str, Mapping[str, Tensor]], bar: tqdm
    ) -> tuple[int, dict[str, Any], list[str]]:
        """Write a shard. Return its size in bytes, the factors for the sidecar, and its linears with NaN."""
        tensors = {key: tensor for tensors_of in names.values() for key, tensor in tensors_of.items()}
        factors: dict[str, Any] = {}
        with_nan: list[str] = []
        with ShardFile(file, tensors, self.metadata(checkpoint)) as shard:
            for name in names:
                entry = checkpoint.entries[name]
                if entry.quantized:
                    parts = checkpoint.linear(name)
                    shard.write_later(self.encode(name, parts, entry))
                    if lost := lost_factors(parts, stores_divisors=self.stores_divisors):
                        factors[name] = lost
                    if nan_blocks(parts):
                        with_nan.append(name)
                else:
                    for chunk in checkpoint.chunks(name):
                        shard.write(name, chunk)
                bar.update(entry.nbytes)
            checkpoint.check_unchanged()
            shard.finish()
        return shard.nbytes, factors, with_nan

    def _write_rest(self, checkpoint: Checkpoint, plan: Plan, state: ResumableFolder) -> None:
        """Write the index, configs and sidecar, and copy the other files of the source."""
        checkpoint.write_auxiliary_files(state.folder)
        tensors = [(key, t, file) for file, names in plan.items() for of in names.values() for key, t in of.items()]
        if len(plan) > 1:
            total, where = sum(tensor.nbytes for _, tensor, _ in tensors), {key: file for key, _, file in tensors}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
            write_json(state.folder / "model.safetensors.index.json", index)
        quantization = self.config_of(checkpoint)
        config = (
            checkpoint.config if quantization is None else checkpoint.config | {"quantization_config": quantization}
        )
        files = {"config.json": config} if config else {}
        for name, value in (files | self.files_of(checkpoint)).items():
            write_json(state.folder / name, value)
        write_factors(state.folder / SIDECAR, state.factors)
        warn_of_nan(state.with_nan)


def _by_size(tensors_of: Mapping[str, dict[str, Tensor]], shard_bytes: int) -> Plan:
    """Fill files up to ``shard_bytes``, in the order of the entries."""
    shards: list[dict[str, dict[str, Tensor]]] = [{}]
    size = 0
    for name, tensors in tensors_of.items():
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        if shards[-1] and size + nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensors
        size += nbytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)}


def warn_of_nan(names: Sequence[str]) -> None:
    """Warn of weights with NaN blocks."""
    if names:
        warnings.warn(
            f"{len(names)} weights have NaN blocks, {some(names)}, and vLLM raises an error for such a checkpoint: "
            "their source has NaN or infinity there, or is damaged",
            stacklevel=3,
        )


def config_has(path: Path, find: Callable[[dict[str, Any]], object]) -> bool:
    """Return whether ``path`` is a folder and ``find`` of its config.json is true."""
    file = path / "config.json"
    try:
        return path.is_dir() and file.is_file() and bool(find(read_json(file)))
    except (ValueError, OSError):
        return False


def check_writable(checkpoint: Checkpoint, format: str, *, rows: bool = False, padded: bool = False) -> None:
    """Raise a ValueError with the names of linears that ``format`` cannot store.

    Args:
        rows: whether it supports one per-tensor scale per row; padded: whether it supports columns that are not a
            multiple of 16.
    """
    quantized = {name: entry for name, entry in checkpoint.entries.items() if entry.quantized}
    many = [name for name, entry in quantized.items() if entry.scales and len(entry.shape) == 2]
    if many and not rows:
        raise ValueError(
            f"{format} has one per-tensor scale per weight, but {some(many)} have one per row, as joined linears do: "
            "split them before saving"
        )
    odd = [f"{name} {list(entry.shape)}" for name, entry in quantized.items() if entry.shape[-1] % 16]
    if odd and not padded:
        raise ValueError(f"{format} needs columns in multiples of 16: leave {some(odd)} dense")
