"""What llama.cpp expects of single families: settings beyond the usual ones, and what it fixes in its code.

llama.cpp ignores settings that it does not know, and computes other numbers. So a model is refused unless all its
settings are those that llama.cpp reads or fixes (as its sources say in llama-cpp-python 0.3.36).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nvfp4_tensor._compat.frames import warn_user
from nvfp4_tensor.checkpoints.architectures import GGUFArchitecture

ROPE_TYPES = {
    "gemma2": ("default",), "gemma3": ("default", "linear"), "phi3": ("default", "longrope"), "smollm3": ("default",),
    "olmo2": ("default",), "gpt-oss": ("default", "yarn"),
}  # fmt: skip
"""The types of rope scaling per architecture, if not both default and llama3."""

_GEMMA_LAYERS = {"gemma2": 46, "gemma3": 62}
"""The numbers of layers of the 27B models, for which llama.cpp scales attention by other sizes."""
PERIODS = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2}
"""The architectures for which llama.cpp applies the sliding window. Each layer of this number has full attention."""
_SMOLLM3_PERIOD = 4
"""Each layer of this number has no rotary embedding."""
_LOCAL_THETA = 10000.0
_REQUIRED = {
    "gemma2": ("head_dim", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping"),
    "gemma3": ("head_dim", "sliding_window"), "smollm3": ("rope_theta",),
    "gpt-oss": ("head_dim", "sliding_window", "rope_theta"),
}  # fmt: skip
"""Settings whose defaults differ between families."""
FIXED: dict[str, dict[str, Sequence[Any]]] = {
    "qwen3moe": {"norm_topk_prob": (True,), "decoder_sparse_step": (None, 1), "mlp_only_layers": (None, [])},
    "gemma2": {"tie_word_embeddings": (None, True), "use_bidirectional_attention": (None, False)},
    "gemma3": {"attn_logit_softcapping": (None,), "use_bidirectional_attention": (None, False)},
    "smollm3": {"use_sliding_window": (None, False)},
    "olmo2": {"tie_word_embeddings": (None, False)},
    "gpt-oss": {
        "swiglu_limit": (None, 7.0), "attention_bias": (None, True), "tie_word_embeddings": (None, False),
        "use_bidirectional_attention": (None, False),
    },
    "gpt2": {
        "scale_attn_weights": (None, True), "scale_attn_by_inverse_layer_idx": (None, False),
        "add_cross_attention": (None, False),
    },
}  # fmt: skip
"""The values of settings that llama.cpp computes; None for a missing one. The last one is its own."""
_YARN = {"beta_fast": (None, 32.0), "beta_slow": (None, 1.0), "attention_factor": (None,), "mscale": (None,),
         "mscale_all_dim": (None,)}  # fmt: skip
_OWN: dict[str, dict[str, tuple[str, Callable[[Any], Any], Any]]] = {
    "gemma2": {
        "final_logit_softcapping": ("final_logit_softcapping", float, 30.0),
        "attn_logit_softcapping": ("attn_logit_softcapping", float, 50.0),
    },
    "gemma3": {
        "final_logit_softcapping": ("final_logit_softcapping", float, None),
        "attn_logit_softcapping": ("attn_logit_softcapping", float, None),
    },
    "granite": {
        "attention_multiplier": ("attention.scale", float, 1.0),
        "embedding_multiplier": ("embedding_scale", float, 1.0),
        "residual_multiplier": ("residual_scale", float, 1.0),
        "logits_scaling": ("logit_scale", float, 1.0),
    },
}
"""Settings of a family by their names in config.json: those in GGUF, their types, and what a missing one means."""


LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
"""The tensors with the factors of Phi-3's rope scaling, longrope, for long and for short texts."""


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the rotary embedding; of full attention, if each kind of layer has its own."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope.get("full_attention", rope)


def decimal(value: Any) -> Any:
    """Return the shortest decimal that rounds to the same float32, such as 1e-05."""
    return value if isinstance(value, int) else float(f"{value:.7g}")


def rope_type(config: dict[str, Any]) -> str:
    """Return the type of rope scaling; "default" without any."""
    rope = rope_of(config)
    return rope.get("rope_type") or rope.get("type") or "default"


def check_family(config: dict[str, Any], architecture: GGUFArchitecture) -> None:
    """Raise a ValueError if llama.cpp would compute something else with this configuration."""
    name, rope = architecture.name, rope_of(config)
    given = config | {"rope_theta": rope.get("rope_theta") or config.get("rope_theta")}
    for key in _REQUIRED.get(name, ()):
        if not given.get(key):  # transformers' default is another than the one here
            raise ValueError(f"config.json has no {key}, which llama.cpp needs for {name}")
    _expect(name, config, FIXED.get(name, {}))
    _expect(name, config, _computed(config, name))
    if name == "gpt-oss" and rope_type(config) == "yarn":
        _expect(name, rope, _YARN)
        if rope.get("truncate") is False:
            warn_user("llama.cpp rounds the bounds of yarn's ramp, as with truncate true: a few frequencies differ")
    if name == "granite":
        for key in _OWN[name]:
            if config.get(key) == 0:
                raise ValueError(f"llama.cpp takes {key} 0 of {name} for a missing one")


def _computed(config: dict[str, Any], name: str) -> dict[str, Sequence[Any]]:
    """Return the values of settings that llama.cpp computes from others, as in :data:`FIXED`."""
    layers, allowed = config.get("num_hidden_layers", 0), dict[str, Sequence[Any]]()
    of_head = config.get("hidden_size", 0) // (config.get("num_attention_heads") or 1)
    if period := PERIODS.get(name):
        slides = [(layer + 1) % period for layer in range(layers)]
        allowed["layer_types"] = None, ["sliding_attention" if each else "full_attention" for each in slides]
        if not config.get("layer_types"):
            allowed["sliding_window_pattern"] = None, period
    if name in _GEMMA_LAYERS:
        scalar = of_head if layers == _GEMMA_LAYERS[name] else config["head_dim"]
        allowed["query_pre_attn_scalar"] = (None, 256) if scalar == 256 else (scalar,)
    if name in ("phi3", "olmo2", "smollm3", "granite"):
        allowed["head_dim"] = None, of_head
    if name == "smollm3":
        allowed["no_rope_layers"] = None, _no_rope_layers(layers)
        allowed["layer_types"] = None, ["full_attention"] * layers
        if not config.get("no_rope_layers"):
            allowed["no_rope_layer_interval"] = None, _SMOLLM3_PERIOD
    return allowed


def _no_rope_layers(layers: int) -> list[int]:
    return [int((layer + 1) % _SMOLLM3_PERIOD != 0) for layer in range(layers)]


def _expect(architecture: str, config: dict[str, Any], allowed: Mapping[str, Sequence[Any]]) -> None:
    for key, values in allowed.items():
        if config.get(key) not in values:
            raise ValueError(f"llama.cpp supports {architecture} with {key} {values[-1]}, not {config.get(key)}")


def family_settings(
    config: dict[str, Any], architecture: GGUFArchitecture, head_dim: int
) -> dict[str, int | float | str]:
    """Return the keys and values of a family, without the architecture's prefix."""
    name, rope, kind = architecture.name, rope_of(config), rope_type(config)
    settings: dict[str, int | float | str] = {}
    if name in PERIODS:
        settings["attention.sliding_window"] = int(config["sliding_window"])
    for key, (setting, cast, default) in _OWN.get(name, {}).items():
        if value := config.get(key, default):
            settings[setting] = cast(value)
    if name == "gemma3":
        local = (config.get("rope_parameters") or {}).get("sliding_attention", {})
        if local.get("rope_type", "default") != "default":
            raise ValueError(
                f"rope scaling of type {local['rope_type']!r} of sliding attention is not supported in GGUF"
            )
        theta = local.get("rope_theta") or config.get("rope_local_base_freq") or _LOCAL_THETA
        settings["rope.freq_base_swa"] = float(theta)
        if not (rope.get("rope_theta") or config.get("rope_theta")):
            settings["rope.freq_base"] = 1e6  # transformers' default for Gemma 3
    if kind in ("linear", "yarn"):
        settings |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"] / rope["factor"]
        settings["rope.scaling.original_context_length"] = int(original)
    if name == "phi3":
        part = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
        settings["rope.dimension_count"] = int(head_dim * part)
    if kind == "longrope":
        original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
        if not original:
            raise ValueError("config.json has no original_max_position_embeddings, which llama.cpp needs for longrope")
        original = int(original)
        settings["rope.scaling.original_context_length"] = original
        scaled = max(config["max_position_embeddings"] / original, 1.0)
        usual = math.sqrt(1 + math.log(scaled) / math.log(original))
        settings["rope.scaling.attn_factor"] = float(rope.get("attention_factor") or usual)
    return settings


def long_and_short_factors(config: dict[str, Any], dimensions: int) -> dict[str, Tensor]:
    """Return :data:`LONG` and :data:`SHORT`, float32 (dimensions / 2,); nothing without this rope scaling.

    llama.cpp uses the long ones if its context is longer than the original length, transformers if a text is.

    Raises:
        ValueError: config.json does not have a factor for each frequency.
    """
    if rope_type(config) != "longrope":
        return {}
    tensors = {}
    for name, key in (LONG, "long_factor"), (SHORT, "short_factor"):
        factors = rope_of(config).get(key) or ()
        if len(factors) != dimensions // 2:
            raise ValueError(f"config.json has {len(factors)} values of {key}, expected {dimensions // 2}")
        tensors[name] = torch.tensor(factors, dtype=torch.float32)
    return tensors


def longrope_of(factors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return transformers' fields for :func:`long_and_short_factors` of a file with these settings."""
    original = int(settings["rope.scaling.original_context_length"])
    rope = {
        "rope_type": "longrope",
        "long_factor": [decimal(value) for value in factors[LONG].tolist()],
        "short_factor": [decimal(value) for value in factors[SHORT].tolist()],
        "original_max_position_embeddings": original,
        "attention_factor": decimal(settings.get("rope.scaling.attn_factor", 1.0)),
    }
    return {"rope_scaling": rope, "original_max_position_embeddings": original}


def family_config(settings: dict[str, Any], architecture: GGUFArchitecture) -> dict[str, Any]:
    """Return the fields of transformers' configuration for the keys of a GGUF file of this family.

    Raises:
        ValueError: the file has a setting of the family that transformers' configuration here has no field for.
    """
    name = architecture.name
    layers, size = int(settings["block_count"]), settings.get("attention.key_length")
    config: dict[str, Any] = {}
    full = {"rope_type": "default", "rope_theta": decimal(settings.get("rope.freq_base", 10000.0))}
    kind, factor = settings.get("rope.scaling.type", "linear"), settings.get("rope.scaling.factor", 0.0)
    if name in PERIODS:
        pattern = settings.get("attention.sliding_window_pattern", PERIODS[name])
        if isinstance(pattern, int):
            pattern = [layer % pattern < pattern - 1 for layer in range(layers)]
        config["sliding_window"] = int(settings.get("attention.sliding_window", 4096))
        config["layer_types"] = ["sliding_attention" if each else "full_attention" for each in pattern]
    if name in _GEMMA_LAYERS:
        config["hidden_activation"] = architecture.activation
    for key, (setting, _, default) in _OWN.get(name, {}).items():
        value = settings.get(setting, default)
        config[key] = None if value is None else decimal(value)
    if name in _GEMMA_LAYERS:
        of_head = int(settings["embedding_length"]) // int(settings["attention.head_count"])
        config["query_pre_attn_scalar"] = of_head if layers == _GEMMA_LAYERS[name] else int(size or of_head)
    if name == "gemma3":
        if kind not in ("none", "linear"):
            raise ValueError(f"rope scaling of type {kind!r} is not supported for Gemma 3: expected linear")
        if kind == "linear" and factor:
            full |= {"rope_type": "linear", "factor": decimal(factor)}
        local = {"rope_type": "default", "rope_theta": decimal(settings.get("rope.freq_base_swa", _LOCAL_THETA))}
        config["rope_parameters"] = {"sliding_attention": local, "full_attention": full}
    if name == "gpt-oss":
        config["num_local_experts"] = int(settings["expert_count"])
        if kind == "yarn":
            original = int(settings["rope.scaling.original_context_length"])
            full |= {"rope_type": "yarn", "factor": decimal(factor)}
            full |= {"original_max_position_embeddings": original, "beta_fast": 32.0, "beta_slow": 1.0}
        config["rope_parameters"] = full
    if name in ("gpt-oss", "phi3", "smollm3"):
        config["pad_token_id"] = None  # the defaults of transformers lie outside of other vocabularies
    part = settings.get("rope.dimension_count")
    if name == "phi3" and part and size and part != size:
        config["partial_rotary_factor"] = decimal(part / size)
    if name == "smollm3":
        config["no_rope_layers"] = _no_rope_layers(layers)
    return config
