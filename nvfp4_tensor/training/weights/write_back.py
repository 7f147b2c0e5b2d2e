"""Write an update to an NVFP4 tensor on the tensor's present grid.

Quantizing the updated tensor would compute new scales from its amax. Slightly different scales round every element
again, with or without an update, at each of thousands of steps. Here, a block scale keeps its mantissa, and only its
exponent follows the block, so an element without an update does not change, and the noise of a write is proportional to
the update. Only where a block outgrows its scale do elements at codes 0.5 and 1.5, which the doubled grid lacks, move
to a neighbor of that grid, without bias.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from nvfp4_tensor.numerics import layout, reference
from nvfp4_tensor.numerics.choices import RoundingMode, ScaleRounding
from nvfp4_tensor.numerics.layout import BLOCK, E2M1_MAX, E4M3_MAX
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.tensor.tiles import tiled

_BETWEEN_6_AND_8 = 2.0
_SMALLEST_NORMAL = 2.0**-126
_OUTGROWN, _SMALLEST_TOP = 2.0**100, 2.0**-118
"""Bounds within which quotients of scales stay finite: the exponent that frexp gives of infinity is the device's."""
_CELLS = 1 << 16
"""The number of values of floor(frac * 2^16) per step, the resolution of 16 random bits (contract, section 3)."""


def check_writable(w: NVFP4Tensor, name: str) -> None:
    """Raise a ValueError if :func:`write_back` does not support the tensor."""
    if w.spec.hadamard_sign is not None:
        raise ValueError(f"{name} holds Hadamard-transformed values, updates do not: quantize without hadamard_sign")
    if w.transposed:
        raise ValueError(f"{name} is a transposed view: pass the tensor that it was made from")
    if w.window is not None:
        raise ValueError(f"{name} is a part of another tensor: pass the full tensor, or a clone()")
    if w.per_tensor_scale.dim() and w.spec.block_rows != 1:
        raise ValueError(f"{name} has several per-tensor scales and 16x16 blocks: use block_rows=1")


def mode_of_write(round_mode: RoundingMode | str) -> RoundingMode:
    """Return the rounding mode of updates; raise a ValueError if they do not support it."""
    mode = RoundingMode.of(round_mode)
    if mode not in (RoundingMode.STOCHASTIC, RoundingMode.RNE):
        raise ValueError(f"round_mode of updates is 'stochastic' or 'rne', not {mode.name.lower()!r}")
    return mode


def write_back(
    w: NVFP4Tensor,
    update: Tensor,
    *,
    round_mode: RoundingMode | str = RoundingMode.STOCHASTIC,
    rng_state: Tensor | None = None,
) -> NVFP4Tensor:
    """Return w + update as a new NVFP4Tensor with the layout of w.

    With stochastic rounding, the expectation of the result is w + update, computed in float32. Computing it rounds once
    or twice to nearest, as an update of a dense float32 weight does, which shifts the expectation by less than 2^-21 of
    a step between codes. The resolution of the random bits shifts it by at most 2^-32 of a step.

    Each block is rounded on the grid of its scale s. If its largest element exceeds 6 s, the block changes to the grid
    of 2 s with a probability that keeps the expectation, and clips to 6 s otherwise. If 3 s suffices, the block changes
    to the grid of s / 2, which has every point of the old one. The per-tensor scale changes by powers of two.

    Args:
        w: a full tensor (no slice), not transposed, without a Hadamard transform.
        update: a dense float32 tensor with the shape of w.
        round_mode: "stochastic"; or "rne" (nearest, ties to even), which loses updates of less than half a step.
        rng_state: int64 (seed, offset) on the device of w; required for "stochastic". Codes are rounded with 32 random
            bits: the upper 16 from stream 0, and the lower 16, shared by the block, from stream 2. Stream 1 decides
            whether blocks grow (contract, sections 3 and 4).

    Raises:
        ValueError: if w is not supported, shapes or round_mode do not fit, or rng_state is missing.
    """
    mode = mode_of_write(round_mode)
    check_writable(w, "w")
    if mode == RoundingMode.STOCHASTIC and rng_state is None:
        raise ValueError("stochastic rounding needs rng_state, an int64 tensor (seed, offset)")
    if update.shape != w.shape:
        raise ValueError(f"the update is {tuple(update.shape)} and w {tuple(w.shape)}")
    if w.numel() == 0:
        return w.clone()
    blocks = _new_values(w, update.float())
    old = w.unswizzled_scale().view(blocks.shape[:2])
    tiles = tiled(old) if w.spec.block_rows == BLOCK else None
    magnitude, scale = _fit(blocks.abs(), old.float(), rng_state if mode == RoundingMode.STOCHASTIC else None, tiles)
    shift = _free_exponents(scale, w.per_tensor_scale)
    factor = _power(shift).repeat_interleave(len(scale) // len(shift)).unsqueeze(-1)
    scale_bytes = reference.to_e4m3(scale * factor, ScaleRounding.UP, scale)
    values = magnitude.mul_(factor.unsqueeze(-1)).copysign_(blocks)
    qdata = _codes(values, scale_bytes.view(torch.float8_e4m3fn).float(), mode, rng_state)
    return w._replace(
        qdata=qdata.view(w.qdata.shape),
        scale=layout.swizzle(scale_bytes).view(torch.float8_e4m3fn),
        per_tensor_scale=w.per_tensor_scale / _power(shift).view(w.per_tensor_scale.shape),
    )


def _new_values(w: NVFP4Tensor, update: Tensor) -> Tensor:
    """Return w + update in units of the per-tensor scale, (rows, blocks, 16) float32; exact where the update is 0."""
    units = w._decode(torch.float32, None).view(-1, w.columns)
    new = units + update.reshape(-1, w.columns) / w.row_scale().view(-1, 1)
    return pad(new, (0, -w.columns % BLOCK)).unflatten(-1, (-1, BLOCK))


def _fit(magnitude: Tensor, old: Tensor, rng_state: Tensor | None, tiles: Tensor | None) -> tuple[Tensor, Tensor]:
    """Choose the scales (rows, blocks) and limit the magnitudes (rows, blocks, 16) to 6 scales.

    tiles: which blocks share a scale with their 16x16 tile, and keep sharing it; None if none does. Blocks with a NaN
    or an infinity get a NaN scale.
    """
    largest = magnitude.amax(dim=-1)
    if tiles is not None:
        largest = torch.where(tiles, reference.over_tile(largest, lambda rows: rows.amax(dim=1)), largest)
    full = E2M1_MAX * old
    need = ((largest - full) / (_BETWEEN_6_AND_8 * old)).nan_to_num(0.0, posinf=1.0).clamp(0, 1)
    share = torch.ones_like(need)
    grown = need > 0.5
    if rng_state is not None:
        random = reference.random16(len(old), old.shape[1], rng_state, stream=1)[:, : old.shape[1]]
        if tiles is not None:
            random = torch.where(tiles, reference.over_tile(random, lambda rows: rows[:, 0]), random)
        chances = (need * (1 << 16)).ceil()
        grown = random < chances
        share = torch.where(grown, chances / (1 << 16), 1.0)
    empty = old * _OUTGROWN <= largest  # no point of the old grid is left, or it had none
    grown = grown | empty
    share = torch.where(empty, 1.0, share)
    full, kept = full.unsqueeze(-1), torch.where(grown, 1 / share, 0.0).unsqueeze(-1)
    fitted = torch.minimum(magnitude, full) + (magnitude - full).clamp_(min=0).mul_(kept)
    scale = torch.where(empty, largest / largest.new_full((), E2M1_MAX), _with_exponent(old, largest, grown))
    return fitted, torch.where(largest.isfinite(), scale, torch.nan)


def _with_exponent(old: Tensor, largest: Tensor, grown: Tensor) -> Tensor:
    """Return old * 2^k with the least k for which 6 * old * 2^k is at least the largest magnitude.

    k is above 0 if the block has grown. Otherwise it is at most 0, and 0 if old * 2^k is not exact in e4m3.
    """
    mantissa, exponent = torch.frexp(largest / (E2M1_MAX * old))
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    up = _power(exponent.clamp(min=1))
    down = old * _power(torch.where(largest == 0, 0, exponent.clamp(-32, 0)))
    down = torch.where(down.to(torch.float8_e4m3fn).float() == down, down, old)
    return torch.where(grown, old * up, down)


def _free_exponents(scale: Tensor, per_tensor_scale: Tensor) -> Tensor:
    """Return how often the block scales of a per-tensor scale can double within e4m3; negative if they must halve."""
    groups = per_tensor_scale.reshape(-1)
    top = scale.nan_to_num(0.0).view(len(groups), -1).amax(dim=1)
    shift = torch.frexp(top.new_full((), E4M3_MAX) / top.clamp(min=_SMALLEST_TOP))[1] - 1
    shift = torch.where(top > 0, shift, 0)
    return torch.where(groups / _power(shift) >= _SMALLEST_NORMAL, shift, shift.clamp(max=0))


def _power(exponent: Tensor) -> Tensor:
    """Return 2^exponent, float32, from its bits: torch.ldexp uses the device's pow, which may be inexact."""
    return (exponent.clamp(-126, 127).to(torch.int32) + 127 << 23).view(torch.float32)


def _codes(values: Tensor, scale: Tensor, mode: RoundingMode, rng_state: Tensor | None) -> Tensor:
    """Return the codes (rows, bytes) of values (rows, blocks, 16) with given scales (rows, blocks).

    The op derives a block's scale from its largest element, so one element is replaced by 6 scales: element 0 in a
    first call, and element 1 in a second call, which gives the code of element 0. Random bits depend on the position,
    so both calls agree.
    """
    if mode == RoundingMode.STOCHASTIC:
        assert rng_state is not None
        values = _dithered(values, scale, rng_state)
    spec = QuantizeSpec(round_mode=mode)
    unit_amax = values.new_full((), spec.largest_value)  # gives a per-tensor scale of 1
    qdata = []
    for element in (0, 1):
        replaced = values.clone()
        replaced[..., element] = E2M1_MAX * scale
        codes, *_ = torch.ops.nvfp4.quantize(replaced.flatten(1), unit_amax, rng_state, spec.pack())
        qdata.append(codes.view(*scale.shape, BLOCK // 2))
    without_0, without_1 = qdata
    without_0[..., 0] = (without_0[..., 0] & 0xF0) | (without_1[..., 0] & 0x0F)
    return without_0.flatten(1)


def _dithered(values: Tensor, scale: Tensor, rng_state: Tensor) -> Tensor:
    """Round values stochastically to a cell of 2^-16 step, with the lower 16 of 32 random bits, and return its middle.

    The op, which uses 16 random bits, rounds a cell down to its lower end. The expectation of that end is the value.
    The elements of a block share their random bits, which decide a code only if the upper bits tie, once in 65,536
    times. The middle stays in its cell when the op multiplies it by a rounded 1 / scale.
    """
    scale = scale.unsqueeze(-1)
    random = reference.random16(len(scale), scale.shape[1], rng_state, stream=2)[:, : scale.shape[1], None]
    cells = values.abs().div_(scale.clamp(min=_SMALLEST_NORMAL))
    per_step = reference.steps_per_unit(cells).mul_(_CELLS)
    cells.mul_(per_step)
    cell = cells.floor()
    cell += random < cells.sub_(cell).mul_(_CELLS)
    return cell.add_(0.5).div_(per_step).mul_(scale).copysign_(values)
