"""The mean of N stochastic roundings converges to the value: python tutorials/03_stochastic_rounding.py"""

import torch

from nvfp4_tensor import NVFP4Tensor, QuantizeSpec, RoundingMode, ScaleRounding, quantize

torch.manual_seed(0)
x = torch.randn(64, 256)

# With block scales rounded up, nothing clips, so the expectation of each element is its exact value.
spec = QuantizeSpec(round_mode=RoundingMode.STOCHASTIC, scale_rounding=ScaleRounding.UP)
nearest = (NVFP4Tensor.to_nvfp4(x).dequantize() - x).square().mean().sqrt()
print(f"to nearest:                  RMSE {nearest:.4f}")

total, errors = torch.zeros_like(x), {}
for n in range(1, 257):
    total += quantize(x, spec).dequantize()
    if n in (1, 4, 16, 64, 256):
        errors[n] = (total / n - x).square().mean().sqrt().item()
        print(f"mean of {n:>3} roundings:       RMSE {errors[n]:.4f}, {errors[1] / errors[n]:.1f} times less than one")
assert abs(errors[1] / errors[256] / 16 - 1) < 0.1  # sqrt(256)

# Random bits are a function of (seed, offset) and the position of an element, so equal states give equal results.
rng_state = torch.tensor([2026, 0])
a, b = (quantize(x, spec, rng_state=rng_state) for _ in range(2))
assert torch.equal(a.qdata, b.qdata)
# A shard with its origin gets the same bits as these rows of the full tensor.
shard = quantize(x[16:32], spec, amax=x.abs().max(), rng_state=rng_state, origin=(16, 0))
assert torch.equal(shard.qdata, a.qdata[16:32])
print("equal rng_states give equal bits, and a shard has the bits of the full tensor")
