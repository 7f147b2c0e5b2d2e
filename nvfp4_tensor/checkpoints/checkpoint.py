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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from nvfp4_tensor.checkpoints.io.files import Files
from nvfp4_tensor.checkpoints.io.safetensors import what_is_in
from nvfp4_tensor.checkpoints.parts import LinearParts
from nvfp4_tensor.numerics.layout import BLOCK, ceil_to

FORMATS = {
    "gguf": "nvfp4_tensor.checkpoints.formats.gguf.format",
    "comfy": "nvfp4_tensor.checkpoints.formats.comfy",
    "mlx": "nvfp4_tensor.checkpoints.formats.mlx",
    "mxfp4": "nvfp4_tensor.checkpoints.formats.mxfp4.folder",
    "modelopt": "nvfp4_tensor.checkpoints.formats.modelopt",
    "compressed-tensors": "nvfp4_tensor.checkpoints.formats.compressed_tensors",
    "torchao": "nvfp4_tensor.checkpoints.formats.torchao",
    "dense": "nvfp4_tensor.checkpoints.formats.dense",
}
"""The formats by name, each the ``FORMAT`` of a module, imported when it is asked for. ``detect`` asks in this order:
"dense" takes what is left and stays last."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """What stands under a parameter's name, known from headers alone.

    Attributes:
        shape: the logical one.
        dtype: as stored; of a quantized weight what it decodes to.
        quantized: whether it is NVFP4.
        quantizes_activations, has_input_scale: of a quantized one, as :class:`LinearParts` says.
        scales: shape of its per-tensor scale.
        shard: the file that holds it, None where there is no file.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    quantized: bool = False
    quantizes_activations: bool = False
    has_input_scale: bool = False
    scales: tuple[int, ...] = ()
    shard: str | None = None

    def meta(self) -> LinearParts:
        """The parts without their values: a writer lays out a file by what it makes of them."""
        *rows, columns = self.shape
        empty = functools.partial(torch.empty, device="meta")
        return LinearParts(
            qdata=empty((*rows, ceil_to(columns, BLOCK) // 2), dtype=torch.uint8),
            scale=empty((*rows, ceil_to(columns, BLOCK) // BLOCK), dtype=torch.float8_e4m3fn),
            per_tensor_scale=empty(self.scales),
            columns=columns,
            quantizes_activations=self.quantizes_activations,
            input_scale=empty(()) if self.has_input_scale else None,
        )


class Checkpoint(abc.ABC):
    """A checkpoint that is open for reading; a context manager.

    Attributes:
        format: the name of its format.
        path: its folder or file; None where it is a model in memory.
        config: of config.json, without ``quantization_config``; {} where there is none.
        entries: by parameter's name ("model.layers.0.mlp.up_proj.weight"), in the order of the files.
        files: those that it is read from, None where there are none.
    """

    format: str
    path: Path | None
    config: dict[str, Any]
    entries: dict[str, Entry]
    files: Files | None = None

    @abc.abstractmethod
    def linear(self, name: str) -> LinearParts:
        """A quantized weight; on a CPU, nothing shared with what was read before."""

    @abc.abstractmethod
    def dense(self, name: str) -> Tensor:
        """A tensor that is not quantized."""

    def per_tensor_scale(self, name: str) -> Tensor:
        """That of a quantized weight, without its codes where the format has it apart."""
        return self.linear(name).per_tensor_scale

    def rows(self, name: str, first: int, last: int, buffer: Tensor | None = None) -> Tensor:
        """Some rows of a dense tensor, the leading dimensions flattened; ``buffer`` (uint8) may be used for them."""
        values = self.dense(name)
        return values.reshape(-1, values.shape[-1])[first:last]

    def chunks(self, name: str) -> Iterator[Tensor]:
        """A dense tensor in flat contiguous pieces, in order: what a writer copies, however large it is."""
        yield self.dense(name).contiguous().view(-1)

    def write_auxiliary_files(self, folder: Path) -> None:  # noqa: B027  a model in memory has none
        """Put into ``folder`` what belongs to the model beside weights and configuration: its tokenizer, above all."""

    def identity(self) -> list[Any] | None:
        """What the content follows from, as JSON: names, sizes and times of files, settings. None: nobody can tell."""
        if self.path is None or self.files is None:
            return None
        return [str(self.path.resolve()), self.format, self.files.identity()]

    def check_unchanged(self) -> None:
        """What is to be called after all has been read, and before anything that was made of it counts.

        Raises:
            ValueError: a file of the checkpoint has been written or replaced since it was opened.
        """
        if self.files is not None:
            self.files.check_unchanged()

    def close(self) -> None:  # noqa: B027  nothing to do for a model in memory
        """Closes what is open."""

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Format(abc.ABC):
    """One layout of checkpoints; each module of :data:`FORMATS` has one as ``FORMAT``.

    Attributes:
        name: as in :data:`FORMATS`.
        is_file: whether a checkpoint is one file (GGUF) and not a folder.
        is_served: whether its readers join q, k and v, gate and up, which then need one per-tensor scale.
        holds_experts: whether NVFP4 experts that are one tensor (E, N, K) can be written.
    """

    name: ClassVar[str]
    is_file: ClassVar[bool] = False
    is_served: ClassVar[bool] = True
    holds_experts: ClassVar[bool] = False

    @abc.abstractmethod
    def detect(self, path: Path) -> bool:
        """Whether ``path`` is a checkpoint of this format; by headers and configs, and without an exception."""

    @abc.abstractmethod
    def read(self, path: Path) -> Checkpoint:
        """Open it, and check all that headers and configs say.

        Raises:
            ValueError: a file that is wrong, truncated or of another kind: it names file, tensor, expected and found.
        """

    def has_scale(self, checkpoint: Checkpoint, name: str, options: dict[str, Any]) -> bool:
        """Whether readers multiply that weight by a per-tensor scale; without, it is quantized with a scale of 1."""
        return True

    @abc.abstractmethod
    def write(self, checkpoint: Checkpoint, path: Path, *, progress: bool = True, **options: Any) -> None:
        """Write ``checkpoint`` to ``path``, which appears when it is whole; nothing is rounded.

        Args:
            progress: show a bar.
            options: of the format alone, each with a default.

        Raises:
            ValueError: it holds what this format cannot, by name; then nothing is written.
        """


def format_named(name: str) -> Format:
    """The format of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in FORMATS:
        raise ValueError(f"no checkpoint format {name!r}: there are {', '.join(FORMATS)}")
    return importlib.import_module(FORMATS[name]).FORMAT


def detect(path: str | Path) -> str:
    """The name of the format of a checkpoint: a folder or a file.

    Example::

        checkpoints.detect("Llama-3.1-8B-Instruct-NVFP4")  # "modelopt"

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: it is none of the formats.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there: give the folder (or the .gguf or .safetensors file) itself")
    for name in FORMATS:
        if format_named(name).detect(path):
            return name
    raise ValueError(
        f"{path} is no checkpoint that is read here: expected a folder with *.safetensors (and config.json), a "
        f".safetensors or a .gguf file; found {what_is_in(path)}"
    )


def read(path: str | Path, format: str | None = None) -> Checkpoint:
    """Open a checkpoint; ``format`` is detected where none is given.

    Example::

        with checkpoints.read("Llama-3.1-8B-Instruct-NVFP4") as checkpoint:
            parts = checkpoint.linear("model.layers.0.mlp.up_proj.weight")

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: it is none of the formats, or wrong: the message names file, tensor, expected and found.
    """
    return format_named(detect(path) if format is None else format).read(Path(path))
