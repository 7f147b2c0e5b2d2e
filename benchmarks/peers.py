"""Products of bfloat16 activations and NVFP4 weights in other libraries, called through their public API.

Every peer gets the same weight in the layout of a checkpoint, rearranges it once, and then multiplies. A peer that is
not installed, does not run or returns a wrong product is skipped, and printed with the reason.

    humming   humming-kernels, of the vLLM project: CUDA C++, all kernels for a weight compiled at the first call
    quack     quack-kernels, of Dao-AILab: CuTe DSL, compiled at the first call of each kind
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.harness import Report
from nvfp4_tensor.numerics.layout import BLOCK, swizzle

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


HUMMING_CONFIG = {"quant_method": "modelopt", "quant_algo": "nvfp4"}


def humming_tensors(weight: Weight) -> dict[str, Tensor]:
    """Return the weight with the names of a ModelOpt checkpoint, which humming reads."""
    return {"weight": weight.codes, "weight_scale": weight.scale, "weight_scale_2": weight.factor.reshape(1)}


def humming(weight: Weight) -> Linear:
    from humming.layer import HummingLayer

    rows, columns = weight.codes.shape[0], weight.scale.shape[1] * BLOCK
    layer = HummingLayer(shape_n=rows, shape_k=columns, weight_config=HUMMING_CONFIG, torch_dtype=torch.bfloat16)
    layer = layer.to(weight.codes.device)
    layer.load_from_tensors(humming_tensors(weight))
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


def gather(report: Report, makers: dict[str, Callable[[], dict[str, Run]]]) -> dict[str, dict[str, Run]]:
    """Return {subject: {peer: run}} for peers that import, compile and run; print the others with the reason."""
    found: dict[str, dict[str, Run]] = {}
    for peer, make in makers.items():
        try:
            runs = make()
        except Exception as error:  # whatever a third party raises on import is its reason to be absent
            report(f"peer {peer} is absent: {reason(error)}")
            continue
        for subject, run in runs.items():
            try:
                run()
            except Exception as error:
                report(f"peer {peer} does not run {subject!r}: {reason(error)}")
            else:
                found.setdefault(subject, {})[peer] = run
    return found


def reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]
