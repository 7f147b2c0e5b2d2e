"""Serve NVFP4 weights that another server has loaded: what the plug-ins of vLLM and SGLang share.

:func:`linear` and :func:`experts` are the forward passes of weights that :mod:`loading` has made of a server's
parameters. They call operators with fakes on plain tensors, and do nothing on the host: torch.compile and CUDA graphs
take them.

The codes of a row of activations never depend on other rows. A server adds rows of other requests, and fills batches
up to the size of a CUDA graph, so an amax of the whole batch would let them change an answer. Static scales of the
checkpoint are used if it has them; otherwise each token gets its own scale.
"""

from __future__ import annotations

import enum
import functools
import importlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import nvfp4_tensor.dispatch  # noqa: F401  registers the tensor's operators
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.ops import native

SETTING = "NVFP4_TENSOR_SERVING"
"""The environment variable that :func:`setting` reads."""

OLDEST, NEWEST = (8, 0), (9, 0)
"""The compute capabilities that the plug-ins serve. Newer GPUs multiply FP4 themselves, by the server's kernels."""

SPEC, SPEC_BY_TOKEN = QuantizeSpec(), QuantizeSpec(row_scaled=True)
_STATIC, _BY_TOKEN = SPEC.pack(), SPEC_BY_TOKEN.pack()  # here, because Dynamo does not trace pack


# --- the plug-in -----------------------------------------------------------------------------------------------------


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


def register(server: str, plugin: str) -> None:
    """Install a plug-in in this process, once. The servers call it in each of their processes.

    If the server is not what the plug-in was written for, or anything fails, it stays as it was, with a warning.
    """
    try:
        left = importlib.import_module(plugin).install()
    except Exception as error:  # an exception would end vLLM
        left = f"{type(error).__name__}: {error}"
    if left:
        warnings.warn(f"nvfp4_tensor leaves {server} as it is: {left}", stacklevel=3)


def why_not(differences: Iterator[str], written_for: str) -> str:
    """Return why a plug-in that was written for another version is not installed, or ""."""
    found = "; ".join(differences)
    return found and f"{found}. This plug-in was written for {written_for}: set {SETTING}=0 to silence this"


def cannot_serve(device: str, capability: tuple[int, int] | None) -> str:
    """Return why weights on a "cpu" or "cuda" device of that compute capability stay with the server, or ""."""
    if setting() is Setting.OFF:
        return f"{SETTING} is 0"
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


def refuse_unread(original: Callable[..., Any], layers: tuple[type, ...], dense: type) -> Callable[..., Any]:
    """Return get_quant_method of a server's config of MIXED_PRECISION, refusing what the server would take for dense.

    Both servers leave a layer of an algorithm that they do not know unquantized, and load its FP8 codes as weights.

    Args:
        original: the server's own.
        layers: the server's classes of layers with weights.
        dense: the server's class of methods of dense linears.
    """

    @functools.wraps(original)
    def get_quant_method(self: Any, layer: Any, prefix: str) -> Any:
        method = original(self, layer, prefix)
        if not isinstance(layer, layers) or not (method is None or isinstance(method, dense)):
            return method
        algorithm = None if self.is_layer_excluded(prefix) else self._resolve_quant_algo(prefix)
        if algorithm is not None and setting() is not Setting.OFF:
            raise NotImplementedError(
                f"{prefix}: the server reads no {algorithm} here, and would take its codes for weights: write the "
                'checkpoint by nvfp4_tensor.checkpoints.convert(folder, out, to="compressed-tensors"), and serve that'
            )
        return method

    return get_quant_method


@functools.cache
def tell(logger: logging.Logger, why: str, what: str = "linears") -> None:
    """Log once why the server's own kernels serve."""
    logger.info("nvfp4_tensor leaves NVFP4 %s to the server's own kernels: %s", what, why)


# --- forward passes --------------------------------------------------------------------------------------------------


class Activations(enum.Enum):
    """How a product treats its activations."""

    DENSE = "dense"
    STATIC = "quantized with the checkpoint's scale"
    BY_TOKEN = "quantized with one scale per token"


class Weight(NamedTuple):
    """The weight of a linear (N, K), or of one projection of all experts (E, N, K), and what its products quantize."""

    qdata: Tensor
    scale: Tensor
    per_tensor_scale: Tensor
    activations: Activations = Activations.DENSE
    amax: Tensor | None = None


def quantized(x: Tensor, w: Weight) -> tuple[Tensor, Tensor | None]:
    """Return the values of x (M, K) that a product with w multiplies, exact in bfloat16, and their factor: 0-d, (M,)
    or None."""
    if w.activations is Activations.DENSE:
        return x, None
    if w.activations is Activations.BY_TOKEN:
        qdata, scale, factor = torch.ops.nvfp4.quantize_rows(x, None, None, _BY_TOKEN)
        return torch.ops.nvfp4.dequantize(qdata, scale, None, x.shape[-1], torch.bfloat16), factor
    assert w.amax is not None
    return torch.ops.nvfp4.fake_quantize(x, w.amax, None, _STATIC, torch.bfloat16, False)


def linear(x: Tensor, w: Weight, bias: Tensor | None = None) -> Tensor:
    """Return x (..., K) @ w^T + bias, rounded once to the dtype of x: (..., N)."""
    values, factor = quantized(x.reshape(-1, x.shape[-1]), w)
    fields = w.qdata, w.scale, w.per_tensor_scale
    y = torch.ops.nvfp4.matmul(values, factor, *fields, bias, values.shape[-1], False, x.dtype)
    return y.view(*x.shape[:-1], w.qdata.shape[-2])


class Combine(enum.Enum):
    """What stands between the two products of an expert."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    SILU_NO_MUL = "silu_no_mul"
    GELU_NO_MUL = "gelu_no_mul"
    GELU_TANH_NO_MUL = "gelu_tanh_no_mul"
    RELU2_NO_MUL = "relu2_no_mul"


def combined(x: Tensor, how: Combine) -> Tensor:
    """Return gate * up of the halves of x (M, 2 * I), or the activation of x (M, I): each step rounded."""
    gate, up = (x, None) if how.value.endswith("_no_mul") else x.chunk(2, -1)
    kind = how.value.removesuffix("_no_mul")
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
    gate_up: Weight,
    down: Weight,
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
    hidden = combined(_grouped(rows, gate_up, ends), combine)
    y = _grouped(hidden, down, ends)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    y = y[back].view(tokens, top, down.qdata.shape[1]).float()
    # A row of another rank's expert may hold 0 * NaN, if its token or its weight is not finite.
    y = torch.where((flat < count).view(tokens, top, 1), y, 0)
    if not weights_on_input:
        y = y * weights[:, :, None].float()
    return y.sum(1).to(x.dtype)


def _grouped(x: Tensor, w: Weight, ends: Tensor) -> Tensor:
    values, factor = quantized(x, w)
    fields = w.qdata, w.scale, w.per_tensor_scale
    if values.dtype != torch.float32:
        return torch.ops.nvfp4.grouped_linear(values, factor, *fields, ends, x.dtype)
    return torch.ops.nvfp4.grouped_matmul(values, factor, *fields, ends, values.shape[-1], False, x.dtype)
