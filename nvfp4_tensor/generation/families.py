"""The families of models that native decoding knows, and how a model of one becomes a description.

    description = describe(model)
    for block in description.blocks: ...

A family is one entry of :data:`FAMILIES`: how the classes of one modeling file of transformers differ from Llama's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import activations

from nvfp4_tensor.generation.architectures import (
    Block,
    Linear,
    Model,
    Norm,
    Rotary,
)
from nvfp4_tensor.generation.model_state import CHANGING, unsupported_reason
from nvfp4_tensor.ops.composite.decode_step import Routing
from nvfp4_tensor.ops.composite.step import Activation
from nvfp4_tensor.quantization.linear import PRE_SCALE, NVFP4Linear

_NORMS = ("norm_before_attention", "norm_after_attention", "norm_before_feed_forward", "norm_after_feed_forward")


def _no_window(config: Any, index: int) -> int:
    return 0


def _window_of_all(config: Any, index: int) -> int:
    return getattr(config, "sliding_window", None) or 0


def _window_by_type(config: Any, index: int) -> int:
    return (config.sliding_window or 0) if config.layer_types[index] == "sliding_attention" else 0


@dataclass(frozen=True)
class Family:
    """How the classes of one modeling file of transformers differ from Llama's.

    Attributes:
        name: the prefix of its classes.
        inner: the suffix of the class of ``model.model``.
        window: the window of layer i by its config.
        offset, rounds_before_weight: of its norms, see :class:`Norm`.
        norms: the names of a layer's norms before and after attention, before and after the feed-forward, "" for none.
        has_q_k_norms: over each head, or over all (see the size of their weights).
        wide_rotary: see :class:`Rotary`.
        softcaps: the config has soft caps of attention and logits.
        router: the name of the router in the feed-forward of mixtures.
        clamped_experts: experts as in gpt-oss.
    """

    name: str
    inner: str = "Model"
    window: Callable[[Any, int], int] = _no_window
    offset: float = 0.0
    rounds_before_weight: bool = True
    norms: tuple[str, str, str, str] = ("input_layernorm", "", "post_attention_layernorm", "")
    has_q_k_norms: bool = False
    wide_rotary: bool = False
    attention_softcap: bool = False
    logits_softcap: bool = False
    router: str = ""
    clamped_experts: bool = False


_GEMMA_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip

FAMILIES: dict[str, Family] = {
    "llama": Family("Llama"),
    "mistral": Family("Mistral", window=_window_of_all),
    "qwen2": Family("Qwen2", window=_window_by_type),
    "qwen3": Family("Qwen3", window=_window_by_type, has_q_k_norms=True),
    "gemma2": Family(
        "Gemma2", window=_window_by_type, offset=1.0, rounds_before_weight=False, norms=_GEMMA_NORMS,
        attention_softcap=True, logits_softcap=True,
    ),
    "gemma3": Family(
        "Gemma3", "TextModel", window=_window_by_type, offset=1.0, rounds_before_weight=False, norms=_GEMMA_NORMS,
        has_q_k_norms=True, logits_softcap=True,
    ),
    "phi3": Family("Phi3", window=_window_of_all),
    "smollm3": Family("SmolLM3", window=_window_by_type),
    "olmo2": Family(
        "Olmo2", rounds_before_weight=False, has_q_k_norms=True, wide_rotary=True,
        norms=("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    ),
    "granite": Family("Granite"),
    "mixtral": Family("Mixtral", window=_window_of_all, router="gate"),
    "qwen3_moe": Family("Qwen3Moe", window=_window_of_all, has_q_k_norms=True, router="gate"),
    "gpt_oss": Family(
        "GptOss", window=_window_by_type, rounds_before_weight=False, router="router", clamped_experts=True
    ),
}  # fmt: skip
"""By the name of the modeling file."""


def family_of(model: Any) -> Family | None:
    """Return the family of a causal language model, or None for other modules."""
    cls = type(model)
    for name, family in FAMILIES.items():
        if cls.__module__ == f"transformers.models.{name}.modeling_{name}":
            return family if cls.__name__ == f"{family.name}ForCausalLM" else None
    return None


def describe(model: Any) -> Model:
    """Describe a causal language model of transformers from its modules.

    Parameters are those of the modules at the time of the call, not copies. The rounding of each value is that of
    the model's own forward, in the attention implementations "sdpa" and "eager".

    Args:
        model: one of :data:`FAMILIES`, for instance a ``LlamaForCausalLM``.

    Raises:
        TypeError: a model of another class.
        ValueError: a configuration, activation, attention or module that the family does not have. The message names
            it.
    """
    family = family_of(model)
    if family is None:
        *names, last = (each.name for each in FAMILIES.values())
        raise TypeError(
            f"decode_natively supports a {', '.join(names)} or {last} of transformers with an output layer, not "
            f"{type(model)}"
        )
    return _Reader(family, model).model()


class _Reader:
    """Reads one model of a family."""

    def __init__(self, family: Family, model: Any) -> None:
        self.family, self.outer, self.inner, self.config = family, model, model.model, model.model.config
        if type(self.inner) is not self.own_class(family.inner):
            raise ValueError(f"model.model is a {type(self.inner).__name__}, not a {family.name}{family.inner}")
        if reason := unsupported_reason(self.config):
            raise ValueError(reason)
        if self.config.num_hidden_layers != len(self.inner.layers):
            raise ValueError(
                f"config.num_hidden_layers is {self.config.num_hidden_layers}, and the model has "
                f"{len(self.inner.layers)} layers"
            )

    def own_class(self, suffix: str) -> Any:
        return getattr(sys.modules[type(self.outer).__module__], f"{self.family.name}{suffix}", None)

    def own(self, name: str, module: Any, suffix: str) -> Any:
        """Return the module, if its class is the family's own with this suffix."""
        if type(module) is not self.own_class(suffix):
            raise ValueError(
                f"{name} is a {type(module).__name__}, not transformers' own {self.family.name}{suffix}, whose forward "
                "decode_natively would not call"
            )
        return module

    def model(self) -> Model:
        inner, config, family = self.inner, self.config, self.family
        self.rotaries = self._rotaries()
        divisor = float(getattr(config, "logits_scaling", 1.0)) if family.name == "Granite" else 1.0
        softcap = config.final_logit_softcapping if family.logits_softcap else None
        return Model(
            family=family.name,
            embedding=self._embedding(),
            embedding_multiplier=self._embedding_multiplier(),
            rotaries=tuple(self.rotaries.values()),
            blocks=tuple(self._block(i, layer) for i, layer in enumerate(inner.layers)),
            norm=self._norm("model.norm", inner.norm),
            head=_linear("lm_head", self.outer.lm_head),
            logits_divisor=divisor,
            logits_softcap=softcap or 0.0,
            has_router_logits=bool(family.router),
        )

    def _embedding(self) -> Tensor:
        module = self.inner.embed_tokens
        scaled = self.own_class("TextScaledWordEmbedding")
        if type(module) is not (nn.Embedding if scaled is None else scaled):
            raise ValueError(f"model.embed_tokens is a {type(module).__name__}, which decode_natively would not call")
        if module.max_norm is not None:
            raise ValueError("model.embed_tokens has max_norm, which decode_natively does not support")
        weight: Tensor = module.weight
        return weight

    def _embedding_multiplier(self) -> float:
        scale = getattr(self.inner.embed_tokens, "embed_scale", None)
        if scale is not None:  # Gemma: rounded to the dtype of the weight
            return float(scale.to(self.inner.embed_tokens.weight.dtype))
        return float(getattr(self.inner, "embedding_multiplier", 1.0))

    def _rotaries(self) -> dict[str | None, Rotary]:
        module = self.own("model.rotary_emb", self.inner.rotary_emb, "RotaryEmbedding")
        kinds: dict[str | None, str] = {None: module.rope_type}  # type: ignore[dict-item]
        if isinstance(module.rope_type, dict):
            kinds = dict(module.rope_type)
        found = {}
        for kind, rope_type in kinds.items():
            frequencies = module.inv_freq if kind is None else getattr(module, f"{kind}_inv_freq")
            dim = 2 * frequencies.numel()
            found[kind] = Rotary(module, kind, dim, rope_type in CHANGING, self.family.wide_rotary)
        return found

    def _block(self, index: int, layer: Any) -> Block:
        name = f"model.layers.{index}"
        self.own(name, layer, "DecoderLayer")
        for each in ("resid_attn_dropout", "resid_mlp_dropout"):
            dropout = getattr(layer, each, None)
            if dropout is not None and not (type(dropout) is nn.Dropout and not (dropout.training and dropout.p)):
                raise ValueError(f"{name}.{each} is not a dropout in evaluation mode: call model.eval() first")
        if layer.training and getattr(layer, "gradient_checkpointing", False):
            raise ValueError(f"{name} uses gradient checkpointing, which disables the cache: call model.eval() first")
        block = Block(experts=self._experts(f"{name}.mlp", layer.mlp))
        norms = zip(_NORMS, self.family.norms, strict=True)
        block.parts.update((part, self._norm(f"{name}.{own}", getattr(layer, own))) for part, own in norms if own)
        block.numbers["residual"] = float(getattr(layer, "residual_multiplier", 1.0))
        self._read_attention(block, f"{name}.self_attn", layer.self_attn, index)
        if block.experts is None:
            self._read_feed_forward(block, f"{name}.mlp", layer.mlp)
        else:
            self._read_mixture(block, f"{name}.mlp", *block.experts)
        return block

    def _norm(self, name: str, module: Any) -> Norm:
        self.own(name, module, "RMSNorm")
        eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
        return Norm(name, module.weight, float(eps), self.family.offset, self.family.rounds_before_weight)

    def _read_attention(self, block: Block, name: str, module: Any, index: int) -> None:
        self.own(name, module, "Attention")
        if module.layer_idx != index or module.config != self.config:
            raise ValueError(f"{name} has layer_idx {module.layer_idx}, or another config than the model")
        if module.is_causal is not True:
            raise ValueError(f"{name} is not causal, which decode_natively does not support")
        if module.training and module.attention_dropout:
            raise ValueError(f"{name} has attention dropout in training mode: call model.eval() first")
        fused, dim = hasattr(module, "qkv_proj"), module.head_dim
        names = {"q": "qkv_proj"} if fused else {"q": "q_proj", "k": "k_proj", "v": "v_proj"}
        for part, own in (names | {"o": "o_proj"}).items():
            block.parts[part] = _linear(f"{name}.{own}", getattr(module, own))
        heads = block.parts["o"].weight.shape[1] // dim
        kv_heads = heads // module.num_key_value_groups
        if sum(each.weight.shape[0] for each in block.linears(*names)) != (heads + 2 * kv_heads) * dim:
            raise ValueError(f"{name}: the sizes of q, k and v do not fit {heads} and {kv_heads} heads of {dim}")
        for part in ("q_norm", "k_norm") if self.family.has_q_k_norms else ():
            block.parts[part] = self._norm(f"{name}.{part}", getattr(module, part))
        if (sinks := getattr(module, "sinks", None)) is not None:
            block.parts["sinks"] = sinks
        block.kinds.update(
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            window=self.family.window(self.config, index),
            rotary=self._rotary_of(module, index),
        )
        block.numbers.update(scaling=float(module.scaling), softcap=self._softcap(name, module))

    def _rotary_of(self, attention: Any, index: int) -> int:
        if not getattr(attention, "use_rope", True):
            return -1
        kinds = list(self.rotaries)
        return 0 if kinds == [None] else kinds.index(self.config.layer_types[index])

    def _softcap(self, name: str, module: Any) -> float:
        softcap = module.attn_logit_softcapping if self.family.attention_softcap else None
        if softcap is not None and self.config._attn_implementation != "eager":
            raise ValueError(
                f"{name} has a soft cap, which the attention {self.config._attn_implementation!r} does not have: call "
                'model.set_attn_implementation("eager")'
            )
        return softcap or 0.0

    def _read_feed_forward(self, block: Block, name: str, module: Any) -> None:
        self.own(name, module, "MLP")
        block.kinds["activation"] = _activation(name, getattr(module, "activation_fn", None) or module.act_fn)
        fused = hasattr(module, "gate_up_proj")
        names = {"gate": "gate_up_proj"} if fused else {"gate": "gate_proj", "up": "up_proj"}
        for part, own in (names | {"down": "down_proj"}).items():
            block.parts[part] = _linear(f"{name}.{own}", getattr(module, own))

    def _experts(self, name: str, module: Any) -> tuple[nn.Module, nn.Module] | None:
        """Return the router and the experts of a mixture, None for another feed-forward."""
        if not (self.family.router and hasattr(module, "experts")):
            return None
        self.own(name, module, "MLP" if self.family.clamped_experts else "SparseMoeBlock")
        if module.training and getattr(module, "jitter_noise", 0):
            raise ValueError(f"{name} has router jitter in training mode: call model.eval() first")
        router = self.own(f"{name}.{self.family.router}", getattr(module, self.family.router), "TopKRouter")
        return router, self.own(f"{name}.experts", module.experts, "Experts")

    def _read_mixture(self, block: Block, name: str, router: Any, experts: Any) -> None:
        clamped = self.family.clamped_experts
        routing = Routing.OF_CHOSEN if clamped else Routing(0)
        if not clamped and getattr(router, "norm_topk_prob", True):
            routing |= Routing.NORMALIZED
        if self.family.name != "Mixtral":
            routing |= Routing.ROUNDED
        bias = getattr(router, "bias", None)
        block.parts["router"] = Linear(f"{name}.{self.family.router}", router.weight, bias)
        for part, own in (("gate", "gate_up_proj"), ("down", "down_proj")):
            bias = getattr(experts, f"{own}_bias", None)
            block.parts[part] = Linear(f"{name}.experts.{own}", getattr(experts, own), bias, transposed=clamped)
        activation = Activation.CLAMPED_GLU if clamped else _activation(name, experts.act_fn)
        block.kinds.update(chosen=router.top_k, routing=routing, activation=activation)
        if clamped:
            block.numbers.update(alpha=float(experts.alpha), limit=float(experts.limit))


def _linear(name: str, module: Any) -> Linear:
    if type(module) not in (nn.Linear, NVFP4Linear) or "weight" not in module._parameters:
        raise ValueError(f"{name} is a {type(module).__name__}, whose forward decode_natively would not call")
    return Linear(name, module.weight, module.bias, module._buffers.get(PRE_SCALE))


def _activation(name: str, module: Any) -> Activation:
    if type(module) in (activations.SiLUActivation, nn.SiLU):
        return Activation.SILU
    is_tanh = isinstance(module, activations.GELUTanh) and not hasattr(module.act, "__self__")
    if is_tanh or (type(module) is nn.GELU and module.approximate == "tanh"):
        return Activation.GELU_TANH
    raise ValueError(f"decode_natively supports the activations silu and tanh-GELU, and {name} has {module}")
