"""Tables of model families: how checkpoints name the weights of each, and how they store them.

To support another model, add it to these tables.
"""

from __future__ import annotations

import dataclasses

JOINED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("wq", "wk", "wv"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
)
"""Linears of one module that vLLM, SGLang and TensorRT-LLM join to one linear. The joined linear has one per-tensor
scale, the largest of the group, and the block scales are not rescaled to it."""

NOT_LINEAR = ("*embed*", "*wte.*", "*wpe.*", "*tok_emb*", "*shared.weight", "*norm*", "*relative_attention_bias*")
"""Patterns of two-dimensional parameters that are not weights of linears."""

LEFT_DENSE = (
    "*lm_head*", "*output_layer*", "*.output.weight", "output.weight", "*score.weight", "*classifier*", "*.router.*",
    "*mlp.gate.weight", "*block_sparse_moe.gate.weight", "*feed_forward.gate.weight", "*shared_expert_gate*",
    "*conv1d*",
    "*vision*", "*visual*", "*audio*", "*multi_modal_projector*", "*mm_projector*",
)  # fmt: skip
"""Patterns of linears that :func:`checkpoints.quantize` leaves dense by default: output layers, routers of experts, and
encoders of images and audio."""

CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale")
"""Suffixes of the scales of a quantized key-value cache."""

LM_HEAD = "lm_head.weight"
EMBEDDINGS = ("*embed_tokens", "*wte", "*word_embeddings")
"""Patterns of the modules whose weight an output layer may share."""

JOINED_AS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
"""Joined parameters of models in memory, and the modules of a checkpoint that each is joined from. The last one applies
only to experts."""

MIXTRAL_EXPERTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""The names of an expert's weights in checkpoints of :data:`MIXTRAL_TYPES`."""

MIXTRAL_TYPES = ("mixtral", "minimax", "minimax_m2")
"""Values of model_type whose checkpoints call ``mlp`` ``block_sparse_moe`` and use :data:`MIXTRAL_EXPERTS`."""

TRANSPOSED_EXPERTS = ("llama4", "llama4_text", "gpt_oss")
"""Values of model_type whose experts are one tensor (E, K, N) per layer. ModelOpt writes their codes as (E, K / 2, N),
and vLLM transposes them again."""

TRANSPOSED_LINEARS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
"""Values of model_type whose weights are stored as (K, N): blocks along the last dimension would be along N."""


@dataclasses.dataclass(frozen=True)
class GGUFArchitecture:
    """An architecture of llama.cpp and the transformers class that it corresponds to.

    Attributes:
        name: general.architecture in a GGUF file.
        model_type, model_class: the names in config.json.
        permutes: whether rows of q and k are stored in the order of llama.cpp's rotary embedding, which rotates
            adjacent rows.
        scales_ffn: whether llama.cpp multiplies by the per-tensor scales of the feed-forward weights. For qwen2 it
            reads them and does not use them (llama-cpp-python 0.3.36).
        experts: the module of a layer that has the experts, "" for a dense model.
    """

    name: str
    model_type: str
    model_class: str
    permutes: bool = False
    scales_ffn: bool = True
    experts: str = ""

    def ignores_scale(self, name: str) -> bool:
        """Return whether llama.cpp ignores the per-tensor scale of a weight, given by its transformers name."""
        return not self.scales_ffn and ".mlp." in name


GGUF_ARCHITECTURES = (
    GGUFArchitecture("llama", "llama", "LlamaForCausalLM", permutes=True),
    GGUFArchitecture("llama", "mistral", "MistralForCausalLM", permutes=True),
    GGUFArchitecture("qwen2", "qwen2", "Qwen2ForCausalLM", scales_ffn=False),
    GGUFArchitecture("qwen3", "qwen3", "Qwen3ForCausalLM"),
    GGUFArchitecture("llama", "mixtral", "MixtralForCausalLM", permutes=True, experts="block_sparse_moe"),
    GGUFArchitecture("qwen3moe", "qwen3_moe", "Qwen3MoeForCausalLM", experts="mlp"),
)
"""The architectures that are read and written. A file is read as the first one with its name, among those with experts
or among those without."""
