"""Quantize a tensor and look at it: python tutorials/01_quantize_a_tensor.py"""

import torch

from nvfp4_tensor import NVFP4Tensor, QuantizeSpec, quantize

torch.manual_seed(0)
x = torch.randn(256, 1024, dtype=torch.bfloat16)

# Round to nearest in 1x16 blocks. Three tensors store the result: codes, two per byte; one e4m3 scale per block; and
# one float32 scale.
t = NVFP4Tensor.to_nvfp4(x)
print(t)
print("codes:", tuple(t.qdata.shape), t.qdata.dtype)
print("block scales:", tuple(t.unswizzled_scale().shape), t.scale.dtype, "(stored swizzled, as tensor cores require)")
print("per-tensor scale:", t.per_tensor_scale.item())

# It has the shape and dtype of x, and supports views, products and comparisons like a dense tensor.
print("a row:", t[3, :4].dequantize().tolist(), "was", x[3, :4].tolist())
print("product:", tuple((x @ t.t()).shape))


def relative_error(t: NVFP4Tensor) -> float:
    return ((t.dequantize(torch.float32) - x.float()).norm() / x.float().norm()).item()


# A spec defines how to quantize.
specs = {
    "nearest": QuantizeSpec(),
    "four over six": QuantizeSpec(four_over_six=True),
    "16x16 tiles": QuantizeSpec(block_rows=16),
    "stochastic": QuantizeSpec(round_mode="stochastic"),
}
errors = {name: relative_error(quantize(x, spec)) for name, spec in specs.items()}
for name, error in errors.items():
    print(f"{name:<14} relative error {error:.4f}")
assert errors["four over six"] < errors["nearest"] < errors["stochastic"]
