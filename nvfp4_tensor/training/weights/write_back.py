"""An update written into a tensor that lives in NVFP4, on the grid that the tensor has already.

Quantizing anew at each step would take new scales from the new amax: a grid that moves by a hair rounds every element
again, updated or not, and a thousand steps are a thousand such roundings. So a block scale keeps its mantissa, and only
its exponent follows the block: the grids of a scale and of its double share all points but a few, an element without an
update stays where it is, and the noise of a write is in proportion to the update.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from nvfp4_tensor.numerics import layout, reference
from nvfp4_tensor.numerics.choices import RoundingMode, ScaleRounding
from nvfp4_tensor.numerics.layout import BLOCK, E2M1_MAX, E4M3_MAX
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.tensor.nvfp4 import Aliasing, NVFP4Tensor

_BETWEEN_6_AND_8 = 2.0
_SMALLEST_NORMAL = 2.0**-126
_CELLS = 1 << 16
"""How many values of floor(frac * 2^16) the rounding by 16 random bits tells apart in a step (contract, section 3)."""


def check_writable(w: NVFP4Tensor, name: str) -> None:
    """Raises a ValueError that names what :func:`write_back` cannot write into."""
    if w.spec.hadamard_sign is not None:
        raise ValueError(f"{name} holds Hadamard-transformed values, and updates are not: use a spec without hadamard")
    if w.transposed:
        raise ValueError(f"{name} is a transposed view: give the tensor as it is stored")
    if w.aliasing != Aliasing.WHOLE:
        raise ValueError(f"{name} is a part or a copy of another tensor: give the whole, or a clone()")
    if w.per_tensor_scale.dim() and w.spec.block_rows != 1:
        raise ValueError(f"{name} has several per-tensor scales and 16x16 tiles: use block_rows=1")


def write_back(
    w: NVFP4Tensor,
    update: Tensor,
    *,
    round_mode: RoundingMode | str = RoundingMode.STOCHASTIC,
    rng_state: Tensor | None = None,
) -> NVFP4Tensor:
    """w + update as a new NVFP4Tensor with the layout of w. Stochastic: its expectation is w + update in float32.

    That is w + update rounded once or twice to float32, to nearest, as a dense float32 weight rounds its updates: the
    expectation is off by less than 2^-21 of a step between codes. The draws add no more than 2^-32 of a step.

    Each block is rounded on the grid of its own scale s. Where its largest element leaves 6 s, the block moves to the
    grid of 2 s with the probability that makes 6 s the right mean otherwise; where 3 s would do, to that of s / 2,
    which has every point of the old one. The per-tensor scale changes by powers of two.

    Args:
        w: not transposed, no Hadamard transform, the whole of its storage.
        update: dense, the shape of w; float32.
        round_mode: "stochastic", or "rne" (nearest, even), where updates of less than half a step vanish.
        rng_state: int64 (seed, offset) on the device of w; needed where stochastic. Codes are rounded by 32 bits, the
            upper 16 from stream 0 and the lower 16, one draw per block, from stream 2; stream 1 decides whether blocks
            grow (contract, sections 3 and 4).

    Raises:
        ValueError: a w outside these, another shape, a mode that is neither, stochastic without rng_state.
    """
    mode = RoundingMode.of(round_mode)
    check_writable(w, "w")
    if mode not in (RoundingMode.STOCHASTIC, RoundingMode.RNE):
        raise ValueError(f"updates are written by 'stochastic' or 'rne', not by {mode.name.lower()!r}")
    if mode == RoundingMode.STOCHASTIC and rng_state is None:
        raise ValueError("stochastic rounding needs rng_state, an int64 tensor (seed, offset)")
    if update.shape != w.shape:
        raise ValueError(f"the update is {tuple(update.shape)} and w {tuple(w.shape)}")
    if w.numel() == 0:
        return w.clone()
    blocks = _new_values(w, update.float())
    old = w.unswizzled_scale().float().view(blocks.shape[:2])
    magnitude, scale = _fit(blocks.abs(), old, rng_state if mode == RoundingMode.STOCHASTIC else None, w)
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
    """w + update in units of the per-tensor scale, (rows, blocks, 16) float32: exact where the update is zero."""
    units = w._decode(torch.float32, None).view(-1, w.columns)
    new = units + update.reshape(-1, w.columns) / w.row_scale().view(-1, 1)
    return pad(new, (0, -w.columns % BLOCK)).unflatten(-1, (-1, BLOCK))


def _fit(magnitude: Tensor, old: Tensor, rng_state: Tensor | None, w: NVFP4Tensor) -> tuple[Tensor, Tensor]:
    """(magnitudes (rows, blocks, 16) held within 6 scales, scales (rows, blocks)); NaN scales where not finite."""
    tiled = w.spec.block_rows == BLOCK
    largest = magnitude.amax(dim=-1)
    if tiled:
        largest = reference._over_tile(largest, lambda tiles: tiles.amax(dim=1))
    full = E2M1_MAX * old
    need = ((largest - full) / (_BETWEEN_6_AND_8 * old)).nan_to_num(0.0, posinf=1.0).clamp(0, 1)
    share = torch.ones_like(need)
    grown = need > 0.5
    if rng_state is not None:
        draw = reference.random16(len(old), old.shape[1], rng_state, stream=1)[:, : old.shape[1]]
        if tiled:
            draw = draw[::BLOCK].repeat_interleave(BLOCK, dim=0)[: len(draw)]
        chances = (need * (1 << 16)).ceil()
        grown = draw < chances
        share = torch.where(grown, chances / (1 << 16), 1.0)
    empty = old == 0
    grown = grown | empty
    share = torch.where(empty, 1.0, share)
    full, kept = full.unsqueeze(-1), torch.where(grown, 1 / share, 0.0).unsqueeze(-1)
    fitted = torch.minimum(magnitude, full) + (magnitude - full).clamp_(min=0).mul_(kept)
    scale = torch.where(empty, largest / largest.new_full((), E2M1_MAX), _with_exponent(old, largest, grown))
    return fitted, torch.where(largest.isfinite(), scale, torch.nan)


def _with_exponent(old: Tensor, largest: Tensor, grown: Tensor) -> Tensor:
    """old * 2^k, k the least for which 6 * old * 2^k holds the largest: above 0 where grown, below 0 where exact."""
    mantissa, exponent = torch.frexp(largest / (E2M1_MAX * old))
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    up = _power(exponent.clamp(min=1))
    down = old * _power(torch.where(largest == 0, 0, exponent.clamp(-32, 0)))
    down = torch.where(down.to(torch.float8_e4m3fn).float() == down, down, old)
    return torch.where(grown, old * up, down)


def _free_exponents(scale: Tensor, per_tensor_scale: Tensor) -> Tensor:
    """How many times the block scales of each per-tensor scale can double within e4m3 (negative: must halve)."""
    groups = per_tensor_scale.reshape(-1)
    top = scale.nan_to_num(0.0).view(len(groups), -1).amax(dim=1)
    shift = torch.frexp(top.new_full((), E4M3_MAX) / top)[1] - 1
    shift = torch.where(top > 0, shift, 0)
    return torch.where(groups / _power(shift) >= _SMALLEST_NORMAL, shift, shift.clamp(max=0))


def _power(exponent: Tensor) -> Tensor:
    """2^exponent by its bits, float32: torch.ldexp takes a device's pow, which need not be exact."""
    return (exponent.clamp(-126, 127).to(torch.int32) + 127 << 23).view(torch.float32)


def _codes(values: Tensor, scale: Tensor, mode: RoundingMode, rng_state: Tensor | None) -> Tensor:
    """Codes (rows, bytes) of values (rows, blocks, 16) by given scales (rows, blocks), in units of 1.

    The op takes a scale from the largest element of a block, so that one element stands in for it: first element 0,
    whose own code then comes from a second call where element 1 does. Random bits go by place, so both calls agree.
    """
    if mode == RoundingMode.STOCHASTIC:
        assert rng_state is not None
        values = _dithered(values, scale, rng_state)
    spec = QuantizeSpec(round_mode=mode)
    unit = torch.full((), spec.largest_value, device=values.device)  # of this amax, the per-tensor scale is 1
    qdata = []
    for place in (0, 1):
        standing_in = values.clone()
        standing_in[..., place] = E2M1_MAX * scale
        codes, *_ = torch.ops.nvfp4.quantize(standing_in.flatten(1), unit, rng_state, spec.pack())
        qdata.append(codes.view(*scale.shape, BLOCK // 2))
    first, second = qdata
    first[..., 0] = (first[..., 0] & 0xF0) | (second[..., 0] & 0x0F)
    return first.flatten(1)


def _dithered(values: Tensor, scale: Tensor, rng_state: Tensor) -> Tensor:
    """values in the middle of their cell of 2^-16 step or of the next: the lower 16 of 32 random bits.

    Rounding by 16 bits, the op cuts a cell to its lower end, which is the value in the mean of the choice made here.
    The elements of a block share one draw: it decides about a code only where the upper bits tie, once in 65,536 times.
    The middle stays in its cell when the op multiplies by a rounded 1 / scale.
    """
    scale = scale.unsqueeze(-1)
    draw = reference.random16(len(scale), scale.shape[1], rng_state, stream=2)[:, : scale.shape[1], None]
    cells = values.abs().div_(scale.clamp(min=_SMALLEST_NORMAL))
    per_step = torch.where(cells < 2, 2.0 * _CELLS, torch.where(cells < 4, 1.0 * _CELLS, 0.5 * _CELLS))
    cells.mul_(per_step)
    cell = cells.floor()
    cell += draw < cells.sub_(cell).mul_(_CELLS)
    return cell.add_(0.5).div_(per_step).mul_(scale).copysign_(values)
