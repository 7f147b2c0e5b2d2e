"""Quantize a model, compile it, save it and load it: python tutorials/02_quantize_a_model.py"""

import copy
import tempfile
from pathlib import Path

import torch
from torch import nn
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Config, NVFP4WeightOnlyConfig

torch.manual_seed(0)
dense = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)).to(torch.bfloat16)
x = torch.randn(8, 128, dtype=torch.bfloat16)
exact = dense(x)

# Weights only (W4A16): activations are not quantized.
model = quantized = copy.deepcopy(dense)
quantize_(model, NVFP4WeightOnlyConfig(four_over_six=True))
print(model)
weight_only = (model(x) - exact).float().norm() / exact.float().norm()

# Weights and activations (W4A4): activations are quantized in each call.
w4a4_model = copy.deepcopy(dense)
quantize_(w4a4_model, NVFP4Config())
w4a4 = (w4a4_model(x) - exact).float().norm() / exact.float().norm()
print(f"relative error: weight-only {weight_only:.4f}, W4A4 {w4a4:.4f}")
assert weight_only < w4a4 < 0.3

# Compile to one graph. backend="aot_eager" works without a C++ compiler; omit it to use Inductor.
compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
with torch.no_grad():
    assert torch.equal(compiled(x), model(x))

# A checkpoint is a state dict, which can be loaded with weights_only=True.
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "model.pt"
    torch.save(quantized.state_dict(), path)
    print(f"{path.stat().st_size} bytes on disk, {sum(2 * p.numel() for p in dense.parameters())} in bfloat16")
    again = copy.deepcopy(dense)
    again.load_state_dict(torch.load(path, weights_only=True), assign=True)
assert torch.equal(again(x), quantized(x))
