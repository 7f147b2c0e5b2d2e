"""Fine-tune a real model whose frozen weights are NVFP4: python tutorials/05_lora_on_a_language_model.py

SmolLM2-135M-Instruct with peft's LoRA, in float32 on a CPU. Its gradients are compared with those of the decoded model,
and it is trained for a few steps.
"""

import copy
import time

import torch
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Tensor, NVFP4WeightOnlyConfig

try:
    import peft

    from nvfp4_cli.demo.model import evaluation_tokens, gguf_path, load_model

    gguf_path()
except (ImportError, FileNotFoundError) as missing:
    raise SystemExit(f"this tutorial needs peft and the packages of the demo: {missing}") from None

TOKENS, STEPS = 96, 6

dense, tokenizer = load_model()
tokens = evaluation_tokens(tokenizer, TOKENS * STEPS).view(STEPS, 1, TOKENS)
quantized = dense.float()
layers = quantized.model.layers
quantize_(layers, NVFP4WeightOnlyConfig())
decoded = copy.deepcopy(quantized)
for module in decoded.modules():
    if isinstance(getattr(module, "weight", None), NVFP4Tensor):
        module.weight = torch.nn.Parameter(module.weight.dequantize())


def with_adapters(model):
    """Add adapters of rank 8 to the attention projections, with a fixed seed, and freeze all other parameters."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def gradients(model):
    model.zero_grad()
    model(input_ids=tokens[0], labels=tokens[0]).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


quantized, decoded = with_adapters(quantized), with_adapters(decoded)
expected, got = gradients(decoded), gradients(quantized)
error = (got - expected).norm() / expected.norm()
print(f"gradients of {len(got)} adapter parameters against the decoded model's: difference {error:.1e}")
assert got.norm() > 0 and error < 1e-4

codes = [p.qdata.clone() for p in quantized.parameters() if isinstance(p, NVFP4Tensor)]
trained = [p for p in quantized.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=2e-3)
before = quantized(input_ids=tokens[0], labels=tokens[0]).loss.item()
start = time.perf_counter()
for step in range(STEPS):
    optimizer.zero_grad()
    loss = quantized(input_ids=tokens[step], labels=tokens[step]).loss
    loss.backward()
    optimizer.step()
    print(f"step {step + 1} of {STEPS}: loss {loss.item():.3f}")
after = quantized(input_ids=tokens[0], labels=tokens[0]).loss.item()
print(f"loss on the first text {before:.3f} -> {after:.3f}, {(time.perf_counter() - start) / STEPS:.1f} s per step")
assert after < 0.8 * before
frozen = [p for p in quantized.parameters() if isinstance(p, NVFP4Tensor)]
assert len(frozen) == len(codes) > 200
assert all(torch.equal(p.qdata, code) for p, code in zip(frozen, codes, strict=True))  # still 4.5 bits per element
