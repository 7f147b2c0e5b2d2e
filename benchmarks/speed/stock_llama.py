"""Llamas of transformers with random weights, made on the device: dense, or quantized as a user would."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torchao.quantization import quantize_

from benchmarks.llama import LLAMA_1B, LLAMA_8B, SMOLLM2_135M, Shape
from nvfp4_tensor import NVFP4WeightOnlyConfig
from nvfp4_tensor.sizes import stored_bytes

SHAPES = {
    "llama-8b": LLAMA_8B,
    "llama-1b": LLAMA_1B,
    "smollm2": SMOLLM2_135M,
    "tiny": Shape(layers=2, hidden=128, heads=2, kv_heads=1, head_dim=64, ffn=256, vocab=512, rope_theta=10_000.0),
}
"""Shapes of published models, and of one for tests."""

WEIGHTS = ("bf16", "NVFP4", "NVFP4, head", "NVFP4, fp8")
"""Of the linears. The output layer is dense unless ``head`` stands there. fp8: activations of many rows, too."""


class Clock:
    """A stopping criterion of ``generate`` that never stops it.

    first, last: seconds on the clock when the first and the last token were there.
    """

    first: float | None = None
    last: float

    def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if self.first is None and ids.is_cuda:
            torch.cuda.synchronize()
        self.last = time.perf_counter()
        self.first = self.first or self.last
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


def stock_llama(shape: Shape, weights: str, device: torch.device, tied: bool = False) -> nn.Module:
    """Return a LlamaForCausalLM in bfloat16 with Gaussian weights; its text never ends by itself.

    tied: the output layer is the embedding.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.ffn, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        rope_theta=shape.rope_theta, rms_norm_eps=shape.eps, max_position_embeddings=8192, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    rotary = type(model.model.rotary_emb)(model.config).to(device)
    model.to_empty(device=device).tie_weights()
    model.model.rotary_emb = rotary
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5) if parameter.dim() > 1 else nn.init.ones_(parameter)
    quantize(model.eval().requires_grad_(False), weights)
    model.generation_config.eos_token_id = None
    return model


def quantize(model: nn.Module, weights: str) -> None:
    """Quantize the linears of the layers, and the output layer too if ``weights`` says so."""
    if weights != "bf16":
        config = NVFP4WeightOnlyConfig(activations="fp8" if weights.endswith("fp8") else None)
        quantize_(model if weights.endswith("head") else model.model, config)


def twin(model: nn.Module) -> nn.Module:
    """Return another model with the same weights in the same memory, for another way to generate."""
    with torch.device("meta"):
        other = type(model)(model.config)
    other.load_state_dict(model.state_dict(), assign=True)
    other.model.rotary_emb = model.model.rotary_emb
    other.generation_config = model.generation_config
    return other.eval().requires_grad_(False)


def bytes_of_a_token(model: nn.Module, length: int, batch: int, coded: bool = False) -> int:
    """Return the bytes that one step reads at least: the linears and ``length`` tokens of the cache.

    coded: of one in NVFP4, with a block scale per 16 elements and a factor per head.
    """
    config, dim = model.config, model.config.head_dim
    linears = sum(stored_bytes(module.weight) for module in model.modules() if isinstance(module, nn.Linear))
    cache = cache_bytes(config.num_hidden_layers, config.num_key_value_heads, dim, length, batch)
    return linears + (cache * (dim // 2 + dim // 16 + 1) // (2 * dim) if coded else cache)


def cache_bytes(layers: int, kv_heads: int, head_dim: int, length: int, batch: int) -> int:
    """Return the bytes of ``length`` keys and values in bfloat16."""
    return 2 * 2 * layers * kv_heads * head_dim * length * batch


def random_prompt(shape: Shape, batch: int, length: int, device: torch.device) -> Tensor:
    """Return token ids, int64 (batch, length)."""
    return torch.randint(shape.vocab, (batch, length), generator=torch.Generator().manual_seed(1)).to(device)
