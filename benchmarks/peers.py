"""Products of bfloat16 activations and 4-bit weights in other libraries, called through their public API.

Every peer gets the same weight in the layout of a checkpoint, rearranges it once, and then multiplies. A peer that is
not installed, does not run or returns a wrong product is skipped, and printed with the reason.

    humming        humming-kernels, of the vLLM project: CUDA C++, all kernels for a weight compiled at the first call
    quack          quack-kernels, of Dao-AILab: CuTe DSL, compiled at the first call of each kind
    torchao int4   tinygemm, torch's own kernel; integers in groups of 128 with a scale and a zero, only in whole models
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from benchmarks.harness import Report
from benchmarks.llama import Llama
from nvfp4_tensor.numerics.layout import BLOCK, swizzle, unswizzle
from nvfp4_tensor.sizes import stored_bytes

Run = Callable[[], object]
Linear = Callable[[Tensor], Tensor]
TOLERANCE = 1e-2
"""Relative error allowed to a peer: bf16 results are off by 2e-3, a wrong scale or nibble order by more than 0.1."""


@dataclasses.dataclass(frozen=True)
class Weight:
    """An NVFP4 matrix (N, K): codes (N, K/2) uint8, the even element low; scale (N, K/16) e4m3, linear; factor ()."""

    codes: Tensor
    scale: Tensor
    factor: Tensor

    def decoded(self) -> Tensor:
        """Return the decoded weight: (N, K) float32."""
        columns = self.scale.shape[1] * BLOCK
        return torch.ops.nvfp4.dequantize(self.codes, swizzle(self.scale), self.factor, columns, torch.float32)


def humming(weight: Weight) -> Linear:
    from humming.layer import HummingLayer

    rows, columns = weight.codes.shape[0], weight.scale.shape[1] * BLOCK
    config = {"quant_method": "modelopt", "quant_algo": "nvfp4"}
    layer = HummingLayer(shape_n=rows, shape_k=columns, weight_config=config, torch_dtype=torch.bfloat16)
    layer = layer.to(weight.codes.device)
    parts = {"weight": weight.codes, "weight_scale": weight.scale, "weight_scale_2": weight.factor.reshape(1)}
    layer.load_from_tensors(parts)  # by the names of ModelOpt's checkpoints
    layer.transform()
    return layer


def quack(weight: Weight) -> Linear:
    from quack.gemm_w4 import gemm_w4a16, prepare_w4_weight

    blob, strip = prepare_w4_weight(weight.codes, weight.scale, "nvfp4")
    return functools.partial(
        gemm_w4a16,
        blob=blob,
        sf=strip,
        tensor_scale=weight.factor.item(),
        n_out=weight.codes.shape[0],
        wformat="nvfp4",
    )


PRODUCTS: dict[str, Callable[[Weight], Linear]] = {"humming": humming, "quack": quack}


# --- whole models ----------------------------------------------------------------------------------------------------

HUMMING = "humming"
INT4_TOLERANCE = 0.2
"""Relative error allowed to int4 in groups of 128, which rounds the weight anew: 0.1 for Gaussian weights."""


class FlatRows(nn.Module):
    """A product of two-dimensional x in a model whose x has a batch, too. bytes: of its weight."""

    def __init__(self, product: nn.Module, nbytes: int) -> None:
        super().__init__()
        self.product, self.bytes = product, nbytes

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x.flatten(0, -2)).unflatten(0, x.shape[:-1])


def humming_model(model: Llama) -> None:
    """Give the blocks' NVFP4 weights to humming; the output layer becomes dense."""
    for layer in model.layers:
        for name in ("qkv", "out", "gate_up", "down"):
            w = getattr(layer, name).weight
            scale = unswizzle(w.scale, w.shape[0], w.shape[1] // BLOCK)
            product = humming(Weight(w.qdata, scale, w.per_tensor_scale))
            setattr(layer, name, FlatRows(product, w.qdata.nbytes + scale.nbytes))
    head = nn.Linear(model.shape.hidden, model.shape.vocab, bias=False, device="meta")
    head.weight = nn.Parameter(model.head.weight.dequantize(), requires_grad=False)
    model.head = head


def int4_model(model: Llama) -> None:
    """Quantize the blocks to torchao's int4 of groups of 128, for its tinygemm."""
    from torchao.quantization import Int4WeightOnlyConfig, quantize_

    quantize_(model.layers, Int4WeightOnlyConfig(group_size=128, int4_packing_format="tile_packed_to_4d"))


MODELS: dict[str, Callable[[Llama], None]] = {"torchao int4": int4_model, HUMMING: humming_model}
"""Changes of a Llama in place, by the weights that it has then. humming's starts from NVFP4."""


def convert(model: Llama, peer: str) -> None:
    """Give a Llama's weights to a peer; raise a ValueError if its product is wrong."""
    x = torch.randn(1, 1, model.shape.hidden, device=model.norm.weight.device, dtype=model.norm.weight.dtype)
    expected = model.layers[0].qkv(x).float()
    MODELS[peer](model)
    error = relative_error(model.layers[0].qkv(x), expected)
    if not error < (TOLERANCE if peer == HUMMING else INT4_TOLERANCE):
        raise ValueError(f"its product is off by {error:.2g}")


def linear_bytes(model: Llama) -> int:
    """Return the bytes of all linears' weights, ours and the peers'."""
    return sum(
        module.bytes if isinstance(module, FlatRows) else stored_bytes(module.weight)
        for module in model.modules()
        if isinstance(module, FlatRows | nn.Linear)
    )


# --- which peers run -------------------------------------------------------------------------------------------------


def products(
    report: Report,
    makers: dict[str, Callable[[Weight], Linear]],
    weights: Sequence[Weight],
    inputs: Sequence[Tensor],
) -> dict[str, list[Linear]]:
    """Return the products of each peer with each weight, for peers that multiply the first weight correctly."""
    found: dict[str, list[Linear]] = {}
    decoded = weights[0].decoded()
    for peer, make in makers.items():
        try:
            linears = [make(weight) for weight in weights]
            error = max(relative_error(linears[0](x), x.float() @ decoded.mT) for x in inputs)
        except Exception as failure:  # whatever a third party raises is its reason to be absent
            report(f"peer {peer} is absent: {reason(failure)}")
            continue
        if error < TOLERANCE:
            found[peer] = linears
        else:
            report(f"peer {peer} is left out: its product is off by {error:.2g}")
    return found


def relative_error(value: Tensor, expected: Tensor) -> float:
    """Return |value - expected| / |expected| in the Frobenius norm; NaN if any value is NaN."""
    return ((value.float() - expected).norm() / expected.norm()).item()


def reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]
