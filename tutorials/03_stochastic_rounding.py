"""The mean of N stochastic roundings goes to the value itself: python tutorials/03_stochastic_rounding.py"""

import torch

from nvfp4_tensor import NVFP4Tensor, QuantizeSpec, RoundingMode, ScaleRounding, quantize

torch.manual_seed(0)
x = torch.randn(64, 256)

# Block scales rounded up clip nothing, so the expectation of each element is the element, exactly.
spec = QuantizeSpec(round_mode=RoundingMode.STOCHASTIC, scale_rounding=ScaleRounding.UP)
nearest = (NVFP4Tensor.to_nvfp4(x).dequantize() - x).square().mean().sqrt()
print(f"to nearest, however often:   RMSE {nearest:.4f}")

total, errors = torch.zeros_like(x), {}
for n in range(1, 257):
    total += quantize(x, spec).dequantize()
    if n in (1, 4, 16, 64, 256):
        errors[n] = (total / n - x).square().mean().sqrt().item()
        print(f"mean of {n:>3} stochastic draws: RMSE {errors[n]:.4f}, {errors[1] / errors[n]:.1f} times less than one")
assert abs(errors[1] / errors[256] / 16 - 1) < 0.1  # sqrt(256)

# The bits are a function of (seed, offset) and of an element's place: give them, and the same draw comes back.
rng_state = torch.tensor([2026, 0])
a, b = (quantize(x, spec, rng_state=rng_state) for _ in range(2))
assert torch.equal(a.qdata, b.qdata)
# A shard that says where it lies gets the bits that the whole has there.
shard = quantize(x[16:32], spec, amax=x.abs().max(), rng_state=rng_state, origin=(16, 0))
assert torch.equal(shard.qdata, a.qdata[16:32])
print("the same rng_state gives the same bits, and a shard those of the whole")
