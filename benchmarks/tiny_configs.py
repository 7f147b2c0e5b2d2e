"""Tiny configurations of all families of transformers: the defaults of each family's config, with small sizes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

VOCABULARY = 128
HIDDEN, HEADS, HEAD_DIM = 64, 4, 16

SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), 128),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "embedding_size", "emb_dim", "embed_dim", "embedding_dim", "dim",
         "hidden_size_global", "attention_hidden_size", "word_embed_proj_dim", "out_hidden_size", "lru_width",
         "input_embedding_size", "output_embedding_size", "backbone_hidden_size", "encoder_hidden_size",
         "projector_input_dim", "projector_output_dim", "decoder_hidden_size"), 64),
    **dict.fromkeys(
        ("intermediate_size", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_dim", "dff", "dim_ff", "d_ff", "mlp_dim",
         "feed_forward_size", "ffn_hidden_size", "d_inner", "n_inner", "intermediate_size_mlp", "hidden_dim",
         "dense_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 128),
    **dict.fromkeys(
        ("num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "depth", "num_encoder_layers",
         "num_decoder_layers", "num_blocks"), 2),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
         "num_encoder_attention_heads", "num_decoder_attention_heads", "attention_heads", "swa_num_attention_heads",
         "linear_num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "kv_n_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "dim_head", "d_kv", "d_head", "attention_head_size", "kv_channels",
                     "attention_head_dim", "global_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_intermediate_size"), 64),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), 256),
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "qk_head_dim": 32, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "mamba_n_heads": 8, "mamba_num_heads": 8, "mamba_d_head": 16, "mamba_head_dim": 16, "mamba_d_state": 16,
    "mamba_chunk_size": 16, "mamba_d_ssm": 128, "ssm_state_size": 16, "state_size": 16, "chunk_size": 16,
    "mamba_dt_rank": 16, "time_step_rank": 16, "mamba_headdim": 16, "n_mamba_heads": 2,
    "num_hidden_layers": 4, "first_k_dense_replace": 1, "rotary_dim": 16, "query_pre_attn_scalar": 16,
    "sliding_window": 16, "image_size": 32, "num_mel_bins": 16, "input_feat_size": 16,
}  # fmt: skip
"""Values by the names of settings, in all families that have them."""

_LATENT = {"num_key_value_heads": 4}  # transformers takes as many keys as heads from the latent
_HYBRID = ["linear_attention", "full_attention"] * 2
_DOTS3 = _LATENT | {
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 32, "swa_kv_lora_rank": 32,
    "swa_head_dim": 32, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 16, "shared_experts_intermediate_size": 64,
    "sliding_window_size": 16,
}  # fmt: skip
_QWEN4 = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
    "indexer_compress_ratio": 2, "ple_embed_dim": 64, "ngram_vocab_size_base": 64, "split_ngram_parts": 2,
}  # fmt: skip
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}

FAMILIES: dict[str, dict[str, Any]] = {
    "axk1": _LATENT,
    "axk2": _LATENT,
    "bailing_hybrid": _LATENT | {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 100},
    "cohere_compass_text": {
        "rope_parameters": {
            each: {"rope_type": "default", "rope_theta": 10000.0} for each in ("full_attention", "sliding_attention")
        }
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64, "pyramid_num_routed": [-1, -1, 4, 4]},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64, "downsample_hidden_size": 16},
    },
    "dots3_note_text": _DOTS3,
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4": {"vision_config": {"position_embedding_size": 64}},
    "gemma4_unified": {"vision_config": {"mm_embed_dim": 64, "mm_posemb_size": 64, "patch_size": 4}},
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 4}
    },
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _LATENT,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": _HYBRID},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": _LATENT | {"layer_types": _HYBRID},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8},
    "minicpm3": _LATENT,
    "nemotron": {"num_key_value_heads": 2},
    "phi4_multimodal": {"audio_config": {"nemo_conv_channels": 16, "ext_pw_out_channel": 64}},
    "qwen2_vl_text": _MROPE,
    "qwen2_5_vl_text": _MROPE,
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": (16, 48), "axial_pos_shape": (16, 16)},
    "roc_bert": {"shape_embed_dim": 16, "pronunciation_embed_dim": 16, "shape_vocab_size": 128},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "youtu": _LATENT,
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""What else a family needs; nested settings under the name of the nested config."""


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """Return the config of a small model of a family."""
    return _shrunk(CONFIG_MAPPING[model_type], {**FAMILIES.get(model_type, {}), **changes})


def _shrunk(config_class: type[PreTrainedConfig], changes: Mapping[str, Any]) -> PreTrainedConfig:
    parameters = inspect.signature(config_class.__init__).parameters
    values = {
        name: SIZES[name] for name, each in parameters.items() if name in SIZES and (each.default or name == "head_dim")
    }
    for name in parameters:
        if name.endswith("token_id") or name.endswith("token_index"):
            values[name] = 1
    nested = config_class.sub_configs
    for name, each in (_nested(config_class) if nested else {}).items():
        values[name] = _shrunk(each, {**FAMILIES.get(each.model_type, {}), **changes.get(name, {})})
    return config_class(**{**values, **{name: value for name, value in changes.items() if name not in nested}})


def _nested(config_class: type[PreTrainedConfig]) -> dict[str, type[PreTrainedConfig]]:
    """Return the classes of the configs that a config has by default."""
    specs = getattr(config_class, "sub_configs_defaults", None)
    if specs:
        return {
            k: v if isinstance(v, type) else CONFIG_MAPPING[v.model_type] for k, v in specs.items() if v is not None
        }
    usual = config_class()
    configs = {name: getattr(usual, name, None) for name in config_class.sub_configs}
    return {name: type(each) for name, each in configs.items() if isinstance(each, PreTrainedConfig)}
