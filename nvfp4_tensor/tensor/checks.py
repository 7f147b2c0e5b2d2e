"""Whether parts that did not come from :func:`quantize` make an NVFP4Tensor: each check says what does not fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nvfp4_tensor.numerics.choices import ProductBackend
from nvfp4_tensor.numerics.layout import BLOCK, HIGH_PRECISION_DTYPES, ceil_to, scale_tiles
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.tensor.arguments import stored_spec


def check_fields(
    *,
    qdata: Tensor,
    scale: Tensor,
    per_tensor_scale: Tensor,
    columns: int,
    orig_dtype: torch.dtype,
    spec: QuantizeSpec,
    activation_spec: QuantizeSpec | None,
    transposed: bool,
    product_backend: ProductBackend,
    activation_amax: Tensor | None,
) -> None:
    """The fields of an NVFP4Tensor, as its attributes describe them.

    Raises:
        TypeError: a field is of another type, or a tensor of another dtype.
        ValueError: shapes, devices or the transforms of two specs do not fit together.
    """
    _check_types(columns, orig_dtype, spec, activation_spec, transposed, product_backend)
    _check_tensor("qdata", qdata, torch.uint8)
    rows = _check_codes(qdata, columns, transposed)
    _check_tensor("scale", scale, torch.float8_e4m3fn, qdata)
    tiles = (*scale_tiles(rows, qdata.shape[-1] * 2), 32, 16)
    if tuple(scale.shape) != tiles:
        raise ValueError(
            f"scale is {tiles}, swizzled, for qdata {tuple(qdata.shape)}, not {tuple(scale.shape)}: "
            "nvfp4_tensor.numerics.layout.swizzle makes it of a plain matrix (rows, columns / 16)"
        )
    _check_tensor("per_tensor_scale", per_tensor_scale, torch.float32, qdata)
    _check_factors(per_tensor_scale, qdata.shape[:-1])
    if activation_amax is not None:
        _check_tensor("activation_amax", activation_amax, torch.float32, qdata)
        if activation_spec is not None and activation_spec.row_scaled:
            raise ValueError("activation_amax would change nothing: an activation_spec with row_scaled has one a row")
        if activation_amax.dim():
            raise ValueError(f"activation_amax is one number, 0-d, not {tuple(activation_amax.shape)}")


def _check_types(
    columns: int,
    orig_dtype: torch.dtype,
    spec: QuantizeSpec,
    activation_spec: QuantizeSpec | None,
    transposed: bool,
    product_backend: ProductBackend,
) -> None:
    if isinstance(columns, bool) or not isinstance(columns, int | torch.SymInt):
        raise TypeError(f"columns is the integer size of the last dimension, not {columns!r}")
    if orig_dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(f"orig_dtype is torch.bfloat16, torch.float16 or torch.float32, not {orig_dtype!r}")
    if not isinstance(spec, QuantizeSpec):
        raise TypeError(f"spec is a QuantizeSpec, not {spec!r}")
    stored_spec(spec)
    if activation_spec is not None:
        if not isinstance(activation_spec, QuantizeSpec):
            raise TypeError(f"activation_spec is a QuantizeSpec or None, not {activation_spec!r}")
        stored_spec(activation_spec)
        if activation_spec.hadamard_sign != spec.hadamard_sign:
            raise ValueError(
                "spec and activation_spec need the same hadamard_sign, for the transform only cancels in pairs, not "
                f"{spec.hadamard_sign} and {activation_spec.hadamard_sign}"
            )
    if not isinstance(transposed, bool):
        raise TypeError(f"transposed is True or False, not {transposed!r}")
    if not isinstance(product_backend, ProductBackend):
        raise TypeError(f"product_backend is a ProductBackend, ProductBackend.AUTO for one, not {product_backend!r}")


def _check_tensor(name: str, value: Any, dtype: torch.dtype, beside: Tensor | None = None) -> None:
    """``value`` is a plain tensor of that dtype, on the device of ``beside``."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a tensor of {dtype}, not a {type(value).__name__}")
    if value.dtype != dtype:
        raise TypeError(f"{name} is a tensor of {dtype}, not of {value.dtype}")
    if value.layout != torch.strided:
        raise TypeError(f"{name} is a dense tensor, not one of layout {value.layout}")
    if beside is not None and value.device != beside.device:
        raise ValueError(f"{name} is on {value.device} and qdata on {beside.device}: move one of them")


def _check_codes(qdata: Tensor, columns: int, transposed: bool) -> int:
    """The rows of codes, the leading dimensions flattened."""
    if qdata.dim() == 0:
        raise ValueError("qdata has at least one dimension, (..., bytes of a row), and is 0-d")
    if columns < 0 or qdata.shape[-1] != ceil_to(columns, BLOCK) // 2:
        raise ValueError(
            f"columns {columns} does not fit qdata {tuple(qdata.shape)}: a row has two codes a byte, its columns "
            f"rounded up to {BLOCK}"
        )
    if transposed and qdata.dim() < 2:
        raise ValueError(f"transposed swaps the last two dimensions, and qdata {tuple(qdata.shape)} has one")
    return math.prod(qdata.shape[:-1])


def _check_factors(per_tensor_scale: Tensor, leading: Sequence[int]) -> None:
    forms = [(), (math.prod(leading),)] + ([(leading[0], 1)] if len(leading) == 2 else [])
    if tuple(per_tensor_scale.shape) not in forms:
        raise ValueError(
            f"per_tensor_scale is {' or '.join(map(str, forms))} for rows {tuple(leading)} (one number, one a row, or "
            f"one a matrix), not {tuple(per_tensor_scale.shape)}"
        )
