"""Map names of tensors and settings, and the order of rows of q and k, between transformers and llama.cpp."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nvfp4_tensor._compat.frames import warn_user
from nvfp4_tensor.checkpoints.architectures import GGUF_ARCHITECTURES, GGUFArchitecture
from nvfp4_tensor.checkpoints.formats.gguf.families import (
    FIXED,
    PERIODS,
    ROPE_TYPES,
    check_family,
    decimal,
    family_config,
    family_settings,
    long_and_short_factors,
    rope_of,
    rope_type,
)
from nvfp4_tensor.checkpoints.io.safetensors import parse_json

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
_EXPERT = re.compile(r"(?<=\.experts)\.(\d+)(?=\.)")
FREQUENCIES = "rope_freqs.weight"
"""The tensor with the frequency factors of rope scaling of type llama3."""
SCALING = "nvfp4_tensor.rope_scaling"
"""A key of this package with the settings from which the factors were computed, in JSON."""


_SETTINGS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "num_hidden_layers": ("block_count", int),
    "max_position_embeddings": ("context_length", int),
    "hidden_size": ("embedding_length", int),
    "intermediate_size": ("feed_forward_length", int),
    "num_attention_heads": ("attention.head_count", int),
    "num_key_value_heads": ("attention.head_count_kv", int),
    "rms_norm_eps": ("attention.layer_norm_rms_epsilon", float),
    "vocab_size": ("vocab_size", int),
}
_EXPERT_SETTINGS: dict[str, dict[str, tuple[str, Callable[[Any], Any]]]] = {
    "": {},
    "block_sparse_moe": {"num_local_experts": ("expert_count", int), "num_experts_per_tok": ("expert_used_count", int)},
    "mlp": {
        "num_experts": ("expert_count", int),
        "num_experts_per_tok": ("expert_used_count", int),
        "moe_intermediate_size": ("expert_feed_forward_length", int),
    },
}
"""By :attr:`GGUFArchitecture.experts`."""


def architecture_of(config: dict[str, Any]) -> GGUFArchitecture:
    """Return the architecture of a transformers configuration.

    Raises:
        ValueError: it is not in :data:`GGUF_ARCHITECTURES`, or has settings that llama.cpp does not support.
    """
    for architecture in GGUF_ARCHITECTURES:
        if config.get("model_type") == architecture.model_type:
            break
    else:
        raise ValueError(
            f"GGUF supports models of model_type {', '.join(a.model_type for a in GGUF_ARCHITECTURES)}, not of "
            f"{config.get('model_type')!r}"
        )
    config = usual_config(config, architecture)
    key = "hidden_activation" if config.get("hidden_activation") else "hidden_act"  # Gemma has the first one
    if config.get(key, architecture.activation) != architecture.activation:
        raise ValueError(
            f"llama.cpp supports {architecture.name} with {key} {architecture.activation}, not {config[key]!r}"
        )
    check_family(config, architecture)
    window, length = config.get("sliding_window"), config.get("max_position_embeddings", 0)
    if architecture.name not in PERIODS and window and window < length and config.get("use_sliding_window", True):
        warn_user(f"llama.cpp attends to all tokens, not only to the last {window}")
    return architecture


def architecture_named(name: str, experts: bool = False) -> GGUFArchitecture:
    """Return the architecture with this general.architecture, or raise a ValueError if it is not supported."""
    for architecture in GGUF_ARCHITECTURES:
        if architecture.name == name and bool(architecture.experts) == experts:
            return architecture
    raise ValueError(
        f"architecture {name!r} is not supported: expected {', '.join(sorted({a.name for a in GGUF_ARCHITECTURES}))}"
        + (", this one without experts" if experts and any(a.name == name for a in GGUF_ARCHITECTURES) else "")
    )


# --- names of tensors ------------------------------------------------------------------------------------------------


class TensorNames:
    """The names of an architecture's tensors in transformers' checkpoints and in GGUF files, by the package gguf."""

    def __init__(self, architecture: GGUFArchitecture) -> None:
        import gguf

        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        found = gguf.get_tensor_name_map(kinds[architecture.name], 1)
        names = {module: found.get_name(module) for module in architecture.modules}
        self._biases = architecture.biases
        self._theirs = {module: name for module, name in names.items() if name is not None}
        self._ours = {name: module for module, name in self._theirs.items()}

    def in_file(self, name: str) -> str | None:
        """Return "blk.0.attn_q.weight" for "model.layers.0.self_attn.q_proj.weight"; None if there is no such tensor.

        All experts of a layer have the same name: "blk.0.ffn_up_exps.weight" for
        "model.layers.0.mlp.experts.3.up_proj.weight".
        """
        module, _, kind = name.rpartition(".")
        module, layer = _EXPERT.sub("", module), _LAYER.search(name)
        if kind == "bias" and self._biases is not None and not module.endswith(self._biases):
            return None
        found = self._theirs.get(_LAYER.sub("0", module, count=1))
        return None if found is None or kind not in ("weight", "bias") else f"{_with_layer(found, layer)}.{kind}"

    def in_model(self, name: str, experts: int = 0) -> list[str]:
        """Invert :meth:`in_file`: return one name, or the names of all experts, or none if the tensor is unknown."""
        module, _, kind = name.rpartition(".")
        found = self._ours.get(_LAYER.sub("0", module, count=1))
        if found is None or kind not in ("weight", "bias"):
            return []
        found = f"{_with_layer(found, _LAYER.search(name))}.{kind}"
        if ".experts." not in found:
            return [found]
        return [found.replace(".experts.", f".experts.{expert}.") for expert in range(experts)]


def _with_layer(name: str, layer: re.Match[str] | None) -> str:
    return name if layer is None else _LAYER.sub(layer[0], name, count=1)


def expert_of(name: str) -> int | None:
    """Return 3 for "model.layers.0.mlp.experts.3.up_proj.weight"; None if the weight is not of an expert."""
    found = _EXPERT.search(name)
    return None if found is None else int(found[1])


_ORDER = (
    "token_embd", "position_embd", "attn_norm", "attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output",
    "attn_q_norm", "attn_k_norm", "attn_sinks", "post_attention_norm", "ffn_gate", "ffn_up", "ffn_down", "ffn_norm",
    "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "post_ffw_norm", "output_norm", "output",
)  # fmt: skip


def tensor_sort_key(gguf_name: str) -> tuple[float, int, str]:
    """Return a sort key for tensors: the order of a forward pass, with q, k and v adjacent."""
    parts = gguf_name.split(".")
    layer = int(parts[1]) if parts[0] == "blk" else -1 if parts[0] in ("token_embd", "position_embd") else math.inf
    return layer, _ORDER.index(parts[-2]), parts[-1]


# --- the order of rows -----------------------------------------------------------------------------------------------


def row_order(name: str, rows: int, config: dict[str, Any], architecture: GGUFArchitecture) -> Tensor | None:
    """Return the index in transformers' q or k of each row in llama.cpp's, int64 (rows,), or None if they are equal.

    transformers rotates row i of a head with row i + head_dim / 2, llama.cpp row 2i with row 2i + 1.

    Raises:
        ValueError: the number of rows does not match the heads of the configuration.
    """
    module = name.rpartition(".")[0]
    if not architecture.permutes or not module.endswith(("self_attn.q_proj", "self_attn.k_proj")):
        return None
    heads = config["num_attention_heads"]
    if module.endswith("k_proj"):
        heads = config.get("num_key_value_heads") or heads
    size = config.get("head_dim") or config["hidden_size"] // max(config["num_attention_heads"], 1)
    if heads * size != rows or size % 2:
        raise ValueError(f"{name} has {rows} rows, but the configuration has {heads} heads of {size}")
    return torch.arange(rows).view(heads, 2, rows // heads // 2).transpose(1, 2).reshape(-1)


# --- settings --------------------------------------------------------------------------------------------------------


def usual_config(config: dict[str, Any], architecture: GGUFArchitecture) -> dict[str, Any]:
    """Return a configuration with the usual names of settings."""
    if not architecture.settings:
        return config
    usual = config | {name: config[own] for name, own in architecture.settings.items() if own in config}
    if usual.get("intermediate_size") is None and "hidden_size" in usual:  # GPT-2's default
        usual["intermediate_size"] = 4 * usual["hidden_size"]
    return usual


def _names_of(architecture: GGUFArchitecture) -> dict[str, tuple[str, Callable[[Any], Any]]]:
    names = _SETTINGS | _EXPERT_SETTINGS[architecture.experts]
    if "layer_norm_eps" in architecture.settings:
        del names["rms_norm_eps"]
        names["layer_norm_eps"] = ("attention.layer_norm_epsilon", float)
    return names


def settings_of(config: dict[str, Any], architecture: GGUFArchitecture) -> dict[str, int | float | str]:
    """Return the keys and values of a GGUF file for a transformers configuration, without the architecture's prefix.

    Raises:
        ValueError: a setting is missing, or llama.cpp does not support the rope scaling.
    """
    config = usual_config(config, architecture)
    config = {"num_key_value_heads": config.get("num_attention_heads"), **config}
    if "num_local_experts" in config:  # two names for one setting
        config.setdefault("num_experts", config["num_local_experts"])
    if architecture.name == "gpt-oss":
        config.setdefault("moe_intermediate_size", config.get("intermediate_size"))
    names = _names_of(architecture)
    missing = [name for name in names if config.get(name) is None]
    if missing:
        raise ValueError(f"config.json has no {', '.join(missing)}, which llama.cpp needs")
    settings: dict[str, int | float | str] = {key: cast(config[name]) for name, (key, cast) in names.items()}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    settings["rope.dimension_count"] = settings["attention.key_length"] = settings["attention.value_length"] = head_dim
    settings["rope.freq_base"] = float(rope_of(config).get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind, scaled = rope_type(config), ROPE_TYPES.get(architecture.name, ("default", "llama3"))
    if kind not in scaled:
        raise ValueError(
            f"rope scaling of type {kind!r} is not supported in GGUF for {architecture.name}: expected "
            f"{' or '.join(scaled)}"
        )
    return settings | family_settings(config, architecture, head_dim)


def config_of(settings: dict[str, Any], architecture: GGUFArchitecture, tied: bool) -> dict[str, Any]:
    """Return a transformers configuration for the keys of a GGUF file, without the architecture's prefix.

    Raises:
        ValueError: a key is missing.
    """
    settings = {"attention.head_count_kv": settings.get("attention.head_count"), **settings}
    names = _names_of(architecture)
    missing = [key for key, _ in names.values() if settings.get(key) is None]
    if missing:
        raise ValueError(f"the file has no {', '.join(f'{architecture.name}.{key}' for key in missing)}")
    config = {name: decimal(settings[key]) for name, (key, _) in names.items()}
    if architecture.name == "qwen3moe":
        config |= {key: values[-1] for key, values in FIXED["qwen3moe"].items()}
    if own := architecture.settings:
        read = {name: value for name, value in config.items() if name != "num_key_value_heads"}
        read |= {"hidden_act": architecture.activation, "tie_word_embeddings": tied}
        kinds = {"architectures": [architecture.model_class], "model_type": architecture.model_type}
        return kinds | {own.get(name, name): value for name, value in read.items()}
    head_dim = settings.get("attention.key_length") or settings.get("rope.dimension_count")
    return {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        **config,
        "head_dim": head_dim or config["hidden_size"] // config["num_attention_heads"],
        "rope_theta": decimal(settings.get("rope.freq_base", 10000.0)),
        "hidden_act": architecture.activation,
        "tie_word_embeddings": tied,
        **family_config(settings, architecture),
    }


# --- rope scaling of Llama 3 -----------------------------------------------------------------------------------------

_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def frequency_factors(config: dict[str, Any], head_dim: int) -> Tensor | None:
    """Return the divisors of rotary frequencies, float32 (head_dim / 2,), for rope scaling of type llama3; else
    None."""
    if rope_type(config) != "llama3":
        return None
    rope = _LLAMA_3 | rope_of(config)
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    length, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    wavelength = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    smooth = ((length / wavelength - low) / (high - low)).clamp(0, 1)  # 0: fully scaled, 1: unscaled
    return (1 / ((1 - smooth) / factor + smooth)).float()


def rope_tensors(config: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of the rope scaling, by name; nothing without any."""
    factors = frequency_factors(config, int(settings["attention.key_length"]))
    return ({} if factors is None else {FREQUENCIES: factors}) | long_and_short_factors(
        config, int(settings["rope.dimension_count"])
    )


def written_scaling(config: dict[str, Any]) -> str:
    """Return the settings of the rope scaling llama3 as JSON, for :data:`SCALING`."""
    rope = _LLAMA_3 | rope_of(config)
    return json.dumps({key: rope[key] for key in ("factor", *_LLAMA_3)})


def scaling_of(factors: Tensor, config: dict[str, Any], written: str | None = None) -> dict[str, Any]:
    """Return the rope scaling with these :func:`frequency_factors`: that of :func:`written_scaling`, or Llama 3's.

    Raises:
        ValueError: it has others.
    """
    rope = {"rope_type": "llama3", "factor": decimal(float(factors.max())), **_LLAMA_3}
    if written is not None:
        rope |= parse_json(written)
    again = frequency_factors(config | {"rope_scaling": rope}, config["head_dim"])
    assert again is not None
    if again.shape != factors.shape or not torch.allclose(again, factors, rtol=1e-5):
        raise ValueError(
            f"the frequency factors in {FREQUENCIES} are not those of {'its settings' if written else 'Llama 3'}"
        )
    return rope
