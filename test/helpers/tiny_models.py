"""Tiny models of transformers with random weights, one of each family that native decoding knows."""

import torch
import transformers
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4WeightOnlyConfig

SIZES = {
    "vocab_size": 300, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WINDOW = 12
MORE = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Mistral": {"sliding_window": WINDOW},
    "Qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "Qwen3": {},
    "Gemma2": {"sliding_window": WINDOW},
    "Gemma3": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "Phi3": {"partial_rotary_factor": 0.5},
    "SmolLM3": {},
    "Olmo2": {},
    "Granite": {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1,
                "logits_scaling": 8.0},
    "Mixtral": {"num_local_experts": 4, "sliding_window": WINDOW},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 64, "num_experts_per_tok": 2},
    "GptOss": {"num_local_experts": 4, "sliding_window": WINDOW, "rope_parameters": {
        "rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}},
}  # fmt: skip
"""Arguments of each family's config, chosen so that what is special about it has an effect."""

MIXTURES = ("Mixtral", "Qwen3Moe", "GptOss")
"""Families with a router, whose ties fall by the last bit: then a token has other experts, and later tokens read it."""


def tiny_model(family, dtype=torch.bfloat16, quantized=True, **changes):
    """Return a model of the family in evaluation mode; its layers, not its output layer, are NVFP4 if ``quantized``."""
    config_class = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    config = config_class(**{**SIZES, **MORE.get(family, {}), **changes})
    if family == "Gemma2":  # transformers 5.17 and older choose sdpa, which has no soft caps
        config._attn_implementation = "eager"
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype).eval()
    for parameter in model.parameters():  # as large as those of a trained model: attention is not flat
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        elif not parameter.any():  # biases, and norms that add one
            torch.nn.init.normal_(parameter, std=0.2)
    if quantized:
        quantize_(model.base_model, NVFP4WeightOnlyConfig(experts=True))
    model.generation_config.eos_token_id = None
    return model
