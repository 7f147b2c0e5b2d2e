"""Tables of model families: how checkpoints name the weights of each, and how they store them.

To support another model, add it to these tables.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nvfp4_tensor.quantization.model_families import MIXTRAL_EXPERTS

CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", "k_proj.k_bias", "v_proj.v_bias")
"""Suffixes of the scales, and offsets, of a quantized key-value cache."""

ROUTER_SCALE = ".mlp.gate.global_scale"
"""The suffix of a parameter of Inkling's routers, which is not the scale of a quantization."""

TRANSPOSED_EXPERTS = ("llama4", "llama4_text", "gpt_oss")
"""Values of model_type whose experts are one tensor (E, K, N) per layer. ModelOpt writes their codes as (E, K / 2, N),
and vLLM transposes them again."""

EXPERT_STACKS = {
    ".experts.gate_up_proj": ".experts.down_proj",
    ".block_sparse_moe.input_linear.weight": ".block_sparse_moe.output_linear.weight",
    ".experts.fc1.weight": ".experts.fc2.weight",
    ".experts.w13_weight": ".experts.w2_weight",
}
"""Ends of the names of tensors with the gate and up, and with the down projections, of all experts of a layer. They are
(E, N, K) or (E, K, N)."""

INTERLEAVED = ".w13_weight"
"""The end of the name of those in which rows of gate and up alternate, instead of gate above up."""

JOINED_ROWS: Mapping[tuple[str, str], Callable[[Mapping[str, Any]], Mapping[str, int]]] = {
    ("hrm_text", ".mlp.gate_up_proj"): lambda c: dict.fromkeys((".mlp.gate_proj", ".mlp.up_proj"), 1),
    ("hrm_text", ".attn.gqkv_proj"): lambda c: {f".self_attn.{name}_proj": 1 for name in ("gate", "q", "k", "v")},
    ("sarvam_moe", ".attention.query_key_value"): lambda c: {
        ".attention.q_proj": c["num_attention_heads"],
        ".attention.k_proj": c["num_key_value_heads"],
        ".attention.v_proj": c["num_key_value_heads"],
    },
    ("lara_mini", ".linear_attn.in_proj"): lambda c: {
        ".linear_attn.in_proj_qkv": 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"]
        + c["linear_num_value_heads"] * c["linear_value_head_dim"],
        ".linear_attn.in_proj_z": c["linear_num_value_heads"] * c["linear_value_head_dim"],
        ".linear_attn.in_proj_b": c["linear_num_value_heads"],
        ".linear_attn.in_proj_a": c["linear_num_value_heads"],
    },
}
"""By model_type and the end of a stored weight's name: the linears of transformers that have its rows, one after the
other, and their shares of the rows, from config.json."""

_MASKS = re.compile(r".*(attn|attention)\.(bias|masked_bias|causal_mask)")


def is_mask(name: str, shape: Sequence[int]) -> bool:
    """Return whether a tensor is a causal mask, which earlier releases of transformers saved and models compute."""
    return _MASKS.fullmatch(name) is not None and len(shape) in (0, 4)


@dataclasses.dataclass(frozen=True)
class GGUFArchitecture:
    """An architecture of llama.cpp and the transformers class that it corresponds to.

    Attributes:
        name: general.architecture in a GGUF file.
        model_type, model_class: the names in config.json.
        modules: transformers' modules with parameters, those of layer 0 for all layers, and ``experts.up_proj`` for all
            experts. Of these, the architecture has those that the package gguf knows of it.
        permutes: whether rows of q and k are stored in the order of llama.cpp's rotary embedding, which rotates
            adjacent rows.
        scales_ffn: whether llama.cpp multiplies by the per-tensor scales of the feed-forward weights. For qwen2 and
            others it reads them and does not use them (llama-cpp-python 0.3.36).
        experts: the module of a layer that has the experts, "" for a dense model.
        norm_offset: what llama.cpp's weights of norms have added to transformers'.
        activation: the only hidden_act, or hidden_activation, that llama.cpp computes.
        biases: the modules of a layer that may have a bias; None for those that transformers knows.
        settings: names of settings in config.json by the usual ones, for an architecture with others.
    """

    name: str
    model_type: str
    model_class: str
    modules: tuple[str, ...]
    permutes: bool = False
    scales_ffn: bool = True
    experts: str = ""
    norm_offset: float = 0.0
    activation: str = "silu"
    biases: tuple[str, ...] | None = None
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def ignores_scale(self, name: str) -> bool:
        """Return whether llama.cpp ignores the per-tensor scale of a weight, given by its transformers name."""
        return not self.scales_ffn and ".mlp." in name


def _modules(*of_layer: str) -> tuple[str, ...]:
    usual = ("model.embed_tokens", "model.norm", "lm_head")
    return (*usual, *(f"model.layers.0.{module}" for module in (*_ATTENTION, *_NORMS, *of_layer)))


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_ATTENTION = (*_QKV, "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm")
_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_FFN = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_EXPERTS = ("mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj")
_MIXTRAL = ("block_sparse_moe.gate", *(f"block_sparse_moe.experts.{name}" for name in MIXTRAL_EXPERTS.values()))
_USUAL = _modules(*_FFN)
_GPT2 = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")

GGUF_ARCHITECTURES = (
    GGUFArchitecture("llama", "llama", "LlamaForCausalLM", _USUAL, permutes=True),
    GGUFArchitecture("llama", "mistral", "MistralForCausalLM", _USUAL, permutes=True),
    GGUFArchitecture("qwen2", "qwen2", "Qwen2ForCausalLM", _USUAL, scales_ffn=False),
    GGUFArchitecture("qwen3", "qwen3", "Qwen3ForCausalLM", _USUAL),
    GGUFArchitecture(
        "llama", "mixtral", "MixtralForCausalLM", _modules(*_MIXTRAL), permutes=True, experts="block_sparse_moe",
    ),
    GGUFArchitecture("qwen3moe", "qwen3_moe", "Qwen3MoeForCausalLM", _modules("mlp.gate", *_EXPERTS), experts="mlp"),
    GGUFArchitecture(
        "gemma2", "gemma2", "Gemma2ForCausalLM", _USUAL, scales_ffn=False, norm_offset=1.0,
        activation="gelu_pytorch_tanh", biases=_QKV,
    ),
    GGUFArchitecture(
        "gemma3", "gemma3_text", "Gemma3ForCausalLM", _USUAL, scales_ffn=False, norm_offset=1.0,
        activation="gelu_pytorch_tanh", biases=_QKV,
    ),
    GGUFArchitecture(
        "phi3", "phi3", "Phi3ForCausalLM", scales_ffn=False, biases=(),
        modules=tuple(name for name in _modules("self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj")
                      if not name.endswith(_QKV)),
    ),
    GGUFArchitecture(
        "smollm3", "smollm3", "SmolLM3ForCausalLM", _USUAL, permutes=True, scales_ffn=False, biases=_QKV,
    ),
    GGUFArchitecture("olmo2", "olmo2", "Olmo2ForCausalLM", _USUAL, scales_ffn=False, biases=_QKV),
    GGUFArchitecture(
        "granite", "granite", "GraniteForCausalLM", _USUAL, permutes=True, scales_ffn=False,
        biases=(*_QKV, "self_attn.o_proj", *_FFN),
    ),
    GGUFArchitecture(
        "gpt-oss", "gpt_oss", "GptOssForCausalLM", _modules("self_attn.sinks", "mlp.router", *_EXPERTS),
        scales_ffn=False, experts="mlp", biases=(*_QKV, "self_attn.o_proj", "mlp.router", *_EXPERTS),
    ),
    GGUFArchitecture(
        "gpt2", "gpt2", "GPT2LMHeadModel", scales_ffn=False, activation="gelu_new",
        modules=("transformer.wte", "transformer.wpe", "transformer.ln_f", "lm_head",
                 *(f"transformer.h.0.{module}" for module in _GPT2)),
        settings={"num_hidden_layers": "n_layer", "max_position_embeddings": "n_positions", "hidden_size": "n_embd",
                  "intermediate_size": "n_inner", "num_attention_heads": "n_head", "hidden_act": "activation_function",
                  "layer_norm_eps": "layer_norm_epsilon"},
    ),
)  # fmt: skip
"""The architectures that are read and written. A file is read as the first one with its name, among those with experts
or among those without."""
