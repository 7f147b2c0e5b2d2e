"""Tables of model families: which linears servers join to one, and which matrices stay dense.

To support another model, add it to these tables. test/data/servers/joined.json has what servers join.
"""

from __future__ import annotations

JOINED_WHOLE = (
    ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"),
    ("q_proj", "k_proj", "v_proj", "b_proj", "f_proj", "g_proj"),
    ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj"),
    ("q_proj", "k_proj", "v_proj", "f_a_proj"),
    ("b_proj", "f_a_proj", "g_a_proj"),
)
"""Like :data:`JOINED`, but only if a module has all of them: others use some of these names apart."""

JOINED = (
    ("q_proj", "k_proj", "v_proj", "g_proj", "gate_proj", "o_gate_proj", "output_gate_proj",
     "index_q_proj", "index_k_proj", "index_v_proj", "indexer.index_qk_proj",
     "sparse_indexer_q", "sparse_indexer_k", "sparse_indexer_z"),
    ("gate_proj", "up_proj"),
    ("gate_proj", "dense_h_to_4h"),
    ("w1", "w3"),
    ("w1", "w2"),
    ("wq", "wk", "wv"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("to_q", "to_k", "to_v"),
    ("add_q_proj", "add_k_proj", "add_v_proj"),
    ("query_net", "key_net", "value_net"),
    ("key_proj", "value_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa", "g_proj"),
    ("wq_a", "wkv"),
    ("wkv", "wgate"),
    ("wk", "weights_proj"),
    ("wq_du", "wk_dv", "wv_dv", "wr_du"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
    ("f_b_proj", "g_b_proj"),
    ("c_fc_0", "c_fc_1"),
    ("fc1", "fc3"),
    ("input_mix_weight_down", "block_inject_weight"),
)  # fmt: skip
"""Linears of one module that vLLM, SGLang or TensorRT-LLM join to one linear. The joined linear has one per-tensor
scale, the largest of the group, and the block scales are not rescaled to it. Of several rows with two or more linears
of a module, the first one applies."""

ALSO_CALLED = {
    "f_proj": "forget_gate.f_proj", "f_a_proj": "forget_gate.f_a_proj", "f_b_proj": "forget_gate.f_b_proj",
    "wq_a": "q_a_proj", "wkv": "kv_proj", "wgate": "gate_proj", "gate_proj": "linear_gate",
    "wq_du": "q_proj.linear", "wk_dv": "k_proj.linear", "wv_dv": "v_proj.linear",
    "wr_du": "relative_position_bias.linear",
}  # fmt: skip
"""Other names of members of these rows: those of transformers' models, or of the files that it writes."""

NOT_LINEAR = (
    "*embed*", "*wte.*", "*wpe.*", "*tok_emb*", "*pos_emb*", "*shared.weight", "transformer.w", "*norm", "*norm[0-9]",
    "*relative_attention_bias*",
)  # fmt: skip
"""Patterns of two-dimensional parameters that are not weights of linears."""

LEFT_DENSE = {
    "output layer": (
        "*lm_head*", "*output_layer*", r"re:(?!.*\.\d+\.)(.*\.)?(output|head)$", "*predictions.decoder",
        "*score.weight", "*classifier*", "*shared_head.head*",
    ),
    "router of experts": (
        "*.router.*", "*mlp.gate.weight", "*block_sparse_moe.gate.weight", "*feed_forward.gate.weight",
        "*shared_expert_gate*",
    ),
    "gate of a linear attention": (
        "*in_proj_a", "*in_proj_b", "*in_proj_ba", "*.a_proj", "*.b_proj", "*.f_a_proj", "*.f_b_proj",
    ),
    "indexer of a sparse attention": ("*.weights_proj",),
    "layer of a drafter": ("mtp.*", "*.mtp.*", "*eh_proj"),
    "convolution": ("*conv1d*",),
    "encoder of images or audio": ("*vision*", "*visual*", "*audio*", "*image_embed*", "*multi_modal_projector*",
                                   "*mm_projector*"),
    "embedder of a diffusion model": ("*embedder*", "*time_embed.*", "*time_text_embed.*"),
    "modulation of a norm": (r"re:.*norm[^.]*\.linear$",),
    "adapter": ("*lora_A*", "*lora_B*"),
}  # fmt: skip
"""Why linears stay dense by default, and their patterns. Routers of other names, and weights of a few rows, are found
by their shapes (model_plan.py)."""

LM_HEAD = "lm_head.weight"
EMBEDDINGS = ("*embed_tokens", "*wte", "*word_embeddings")
"""Patterns of the modules whose weight an output layer may share."""

TRANSPOSED_LINEARS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
"""Values of model_type whose linears are transformers' Conv1D, with weights stored as (K, N)."""

CONV1D = ("*.c_attn", "*.c_fc", "*.c_proj", "*.q_attn")
"""Patterns of these linears."""

JOINED_AS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
}
"""Joined parameters of models in memory, and the modules of a checkpoint that each is joined from. The last two apply
only to experts."""

MIXTRAL_EXPERTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""The names of an expert's weights in checkpoints of :data:`MIXTRAL_TYPES`."""

EXPERTS_IN_FILES: tuple[dict[str, str], ...] = (
    {},
    MIXTRAL_EXPERTS,
    {"gate_proj": "fc1", "up_proj": "fc3", "down_proj": "fc2"},
)
"""The names of an expert's weights in checkpoints of any family, the last those of Dots 3's vision."""

MIXTRAL_TYPES = ("mixtral", "minimax", "minimax_m2")
"""Values of model_type whose checkpoints call ``mlp`` ``block_sparse_moe`` and use :data:`MIXTRAL_EXPERTS`."""
