"""FP8Tensor: a weight in FP8 as checkpoints store it beside NVFP4, and how its values follow from codes and scales.

torchao's Float8Tensor has neither static scales of activations nor blocks that end at the edge of a weight, and
multiplies blocks by Triton only; it could not be saved as it was read.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, ClassVar, SupportsIndex

import torch
from torch import Tensor

from nvfp4_tensor._compat.frames import caller_frame_locals
from nvfp4_tensor._compat.pickles import _rebuild_fp8, pin
from nvfp4_tensor.numerics import fp8
from nvfp4_tensor.numerics.choices import FP8Activations
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES
from nvfp4_tensor.tensor.description import CodedTensor

E4M3 = torch.float8_e4m3fn
NOT_MERGED = "merging an adapter would round it again: keep the adapter apart, or merge it into the dense model"


@pin
@dataclasses.dataclass(frozen=True)
class FP8Spec:
    """How an FP8 weight (*leading, N, K) is scaled, and how products treat their dense operand.

    Attributes:
        block: the rows and columns that share a scale, 0 for all: (0, 0) per tensor, (1, 0) per channel, (128, 128).
        activations: how products round the dense operand to e4m3 too; None keeps it dense.
    """

    block: tuple[int, int] = (0, 0)
    activations: FP8Activations | None = None

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the scales of a weight: (*leading, blocks of rows, blocks of columns)."""
        sizes = zip(shape[-2:], self.block, strict=True)
        return (*shape[:-2], *(-(-size // step) if step else 1 for size, step in sizes))


def decode(codes: Tensor, scale: Tensor, block: tuple[int, int], dtype: torch.dtype, first: int = 0) -> Tensor:
    """Return rows of FP8 weights as ``dtype``: code x scale in float32, rounded once.

    Args:
        codes: e4m3 (*leading, rows, K), the rows from row ``first`` on.
        scale, block: the scales of all rows, float32; see :class:`FP8Spec`.
    """
    if type(codes) is not Tensor or not codes.is_cpu or torch.compiler.is_compiling():
        return fp8.decode(codes, scale, block, first).to(dtype)
    out = torch.empty(codes.shape, dtype=dtype)
    torch.ops.nvfp4.decode_fp8(codes, scale, *block, first, out)
    return out


@pin
class FP8Tensor(CodedTensor):
    """A weight (*leading, N, K) in e4m3 with a scale per tensor, channel or block. Its dtype is ``orig_dtype``.

    Readers of checkpoints create it; :meth:`dequantize` decodes it. ``linear`` decodes the weight for the call, or
    multiplies codes on FP8 tensor cores if activations are FP8 too. Other operators decode it.

    Attributes:
        qdata: float8_e4m3fn (*leading, N, K).
        scale: float32, of the shape ``spec.scale_shape(shape)``. Value = code x scale.
        spec: the blocks of the scales, and how products treat activations.
        orig_dtype: bfloat16, float16 or float32, which it decodes to by default.
        transposed: whether the logical tensor is the stored one with its last two dimensions swapped.
        input_scale: the static scale of activations, float32 0-d; None to compute it in each call.
    """

    tensor_data_names: ClassVar[list[str]] = ["qdata", "scale"]
    optional_tensor_data_names: ClassVar[list[str]] = ["input_scale"]
    tensor_attribute_names: ClassVar[list[str]] = ["spec", "orig_dtype", "transposed"]

    qdata: Tensor
    scale: Tensor
    spec: FP8Spec
    orig_dtype: torch.dtype
    transposed: bool
    input_scale: Tensor | None

    def __new__(
        cls,
        qdata: Tensor,
        scale: Tensor | None = None,
        spec: FP8Spec | None = None,
        orig_dtype: torch.dtype = torch.bfloat16,
        transposed: bool = False,
        input_scale: Tensor | None = None,
        *,
        requires_grad: bool = False,
    ) -> FP8Tensor:
        """
        Raises:
            TypeError: a tensor or orig_dtype has another dtype.
            ValueError: the shape of scale does not fit.
        """
        if isinstance(qdata, FP8Tensor):  # accelerate creates a parameter by calling the class of another one
            return torch.nn.Parameter(qdata, requires_grad)  # type: ignore[return-value]  # still an FP8Tensor
        spec = FP8Spec() if spec is None else spec
        if qdata.dtype != E4M3 or orig_dtype not in HIGH_PRECISION_DTYPES or scale is None:
            raise TypeError(f"expected codes in {E4M3} with scales, for a dense dtype, got {qdata.dtype}, {orig_dtype}")
        if scale.dtype != torch.float32 or (input_scale is not None and input_scale.dtype != torch.float32):
            raise TypeError(f"expected scales in torch.float32, got {scale.dtype}")
        if qdata.dim() < 2 or scale.shape != torch.Size(spec.scale_shape(qdata.shape)):
            raise ValueError(
                f"codes {tuple(qdata.shape)} in blocks {spec.block} do not have scales {tuple(scale.shape)}"
            )
        shown = qdata.mT if transposed else qdata
        self = torch.Tensor._make_wrapper_subclass(
            cls, shown.shape, strides=shown.stride(), dtype=orig_dtype, device=qdata.device
        )
        self.qdata, self.scale, self.spec = qdata, scale, spec
        self.orig_dtype, self.transposed, self.input_scale = orig_dtype, transposed, input_scale
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values as a dense tensor of ``dtype`` (``orig_dtype`` by default), rounded once.

        Raises:
            ValueError: peft would merge an adapter into the values, and quantize the sum to NVFP4.
        """
        if "peft" in sys.modules and caller_frame_locals("merge", "peft/tuners/lora/torchao.py") is not None:
            raise ValueError(f"the weight is FP8: {NOT_MERGED}")
        return self.values(dtype)

    def values(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values, as :meth:`dequantize` does for any caller."""
        values = decode(self.qdata, self.scale, self.spec.block, self.orig_dtype if dtype is None else dtype)
        return values.mT if self.transposed else values

    def _parts(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.__tensor_flatten__()[0]]

    def replace(self, **changes: Any) -> FP8Tensor:
        """Return a tensor with some fields changed, which shares the others."""
        return FP8Tensor(**self._fields(without=changes), **changes)

    def weight_only(self) -> FP8Tensor:
        """Return a copy whose products keep activations dense."""
        return self.replace(spec=dataclasses.replace(self.spec, activations=None), input_scale=None)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"FP8Tensor({tuple(self.shape)}, {self.spec}, dtype={self.dtype}, device={self.device})"

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, tuple]:
        static = None if self.input_scale is None else self.input_scale.detach()
        # Codes are stored as bytes: pickle cannot load a float8 storage.
        codes = self.qdata.detach().view(torch.uint8)
        fields = (codes, self.scale.detach(), self.spec, self.orig_dtype, self.transposed, static)
        return _rebuild_fp8, (fields, getattr(self, "_is_param", False))
