"""Choose the backend of each product. No other module makes this choice.

With ``NVFP4_TENSOR_PRINT_PLANS=1`` in the environment, each choice is printed once to stderr with its reason, and the
native kernels print their choices too.
"""

from __future__ import annotations

import enum
import functools
import os
import sys

import torch
from torch import Tensor

from nvfp4_tensor.matmul import fbgemm
from nvfp4_tensor.numerics.choices import ProductBackend
from nvfp4_tensor.numerics.codes import Codes
from nvfp4_tensor.numerics.layout import FP4_CAPABILITY
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

FP8_ROWS = 768
"""The fewest rows of activations that are rounded to e4m3 (contract, section 13).

On an H200, 8 weights were as fast as W4A16 or faster from here on; with 640 rows 2 were slower, by 6 and 12 %.
"""


class Backend(enum.Enum):
    """How a product with an NVFP4 operand w is computed."""

    DECODED = "dense rows x decoded codes, by the op nvfp4.matmul"
    """x stays dense; an NVFP4 x is decoded first."""
    QUANTIZED_VALUES = "rows rounded to NVFP4 values x decoded codes, by the op nvfp4.matmul"
    """W4A4 without FP4 tensor cores: x is quantized and decoded, so that the sums have the same values."""
    SCALED_MM = "codes x codes on FP4 tensor cores, by torch's scaled_mm"
    FBGEMM = "codes x codes on FP4 tensor cores, by fbgemm's f4f4bf16"
    GROUPED_FP4 = "codes x codes on FP4 tensor cores, by torch's scaled_grouped_mm"
    FP8_SCALED_MM = "rows and codes rounded to e4m3 on FP8 tensor cores, by torch's scaled_mm"
    FP8_VALUES = "rows and codes rounded to e4m3, by the op nvfp4.fp8_matmul"
    """The same operands without FP8 tensor cores."""

    @property
    def on_codes(self) -> bool:
        """Whether the backend multiplies two NVFP4 operands, so that a dense one must be quantized."""
        return self in (Backend.SCALED_MM, Backend.FBGEMM, Backend.GROUPED_FP4)


def choose(x: Tensor, w: NVFP4Tensor, along_blocks: bool) -> Backend:
    """Return the backend of x (M, K) or (E, M, K) times the stored w, transposed if the sum runs along its blocks.

    Raises:
        RuntimeError: w's product_backend does not support this product; the message has the fix.
    """
    return _printed(x, w, *_choose(x, w, along_blocks))


def _choose(x: Tensor, w: NVFP4Tensor, along_blocks: bool) -> tuple[Backend, str]:
    quantized = isinstance(x, NVFP4Tensor)
    if not along_blocks:
        return Backend.DECODED, "the sum runs across the blocks of w, as a gradient's does"
    if not quantized and w.activation_spec is None:
        if w.product_backend == ProductBackend.FP8:
            return _choose_fp8(x, w)
        return Backend.DECODED, "activations are not quantized (W4A16)"
    otherwise = Backend.DECODED if quantized else Backend.QUANTIZED_VALUES
    if not quantized:
        check_backend(w.product_backend, x.device, x.dtype)
    if not has_fp4_tensor_cores(x.device):
        return otherwise, f"{x.device} has no FP4 tensor cores"
    if not fits_tensor_cores(x, w):
        return otherwise, "FP4 tensor cores need nonempty matrices, not transposed, with one per-tensor scale each"
    check_backend(w.product_backend, x.device, x.dtype)
    return (Backend.FBGEMM if w.product_backend == ProductBackend.FBGEMM else Backend.SCALED_MM), "w's product_backend"


def _choose_fp8(x: Tensor, w: NVFP4Tensor) -> tuple[Backend, str]:
    """Return the backend of a weight with FP8 activations. Operands depend on the shapes only, not on the device."""
    if x.dim() != 2 or x.shape[0] < FP8_ROWS:
        return Backend.DECODED, f"FP8 activations need a matrix of at least {FP8_ROWS} rows"
    if has_fp8_tensor_cores(x.device) and w.numel() > 0:
        return Backend.FP8_SCALED_MM, "w's activations are FP8"
    return Backend.FP8_VALUES, f"{x.device} has no FP8 tensor cores that were tried"


def choose_grouped(x: Tensor, w: NVFP4Tensor) -> Backend:
    """Return the backend of groups of rows of x (M, K) times experts w (E, K, N); raise as :func:`choose`."""
    if not w.transposed or w.activation_spec is None:
        return _printed(x, w, Backend.DECODED, "activations are not quantized, or the sum runs across the blocks")
    check_backend(w.product_backend, x.device, x.dtype)
    one_scale = not w.activation_spec.row_scaled and w.per_tensor_scale.dim() != 1  # per expert
    if has_grouped_fp4(x.device) and x.dtype == torch.bfloat16 and one_scale and x.numel() * w.numel() > 0:
        return _printed(x, w, Backend.GROUPED_FP4, "compute capability 10, bfloat16 rows")
    why = f"{x.device} has no grouped FP4 product for these operands"
    return _printed(x, w, Backend.QUANTIZED_VALUES, why)


# --- printing --------------------------------------------------------------------------------------------------------

PRINTS_PLANS = os.environ.get("NVFP4_TENSOR_PRINT_PLANS") == "1"


def _printed(x: Tensor, w: NVFP4Tensor, backend: Backend, why: str) -> Backend:
    if PRINTS_PLANS:
        _print_plan(tuple(x.shape), tuple(w.shape), str(x.dtype), str(x.device), backend, why)
    return backend


@functools.cache  # print each problem once
def _print_plan(x: tuple, w: tuple, dtype: str, device: str, backend: Backend, why: str) -> None:
    print(f"nvfp4_tensor: {x} x {w} {dtype} on {device}: {backend.value} ({why})", file=sys.stderr)


# --- device capabilities ---------------------------------------------------------------------------------------------


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of an NVIDIA device, or (0, 0) for any other device."""
    if device.type != "cuda" or torch.version.cuda is None:
        return 0, 0  # outside of the cache, because Dynamo warns of caches that it traces through
    return _cuda_capability(device)


@functools.cache
def _cuda_capability(device: torch.device) -> tuple[int, int]:
    own = torch.cuda.get_device_capability(device)
    # The native kernels read the same variable: docs/contributing/add_kernel.md.
    _, _, text = os.environ.get("NVFP4_TENSOR_PRETEND", "").partition("capability=")
    digits = text.partition(",")[0].strip()  # by methods of str: Dynamo, which traces this, cannot trace re
    return min(own, (int(digits[:-1]), int(digits[-1]))) if digits else own


def has_fp4_tensor_cores(device: torch.device) -> bool:
    """Return whether scaled_mm supports FP4 on the device."""
    return capability(device) >= FP4_CAPABILITY


def has_fp8_tensor_cores(device: torch.device) -> bool:
    """Return whether scaled_mm was tried on the FP8 tensor cores of the device."""
    return capability(device) == (9, 0)


@torch.compiler.assume_constant_result
def multiplies_codes(device: torch.device) -> bool:
    """Return whether products of two quantized operands read codes; if not, the left operand is decoded."""
    return has_fp4_tensor_cores(device)


@torch.compiler.assume_constant_result
def reads_transposed(device: torch.device) -> bool:
    """Return whether dgrad multiplies the codes of w^T instead of summing across the blocks of decoded w.

    FP4 tensor cores require it. Hopper's kernels decode in the product: transposed codes need 9/16 bytes per element,
    decoded values 2.
    """
    return has_fp4_tensor_cores(device) or capability(device) == (9, 0)


def multiplies(a: Codes, b: Codes) -> bool:
    """Return whether FP4 tensor cores multiply a (M, K) @ b (N, K)^T."""
    one_scale = a.per_tensor_scale.dim() == b.per_tensor_scale.dim() == 0
    return multiplies_codes(a.qdata.device) and one_scale and a.qdata.numel() > 0 and b.qdata.numel() > 0


def has_grouped_fp4(device: torch.device) -> bool:
    """Return whether scaled_grouped_mm and f4f4bf16 run there: CUTLASS kernels for compute capability 10."""
    return capability(device)[0] == 10


def fits_tensor_cores(a: Tensor, b: NVFP4Tensor) -> bool:
    """Return whether both are nonempty matrices with one per-tensor scale each, and the sum runs along the blocks."""
    if isinstance(a, NVFP4Tensor):
        one_scale = not a.transposed and a.per_tensor_scale.dim() == 0
    else:
        one_scale = b.activation_spec is None or not b.activation_spec.row_scaled
    return a.dim() == 2 and one_scale and b.per_tensor_scale.dim() == 0 and a.numel() > 0 and b.numel() > 0


# --- requested backends ----------------------------------------------------------------------------------------------


def check_backend(backend: ProductBackend, device: torch.device, dtype: torch.dtype) -> None:
    """Raise a RuntimeError with the fix if the requested backend does not support this device and dtype."""
    if backend in (ProductBackend.AUTO, ProductBackend.FP8) or device.type == "meta":
        return
    check_installed(backend)
    fix = "use ProductBackend.AUTO, which decodes where necessary"
    if backend == ProductBackend.SCALED_MM and not has_fp4_tensor_cores(device):
        raise RuntimeError(f"ProductBackend.SCALED_MM needs FP4 tensor cores, which {device} does not have: {fix}")
    if backend == ProductBackend.FBGEMM:
        if not has_grouped_fp4(device):
            raise RuntimeError(
                f"ProductBackend.FBGEMM needs compute capability 10, which {device} does not have: {fix}"
            )
        if dtype != torch.bfloat16:
            raise RuntimeError(
                f"ProductBackend.FBGEMM supports bfloat16, not {dtype}: cast the model, or use ProductBackend.AUTO"
            )


def check_installed(backend: ProductBackend) -> None:
    """Raise a RuntimeError with the fix if fbgemm was requested and its op is missing."""
    if backend == ProductBackend.FBGEMM and fbgemm.product().op is None:
        raise RuntimeError(
            f"ProductBackend.FBGEMM needs the op f4f4bf16 ({fbgemm.product().text}): `pip install "
            "'nvfp4-tensor[fbgemm]'` in the release for this version of torch, or use ProductBackend.AUTO"
        )
