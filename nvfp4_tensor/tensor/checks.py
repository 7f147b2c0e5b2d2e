"""Validate the fields of an NVFP4Tensor that was not created by :func:`quantize`."""

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

_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "columns": ((int, torch.SymInt), "an integer, the size of the last dimension"),
    "spec": ((QuantizeSpec,), "a QuantizeSpec"),
    "activation_spec": ((QuantizeSpec, type(None)), "a QuantizeSpec or None"),
    "transposed": ((bool,), "True or False"),
    "product_backend": ((ProductBackend,), "a ProductBackend, such as AUTO"),
}


def check_fields(fields: dict[str, Any]) -> None:
    """Check all fields of an NVFP4Tensor, by name, against the documentation of its attributes.

    Raises:
        TypeError: a field has another type, or a tensor another dtype.
        ValueError: shapes, devices or the Hadamard transforms of the two specs do not match.
    """
    for name, (kinds, what) in _KINDS.items():
        value = fields[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise TypeError(f"{name} must be {what}, got {value!r}")
    if fields["orig_dtype"] not in HIGH_PRECISION_DTYPES:
        got = fields["orig_dtype"]
        raise TypeError(f"orig_dtype must be torch.bfloat16, torch.float16 or torch.float32, got {got!r}")
    _check_specs(fields["spec"], fields["activation_spec"], fields["product_backend"])
    qdata, scale, per_tensor_scale = fields["qdata"], fields["scale"], fields["per_tensor_scale"]
    _check_tensor("qdata", qdata, torch.uint8)
    rows = _check_codes(qdata, fields["columns"], fields["transposed"])
    _check_tensor("scale", scale, torch.float8_e4m3fn, qdata)
    tiles = (*scale_tiles(rows, qdata.shape[-1] * 2), 32, 16)
    if tuple(scale.shape) != tiles:
        raise ValueError(
            f"scale must be swizzled, {tiles} for qdata {tuple(qdata.shape)}, got {tuple(scale.shape)}: "
            "nvfp4_tensor.numerics.layout.swizzle creates it from a plain matrix (rows, columns / 16)"
        )
    _check_tensor("per_tensor_scale", per_tensor_scale, torch.float32, qdata)
    _check_factors(per_tensor_scale, qdata.shape[:-1])
    if (amax := fields["activation_amax"]) is not None:
        _check_tensor("activation_amax", amax, torch.float32, qdata)
        if fields["activation_spec"] is not None and fields["activation_spec"].row_scaled:
            raise ValueError("activation_amax has no effect with a row_scaled activation_spec: leave it out")
        if amax.dim():
            raise ValueError(f"activation_amax must be one number, 0-d, got {tuple(amax.shape)}")


def _check_specs(spec: QuantizeSpec, activation_spec: QuantizeSpec | None, backend: ProductBackend) -> None:
    stored_spec(spec)
    if activation_spec is None:
        return
    stored_spec(activation_spec)
    if activation_spec.hadamard_sign != spec.hadamard_sign:
        raise ValueError(
            "spec and activation_spec must have the same hadamard_sign, because only equal transforms cancel, got "
            f"{spec.hadamard_sign} and {activation_spec.hadamard_sign}"
        )
    if backend == ProductBackend.FP8:
        raise ValueError("product_backend FP8 rounds activations to e4m3, activation_spec to NVFP4: give one of them")


def _check_tensor(name: str, value: Any, dtype: torch.dtype, qdata: Tensor | None = None) -> None:
    """Check that ``value`` is a strided tensor of ``dtype`` on the device of ``qdata``."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor of {dtype}, got {type(value).__name__}")
    if value.dtype != dtype:
        raise TypeError(f"{name} must be a tensor of {dtype}, got {value.dtype}")
    if value.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {value.layout}")
    if qdata is not None and value.device != qdata.device:
        raise ValueError(f"{name} is on {value.device}, but qdata is on {qdata.device}: move one of them")


def _check_codes(qdata: Tensor, columns: int, transposed: bool) -> int:
    """Check the shape of the codes, and return their number of rows with the leading dimensions flattened."""
    if qdata.dim() == 0:
        raise ValueError("qdata must have at least one dimension, (..., bytes per row), got a 0-d tensor")
    if columns < 0 or qdata.shape[-1] != ceil_to(columns, BLOCK) // 2:
        raise ValueError(
            f"columns {columns} does not match qdata {tuple(qdata.shape)}: a row has two codes per byte, with columns "
            f"rounded up to a multiple of {BLOCK}"
        )
    if transposed and qdata.dim() < 2:
        raise ValueError(f"transposed=True needs two dimensions, but qdata {tuple(qdata.shape)} has one")
    return math.prod(qdata.shape[:-1])


def _check_factors(per_tensor_scale: Tensor, leading: Sequence[int]) -> None:
    forms = [(), (math.prod(leading),)] + ([(leading[0], 1)] if len(leading) == 2 else [])
    if tuple(per_tensor_scale.shape) not in forms:
        raise ValueError(
            f"per_tensor_scale must be {' or '.join(map(str, forms))} for rows {tuple(leading)} (one number, one per "
            f"row, or one per matrix), got {tuple(per_tensor_scale.shape)}"
        )
