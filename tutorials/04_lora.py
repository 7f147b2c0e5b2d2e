"""Train LoRA adapters on frozen NVFP4 weights with peft: python tutorials/04_lora.py"""

import torch
from torch import nn
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Config, NVFP4WeightOnlyConfig

try:
    import peft
except ImportError:
    raise SystemExit("this tutorial needs peft: pip install peft") from None

WEIGHTS = {"weight-only": NVFP4WeightOnlyConfig(), "W4A4": NVFP4Config()}


def make_model(config) -> nn.Module:
    """Create two NVFP4 linears with adapters of rank 8."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 64))
    quantize_(model, config)
    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["0", "2"]))


torch.manual_seed(1)
x = torch.randn(256, 128)
target = torch.tanh(x @ torch.randn(128, 64) / 8)

for name, config in WEIGHTS.items():
    model = make_model(config)
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = model.base_model.model[0].base_layer
    print(f"{name}: {sum(p.numel() for p in trained)} trained parameters on {frozen}")
    codes = frozen.weight.qdata.clone()
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"    loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert losses[-1] < 0.5 * losses[0]
    assert torch.equal(frozen.weight.qdata, codes)  # the weights are unchanged, 4.5 bits per element

    # To merge, peft needs a config to quantize the sum. This rounds again, so separate adapters are more accurate.
    with torch.no_grad():
        separate = model(x)
    for layer in model.modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer):
            layer.get_apply_tensor_subclass = lambda config=config: config
    merged = model.merge_and_unload()
    with torch.no_grad():
        error = (merged(x) - separate).norm() / separate.norm()
    print(f"    merged into {merged[0]}: output changes by {error:.1%}")
    assert error < 0.5
