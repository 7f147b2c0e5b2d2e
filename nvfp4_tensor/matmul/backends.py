"""Choose the backend of a product: once for each product, and nowhere else.

``NVFP4_TENSOR_PRINT_PLANS=1`` in the environment prints each choice to stderr, once, with its reason; the native
kernels then print theirs too.
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


class Backend(enum.Enum):
    """How a product with an NVFP4 operand w is computed."""

    DECODED = "dense rows x decoded codes, by the op nvfp4.matmul"
    """x as it is; an NVFP4 x is decoded first."""
    QUANTIZED_VALUES = "rows rounded to NVFP4 values x decoded codes, by the op nvfp4.matmul"
    """W4A4 without FP4 tensor cores: the same sums over the same values."""
    SCALED_MM = "codes x codes on FP4 tensor cores, by torch's scaled_mm"
    FBGEMM = "codes x codes on FP4 tensor cores, by fbgemm's f4f4bf16"
    GROUPED_FP4 = "codes x codes on FP4 tensor cores, by torch's scaled_grouped_mm"

    @property
    def on_codes(self) -> bool:
        """Whether both operands are NVFP4 there, so that a dense one has to be quantized."""
        return self in (Backend.SCALED_MM, Backend.FBGEMM, Backend.GROUPED_FP4)


def choose(x: Tensor, w: NVFP4Tensor, along_blocks: bool) -> Backend:
    """The backend of x (M, K) or (E, M, K) times what w stores, transposed if the sum runs along its blocks.

    Raises:
        RuntimeError: w names a backend that cannot multiply here; the message says what to do.
    """
    backend, why = _choose(x, w, along_blocks)
    if PRINTS_PLANS:
        _print_plan(tuple(x.shape), tuple(w.shape), str(x.dtype), str(x.device), backend, why)
    return backend


def _choose(x: Tensor, w: NVFP4Tensor, along_blocks: bool) -> tuple[Backend, str]:
    quantized = isinstance(x, NVFP4Tensor)
    if not along_blocks:
        return Backend.DECODED, "the sum runs across the blocks of w, as a gradient's does"
    if not quantized and w.activation_spec is None:
        return Backend.DECODED, "activations stay as they are (W4A16)"
    otherwise = Backend.DECODED if quantized else Backend.QUANTIZED_VALUES
    if not quantized:
        check_backend(w.product_backend, x.device, x.dtype)
    if not has_fp4_tensor_cores(x.device):
        return otherwise, f"{x.device} has no FP4 tensor cores"
    if not fits_tensor_cores(x, w):
        return otherwise, "FP4 tensor cores take matrices with one per-tensor scale each, not transposed, not empty"
    check_backend(w.product_backend, x.device, x.dtype)
    return (Backend.FBGEMM if w.product_backend == ProductBackend.FBGEMM else Backend.SCALED_MM), "w's product_backend"


def choose_grouped(x: Tensor, w: NVFP4Tensor) -> Backend:
    """The backend of rows x (M, K) by groups times experts w (E, K, N); RuntimeError as :func:`choose`."""
    if not w.transposed or w.activation_spec is None:
        backend, why = Backend.DECODED, "activations stay as they are, or the sum runs across the blocks"
    else:
        check_backend(w.product_backend, x.device, x.dtype)
        if has_grouped_fp4(x.device) and _fits_grouped_tensor_cores(x, w):
            backend, why = Backend.GROUPED_FP4, "compute capability 10, bfloat16 rows"
        else:
            backend, why = Backend.QUANTIZED_VALUES, f"{x.device} has no grouped FP4 product of such operands"
    if PRINTS_PLANS:
        _print_plan(tuple(x.shape), tuple(w.shape), str(x.dtype), str(x.device), backend, why)
    return backend


# --- what is printed -------------------------------------------------------------------------------------------------

PRINTS_PLANS = os.environ.get("NVFP4_TENSOR_PRINT_PLANS") == "1"


@functools.cache  # each problem once
def _print_plan(x: tuple, w: tuple, dtype: str, device: str, backend: Backend, why: str) -> None:
    print(f"nvfp4_tensor: {x} x {w} {dtype} on {device}: {backend.value} ({why})", file=sys.stderr)


# --- what a device has -----------------------------------------------------------------------------------------------


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of an NVIDIA device; (0, 0) of any other."""
    if device.type != "cuda" or torch.version.cuda is None:
        return 0, 0  # said outside the cache: dynamo warns of any that it traces through
    return _cuda_capability(device)


@functools.cache
def _cuda_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def has_fp4_tensor_cores(device: torch.device) -> bool:
    """Whether scaled_mm takes FP4 there."""
    return capability(device) >= FP4_CAPABILITY


@torch.compiler.assume_constant_result
def multiplies_codes(device: torch.device) -> bool:
    """Whether a product of two quantized operands reads codes there; elsewhere the left one is decoded."""
    return has_fp4_tensor_cores(device)


@torch.compiler.assume_constant_result
def reads_transposed(device: torch.device) -> bool:
    """Whether dgrad multiplies the codes of w^T there, instead of summing across the blocks of decoded w.

    FP4 tensor cores require it, and Hopper's kernels decode as they multiply: moved codes are 9/16 bytes per element
    to write, decoded ones 2.
    """
    return has_fp4_tensor_cores(device) or capability(device) == (9, 0)


def choose_for_codes(a: Codes, b: Codes) -> Backend:
    """The backend of a (M, K) @ b (N, K)^T of plain codes."""
    one_scale = a.per_tensor_scale.dim() == b.per_tensor_scale.dim() == 0
    if multiplies_codes(a.qdata.device) and one_scale and a.qdata.numel() > 0 and b.qdata.numel() > 0:
        return Backend.SCALED_MM
    return Backend.DECODED


def has_grouped_fp4(device: torch.device) -> bool:
    """Whether scaled_grouped_mm and f4f4bf16, CUTLASS kernels for compute capability 10, run there."""
    return capability(device)[0] == 10


def fits_tensor_cores(a: Tensor, b: NVFP4Tensor) -> bool:
    """Two matrices that sum along their blocks, with one per-tensor scale each and nothing empty."""
    if isinstance(a, NVFP4Tensor):
        one_scale = not a.transposed and a.per_tensor_scale.dim() == 0
    else:
        one_scale = b.activation_spec is None or not b.activation_spec.row_scaled
    return a.dim() == 2 and one_scale and b.per_tensor_scale.dim() == 0 and a.numel() > 0 and b.numel() > 0


def _fits_grouped_tensor_cores(x: Tensor, w: NVFP4Tensor) -> bool:
    """bfloat16 rows and experts (E, K, N) that sum along their blocks, a per-tensor scale an expert, nothing empty."""
    if w.activation_spec is not None and w.activation_spec.row_scaled:
        return False
    return x.dtype == torch.bfloat16 and w.transposed and w.per_tensor_scale.dim() != 1 and x.numel() * w.numel() > 0


# --- what was asked for ----------------------------------------------------------------------------------------------


def check_backend(backend: ProductBackend, device: torch.device, dtype: torch.dtype) -> None:
    """Raises a RuntimeError that says what to do where the chosen backend cannot multiply that dtype here."""
    if backend == ProductBackend.AUTO or device.type == "meta":
        return
    check_installed(backend)
    otherwise = "choose ProductBackend.AUTO, which decodes where it has to"
    if backend == ProductBackend.SCALED_MM and not has_fp4_tensor_cores(device):
        raise RuntimeError(f"ProductBackend.SCALED_MM needs FP4 tensor cores, which {device} has not: {otherwise}")
    if backend == ProductBackend.FBGEMM:
        if not has_grouped_fp4(device):
            raise RuntimeError(
                f"ProductBackend.FBGEMM needs compute capability 10, which {device} has not: {otherwise}"
            )
        if dtype != torch.bfloat16:
            raise RuntimeError(
                f"ProductBackend.FBGEMM gives bfloat16, not {dtype}: cast the model, or choose ProductBackend.AUTO"
            )


def check_installed(backend: ProductBackend) -> None:
    """Raises a RuntimeError that says what to do where fbgemm was chosen and its op is not there."""
    if backend == ProductBackend.FBGEMM and fbgemm.product().op is None:
        raise RuntimeError(
            f"ProductBackend.FBGEMM needs the op f4f4bf16 ({fbgemm.product()}): `pip install "
            "'nvfp4-tensor[fbgemm]'` in the release that belongs to this torch, or choose ProductBackend.AUTO"
        )
