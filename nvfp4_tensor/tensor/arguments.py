"""What callers give, as the ops take it: specs, amax, random state and the place in a logical tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_tensor.numerics import layout
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.ops.composite import own_amax

PLAIN = QuantizeSpec()
"""To nearest even, in 1x16 blocks: how a tensor is quantized where nothing else is said."""


def checked_spec(spec: QuantizeSpec | None) -> QuantizeSpec:
    """The spec, the plain one for None; a TypeError that shows one for anything else."""
    if spec is None:
        return PLAIN
    if not isinstance(spec, QuantizeSpec):
        raise TypeError(f"spec is a QuantizeSpec, QuantizeSpec(round_mode='stochastic') for instance, not {spec!r}")
    return spec


def stored_spec(spec: QuantizeSpec | None) -> QuantizeSpec:
    """:func:`checked_spec` for what is kept as NVFP4; ValueError for EDEN, whose values no tensor can decode alone."""
    spec = checked_spec(spec)
    if spec.is_eden:
        raise ValueError(
            "EDEN makes no NVFP4Tensor: its values are rotated by signs drawn for the call. fake_quantize(x, spec) "
            "gives them rotated back; torch.ops.nvfp4.quantize makes operands of products in which rotations cancel"
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
    """(amax or None for that of x, rng_state, (row0, col0, full_width)) as the ops take them."""
    if not isinstance(x, Tensor):
        raise TypeError(f"quantize takes a tensor, got {type(x).__name__}: use torch.as_tensor first")
    if x.layout != torch.strided or x.is_nested:
        kind = "a nested tensor" if x.is_nested else f"a tensor of layout {x.layout}"
        fix = "x.to_padded_tensor(0)" if x.is_nested else "x.to_dense()"
        raise TypeError(f"quantize takes a dense tensor, got {kind}: use {fix} first")
    if x.dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(f"NVFP4 takes bfloat16, float16 or float32, got {x.dtype}: cast with x.to(torch.float32) first")
    if x.dim() == 0:
        raise ValueError("a 0-d tensor has no dimension to block: use x.reshape(1)")
    return (
        None if amax is None else resolve_amax(x, spec, amax),
        resolve_rng_state(x, spec, rng_state, generator),
        _resolve_place(x, spec, origin, full_width),
    )


def resolve_amax(
    x: Tensor, spec: QuantizeSpec, amax: Tensor | float | None, rng_state: Tensor | None = None, col0: int = 0
) -> Tensor:
    """amax as the ops take it, float32 0-d on the device of x; that of x (transformed as the spec says) for None."""
    if amax is None:
        return own_amax(x.detach(), spec, rng_state, col0)
    if spec.row_scaled:
        return _resolve_row_amax(x, amax)
    if isinstance(amax, Tensor):
        if amax.numel() != 1 or not amax.dtype.is_floating_point:
            raise ValueError(f"amax is one floating-point number, got {amax.dtype} of shape {tuple(amax.shape)}")
        if amax.dim() == 0 and amax.dtype == torch.float32 and amax.device == x.device and not amax.requires_grad:
            return amax  # as a static one is: 1 us of the host
        return amax.detach().to(device=x.device, dtype=torch.float32).reshape(())
    if isinstance(amax, str | list | tuple) or not 0 <= amax <= layout.FLOAT32_MAX:
        raise ValueError(f"amax is a finite magnitude, 3.0 for instance or a tensor of one, got {amax!r}")
    return torch.full((), amax, dtype=torch.float32, device=x.device)


def _resolve_row_amax(x: Tensor, amax: Tensor | float) -> Tensor:
    """amax as the op quantize_rows takes it: float32 (rows,)."""
    rows = x.shape[:-1].numel()
    if not isinstance(amax, Tensor) or amax.numel() != rows or not amax.dtype.is_floating_point:
        what = f"{amax.dtype} {tuple(amax.shape)}" if isinstance(amax, Tensor) else repr(amax)
        raise ValueError(
            f"with row_scaled=True amax is a floating-point tensor of one number for each of the {rows} rows, or left "
            f"out, not {what}"
        )
    return amax.detach().to(device=x.device, dtype=torch.float32).reshape(-1)


def resolve_rng_state(
    x: Tensor, spec: QuantizeSpec, rng_state: Tensor | None, generator: torch.Generator | None
) -> Tensor | None:
    """The (seed, offset) given, or one drawn where the spec takes random bits; None where it takes none."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator is a torch.Generator, torch.Generator().manual_seed(42) for instance, not {generator!r}"
        )
    if rng_state is not None and generator is not None:
        raise ValueError("give rng_state or generator, not both")
    if rng_state is not None:
        if not isinstance(rng_state, Tensor):
            raise TypeError(f"rng_state is a tensor, torch.tensor([seed, offset]), not a {type(rng_state).__name__}")
        if rng_state.dtype != torch.int64 or rng_state.shape != (2,):
            raise ValueError(
                f"rng_state is int64 (seed, offset), got {rng_state.dtype} of shape {tuple(rng_state.shape)}"
            )
        if rng_state.device != x.device:
            raise ValueError(f"rng_state is on {rng_state.device} and x on {x.device}: use rng_state.to(x.device)")
        return rng_state.contiguous()
    if not spec.is_stochastic:
        return None
    if generator is not None:
        return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=x.device, generator=generator)
    # The fresh tensor keeps two draws of one graph apart: no compiler pass folds two ops with different arguments.
    return torch.ops.nvfp4.draw_rng_state(torch.empty((2,), dtype=torch.int64, device=x.device))


def _resolve_place(
    x: Tensor, spec: QuantizeSpec, origin: tuple[int, int], full_width: int | None
) -> tuple[int, int, int]:
    row0, col0 = origin
    if row0 < 0 or row0 % spec.block_rows:
        raise ValueError(f"the row of origin is a multiple of block_rows ({spec.block_rows}), got {row0}")
    if col0 < 0 or col0 % spec.column_multiple:
        raise ValueError(f"the column of origin is a multiple of {spec.column_multiple}, got {col0}")
    if full_width is None:
        if col0:
            raise ValueError("a shard that does not start at column 0 needs full_width, the logical tensor's columns")
        return row0, 0, x.shape[-1]
    if full_width < col0 + x.shape[-1]:
        raise ValueError(f"full_width {full_width} is less than column {col0} + {x.shape[-1]} columns of x")
    return row0, col0, full_width
