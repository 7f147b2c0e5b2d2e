"""Validate the fields of an NVFP4Tensor that was not created by :func:`quantize`."""

from __future__ import annotations

import math
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
_DTYPES = {
    "qdata": torch.uint8,
    "scale": torch.float8_e4m3fn,
    "per_tensor_scale": torch.float32,
    "activation_amax": torch.float32,
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
    for name, dtype in _DTYPES.items():
        if name != "activation_amax" or fields[name] is not None:
            _check_tensor(name, fields[name], dtype, fields["qdata"])
    _check_specs(fields["spec"], fields["activation_spec"], fields["product_backend"])
    _check_shapes(fields["qdata"].shape, fields)


def _check_tensor(name: str, value: Any, dtype: torch.dtype, qdata: Tensor) -> None:
    """Check that ``value`` is a strided tensor of ``dtype`` on the device of ``qdata``."""
    if not isinstance(value, Tensor) or value.dtype != dtype:
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} must be a tensor of {dtype}, got {got}")
    if value.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {value.layout}")
    if value.device != qdata.device:
        raise ValueError(f"{name} is on {value.device}, but qdata is on {qdata.device}: move one of them")


def _check_specs(spec: QuantizeSpec, activation_spec: QuantizeSpec | None, backend: ProductBackend) -> None:
    stored_spec(spec)
    if activation_spec is None:
        return
    if stored_spec(activation_spec).hadamard_sign != spec.hadamard_sign:
        raise ValueError(
            "spec and activation_spec must have the same hadamard_sign, because only equal transforms cancel, got "
            f"{spec.hadamard_sign} and {activation_spec.hadamard_sign}"
        )
    if backend == ProductBackend.FP8:
        raise ValueError("product_backend FP8 rounds activations to e4m3, activation_spec to NVFP4: give one of them")


def _check_shapes(qdata: torch.Size, fields: dict[str, Any]) -> None:
    """Check the shapes of all tensors, given that of the codes."""
    columns, scale, factor = fields["columns"], tuple(fields["scale"].shape), tuple(fields["per_tensor_scale"].shape)
    if not qdata:
        raise ValueError("qdata must have at least one dimension, (..., bytes per row), got a 0-d tensor")
    if columns < 0 or qdata[-1] != ceil_to(columns, BLOCK) // 2:
        raise ValueError(
            f"columns {columns} does not match qdata {tuple(qdata)}: a row has two codes per byte, with columns "
            f"rounded up to a multiple of {BLOCK}"
        )
    if fields["transposed"] and len(qdata) < 2:
        raise ValueError(f"transposed=True needs two dimensions, but qdata {tuple(qdata)} has one")
    rows = math.prod(qdata[:-1])
    tiles = (*scale_tiles(rows, qdata[-1] * 2), 32, 16)
    if scale != tiles:
        raise ValueError(
            f"scale must be swizzled, {tiles} for qdata {tuple(qdata)}, got {scale}: "
            "nvfp4_tensor.numerics.layout.swizzle creates it from a plain matrix (rows, columns / 16)"
        )
    forms = [(), (rows,)] + ([(qdata[0], 1)] if len(qdata) == 3 else [])
    if factor not in forms:
        raise ValueError(
            f"per_tensor_scale must be {' or '.join(map(str, forms))} for rows {tuple(qdata[:-1])} (one number, one "
            f"per row, or one per matrix), got {factor}"
        )
    if (amax := fields["activation_amax"]) is not None:
        if fields["activation_spec"] is not None and fields["activation_spec"].row_scaled:
            raise ValueError("activation_amax has no effect with a row_scaled activation_spec: leave it out")
        if amax.dim():
            raise ValueError(f"activation_amax must be one number, 0-d, got {tuple(amax.shape)}")
