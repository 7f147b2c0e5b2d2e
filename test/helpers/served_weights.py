"""Weights as checkpoints for servers hold them, and what products with them are."""

import torch

from nvfp4_tensor import QuantizeSpec, fake_quantize, quantize
from nvfp4_tensor.checkpoints import parts_of

RATIOS = (1.0, 700.0, 0.02)
"""Of q, k and v: servers of other kernels are wrong where their scales differ."""
INPUT_SCALE = 0.0015


def weights_of(rows, columns, ratios=RATIOS):
    generator = torch.Generator().manual_seed(0)
    return [
        quantize((torch.randn(n, columns, generator=generator) * ratio / columns**0.5).bfloat16())
        for n, ratio in zip(rows, ratios, strict=True)
    ]


def tensors_of(weight, compressed, input_scale=None):
    """Return a weight's tensors by their names in a checkpoint of compressed-tensors, or of ModelOpt."""
    parts = parts_of(weight)
    if not compressed:
        found = {"weight": parts.qdata, "weight_scale": parts.scale, "weight_scale_2": parts.per_tensor_scale}
        return found if input_scale is None else {**found, "input_scale": torch.tensor(input_scale)}
    found = {"weight_packed": parts.qdata, "weight_scale": parts.scale}
    found["weight_global_scale"] = parts.per_tensor_scale.reciprocal().reshape(1)
    return found if input_scale is None else {**found, "input_global_scale": torch.tensor([1 / input_scale])}


def rounded(x, activations, scale=INPUT_SCALE):
    """Return the activations that products multiply, float64: "dense", "static", or "dynamic", one scale a token."""
    if activations == "dense":
        return x.double()
    amax = torch.tensor(scale) * 2688 if activations == "static" else None
    return fake_quantize(x, QuantizeSpec(row_scaled=amax is None), amax=amax, dtype=torch.float32).double()


def decoded(weights):
    return torch.cat([weight.dequantize(torch.float32) for weight in weights]).double()


def error_by_column(got, expected):
    """Return the largest error of each output by its own size: fused weights have sizes far apart."""
    return ((got.double() - expected).abs().amax(0) / expected.abs().amax(0)).max().item()
