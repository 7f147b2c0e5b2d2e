"""What llama.cpp expects of single families: settings beyond the usual ones, and what it fixes in its code.

llama.cpp ignores settings that it does not know, and computes other numbers. So a model is refused unless all its
settings are those that llama.cpp reads or fixes (as its sources say in llama-cpp-python 0.3.36).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nvfp4_tensor.checkpoints.architectures import GGUFArchitecture

WINDOWED = ("gemma2", "gemma3", "gpt-oss")
"""Architectures for which llama.cpp applies the sliding window."""

ROPE_TYPES = {
    "gemma2": ("default",), "gemma3": ("default", "linear"), "phi3": ("default", "longrope"), "smollm3": ("default",),
    "olmo2": ("default",), "gpt-oss": ("default", "yarn"),
}  # fmt: skip
"""The types of rope scaling per architecture, if not both default and llama3."""

_GEMMA_LAYERS = {"gemma2": 46, "gemma3": 62}
"""The numbers of layers of the 27B models, for which llama.cpp scales attention by other sizes."""
_PERIODS = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2}
"""Each layer of this number has full attention, the others have a sliding window."""
_SMOLLM3_PERIOD = 4
"""Each layer of this number has no rotary embedding."""
_GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_LOCAL_THETA = 10000.0
_REQUIRED = {
    "gemma2": ("head_dim", "sliding_window"), "gemma3": ("head_dim", "sliding_window"), "smollm3": ("rope_theta",),
    "gpt-oss": ("head_dim", "sliding_window", "rope_theta"),
}  # fmt: skip
"""Settings whose defaults differ between families."""


LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
"""The tensors with the factors of Phi-3's rope scaling, longrope, for long and for short texts."""


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the rotary embedding; of full attention, if each kind of layer has its own."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope.get("full_attention", rope)


def decimal(value: Any) -> Any:
    """Return the shortest decimal that rounds to the same float32, such as 1e-05."""
    return value if isinstance(value, int) else float(f"{value:.7g}")


def check_family(config: dict[str, Any], architecture: GGUFArchitecture) -> None:
    """Raise a ValueError if llama.cpp would compute something else with this configuration."""
    name, rope = architecture.name, rope_of(config)
    given = config | {"rope_theta": rope.get("rope_theta") or config.get("rope_theta")}
    for key in _REQUIRED.get(name, ()):
        if not given.get(key):  # transformers' default is another than the one here
            raise ValueError(f"config.json has no {key}, which llama.cpp needs for {name}")
    if name in _PERIODS:
        _check_window(config, name)
    if name in _GEMMA_LAYERS:
        _check_gemma(config, name)
    if name == "gpt-oss":
        _check_gpt_oss(config, name)
    if name in ("phi3", "olmo2", "smollm3", "granite"):
        heads, hidden = config.get("num_attention_heads") or 1, config.get("hidden_size", 0)
        _expect(name, config, head_dim=(None, hidden // heads))
    if name == "smollm3":
        layers = config.get("num_hidden_layers", 0)
        expected = [int((layer + 1) % _SMOLLM3_PERIOD != 0) for layer in range(layers)]
        _expect(name, config, no_rope_layers=(None, expected), use_sliding_window=(None, False))
        _expect(name, config, no_rope_layer_interval=(None, _SMOLLM3_PERIOD)) if not config.get(
            "no_rope_layers"
        ) else None
        _expect(name, config, layer_types=(None, ["full_attention"] * layers))
    if name == "olmo2":
        _expect(name, config, tie_word_embeddings=(None, False))
    if name == "gpt2":
        _expect(name, config, scale_attn_weights=(None, True), scale_attn_by_inverse_layer_idx=(None, False))
        _expect(name, config, add_cross_attention=(None, False))
    if name == "granite":
        for key in _GRANITE:
            if config.get(key) == 0:
                raise ValueError(f"llama.cpp takes {key} 0 of {name} for a missing one")


def _check_window(config: dict[str, Any], name: str) -> None:
    layers, period = config.get("num_hidden_layers", 0), _PERIODS[name]
    kinds = ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)]
    _expect(name, config, layer_types=(None, kinds), use_bidirectional_attention=(None, False))
    if not config.get("layer_types"):
        _expect(name, config, sliding_window_pattern=(None, period))


def _check_gpt_oss(config: dict[str, Any], name: str) -> None:
    rope = rope_of(config)
    _expect(name, config, swiglu_limit=(None, 7.0), attention_bias=(None, True), tie_word_embeddings=(None, False))
    if rope.get("rope_type") == "yarn":
        _expect(name, rope, beta_fast=(None, 32.0), beta_slow=(None, 1.0), attention_factor=(None,))
        _expect(name, rope, mscale=(None,), mscale_all_dim=(None,))
        if rope.get("truncate") is False:
            warnings.warn(
                "llama.cpp rounds the bounds of yarn's ramp, as with truncate true: a few frequencies differ",
                stacklevel=2,
            )


def _check_gemma(config: dict[str, Any], name: str) -> None:
    layers = config.get("num_hidden_layers", 0)
    if name == "gemma2":
        _expect(name, config, tie_word_embeddings=(None, True))
        if not config.get("attn_logit_softcapping") or not config.get("final_logit_softcapping"):
            raise ValueError(f"llama.cpp supports {name} with attn_logit_softcapping and final_logit_softcapping only")
    else:
        _expect(name, config, attn_logit_softcapping=(None,))
    by_heads = layers == _GEMMA_LAYERS[name]
    size = config.get("head_dim") or 256
    scalar = config["hidden_size"] // config["num_attention_heads"] if by_heads else size
    found = config.get("query_pre_attn_scalar", 256)
    if found != scalar:
        raise ValueError(
            f"llama.cpp supports {name} of {layers} layers with query_pre_attn_scalar {scalar}, not {found}"
        )


def _expect(architecture: str, config: dict[str, Any], **allowed: Sequence[Any]) -> None:
    for key, values in allowed.items():
        if config.get(key) not in values:
            raise ValueError(f"llama.cpp supports {architecture} with {key} {values[-1]}, not {config[key]}")


def family_settings(
    config: dict[str, Any], architecture: GGUFArchitecture, head_dim: int
) -> dict[str, int | float | str]:
    """Return the keys and values of a family, without the architecture's prefix."""
    settings: dict[str, int | float | str] = {}
    name, rope = architecture.name, rope_of(config)
    if name in WINDOWED:
        settings["attention.sliding_window"] = int(config["sliding_window"])
        if config.get("final_logit_softcapping"):
            settings["final_logit_softcapping"] = float(config["final_logit_softcapping"])
    if name == "gpt-oss" and rope.get("rope_type") == "yarn":
        settings |= {"rope.scaling.type": "yarn", "rope.scaling.factor": float(rope["factor"])}
        original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"] / rope["factor"]
        settings["rope.scaling.original_context_length"] = int(original)
    if name == "gemma2":
        settings["attn_logit_softcapping"] = float(config["attn_logit_softcapping"])
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
    if name == "gemma3" and rope.get("rope_type", rope.get("type")) == "linear":
        settings |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    if name == "phi3":
        part = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
        settings["rope.dimension_count"] = int(head_dim * part)
        if is_longrope(config):
            original = _original_length(config)
            settings["rope.scaling.original_context_length"] = original
            scaled = max(config["max_position_embeddings"] / original, 1.0)
            usual = math.sqrt(1 + math.log(scaled) / math.log(original))
            settings["rope.scaling.attn_factor"] = float(rope.get("attention_factor") or usual)
    if name == "granite":
        for key, setting in _GRANITE.items():
            settings[setting] = float(config.get(key, 1.0))
    return settings


def is_longrope(config: dict[str, Any]) -> bool:
    """Return whether the rope scaling is Phi-3's for long texts."""
    rope = rope_of(config)
    return rope.get("rope_type", rope.get("type")) == "longrope"


def _original_length(config: dict[str, Any]) -> int:
    length = rope_of(config).get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    if not length:
        raise ValueError("config.json has no original_max_position_embeddings, which llama.cpp needs for longrope")
    return int(length)


def long_and_short_factors(config: dict[str, Any], dimensions: int) -> dict[str, Tensor]:
    """Return :data:`LONG` and :data:`SHORT`, float32 (dimensions / 2,); nothing without this rope scaling.

    llama.cpp uses the long ones if its context is longer than the original length, transformers if a text is.

    Raises:
        ValueError: config.json does not have a factor for each frequency.
    """
    if not is_longrope(config):
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
    size = settings.get("attention.key_length")
    config: dict[str, Any] = {}
    if name in WINDOWED:
        layers, period = int(settings["block_count"]), _PERIODS[name]
        pattern = settings.get("attention.sliding_window_pattern", period)
        if isinstance(pattern, int):
            pattern = [layer % pattern < pattern - 1 for layer in range(layers)]
        config["sliding_window"] = int(settings.get("attention.sliding_window", 4096))
        config["layer_types"] = ["sliding_attention" if each else "full_attention" for each in pattern]
    if name in _GEMMA_LAYERS:
        layers = int(settings["block_count"])
        capping = settings.get("final_logit_softcapping", 30.0 if name == "gemma2" else None)
        by_heads = layers == _GEMMA_LAYERS[name]
        heads = int(settings["embedding_length"]) // int(settings["attention.head_count"])
        config |= {
            "hidden_activation": architecture.activation,
            "final_logit_softcapping": None if capping is None else decimal(capping),
            "attn_logit_softcapping": None,
            "query_pre_attn_scalar": heads if by_heads else int(size or heads),
        }
    if name == "gemma2":
        config["attn_logit_softcapping"] = decimal(settings.get("attn_logit_softcapping", 50.0))
    if name == "gemma3":
        kind, factor = settings.get("rope.scaling.type", "linear"), settings.get("rope.scaling.factor", 0.0)
        if kind not in ("none", "linear"):
            raise ValueError(f"rope scaling of type {kind!r} is not supported for Gemma 3: expected linear")
        full: dict[str, Any] = {"rope_type": "default", "rope_theta": decimal(settings.get("rope.freq_base", 10000.0))}
        if kind == "linear" and factor:
            full |= {"rope_type": "linear", "factor": decimal(factor)}
        local = {"rope_type": "default", "rope_theta": decimal(settings.get("rope.freq_base_swa", _LOCAL_THETA))}
        config["rope_parameters"] = {"sliding_attention": local, "full_attention": full}
    if name == "gpt-oss":
        config["num_local_experts"] = int(settings["expert_count"])
        rope = {"rope_type": "default", "rope_theta": decimal(settings.get("rope.freq_base", 10000.0))}
        if settings.get("rope.scaling.type") == "yarn":
            original = int(settings["rope.scaling.original_context_length"])
            rope |= {"rope_type": "yarn", "factor": decimal(settings["rope.scaling.factor"])}
            rope |= {"original_max_position_embeddings": original, "beta_fast": 32.0, "beta_slow": 1.0}
        config |= {"rope_parameters": rope, "pad_token_id": None}
    if name in ("phi3", "smollm3"):
        config["pad_token_id"] = None  # the defaults of transformers lie outside of other vocabularies
    if name == "phi3":
        part = settings.get("rope.dimension_count")
        if part and size and part != size:
            config["partial_rotary_factor"] = decimal(part / size)
    if name == "smollm3":
        layers = int(settings["block_count"])
        config["no_rope_layers"] = [int((layer + 1) % _SMOLLM3_PERIOD != 0) for layer in range(layers)]
    if name == "granite":
        config |= {key: decimal(settings[setting]) for key, setting in _GRANITE.items() if setting in settings}
    return config
