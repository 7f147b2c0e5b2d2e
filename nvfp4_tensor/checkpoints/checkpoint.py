"""Abstractions that all checkpoint formats share.

A :class:`Checkpoint` reads one parameter at a time. A :class:`Format` opens checkpoints, and writes any checkpoint in
its own layout. ``convert`` is ``write(read(src))``, ``quantize`` inserts a checkpoint that quantizes each weight when
it is read, and ``save`` wraps a model in memory as a checkpoint.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import importlib
import math
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from nvfp4_tensor.checkpoints.formats.unlabelled import unlabelled
from nvfp4_tensor.checkpoints.io.files import Files
from nvfp4_tensor.checkpoints.io.safetensors import what_is_in
from nvfp4_tensor.checkpoints.parts import LinearParts
from nvfp4_tensor.numerics.layout import BLOCK, ceil_to
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.tensor.fp8 import E4M3, FP8Spec, FP8Tensor

FORMATS = {
    "gguf": "nvfp4_tensor.checkpoints.formats.gguf.format",
    "comfy": "nvfp4_tensor.checkpoints.formats.comfy",
    "auto-round": "nvfp4_tensor.checkpoints.formats.auto_round",
    "mlx": "nvfp4_tensor.checkpoints.formats.mlx",
    "mxfp4": "nvfp4_tensor.checkpoints.formats.mxfp4.folder",
    "modelopt": "nvfp4_tensor.checkpoints.formats.modelopt",
    "compressed-tensors": "nvfp4_tensor.checkpoints.formats.compressed_tensors",
    "torchao": "nvfp4_tensor.checkpoints.formats.torchao",
    "dense": "nvfp4_tensor.checkpoints.formats.dense",
}
"""The module of each format, which has it as ``FORMAT`` and is imported on first use. ``detect`` tries the formats in
this order; "dense" matches any safetensors file, so it is last."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """The description of one parameter, from file headers only.

    Attributes:
        shape: the logical shape.
        dtype: the stored dtype; for a quantized weight, the dtype that it decodes to.
        quantized: whether it is NVFP4.
        quantizes_activations, has_input_scale: for a quantized weight, as in :class:`LinearParts`. The second is of
            FP8 weights too.
        activation: how a weight in memory quantizes activations, which files do not say.
        scales: the shape of the per-tensor scale.
        fp8: how it is scaled if it is FP8; then :meth:`Checkpoint.fp8` reads it, and ``dense`` decodes it.
        group: the stored number of elements of a block: 16, or 32 for MXFP4, which is read as NVFP4.
        shard: the name of its file, or None if there is no file.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    quantized: bool = False
    quantizes_activations: bool = False
    has_input_scale: bool = False
    activation: QuantizeSpec | None = None
    scales: tuple[int, ...] = ()
    fp8: FP8Spec | None = None
    group: int = BLOCK
    shard: str | None = None

    @property
    def numbers(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the size in bytes of the tensor in its dtype, before it is quantized."""
        return self.numbers * self.dtype.itemsize

    @property
    def is_coded(self) -> bool:
        """Return whether it is NVFP4 or FP8."""
        return self.quantized or self.fp8 is not None

    @property
    def bits(self) -> float:
        """Return the stored bits per element, scales included."""
        if not self.is_coded:
            return 8.0 * self.dtype.itemsize
        weight = self.meta()
        return weight.bits if isinstance(weight, LinearParts) else 8 * weight.nbytes / max(self.numbers, 1)

    @property
    def kind(self) -> str:
        """Return "NVFP4", "FP8", or the dtype of a dense tensor."""
        return "NVFP4" if self.quantized else "FP8" if self.fp8 else str(self.dtype).removeprefix("torch.")

    @classmethod
    def of(cls, value: LinearParts | FP8Tensor | Tensor, dtype: torch.dtype) -> Entry:
        """Return the description of a tensor in memory, which decodes to ``dtype``. :meth:`meta` is the inverse."""
        entry = cls(shape=tuple(value.shape), dtype=dtype)
        if isinstance(value, FP8Tensor):
            return dataclasses.replace(entry, fp8=value.spec, has_input_scale=value.input_scale is not None)
        if isinstance(value, Tensor):
            return entry
        return dataclasses.replace(
            entry, quantized=True, quantizes_activations=value.quantizes_activations,
            has_input_scale=value.input_scale is not None, scales=tuple(value.per_tensor_scale.shape),
        )  # fmt: skip

    def meta(self) -> LinearParts | FP8Tensor:
        """Return a quantized weight on the meta device, from which a writer computes the layout of a file."""
        *rows, columns = self.shape
        empty = functools.partial(torch.empty, dtype=torch.float32, device="meta")
        if self.fp8 is not None:
            static = empty(()) if self.has_input_scale else None
            codes, scale = empty(self.shape, dtype=E4M3), empty(self.fp8.scale_shape(self.shape))
            return FP8Tensor(codes, scale, self.fp8, self.dtype, input_scale=static)
        return LinearParts(
            qdata=empty((*rows, ceil_to(columns, BLOCK) // 2), dtype=torch.uint8),
            scale=empty((*rows, ceil_to(columns, BLOCK) // BLOCK), dtype=torch.float8_e4m3fn),
            per_tensor_scale=empty(self.scales),
            columns=columns,
            quantizes_activations=self.quantizes_activations,
            input_scale=empty(()) if self.has_input_scale else None,
        )


def chunks_of(values: Tensor, rows: int = 0) -> Iterator[Tensor]:
    """Yield chunks of a tensor, as :meth:`Checkpoint.chunks` does."""
    if values.numel():
        matrix = values.reshape(-1, values.shape[-1] if values.dim() else 1)
        yield from matrix.split(rows or len(matrix))


class Checkpoint(abc.ABC):
    """A checkpoint that is open for reading. It is a context manager.

    Attributes:
        format: the name of its format.
        path: its folder or file; None for a model in memory.
        config: the content of config.json without ``quantization_config``; {} if there is no config.json.
        entries: by parameter name ("model.layers.0.mlp.up_proj.weight"), in the order of the files.
        files: the files that it is read from; None for a model in memory.
        cache: how servers are to quantize the key-value cache: the name or the settings in the configuration, or None.
    """

    format: str
    path: Path | None
    config: dict[str, Any]
    entries: dict[str, Entry]
    files: Files | None = None
    cache: Any = None

    @abc.abstractmethod
    def value(self, name: str) -> LinearParts | FP8Tensor | Tensor:
        """Read a tensor as it is, in NVFP4, in FP8 or dense, into CPU tensors."""

    def linear(self, name: str) -> LinearParts:
        """Read a quantized weight."""
        if not self.entries[name].quantized:
            raise ValueError(f"{name} is dense: read it by dense(name) instead")
        value = self.value(name)
        assert isinstance(value, LinearParts)
        return value

    def fp8(self, name: str) -> FP8Tensor:
        """Read a weight in FP8."""
        if self.entries[name].fp8 is None:
            raise ValueError(f"{name} is not FP8: read it by linear(name) or dense(name) instead")
        value = self.value(name)
        assert isinstance(value, FP8Tensor)
        return value

    def dense(self, name: str) -> Tensor:
        """Read a tensor that is not quantized; decode one in FP8."""
        value = self.value(name)
        assert isinstance(value, Tensor), name
        return value.values() if isinstance(value, FP8Tensor) else value

    def per_tensor_scale(self, name: str) -> Tensor:
        """Read the per-tensor scale of a quantized weight, without its codes if the format stores them separately."""
        return self.linear(name).per_tensor_scale

    def chunks(self, name: str, rows: int = 0, buffer: Tensor | None = None) -> Iterator[Tensor]:
        """Read a dense tensor of any size in chunks (rows, columns), in order, with its leading dimensions flattened.

        Args:
            rows: the rows of a chunk; by default those of 32 MB, or all.
            buffer: uint8 memory that the chunks may use. Each may overwrite the one before it.
        """
        yield from chunks_of(self.dense(name), rows)

    def write_auxiliary_files(self, folder: Path) -> None:  # noqa: B027  a model in memory has none
        """Write the tokenizer and other files of the model, except weights and configuration, to ``folder``."""

    def check_values(self) -> None:  # noqa: B027  only weights in other codes have some
        """Check what headers do not say, before anything is written."""

    def report(self, quantized: Container[str]) -> str:
        """Return what the weights in other codes were, one line for each kind; ``quantized``: which become NVFP4."""
        return ""

    def identity(self) -> list[Any] | None:
        """Return everything that determines the content, as JSON: names, sizes and times of files, and settings.

        None means that the content cannot be identified.
        """
        if self.path is None or self.files is None:
            return None
        return [str(self.path.resolve()), self.format, self.files.identity()]

    def check_unchanged(self) -> None:
        """Check that no file has changed. Call it after reading, before using the result.

        Raises:
            ValueError: a file of the checkpoint was written or replaced after it was opened.
        """
        if self.files is not None:
            self.files.check_unchanged()

    def close(self) -> None:  # noqa: B027  nothing to do for a model in memory
        """Close all files."""

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


FP8_CACHE = {"num_bits": 8, "type": "float", "dynamic": False}
"""The settings of a key-value cache in FP8 with a scale per tensor."""


def is_fp8_cache(cache: Any) -> bool:
    """Return whether ``cache`` of a checkpoint is FP8 with a scale per tensor."""
    if not isinstance(cache, dict):
        return cache == "FP8"
    return cache.get("strategy", "tensor") == "tensor" and FP8_CACHE.items() <= cache.items()


class Format(abc.ABC):
    """A checkpoint format. Each module of :data:`FORMATS` has an instance as ``FORMAT``.

    Attributes:
        name: the key in :data:`FORMATS`.
        is_file: whether a checkpoint is one file (GGUF) instead of a folder.
        is_served: whether its readers join q, k and v, or gate and up, which then need equal per-tensor scales.
        holds_experts: whether NVFP4 experts in one tensor (E, N, K) can be written.
        holds_embeddings: whether a reader takes the weight of an embedding in NVFP4.
        cache_scales: the names, in a layer's attention, of the scales of keys and values in an FP8 cache; () for none.
    """

    name: ClassVar[str]
    is_file: ClassVar[bool] = False
    is_served: ClassVar[bool] = True
    holds_experts: ClassVar[bool] = False
    holds_embeddings: ClassVar[bool] = False
    cache_scales: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def detect(self, path: Path) -> bool:
        """Return whether ``path`` is a checkpoint of this format, from headers and configs. Does not raise."""

    @abc.abstractmethod
    def read(self, path: Path) -> Checkpoint:
        """Open a checkpoint and check its headers and configs.

        Raises:
            ValueError: a file is invalid, truncated or of another format. The message has the file, the tensor, and
                what was expected and found.
        """

    def has_scale(self, checkpoint: Checkpoint, name: str, options: dict[str, Any]) -> bool:
        """Return whether readers multiply a weight by its per-tensor scale. If not, it is quantized with a scale of
        1."""
        return True

    @abc.abstractmethod
    def write(self, checkpoint: Checkpoint, path: Path, *, progress: bool = True, **options: Any) -> None:
        """Write ``checkpoint`` to ``path`` without rounding. ``path`` appears when it is complete.

        Args:
            progress: show a progress bar.
            options: options of this format, each with a default.

        Raises:
            ValueError: a tensor cannot be stored in this format; the message has its name. Nothing is written.
        """


def format_named(name: str) -> Format:
    """Return the format with this name.

    Raises:
        ValueError: there is no such format.
    """
    if name not in FORMATS:
        raise ValueError(f"no checkpoint format {name!r}: expected one of {', '.join(FORMATS)}")
    return importlib.import_module(FORMATS[name]).FORMAT


def detect(path: str | Path) -> str:
    """Return the name of the format of a checkpoint, which is a folder or a file.

    Example::

        checkpoints.detect("Llama-3.1-8B-Instruct-NVFP4")  # "modelopt"

    NVFP4 weights that no configuration describes, as in some single files, are recognized by their tensors.

    Raises:
        FileNotFoundError: ``path`` does not exist.
        ValueError: it is not a checkpoint in any of the formats, or could be of two.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: pass a checkpoint folder, or a .gguf or .safetensors file")
    for name in FORMATS:
        if format_named(name).detect(path):
            candidates = unlabelled(path) if name == "dense" else []
            if len(candidates) > 1:
                raise ValueError(
                    f"{path} has NVFP4 weights that no configuration describes, with the names and shapes of "
                    f"{' and '.join(candidates)}, which would give different values: pass format={candidates[0]!r} or "
                    f"format={candidates[1]!r}, as the program that wrote it"
                )
            return candidates[0] if candidates else name
    raise ValueError(
        f"{path} is not a checkpoint: expected a folder with *.safetensors (and config.json), a .safetensors or a "
        f".gguf file; found {what_is_in(path)}"
    )


def read(path: str | Path, format: str | None = None) -> Checkpoint:
    """Open a checkpoint. Its ``format`` is detected by default.

    Example::

        with checkpoints.read("Llama-3.1-8B-Instruct-NVFP4") as checkpoint:
            parts = checkpoint.linear("model.layers.0.mlp.up_proj.weight")

    Raises:
        FileNotFoundError: ``path`` does not exist.
        ValueError: it is not a checkpoint, or is invalid. The message has the file, the tensor, and what was expected
            and found.
    """
    return format_named(detect(path) if format is None else format).read(Path(path))
