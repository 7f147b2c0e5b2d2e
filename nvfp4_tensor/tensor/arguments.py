"""Convert a caller's arguments to those of the ops: spec, amax, random state and offsets of a shard."""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_tensor.numerics import layout
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.ops.composite.quantization import own_amax

PLAIN = QuantizeSpec()
"""The default spec: round to nearest even, 1x16 blocks."""


def checked_spec(spec: QuantizeSpec | None) -> QuantizeSpec:
    """Return ``spec``, or the plain spec for None; raise a TypeError for anything else."""
    if spec is None:
        return PLAIN
    if not isinstance(spec, QuantizeSpec):
        raise TypeError(f"spec must be a QuantizeSpec such as QuantizeSpec(round_mode='stochastic'), got {spec!r}")
    return spec


def stored_spec(spec: QuantizeSpec | None) -> QuantizeSpec:
    """Return :func:`checked_spec` for a stored tensor; raise a ValueError for EDEN, whose rotation is not stored."""
    spec = checked_spec(spec)
    if spec.is_eden:
        raise ValueError(
            "EDEN cannot create an NVFP4Tensor, because its values are rotated by signs that are not stored: use "
            "fake_quantize(x, spec), which rotates them back, or torch.ops.nvfp4.quantize for operands of products in "
            "which the rotations cancel"
        )
    return spec


def resolve_arguments(
    x: Tensor,
    spec: QuantizeSpec,
    amax: Tensor | float | None,
    rng_state: Tensor | None,
    generator: torch.Generator | None,
    origin: tuple[int, int],
    full_width: int | None,
) -> tuple[Tensor | None, Tensor | None, tuple[int, int, int]]:
    """Return (amax, rng_state, (row0, col0, full_width)) for the ops, which compute an amax of None from x."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, got {type(x).__name__}: use torch.as_tensor first")
    if x.layout != torch.strided or x.is_nested:
        kind = "a nested tensor" if x.is_nested else f"a tensor of layout {x.layout}"
        fix = "x.to_padded_tensor(0)" if x.is_nested else "x.to_dense()"
        raise TypeError(f"x must be a dense tensor, got {kind}: use {fix} first")
    if x.dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(f"x must be bfloat16, float16 or float32, got {x.dtype}: use x.to(torch.float32) first")
    if x.dim() == 0:
        raise ValueError("a 0-d tensor has no dimension to divide into blocks: use x.reshape(1)")
    return (
        None if amax is None else resolve_amax(x, spec, amax),
        resolve_rng_state(x, spec, rng_state, generator),
        _resolve_offsets(x, spec, origin, full_width),
    )


def resolve_amax(
    x: Tensor, spec: QuantizeSpec, amax: Tensor | float | None, rng_state: Tensor | None = None, col0: int = 0
) -> Tensor:
    """Return amax as float32 0-d on the device of x; None computes it from x, after the spec's transform."""
    if amax is None:
        return own_amax(x.detach(), spec, rng_state, col0)
    if spec.row_scaled:
        return _resolve_row_amax(x, amax)
    if isinstance(amax, Tensor):
        if amax.numel() != 1 or not amax.dtype.is_floating_point:
            raise ValueError(f"amax must be one floating-point number, got {amax.dtype} of shape {tuple(amax.shape)}")
        if amax.dim() == 0 and amax.dtype == torch.float32 and amax.device == x.device and not amax.requires_grad:
            return amax  # saves 1 us of CPU time for a static amax
        return amax.detach().to(device=x.device, dtype=torch.float32).reshape(())
    if isinstance(amax, str | list | tuple) or not 0 <= amax <= layout.FLOAT32_MAX:
        raise ValueError(f"amax must be a finite nonnegative number such as 3.0 or a tensor of one, got {amax!r}")
    return torch.full((), amax, dtype=torch.float32, device=x.device)


def _resolve_row_amax(x: Tensor, amax: Tensor | float) -> Tensor:
    """Return amax for the op quantize_rows: float32 (rows,)."""
    rows = x.shape[:-1].numel()
    if not isinstance(amax, Tensor) or amax.numel() != rows or not amax.dtype.is_floating_point:
        what = f"{amax.dtype} {tuple(amax.shape)}" if isinstance(amax, Tensor) else repr(amax)
        raise ValueError(
            f"with row_scaled=True, amax must be None or a floating-point tensor with one number per row, {rows} in "
            f"total, got {what}"
        )
    return amax.detach().to(device=x.device, dtype=torch.float32).reshape(-1)


def resolve_rng_state(
    x: Tensor, spec: QuantizeSpec, rng_state: Tensor | None, generator: torch.Generator | None
) -> Tensor | None:
    """Return the given (seed, offset), a new one if the spec is stochastic, or None."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator must be a torch.Generator such as torch.Generator().manual_seed(42), got {generator!r}"
        )
    if rng_state is not None and generator is not None:
        raise ValueError("rng_state and generator are mutually exclusive: give one of them")
    if rng_state is not None:
        if not isinstance(rng_state, Tensor):
            got = type(rng_state).__name__
            raise TypeError(f"rng_state must be a tensor such as torch.tensor([seed, offset]), got {got}")
        if rng_state.dtype != torch.int64 or rng_state.shape != (2,):
            raise ValueError(
                f"rng_state must be int64 (seed, offset), got {rng_state.dtype} of shape {tuple(rng_state.shape)}"
            )
        if rng_state.device != x.device:
            raise ValueError(f"rng_state is on {rng_state.device}, but x is on {x.device}: use rng_state.to(x.device)")
        return rng_state.contiguous()
    if not spec.is_stochastic:
        return None
    if generator is not None:
        return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=x.device, generator=generator)
    # The new tensor makes the arguments of two calls differ, so that no compiler pass merges them.
    return torch.ops.nvfp4.draw_rng_state(torch.empty((2,), dtype=torch.int64, device=x.device))


def _resolve_offsets(
    x: Tensor, spec: QuantizeSpec, origin: tuple[int, int], full_width: int | None
) -> tuple[int, int, int]:
    row0, col0 = origin
    if row0 < 0 or row0 % spec.block_rows:
        raise ValueError(f"the row of origin must be a multiple of block_rows ({spec.block_rows}), got {row0}")
    if col0 < 0 or col0 % spec.column_multiple:
        raise ValueError(f"the column of origin must be a multiple of {spec.column_multiple}, got {col0}")
    if full_width is None:
        if col0:
            raise ValueError("a shard that does not start at column 0 needs full_width, the columns of the full tensor")
        return row0, 0, x.shape[-1]
    if full_width < col0 + x.shape[-1]:
        raise ValueError(f"full_width must be at least column {col0} + {x.shape[-1]} columns of x, got {full_width}")
    return row0, col0, full_width
