"""Serve NVFP4 weights that another server has loaded: what the plug-ins of vLLM and SGLang share.

A server's loaders fill plain parameters: packed codes, block scales in the order of the weight, and one scale for each
of the weights that it fuses (q, k and v). :func:`weight_of` turns them into an :class:`NVFP4Tensor`, with one
per-tensor scale a row, so that fused weights with different scales are exact. :func:`linear` and :func:`experts` are
the forward passes. They call operators with fakes on plain tensors, and do nothing on the host: torch.compile and CUDA
graphs take them.

The codes of a row of activations never depend on other rows. A server adds rows of other requests, and fills batches
up to the size of a CUDA graph, so an amax of the whole batch would let them change an answer. Static scales of the
checkpoint are used if it has them; otherwise each token gets its own scale.
"""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Sequence

import torch
from torch import Tensor

import nvfp4_tensor.dispatch  # noqa: F401  registers the tensor's operators
from nvfp4_tensor.checkpoints.parts import LinearParts, check_scales, tensor_of
from nvfp4_tensor.numerics.layout import BLOCK
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.ops import native
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

SETTING = "NVFP4_TENSOR_SERVING"
"""The environment variable that :func:`setting` reads."""

OLDEST, NEWEST = (8, 0), (9, 0)
"""The compute capabilities that the plug-ins serve. Newer GPUs multiply FP4 themselves, by the server's kernels."""

_SPEC = QuantizeSpec()
_SPEC_BY_TOKEN = QuantizeSpec(row_scaled=True)
_STATIC, _BY_TOKEN = _SPEC.pack(), _SPEC_BY_TOKEN.pack()  # here, because Dynamo does not trace pack


class Setting(enum.Enum):
    """What the environment variable ``NVFP4_TENSOR_SERVING`` asks for."""

    OFF = "0"
    """Leave the server as it is."""
    AS_CHECKPOINT = "1"
    """Quantize activations if the checkpoint does (W4A4). The default."""
    W4A16 = "w4a16"
    """Keep activations dense, whatever the checkpoint says."""


def setting() -> Setting:
    """Return the setting of this process.

    Raises:
        ValueError: the variable has another value than 0, 1 and w4a16.
    """
    value = os.environ.get(SETTING, "1").strip().lower() or "1"
    try:
        return Setting(value)
    except ValueError:
        choices = ", ".join(each.value for each in Setting)
        raise ValueError(f"{SETTING}={value} is not one of {choices}: set one of these, or unset it") from None


def cannot_serve(device: str, capability: tuple[int, int] | None) -> str:
    """Return why weights on a "cpu" or "cuda" device of that compute capability stay with the server, or ""."""
    if device == "cpu":
        return ""
    if device != "cuda" or capability is None:
        return f"nvfp4_tensor has no kernels for {device}"
    if not OLDEST <= capability <= NEWEST:
        found = ".".join(map(str, capability))
        return f"compute capability {found} is not between 8.0 and 9.0: the server's own FP4 kernels are used"
    if not native.library("cuda").loaded:
        return f"nvfp4_tensor's kernels are not in use ({native.library('cuda').reason})"
    return ""


# --- what a server has loaded ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
    """The parameters of one linear, or of one projection of all experts, as a server's loaders have filled them.

    Attributes:
        name: the layer's name, for messages.
        qdata: uint8 (N, K / 2) or (E, N, K / 2), the even element in the low nibble.
        scale: float8_e4m3fn (N, K / 16) or (E, N, K / 16), in the order of the weight; NaN where none was loaded.
        factors: float32 (parts,) or (E, parts), one a fused weight; NaN where none was loaded.
        rows: the rows of each fused weight, which sum to N.
        input_scales: None, or float32 (parts,) or (E, parts); NaN where none was loaded.
        divides: whether factors and input_scales are divisors, as compressed-tensors stores them.
        quantizes_activations: whether the checkpoint is W4A4.
    """

    name: str
    qdata: Tensor
    scale: Tensor
    factors: Tensor
    rows: Sequence[int]
    input_scales: Tensor | None = None
    divides: bool = False
    quantizes_activations: bool = False


def weight_of(loaded: Loaded, dtype: torch.dtype) -> NVFP4Tensor:
    """Return the weight: an NVFP4Tensor (N, K) or (E, N, K) that shares the codes.

    Its ``per_tensor_scale`` is 0-d for one weight, and has one element a row for fused weights and experts. Its
    ``activation_spec`` and ``activation_amax`` say how products quantize activations: not, with the static amax, or
    with one scale a token. Fused weights and experts get the largest of their static amaxes, so that none of them clips
    more than alone.

    Raises:
        ValueError: a scale was not loaded, is NaN, infinite or negative; scales were loaded for some of the fused
            weights or experts only; or K is not a multiple of 16.
    """
    name, by_expert = loaded.name, loaded.qdata.dim() == 3
    columns = loaded.qdata.shape[-1] * 2
    if loaded.qdata.dtype != torch.uint8:
        raise ValueError(
            f"{name}: the weight is {loaded.qdata.dtype} and not packed NVFP4 codes (uint8), as of a head that is tied "
            "to dense embeddings: add the layer to `ignore` in the checkpoint's quantization_config"
        )
    if columns % BLOCK or loaded.scale.shape[-1] * BLOCK != columns:
        raise ValueError(
            f"{name}: its {columns} columns on this rank have {loaded.scale.shape[-1]} block scales: they must be a "
            f"multiple of {BLOCK}, with a scale for each {BLOCK}. Use fewer ranks of tensor parallelism"
        )
    parts = LinearParts(
        qdata=loaded.qdata,
        scale=loaded.scale,
        per_tensor_scale=_row_factors(loaded, by_expert),
        columns=columns,
        quantizes_activations=loaded.quantizes_activations,
        input_scale=_input_scale(loaded) if loaded.quantizes_activations else None,
    )
    if count := int(((parts.scale.view(torch.uint8) & 0x7F) == 0x7F).sum()):
        raise ValueError(
            f"{name}: {count} of {parts.scale.numel()} block scales were not loaded, or are NaN in the checkpoint: a "
            "layer that the checkpoint keeps dense must be in `ignore` of its quantization_config"
        )
    try:
        check_scales(parts)
        static = parts.input_scale is not None
        return tensor_of(parts, dtype, activation_spec=_SPEC if static else _SPEC_BY_TOKEN)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _row_factors(loaded: Loaded, by_expert: bool) -> Tensor:
    """Return the per-tensor scales: 0-d for one weight, else one per row."""
    factors = loaded.factors.detach().float()
    missing = factors.isnan()
    if missing.any():
        # A checkpoint that stores q, k and v as one tensor has one scale, which loaders put first.
        if by_expert or missing[0] or not missing[1:].all():
            raise ValueError(
                f"{loaded.name}: {int(missing.sum())} of {factors.numel()} per-tensor scales were not loaded, or are "
                "NaN: the checkpoint is incomplete, or its names are not those of this model"
            )
        factors = factors[0].expand_as(factors)
    if loaded.divides:
        factors = factors.reciprocal()
    if len(loaded.rows) == 1 and not by_expert:
        return factors.reshape(()).clone()
    rows = torch.tensor(loaded.rows, dtype=torch.int64, device=factors.device)
    # The same form on every load: a reload writes into the memory that CUDA graphs read.
    return factors.repeat_interleave(rows, dim=-1).reshape(-1).contiguous()


def _input_scale(loaded: Loaded) -> Tensor | None:
    """Return the static scale of the activations, 0-d, or None if the checkpoint has none."""
    if loaded.input_scales is None:
        return None
    scales = loaded.input_scales.detach().float()
    loaded_ones = ~scales.isnan()
    if not loaded_ones.any():
        return None
    first_only = scales.dim() == 1 and bool(loaded_ones[0]) and not bool(loaded_ones[1:].any())
    if not loaded_ones.all() and not first_only:
        raise ValueError(
            f"{loaded.name}: {int((~loaded_ones).sum())} of {scales.numel()} input scales are missing, so its "
            f"activations have no scale: calibrate the model again, or set {SETTING}=w4a16 to keep activations dense"
        )
    found = scales[loaded_ones]
    if loaded.divides:
        found = found.reciprocal()
    if not (found.isfinite() & (found > 0)).all():
        raise ValueError(
            f"{loaded.name}: an input scale is zero, negative or infinite: calibrate the model again, or set "
            f"{SETTING}=w4a16 to keep activations dense"
        )
    return found.max()


def differs_within(scales: Tensor | None) -> bool:
    """Return whether fused weights have different static scales of their common input."""
    if scales is None:
        return False
    found = scales[~scales.isnan()]
    return found.numel() > 1 and bool((found != found[0]).any())


# --- forward passes --------------------------------------------------------------------------------------------------


class Activations(enum.Enum):
    """How a product treats its activations."""

    DENSE = "dense"
    STATIC = "quantized with the checkpoint's scale"
    BY_TOKEN = "quantized with one scale per token"

    @classmethod
    def of(cls, weight: NVFP4Tensor) -> Activations:
        """Return how products with the weight treat activations."""
        if weight.activation_spec is None:
            return cls.DENSE
        return cls.STATIC if weight.activation_amax is not None else cls.BY_TOKEN


def quantized(x: Tensor, activations: Activations, amax: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the values of x (M, K) that a product multiplies, exact in bfloat16, and their factor: 0-d, (M,) or
    None."""
    if activations is Activations.DENSE:
        return x, None
    if activations is Activations.BY_TOKEN:
        qdata, scale, factor = torch.ops.nvfp4.quantize_rows(x, None, None, _BY_TOKEN)
        return torch.ops.nvfp4.dequantize(qdata, scale, None, x.shape[-1], torch.bfloat16), factor
    assert amax is not None
    return torch.ops.nvfp4.fake_quantize(x, amax, None, _STATIC, torch.bfloat16, False)


def linear(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    per_tensor_scale: Tensor,
    bias: Tensor | None = None,
    activations: Activations = Activations.DENSE,
    amax: Tensor | None = None,
) -> Tensor:
    """Return x (..., K) @ w^T + bias of the fields of :func:`weight_of`, rounded once to the dtype of x: (..., N)."""
    values, factor = quantized(x.reshape(-1, x.shape[-1]), activations, amax)
    y = torch.ops.nvfp4.matmul(values, factor, qdata, scale, per_tensor_scale, bias, values.shape[-1], False, x.dtype)
    return y.view(*x.shape[:-1], qdata.shape[-2])


@dataclasses.dataclass(frozen=True)
class Projection:
    """One projection of all experts: the fields of :func:`weight_of` (E, N, K)."""

    qdata: Tensor
    scale: Tensor
    per_tensor_scale: Tensor
    activations: Activations = Activations.DENSE
    amax: Tensor | None = None


class Combine(enum.Enum):
    """What stands between the two products of an expert."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    SILU_NO_MUL = "silu_no_mul"
    GELU_NO_MUL = "gelu_no_mul"
    GELU_TANH_NO_MUL = "gelu_tanh_no_mul"
    RELU2_NO_MUL = "relu2_no_mul"

    def __call__(self, x: Tensor) -> Tensor:
        """Return gate * up of the halves of x (M, 2 * I), or the activation of x (M, I): each step rounded."""
        gate, up = (x, None) if self.value.endswith("_no_mul") else x.chunk(2, -1)
        kind = self.value.removesuffix("_no_mul")
        if kind == "silu":
            y = torch.nn.functional.silu(gate)
        elif kind == "relu2":
            y = torch.nn.functional.relu(gate).square()
        else:
            y = torch.nn.functional.gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none")
        return y if up is None else y * up


def experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Projection,
    down: Projection,
    combine: Combine,
    expert_map: Tensor | None = None,
    weights_on_input: bool = False,
) -> Tensor:
    """Return the weighted sum of each token's experts: (M, K).

    The shapes of all steps depend only on those of the arguments. The sum of a token's experts is in float32, in the
    order of ``ids``, so equal batches give equal bits.

    Args:
        x: (M, K), the tokens.
        weights: (M, top), the weight of each of a token's experts.
        ids: integers (M, top), the token's experts; -1 for none.
        gate_up: (E, 2 * I, K), the gate's rows first; (E, I, K) if ``combine`` has one input.
        down: (E, K, I).
        expert_map: int (all experts,), the index of each expert in these weights, or -1 if it is on another rank,
            which then adds its part.
        weights_on_input: multiply x instead of the result; for one expert a token.
    """
    tokens, top = ids.shape
    count, flat = gate_up.qdata.shape[0], ids.reshape(-1).long()
    if expert_map is not None:  # -1 is no expert, and not the last one
        flat = torch.where(flat < 0, -1, expert_map[flat.clamp(min=0)].long())
    flat = torch.where((flat < 0) | (flat >= count), count, flat)  # behind all groups: their rows of the result are 0
    order = flat.argsort(stable=True)
    ends = torch.searchsorted(flat[order], torch.arange(count, device=x.device), right=True, out_int32=True)
    rows = x[order // top]
    if weights_on_input:
        rows = rows * weights.reshape(-1)[order, None].to(x.dtype)
    hidden = combine(_grouped(rows, gate_up, ends))
    y = _grouped(hidden, down, ends)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    y = y[back].view(tokens, top, down.qdata.shape[1]).float()
    # A row of another rank's expert may hold 0 * NaN, if its token or its weight is not finite.
    y = torch.where((flat < count).view(tokens, top, 1), y, 0)
    if not weights_on_input:
        y = y * weights[:, :, None].float()
    return y.sum(1).to(x.dtype)


def _grouped(x: Tensor, w: Projection, ends: Tensor) -> Tensor:
    values, factor = quantized(x, w.activations, w.amax)
    fields = w.qdata, w.scale, w.per_tensor_scale
    if values.dtype != torch.float32:
        return torch.ops.nvfp4.grouped_linear(values, factor, *fields, ends, x.dtype)
    return torch.ops.nvfp4.grouped_matmul(values, factor, *fields, ends, values.shape[-1], False, x.dtype)
