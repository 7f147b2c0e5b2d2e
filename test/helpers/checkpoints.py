"""Checkpoints of tensors in memory, and the tensors of small models."""

from pathlib import Path
from typing import Any

import torch

from nvfp4_tensor import quantize
from nvfp4_tensor.checkpoints import Checkpoint, LinearParts
from nvfp4_tensor.checkpoints.models.saving import ModelCheckpoint

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}

Q, DOWN = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"
_MIXTURE = {"num_experts_per_tok": 2, "intermediate_size": 192}
EXPERTS = {
    "mixtral": TINY | _MIXTURE | {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4,
    },
    "qwen3_moe": TINY | _MIXTURE | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4, "head_dim": 32,
        "moe_intermediate_size": 192, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
}  # fmt: skip
"""Small mixtures of four experts, by model_type."""


InMemory = ModelCheckpoint
"""A checkpoint of tensors by name, which can be NVFP4Tensors."""


def tiny_tensors(config: dict[str, Any] = TINY, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Return the state dict of a dense model with that configuration and random weights."""
    import transformers

    settings = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(config["model_type"], **settings), dtype=dtype
    )
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    return {name: t.detach() for name, t in model.state_dict().items()}


def expert_tensors(kind: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Return the tensors of one of :data:`EXPERTS` by their names in files, with quantized attention and experts."""
    tensors: dict[str, torch.Tensor] = {}
    gate, up, down = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")

    def add(name: str, w: torch.Tensor) -> None:
        w[0, 0] = 1.5 + len(tensors) / 64  # the largest: no two per-tensor scales are equal
        tensors[name] = quantize(w.contiguous())

    for name, t in tiny_tensors(EXPERTS[kind], dtype).items():
        name = name.replace(".mlp.", ".block_sparse_moe.") if kind == "mixtral" else name
        prefix, _, last = name.rpartition(".")
        for i, matrix in enumerate(t) if t.dim() == 3 else ():
            found = zip((gate, up), matrix.chunk(2), strict=True) if last == "gate_up_proj" else [(down, matrix)]
            for linear, w in found:
                add(f"{prefix}.{i}.{linear}.weight", w)
        if "_proj.weight" in name:
            add(name, t)
        elif t.dim() < 3:
            tensors[name] = t
    return tensors


def quantized(tensors: dict[str, torch.Tensor], spec=None) -> dict[str, torch.Tensor]:
    """Quantize every projection of the blocks."""
    return {name: quantize(t, spec) if "_proj.weight" in name else t for name, t in tensors.items()}


def same_parts(a: LinearParts, b: LinearParts) -> bool:
    """Whether all bytes are equal."""
    return (
        torch.equal(a.qdata, b.qdata)
        and torch.equal(a.scale.view(torch.uint8), b.scale.view(torch.uint8))
        and torch.equal(a.per_tensor_scale, b.per_tensor_scale)
        and a.columns == b.columns
        and a.quantizes_activations == b.quantizes_activations
        and (a.input_scale is None) == (b.input_scale is None)
        and (a.input_scale is None or torch.equal(a.input_scale, b.input_scale))
    )


def write_gguf(
    path: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] = TINY, **options: Any
) -> Checkpoint:
    """Write a GGUF file of these tensors and open it; it has no tokenizer unless one is given."""
    from nvfp4_tensor.checkpoints.formats.gguf.format import FORMAT

    options.setdefault("tokenizer", None)
    FORMAT.write(InMemory(tensors, config), path, progress=False, **options)
    return FORMAT.read(path)
