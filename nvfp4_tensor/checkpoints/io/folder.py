"""A checkpoint that is a folder of safetensors files and a config.json, or one such file."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nvfp4_tensor._compat.frames import warn_user
from nvfp4_tensor.checkpoints.architectures import is_mask
from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, chunks_of
from nvfp4_tensor.checkpoints.formats import fp8
from nvfp4_tensor.checkpoints.formats.unlabelled import unlabelled
from nvfp4_tensor.checkpoints.io.files import Files, check_same, naming
from nvfp4_tensor.checkpoints.io.safetensors import NAMES, Shards, parse_json, read_json
from nvfp4_tensor.checkpoints.io.sidecar import SIDECAR, read_factors, sidecars_of, with_factors
from nvfp4_tensor.checkpoints.parts import LinearParts, check_scales
from nvfp4_tensor.checkpoints.understood import check_understood
from nvfp4_tensor.numerics.layout import BLOCK
from nvfp4_tensor.quantization.names import natural, some
from nvfp4_tensor.tensor.fp8 import FP8Tensor, decode

if TYPE_CHECKING:
    from nvfp4_tensor.checkpoints.formats.table import TableFormat

_OWN = ("config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json", SIDECAR)
"""Files that formats write themselves, and those in which GPTQ and AWQ describe the quantization of a source."""


class FolderCheckpoint(Checkpoint):
    """A folder of safetensors files in some format.

    Attributes:
        is_described: whether a configuration says what is in it, or only its tensors do; then activations are quantized
            where there are input scales.
    """

    def __init__(self, format: TableFormat, path: Path) -> None:
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
            self.is_described = format.name not in unlabelled(path, self.shards)
            is_read = self.is_described or format.is_file
            self.quantization = format.quantization(folder, self.config) if is_read else {}
            if not self.is_described:
                warn_user(
                    f"{path}: no configuration describes its NVFP4 weights: they are read as {format.name}, by their "
                    "names and shapes, and activations are quantized where there are input scales",
                )
            self.config.pop("quantization_config", None)
            self.cache = self.quantization.get("kv_cache_quant_algo") or self.quantization.get("kv_cache_scheme")
            entries = {name: e for name, e in format.entries(self).items() if not is_mask(name, e.shape)}
            check_understood(entries, path, format.has_pre_scales)
        except (AttributeError, IndexError, KeyError, TypeError) as error:  # JSON values of unexpected types
            raise ValueError(f"{path}: the configuration of {format.name} is invalid: {error!r}") from error
        except ValueError as error:
            if str(error).startswith((str(path), str(folder))):
                raise
            raise ValueError(f"{path}: {error}") from None
        order = {file.name: i for i, file in enumerate(self.shards.files)}
        self.entries = dict(sorted(entries.items(), key=lambda item: (order[str(item[1].shard)], natural(item[0]))))

    def value(self, name: str) -> LinearParts | FP8Tensor | Tensor:
        return self.decoded(name, self.shards)

    def per_tensor_scale(self, name: str) -> Tensor:
        if self.entries[name].group != BLOCK:  # it follows from the block scales and codes of MXFP4
            return self.linear(name).per_tensor_scale
        return self.decoded(name, self._numbers(name)).per_tensor_scale

    def keys_of(self, name: str) -> list[str]:
        """Return the names of the tensors of a weight, of those that are there."""
        entry = self.entries[name]
        keys = fp8.keys_of(name) if entry.fp8 else self._format.layout.keys_of(name) if entry.quantized else {"": name}
        return [key for key in keys.values() if key in self.shards.info]

    def _numbers(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a weight, with those of one byte per element (codes, block scales) on the meta
        device."""
        found = {key: self.shards.info[key] for key in self.keys_of(name)}
        return {
            key: self.shards[key]
            if info.dtype.itemsize > 1
            else torch.empty(info.shape, dtype=info.dtype, device="meta")
            for key, info in found.items()
        }

    def decoded(self, name: str, tensors: Mapping[str, Tensor]) -> Any:
        """Return a weight, from its tensors in the files or elsewhere."""
        entry = self.entries[name]
        if not entry.is_coded:
            return tensors[name]
        with naming(self.path / str(entry.shard) if self.path.is_dir() else self.path, name):
            if entry.fp8:
                return fp8.decode(name, tensors, entry)
            parts = check_scales(self._format.decode(name, tensors, entry))
            return with_factors(parts, self._factors.get(name, {}))

    def chunks(self, name: str, rows: int = 0, buffer: Tensor | None = None) -> Iterator[Tensor]:
        entry = self.entries[name]
        if entry.fp8 is None:
            yield from self.shards.chunks(name, rows, buffer)
        elif len(entry.shape) > 2:
            yield from chunks_of(self.dense(name), rows)
        else:
            scale, first = self.decoded(name, self._numbers(name)).scale, 0
            for codes in self.shards.chunks(name, rows):
                yield decode(codes, scale, entry.fp8.block, entry.dtype, first)
                first += len(codes)

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
            warn_user(
                f"{some(names)} of {self.path} are not copied, because they seem to be other copies of the weights: "
                "copy them to the output if the model needs them",
            )

    def dtype(self) -> torch.dtype:
        """Return the dtype that quantized weights decode to: that of config.json, or bfloat16."""
        named = self.config.get("dtype", self.config.get("torch_dtype", "bfloat16"))
        dtype = getattr(torch, str(named).removeprefix("torch."), None)
        return dtype if dtype in (torch.bfloat16, torch.float16, torch.float32) else torch.bfloat16

    def expect(
        self, name: str, dtypes: torch.dtype | Sequence[torch.dtype], shape: Sequence[float] | None = None,
        owner: str | None = None,
    ) -> tuple[int, ...]:  # fmt: skip
        """Return the shape of a tensor.

        shape: the sizes that it must have, -1 for any but 0; None for any shape.
        owner: the weight that it belongs to.

        Raises:
            ValueError: the tensor is missing, or of another dtype or shape.
        """
        dtypes = (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes
        sizes = "" if shape is None else f" [{', '.join('any' if size < 0 else f'{size:g}' for size in shape)}]"
        wanted = " or ".join(NAMES[dtype] for dtype in dtypes) + sizes
        info = self.shards.info.get(name)
        if info is None:
            where, needs = (self.shards.info[owner].file, f": {owner} needs it") if owner else (self.path, "")
            raise ValueError(f"{where}: tensor {name} ({wanted}) is missing{needs}")
        fits = shape is None or (
            len(info.shape) == len(shape)
            and all(size == want or (want < 0 and size) for want, size in zip(shape, info.shape, strict=True))
        )
        if info.dtype not in dtypes or not fits:
            raise ValueError(f"{info.file}: tensor {name}: expected {wanted}, found {info}")
        return info.shape

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


def warn_of_nan(names: Sequence[str]) -> None:
    """Warn of weights with NaN blocks."""
    if names:
        warn_user(
            f"{len(names)} weights have NaN blocks, {some(names)}, and vLLM raises an error for such a checkpoint: "
            "their source has NaN or infinity there, or is damaged",
        )
