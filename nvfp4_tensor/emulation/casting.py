"""cast and upcast: convert a tensor to a block format and back."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from nvfp4_tensor._compat.frames import warn_user
from nvfp4_tensor.emulation.blocks import BlockTensor
from nvfp4_tensor.emulation.formats import FORMATS, BlockFormat
from nvfp4_tensor.emulation.modes import CastMode, ComputeMode, ScaleMode
from nvfp4_tensor.numerics import layout, reference
from nvfp4_tensor.numerics.choices import RoundingMode, ScaleRounding
from nvfp4_tensor.numerics.layout import FLOAT32_MAX, HIGH_PRECISION_DTYPES
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.ops import native
from nvfp4_tensor.tensor.arguments import resolve_amax, resolve_rng_state


def cast(
    x: Tensor,
    format: BlockFormat | str,
    *,
    scale_mode: ScaleMode | str | None = None,
    round_mode: RoundingMode | str = RoundingMode.RNE,
    cast_mode: CastMode | str = CastMode.VIRTUAL,
    compute_mode: ComputeMode | str = ComputeMode.TORCH,
    amax: Tensor | float | None = None,
    rng_state: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor | BlockTensor:
    """Quantize x to a block format, in blocks along its last dimension.

    The last block of a row is padded with zeros, which do not appear in the result. A block with NaN or Inf decodes to
    NaN and does not affect other blocks. The function is not differentiable.

    Args:
        x: (..., K), at least 1-D; bfloat16, float16 or float32.
        format: a name in :data:`FORMATS`, or a :class:`BlockFormat`.
        scale_mode: how block scales are computed, see :class:`ScaleMode`. By default "floor" for powers of two and
            "nearest" for scales with a mantissa.
        round_mode: "even", "away" or "zero", which round to nearest and name the direction of ties, or "stochastic".
        cast_mode: "virtual" returns the decoded values, "actual" and "compressed" return a :class:`BlockTensor`.
        compute_mode: "torch", or "native" for this package's operators. If the operators do not support the cast, a
            UserWarning is issued and torch is used.
        amax: the largest magnitude that the tensor scale allows, in formats that have one; by default the amax of x.
        rng_state: int64 (seed, offset), which determines the random bits of stochastic rounding, as in the numerics
            contract. By default it is sampled from ``generator``, or from torch's generator of the device.
        generator: the generator of ``rng_state``.

    Raises:
        TypeError: x is not a tensor of one of these dtypes.
        ValueError: an unknown format or mode, a scale_mode that the format does not support, amax for a format without
            a tensor scale, a 0-d x, or both rng_state and generator.

    Example:
        >>> y = cast(torch.randn(4, 64), "mxfp4", scale_mode="midmax", round_mode="stochastic")
    """
    format = BlockFormat.of(format)
    mode = format.scale.checked_mode(scale_mode, format.element)
    rounding, how, compute = RoundingMode.of(round_mode), CastMode.of(cast_mode), ComputeMode.of(compute_mode)
    if rounding == RoundingMode.EDEN:
        raise ValueError("round_mode 'eden' also rotates, so cast does not support it: use fake_quantize")
    _check(x, format, amax)
    x = x.detach()
    rng_state = resolve_rng_state(x, QuantizeSpec(round_mode=rounding), rng_state, generator)
    largest = None
    if format.two_level:
        largest = reference.amax(x) if amax is None else reference.magnitude(resolve_amax(x, QuantizeSpec(), amax))
    run = _by_torch
    if compute == ComputeMode.NATIVE:
        reason = _unsupported_reason(x, format)
        run = _by_torch if reason else _by_operators
        if reason:
            warn_user(f"compute_mode 'native' {reason}: torch computes this cast")
    codes, scale, tensor_scale = run(x, format, mode, rounding, largest, rng_state)
    result = BlockTensor.of_codes(format, codes, scale, tensor_scale, x.dtype, packed=how == CastMode.COMPRESSED)
    return result.dequantize() if how == CastMode.VIRTUAL else result


def upcast(t: BlockTensor, dtype: torch.dtype | None = None) -> Tensor:
    """Decode a BlockTensor to a dense tensor, rounded once to dtype (by default, the original dtype).

    Raises:
        TypeError: t is not a BlockTensor (a virtual cast is already dense), or dtype is not bfloat16, float16 or
            float32.
    """
    if not isinstance(t, BlockTensor):
        raise TypeError(
            f"upcast needs the BlockTensor of cast_mode 'actual' or 'compressed', not a {type(t).__name__}: "
            "the result of a virtual cast is already dense"
        )
    return t.dequantize(dtype)


def _check(x: Tensor, format: BlockFormat, amax: Tensor | float | None) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"cast needs a tensor, got {type(x).__name__}: use torch.as_tensor first")
    if x.layout != torch.strided or x.dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(f"cast needs dense bfloat16, float16 or float32, got {x.layout}, {x.dtype}: convert it first")
    if x.dim() == 0:
        raise ValueError("a 0-d tensor has no dimension to split into blocks: use x.reshape(1)")
    if amax is not None and not format.two_level:
        raise ValueError(f"{format.name} has no tensor scale for amax to set: omit amax")


# --- plain torch -----------------------------------------------------------------------------------------------------

_Parts = tuple[Tensor, Tensor, Tensor | None]
"""Codes (..., K), scales (..., blocks) and the tensor scale."""


def _by_torch(
    x: Tensor,
    format: BlockFormat,
    mode: ScaleMode,
    rounding: RoundingMode,
    amax: Tensor | None,
    rng_state: Tensor | None,
) -> _Parts:
    encode, tensor_scale = _tensor_scale(x, format, amax)
    padded = pad(x.float(), (0, -x.shape[-1] % format.block_size))
    blocks = padded.reshape(*x.shape[:-1], padded.shape[-1] // format.block_size, format.block_size)
    scale = format.scale.of_blocks(blocks.abs().amax(dim=-1), encode, format.element, mode)
    factor = reference.block_encode(scale.float(), encode).unsqueeze(-1)
    v = torch.where(factor.isnan(), 0.0, blocks * factor).flatten(-2)[..., : x.shape[-1]]
    rows, columns, r16 = x.shape[:-1].numel(), x.shape[-1], None
    if rng_state is not None:  # 16 random bits per element as in the contract
        r16 = reference.random16(rows, columns, rng_state)[:, :columns].reshape(x.shape)
    return format.element.round(v, rounding, r16), scale, tensor_scale


def _tensor_scale(x: Tensor, format: BlockFormat, amax: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the factor that multiplies elements before block scaling, and the tensor scale (contract, section 2)."""
    if amax is None:
        return torch.ones((), dtype=torch.float32, device=x.device), None
    largest = amax.new_full((), format.largest_value)
    encode = torch.where(amax == 0, 1.0, (largest / amax).clamp(max=FLOAT32_MAX))
    return encode, torch.where(amax == 0, 1.0, amax / largest)


# --- this package's operators ----------------------------------------------------------------------------------------


def _unsupported_reason(x: Tensor, format: BlockFormat) -> str:
    """Return why the operators do not support the cast, or an empty string if they do."""
    nvfp4 = FORMATS["nvfp4"]
    if format.replace(name=nvfp4.name) != nvfp4:
        return f"supports only nvfp4, not {format.name}"
    if x.device.type not in ("cpu", "cuda"):
        return f"has no library for {x.device.type}"
    library = native.library(x.device.type)
    return "" if library.loaded else f"has no library for {x.device.type} ({library.reason})"


def _by_operators(
    x: Tensor,
    format: BlockFormat,
    mode: ScaleMode,
    rounding: RoundingMode,
    amax: Tensor | None,
    rng_state: Tensor | None,
) -> _Parts:
    up = ScaleRounding.UP if mode == ScaleMode.UP else ScaleRounding.NEAREST
    spec = QuantizeSpec(round_mode=rounding, scale_rounding=up)
    qdata, scale, tensor_scale = torch.ops.nvfp4.quantize(x, amax, rng_state, spec.pack())
    blocks = qdata.shape[-1] * 2 // format.block_size
    linear = layout.unswizzle(scale, x.shape[:-1].numel(), blocks).view(*x.shape[:-1], blocks)
    return layout.unpack(qdata)[..., : x.shape[-1]].contiguous(), linear, tensor_scale
