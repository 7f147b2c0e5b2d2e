"""Where a rank's tensors lie in those of the whole step, so that codes and random bits do not know the ranks.

A step has three dimensions: tokens, and the output and input features of each linear. Each can be shared evenly by a
group of ranks. An operand lies along two of them: x (tokens, input), dy (tokens, output), w (output, input), and their
transposes. Its amax is the largest over the ranks that share it, and its blocks draw the bits of their place in the
whole (contract, section 4).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from nvfp4_tensor.numerics import reference
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.ops.definitions import own_amax
from nvfp4_tensor.training.products import Operand, Values, runs_on_codes


class Axis(NamedTuple):
    """One dimension, of which this rank has piece ``rank`` of ``ranks`` equal ones; ``group`` is their group's name."""

    rank: int = 0
    ranks: int = 1
    group: str = ""


WHOLE = Axis()
"""All of it."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Which pieces of the tokens, and of a linear's output and input features, this rank has."""

    tokens: Axis = WHOLE
    outputs: Axis = WHOLE
    inputs: Axis = WHOLE

    @property
    def x(self) -> Region:
        """Of the input."""
        return Region(self.tokens, self.inputs)

    @property
    def dy(self) -> Region:
        """Of the output's gradient."""
        return Region(self.tokens, self.outputs)

    @property
    def w(self) -> Region:
        """Of the weight."""
        return Region(self.outputs, self.inputs)


class Region(NamedTuple):
    """Where a matrix lies: the axis of its rows, and that of its columns."""

    rows: Axis
    columns: Axis

    @property
    def t(self) -> Region:
        """Of the transpose."""
        return Region(self.columns, self.rows)

    def of(self, x: Tensor) -> tuple[int, int, int]:
        """(row0, col0, full_width) of x (R, C), as the ops take them."""
        rows, columns = x.shape
        return self.rows.rank * rows, self.columns.rank * columns, self.columns.ranks * columns

    def check(self, x: Tensor, spec: QuantizeSpec, name: str) -> None:
        """Raises a ValueError where a piece would begin within a block."""
        if self.columns.ranks > 1 and x.shape[1] % spec.column_multiple:
            raise ValueError(
                f"{name}: {self.columns.ranks} ranks share {x.shape[1]} each of what is quantized in groups of "
                f"{spec.column_multiple} ({spec}), which cannot be cut: give each rank a multiple of that"
            )
        if self.rows.ranks > 1 and x.shape[0] % spec.block_rows:
            raise ValueError(f"{name}: {x.shape[0]} rows a rank are no multiple of {spec.block_rows}, its blocks' rows")


def local(t: Tensor) -> Tensor:
    """This rank's piece of a DTensor, differentiable; any other tensor as it is."""
    from torch.distributed.tensor import DTensor  # whoever has a place has imported it; others need not

    return t.to_local() if isinstance(t, DTensor) else t  # dynamo does not see the method of a DTensor of NVFP4


def _agreed(amax: Tensor, x: Tensor, region: Region) -> Tensor:
    """amax (n,) over the ranks; an error in the stream where they have unequal tokens, whose places would overlap."""
    if region.rows.ranks == 1:
        return largest(amax, region)
    rows = amax.new_full((1,), x.shape[0])
    *found, most, fewest = largest(torch.cat([amax, rows, -rows]), region).unbind()
    torch._assert_async(most == -fewest, "ranks that share tokens have unequally many: give each as many rows")
    return torch.stack(found)


def largest(amax: Tensor, axes: tuple[Axis, ...]) -> Tensor:
    """amax (any shape) over all ranks that share the axes."""
    for axis in axes:
        if axis.ranks > 1:
            collectives = torch.ops._c10d_functional
            amax = collectives.wait_tensor(collectives.all_reduce(amax, "max", axis.group))
    return amax


def _own(x: Tensor, spec: QuantizeSpec, rng_state: Tensor | None, region: Region) -> Tensor:
    return own_amax(x, spec, rng_state, region.of(x)[1])


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
    if spec.row_scaled:
        amax = largest(reference.row_amax(x, spec.hadamard_sign), (region.columns,))
        return Operand(*torch.ops.nvfp4.quantize_rows(x, amax, rng_state, spec.pack(), *region.of(x), stream))
    if amax is None:
        amax = largest(_own(x, spec, rng_state, region), region)
    return Operand(*torch.ops.nvfp4.quantize(x, amax, rng_state, spec.pack(), *region.of(x), stream))


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
    values = torch.ops.nvfp4.fake_quantize(x, amax, rng_state, spec.pack(), torch.bfloat16, False, *region.of(x))
    return Values(*values), None


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
    row0, col0, full_width = region.of(x)
    where = row0, col0, region.rows.ranks * x.shape[0], full_width
    packed = spec.pack(), spec_t.pack()
    if codes:
        parts = torch.ops.nvfp4.quantize_pair(x, amax, amax_t, rng_state, *packed, *where, stream_t)
        return Operand(*parts[:3]), Operand(*parts[3:])
    values, factor, t, scale_t, factor_t = torch.ops.nvfp4.quantize_pair_values(
        x, amax, amax_t, rng_state, *packed, codes_t, *where, stream_t
    )
    return Values(values, factor), Operand(t, scale_t, factor_t) if codes_t else Values(t, factor_t)
