"""What every layout of a checkpoint is made of: the plain tensors of a linear, what a checkpoint holds, the formats.

A :class:`Checkpoint` reads, one parameter at a time. A :class:`Format` opens one, and writes any other one in its own
layout. So ``convert`` is ``write(read(src))``, ``quantize`` is the same with a checkpoint between that quantizes what
it is asked for, and ``save`` writes a model that stands as a checkpoint.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from nvfp4_tensor.checkpoints.files import Files
from nvfp4_tensor.checkpoints.io.safetensors import what_is_in
from nvfp4_tensor.numerics import layout
from nvfp4_tensor.numerics.layout import BLOCK, ceil_to
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

LARGEST = 2688.0
"""6 * 448: an activation's amax over its input scale, by the rule that every reader applies."""

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
class LinearParts:
    """A quantized weight (*leading, N, K) in plain tensors, nothing swizzled. Value = code x scale x per_tensor_scale.

    Attributes:
        qdata: uint8 (*leading, N, K / 2, K rounded up to 16), two codes a byte, the even element low.
        scale: float8_e4m3fn (*leading, N, K / 16, rounded up), in the order of the weight.
        per_tensor_scale: float32 in the direction of decoding (it multiplies, amax / 2688): 0-d, or (E, 1), one for
            each matrix of (E, N, K), or (rows,), one a row.
        columns: K, without padding.
        quantizes_activations: whether products quantize what they multiply the weight by (W4A4).
        input_scale: None, or the static scale of that operand, float32 0-d, in the direction of decoding (its
            amax / 2688).
        divisor, input_divisor: None, or the inverse of per_tensor_scale and of input_scale as a file had it, float32 of
            the same shape: 1/x taken twice is another number. They are kept so that a checkpoint that goes there and
            back is the same, byte for byte.
        input_amax: None, or the amax that input_scale was made of, float32 0-d, for the same reason: a tensor keeps it.
    """

    qdata: Tensor
    scale: Tensor
    per_tensor_scale: Tensor
    columns: int
    quantizes_activations: bool = False
    input_scale: Tensor | None = None
    divisor: Tensor | None = None
    input_divisor: Tensor | None = None
    input_amax: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape, (*leading, N, K)."""
        return (*self.qdata.shape[:-1], self.columns)

    @property
    def bits(self) -> float:
        """Stored bits per element: codes, block scales and per-tensor scales."""
        stored = self.qdata.nbytes + self.scale.nbytes + self.per_tensor_scale.nbytes
        return 8 * stored / max(math.prod(self.shape), 1)

    def replace(self, **changes: Any) -> LinearParts:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def weight_divisor(self) -> Tensor:
        """What a writer of divisors writes: the one that a file had, else 1 / per_tensor_scale."""
        return self.per_tensor_scale.reciprocal() if self.divisor is None else self.divisor

    def activation_divisor(self) -> Tensor | None:
        """The same of input_scale; None where there is none."""
        if self.input_scale is None or self.input_divisor is not None:
            return self.input_divisor
        return self.input_scale.reciprocal()

    def activation_amax(self) -> Tensor | None:
        """The amax that products quantize by: the one that input_scale was made of, else input_scale * 2688."""
        if self.input_scale is None or not self.quantizes_activations:
            return None
        if self.input_amax is not None and torch.equal(self.input_amax / LARGEST, self.input_scale):
            return self.input_amax
        return self.input_scale * LARGEST


def parts_of(
    weight: NVFP4Tensor,
    *,
    input_scale: Tensor | None = None,
    divisor: Tensor | None = None,
    input_divisor: Tensor | None = None,
) -> LinearParts:
    """The plain tensors of an NVFP4Tensor: byte for byte, and :func:`tensor_of` makes the same tensor of them.

    Args:
        input_scale, divisor, input_divisor: as a file had them, float32. Each is used where it still says what the
            tensor says, and left out where the tensor has changed since.

    Raises:
        ValueError: the tensor is transposed, or holds Hadamard-transformed values: no layout can say so.
    """
    if weight.transposed:
        raise ValueError("a transposed NVFP4Tensor has no layout in checkpoints: save the one it is the transpose of")
    if weight.spec.hadamard_sign is not None:
        raise ValueError(
            f"a weight quantized with hadamard_sign {weight.spec.hadamard_sign:#06x} holds transformed values, which "
            "no checkpoint's layout can say: quantize without the transform, or save it with torch.save"
        )
    if divisor is not None and not torch.equal(divisor.reciprocal(), weight.per_tensor_scale):
        divisor = None
    amax = weight.activation_amax
    if amax is None:
        input_scale = None
    elif input_scale is None or not torch.equal(input_scale * LARGEST, amax):
        input_scale = amax / LARGEST
    if input_scale is None or (input_divisor is not None and not torch.equal(input_divisor.reciprocal(), input_scale)):
        input_divisor = None
    return LinearParts(
        qdata=weight.qdata,
        scale=weight.unswizzled_scale(),
        per_tensor_scale=weight.per_tensor_scale,
        columns=weight.columns,
        quantizes_activations=weight.activation_spec is not None,
        input_scale=input_scale,
        divisor=divisor,
        input_divisor=input_divisor,
        input_amax=amax,
    )


def tensor_of(
    parts: LinearParts,
    dtype: torch.dtype = torch.bfloat16,
    *,
    spec: QuantizeSpec | None = None,
    activation_spec: QuantizeSpec | None = None,
) -> NVFP4Tensor:
    """The NVFP4Tensor of plain tensors, which it shares its codes with.

    Args:
        dtype: what it decodes to: bfloat16, float16 or float32.
        spec: how ``copy_`` from a dense tensor quantizes; the plain spec by default, for files do not say.
        activation_spec: how products quantize what they meet, where the parts say that they do (the plain spec by
            default).

    Raises:
        TypeError, ValueError: the parts do not fit together.
    """
    rows = math.prod(parts.qdata.shape[:-1])
    blocks = ceil_to(parts.columns, BLOCK) // BLOCK
    if tuple(parts.scale.shape) != (*parts.qdata.shape[:-1], blocks):
        raise ValueError(
            f"block scales are {(*parts.qdata.shape[:-1], blocks)} for codes {tuple(parts.qdata.shape)}, not "
            f"{tuple(parts.scale.shape)}"
        )
    if parts.quantizes_activations and activation_spec is None:
        activation_spec = QuantizeSpec()
    return NVFP4Tensor(
        parts.qdata.contiguous(),
        layout.swizzle(parts.scale.reshape(rows, blocks)),
        parts.per_tensor_scale,
        parts.columns,
        dtype,
        QuantizeSpec() if spec is None else spec,
        activation_spec if parts.quantizes_activations else None,
        activation_amax=parts.activation_amax(),
    )


def nan_blocks(parts: LinearParts) -> int:
    """How many block scales are NaN (bytes 0x7F and above): vLLM takes them for scales that were never loaded."""
    data = parts.scale.view(torch.uint8)
    return int((data >= layout.E4M3_NAN).sum()) if data.numel() and data.max() >= layout.E4M3_NAN else 0


def check_scales(parts: LinearParts) -> LinearParts:
    """The parts, if their scales can be those of some tensor.

    A per-tensor scale of 0 is right where all that it multiplies is zero: ModelOpt and torchao write it for a weight of
    zeros. NaN block scales are right too, they mean NaN. Block scales on the meta device are not looked at.

    Raises:
        ValueError: a per-tensor scale that is negative, infinite, NaN, or 0 beside codes that are not zero; a negative
            block scale; an input scale that is not above zero, or infinite.
    """
    factor, static = parts.per_tensor_scale, parts.input_scale
    if (wrong := ~(factor.isfinite() & (factor >= 0))).any():
        raise ValueError(f"expected a per-tensor scale that is finite and not negative, found {factor[wrong][0]}")
    if static is not None and not ((static * LARGEST).isfinite() & (static > 0)):
        raise ValueError(f"expected an input scale that is finite and above zero, found {static}")
    if parts.scale.is_meta:
        return parts
    rows = factor.view(parts.qdata.shape[:-1]) if factor.dim() == 1 else factor
    if not factor.all() and ((rows == 0) & (parts.qdata & 0x77).any(-1)).any():
        raise ValueError("expected a per-tensor scale above zero, found 0 for codes that are not all zero")
    data = parts.scale.view(torch.uint8)
    if data.numel() and data.max() > layout.E4M3_NAN and (negative := (data > layout.E4M3_NAN) & (data != 0xFF)).any():
        raise ValueError(f"expected block scales that are not negative, found {int(negative.sum())} that are")
    return parts


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
