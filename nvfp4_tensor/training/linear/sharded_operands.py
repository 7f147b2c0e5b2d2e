"""The operands of :mod:`products`, of pieces that ranks share: with one amax, and the random bits of their places."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nvfp4_tensor.numerics import layout, reference
from nvfp4_tensor.numerics.layout import BLOCK
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.ops.definitions import own_amax
from nvfp4_tensor.sharding.layout import Region, largest
from nvfp4_tensor.training.linear.operands import Operand, Values, runs_on_codes


def _agreed(amax: Tensor, x: Tensor, region: Region) -> Tensor:
    """amax (n,) over the ranks; an error in the stream where they have unequal tokens, whose places would overlap."""
    if region.rows.ranks == 1:
        return largest(amax, region)
    rows = amax.new_full((1,), x.shape[0])
    *found, most, fewest = largest(torch.cat([amax, rows, -rows]), region).unbind()
    torch._assert_async(most == -fewest, "ranks that share tokens have unequally many: give each as many rows")
    return torch.stack(found) if found else amax


def compare_tokens(region: Region, x: Tensor, *specs: QuantizeSpec | None) -> None:
    """An error in the stream where ranks have unequally many rows, before x or its codes are gathered.

    Gathers take unequal pieces for another number of bytes. Where amaxes go over the ranks these compare too, by the
    same all-reduce as this: a rank whose rows fill no whole blocks, and which gathers values, meets the others there.
    """
    given = [spec for spec in specs if spec is not None]
    amaxes = 0 if any(spec.row_scaled for spec in given) else len(given)
    _agreed(x.new_zeros(amaxes, dtype=torch.float32), x, region)


def _own(x: Tensor, spec: QuantizeSpec, rng_state: Tensor | None, region: Region) -> Tensor:
    if not spec.is_eden:
        return own_amax(x, spec, rng_state)
    amaxes = [own_amax(piece.x, spec, rng_state, piece.col0) for piece in region.pieces(x, spec)]
    return torch.stack(amaxes).amax()


def joined(parts: Sequence[Operand], dim: int | None) -> Operand:
    """Operands that lie beside each other along a dimension, each in whole blocks, as one."""
    if len(parts) == 1:
        return parts[0]
    assert dim is not None
    linear = [layout.unswizzle(p.scale, p.qdata.shape[0], p.columns // BLOCK).view(torch.uint8) for p in parts]
    factor = parts[0].per_tensor_scale
    if factor.dim() and dim == 0:
        factor = torch.cat([part.per_tensor_scale for part in parts])
    scale = layout.swizzle(torch.cat(linear, dim)).view(torch.float8_e4m3fn)
    return Operand(torch.cat([part.qdata for part in parts], dim), scale, factor)


def _joined(parts: Sequence[Operand | Values], dim: int | None) -> Operand | Values:
    """:func:`joined`, of values too."""
    values = [part for part in parts if isinstance(part, Values)]
    if not values:
        return joined([part for part in parts if isinstance(part, Operand)], dim)
    if len(values) == 1:
        return values[0]
    assert dim is not None
    return Values(torch.cat([part.values for part in values], dim), values[0].per_tensor_scale)


def quantized_at(
    region: Region,
    name: str,
    x: Tensor,
    spec: QuantizeSpec,
    rng_state: Tensor | None,
    stream: int,
    amax: Tensor | None = None,
) -> Operand:
    """:func:`products.quantized` of a piece of the whole, by an amax that is known already if one is given."""
    region.check(x, spec, name)
    pieces = region.pieces(x, spec)
    if spec.row_scaled:
        row_amax = largest(reference.row_amax(x, spec.hadamard_sign), (region.columns,))
        rows = [len(p.x) for p in pieces]
        amaxes = row_amax.split(rows) if region.cut == 0 and len(pieces) > 1 else [row_amax] * len(pieces)
        quantize = torch.ops.nvfp4.quantize_rows
    else:
        if amax is None:
            (amax,) = _agreed(_own(x, spec, rng_state, region).view(1), x, region)
        amaxes, quantize = [amax] * len(pieces), torch.ops.nvfp4.quantize
    parts = [
        Operand(*quantize(p.x, each, rng_state, spec.pack(), *p.place, stream))
        for p, each in zip(pieces, amaxes, strict=True)
    ]
    return joined(parts, region.cut)


def multipliable_at(
    region: Region,
    name: str,
    x: Tensor,
    spec: QuantizeSpec | None,
    spec_t: QuantizeSpec | None,
    rng_state: Tensor | None,
    stream_t: int,
    *,
    codes_t: bool = False,
    codes: bool = False,
) -> tuple[Operand | Values | None, Operand | Values | None]:
    """:func:`products.multipliable` of a piece of the whole. Both amaxes go over the ranks together."""
    if spec is not None:
        region.check(x, spec, name)
    if spec_t is not None:
        region.t.check(x.t(), spec_t, f"{name}^T")
    row_scaled = any(each is not None and each.row_scaled for each in (spec, spec_t))
    codes = codes or row_scaled or runs_on_codes(x.device)
    if spec is not None and spec_t is not None and not row_scaled:
        return _pair_at(region, x, spec, spec_t, rng_state, stream_t, codes_t, codes)
    of_t = None
    if spec_t is not None:
        of_t = quantized_at(region.t, f"{name}^T", x.t().contiguous(), spec_t, rng_state, stream_t)
    if spec is None or codes:
        return None if spec is None else quantized_at(region, name, x, spec, rng_state, 0), of_t
    (amax,) = _agreed(_own(x, spec, rng_state, region).view(1), x, region)
    values = [
        Values(*torch.ops.nvfp4.fake_quantize(p.x, amax, rng_state, spec.pack(), torch.bfloat16, False, *p.place))
        for p in region.pieces(x, spec)
    ]
    return _joined(values, region.cut), None


def _pair_at(
    region: Region,
    x: Tensor,
    spec: QuantizeSpec,
    spec_t: QuantizeSpec,
    rng_state: Tensor | None,
    stream_t: int,
    codes_t: bool,
    codes: bool,
) -> tuple[Operand | Values, Operand | Values]:
    if spec.rotation is None and not spec_t.is_eden:  # in one pass over x
        own = torch.ops.nvfp4.amax_pair(x, -1 if spec_t.hadamard_sign is None else spec_t.hadamard_sign)
    else:
        own = _own(x, spec, rng_state, region), _own(x.t().contiguous(), spec_t, rng_state, region.t)
    amax, amax_t = _agreed(torch.stack(own), x, region).unbind()
    packed = spec.pack(), spec_t.pack()
    of_x: list[Operand | Values] = []
    of_t: list[Operand | Values] = []
    for p in region.pieces(x, spec, spec_t):
        where = p.row0, p.col0, p.full_rows, p.full_width
        if codes:
            parts = torch.ops.nvfp4.quantize_pair(p.x, amax, amax_t, rng_state, *packed, *where, stream_t)
            of_x.append(Operand(*parts[:3]))
            of_t.append(Operand(*parts[3:]))
            continue
        values, factor, t, scale_t, factor_t = torch.ops.nvfp4.quantize_pair_values(
            p.x, amax, amax_t, rng_state, *packed, codes_t, *where, stream_t
        )
        of_x.append(Values(values, factor))
        of_t.append(Operand(t, scale_t, factor_t) if codes_t else Values(t, factor_t))
    return _joined(of_x, region.cut), _joined(of_t, region.t.cut)
