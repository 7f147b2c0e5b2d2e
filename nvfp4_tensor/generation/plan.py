"""What the op that decodes a token reads of a Llama, and whether the model still is what was read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, repeat
from operator import attrgetter, contains
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle
from transformers.activations import SiLUActivation
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral

from nvfp4_tensor.quantization import NVFP4Linear
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

MODELS = (llama.LlamaModel, mistral.MistralModel)
STEP = 32
"""The op takes hidden sizes and heads of a multiple of so many elements."""
LINEARS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
_OTHERS = (
    llama.LlamaDecoderLayer, llama.LlamaAttention, llama.LlamaMLP, llama.LlamaRMSNorm, llama.LlamaRotaryEmbedding,
    mistral.MistralDecoderLayer, mistral.MistralAttention, mistral.MistralMLP, mistral.MistralRMSNorm,
    mistral.MistralRotaryEmbedding, SiLUActivation, nn.SiLU, nn.ModuleList,
)  # fmt: skip
_FORWARDS: list[tuple[type, Any]] = [(each, each.forward) for each in (*MODELS, *_OTHERS, nn.Linear)]
"""The computations that the op stands for: a class whose forward was patched has another."""
_CAPTURING = "install_output_capuring_hook"
"""Transformers leaves such hooks in a model that was asked for its hidden states. They do nothing by themselves."""

_LAYER = attrgetter("training", "gradient_checkpointing")
_ATTENTION = attrgetter("scaling", "head_dim", "layer_idx", "training", "attention_dropout")
_PARTS = attrgetter("qdata", "scale", "per_tensor_scale")
_FIELDS = attrgetter("__class__", "qdata", "scale", "per_tensor_scale", "orig_dtype", "activation_spec", "transposed")
"""Of a weight. Module.to() swaps the tensor inside of a parameter, which stays the same object."""


class Plan:
    """The tensors and numbers of a model for the op, and everything that they were concluded from.

    Raises:
        ValueError: the op does not compute what this model's forward does; it says why.
    """

    def __init__(self, inner: Any) -> None:
        _check_config(inner.config)
        layers = list(inner.layers)
        if reason := _why_not(inner.config, len(layers)):
            raise ValueError(reason)
        for i, layer in enumerate(layers):
            _check_layer(f"model.layers.{i}", layer, i, inner.config)
        named = dict(_modules(inner))
        for name, module in named.items():
            _check_module(name, module)
        self.layers, self._layers = len(layers), layers
        self._attentions = [layer.self_attn for layer in layers]
        self._norms = [module for name, module in named.items() if name.endswith("norm")]
        self._linears = [layer.get_submodule(name) for layer in layers for name in LINEARS]
        self._weights = [each.weight for each in self._linears]
        self._norm_weights = [each.weight for each in self._norms]
        _check_alike(self)
        self.eps: float = self._norms[0].variance_epsilon
        self.scaling: float = self._attentions[0].scaling
        self._watch(inner, list(named.values()))
        self.tensors = self._in_order()

    def _in_order(self) -> list[Tensor]:
        """As ``nvfp4::decode_llama`` takes them."""
        tensors: list[Tensor] = []
        for i in range(len(self._layers)):
            parts = [_PARTS(weight) for weight in self._weights[7 * i : 7 * i + 7]]
            first, second = self._norm_weights[2 * i : 2 * i + 2]
            tensors += [first, *chain(*parts[:4]), second, *chain(*parts[4:])]
        return [*tensors, self._norm_weights[-1]]

    def _watch(self, inner: Any, modules: list[nn.Module]) -> None:
        """What :meth:`holds` compares: a few lists, which C compares in some tens of nanoseconds an element."""
        self._modules = modules
        self._types = list(map(type, modules))
        self._own = [vars(each) for each in modules]
        holders: list[nn.Module] = [inner, *modules]
        self._children = [each._modules for each in holders if each._modules]
        self._child = list(chain.from_iterable(map(dict.values, self._children)))
        self._owners = [each._parameters for each in modules if each._parameters]
        self._parameters = list(chain.from_iterable(map(dict.values, self._owners)))
        hooks: list[Any] = [h for each in modules for h in (each._forward_hooks, each._forward_pre_hooks)]
        self._next_id = RemovableHandle.next_id
        self._hooks = [each for each in hooks if not each]
        self._idle = [each for each in hooks if each]
        self._idle_ids = list(chain.from_iterable(self._idle))
        self._fields = list(map(_FIELDS, self._weights))
        self._values = self._now()

    def _now(self) -> tuple[list[Any], ...]:
        return (
            [each.variance_epsilon for each in self._norms],
            [each.dtype for each in self._norm_weights],
            list(map(_ATTENTION, self._attentions)),
            list(map(_LAYER, self._layers)),
        )

    def _hold_hooks(self) -> bool:
        """Whether no hook was added. Each takes the next id of all, so no dictionary is looked at while that stays."""
        if RemovableHandle.next_id != self._next_id:
            if any(self._hooks) or list(chain.from_iterable(self._idle)) != self._idle_ids:
                return False
            self._next_id = RemovableHandle.next_id
        return True

    def holds(self, config: Any) -> bool:
        """Whether the model still is what the plan was made of: identical objects, or scalar tensors of equal value."""
        try:
            return (
                list(chain.from_iterable(map(dict.values, self._children))) == self._child
                and list(map(type, self._modules)) == self._types
                and self._hold_hooks()
                and not any(map(contains, self._own, repeat("forward")))
                and list(chain.from_iterable(map(dict.values, self._owners))) == self._parameters
                and list(map(_FIELDS, self._weights)) == self._fields
                and self._now() == self._values
                and _why_not(config, self.layers) is None
            )
        except (AttributeError, RuntimeError, TypeError):  # other tensors, which == compares by element, or dense ones
            return False


def _modules(inner: Any) -> Iterator[tuple[str, Any]]:
    """All modules whose forward the op stands for, by name."""
    yield "model.layers", inner.layers
    for path, module in inner.layers.named_modules(remove_duplicate=False):
        if path:
            yield f"model.layers.{path}", module
    yield "model.norm", inner.norm
    yield "model.rotary_emb", inner.rotary_emb


def _why_not(config: Any, layers: int) -> str | None:
    """What of the configuration, or of the process, keeps a token from the op; None for nothing."""
    attention = config._attn_implementation
    is_sdpa = attention == "sdpa" and ALL_ATTENTION_FUNCTIONS.get("sdpa") is sdpa_attention_forward
    if not is_sdpa and not (attention == "eager" and "eager" not in ALL_ATTENTION_FUNCTIONS):
        return f"the attention implementation is {attention!r}, and decode_natively replaces 'sdpa' and 'eager'"
    if config.num_hidden_layers != layers:
        return f"config.num_hidden_layers is {config.num_hidden_layers}, and the model has {layers} layers"
    if getattr(config, "is_causal", None) is False:
        return "config.is_causal is False"
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return "there are global forward hooks, which decode_natively would not call"
    if patched := [each.__name__ for each, forward in _FORWARDS if each.forward is not forward]:  # type: ignore[attr-defined]
        return f"the forward of {patched[0]} was patched, and decode_natively would not call it"
    return None


def _check_config(config: Any) -> None:
    if config.hidden_act not in ("silu", "swish"):
        raise ValueError(f"decode_natively knows the activation silu, and this model's is {config.hidden_act}")
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes: Mapping[str, int] = {"hidden_size": config.hidden_size, "head_dim": dim}
    for name, size in sizes.items():
        if size % STEP:
            raise ValueError(f"decode_natively takes sizes that are multiples of {STEP}, and {name} is {size}")


def _check_layer(name: str, layer: Any, index: int, config: Any) -> None:
    """ValueError for a layer that is not the one of transformers, or does more than the op."""
    if type(layer) not in _OTHERS or type(layer.self_attn) not in _OTHERS or type(layer.mlp) not in _OTHERS:
        raise ValueError(f"{name} has modules that are not transformers' own, which decode_natively would not call")
    if layer.training and layer.gradient_checkpointing:
        raise ValueError(f"{name} checkpoints its gradients, and has no cache then: model.eval() first")
    attention = layer.self_attn
    if attention.training and attention.attention_dropout:
        raise ValueError(f"{name} drops out some of its attention: model.eval() first")
    if attention.layer_idx != index or attention.config is not config:
        raise ValueError(f"{name}.self_attn has layer_idx {attention.layer_idx}, or a config of its own")
    if type(layer.mlp.act_fn) not in (SiLUActivation, nn.SiLU):
        raise ValueError(f"decode_natively knows the activation silu, and that of {name} is {layer.mlp.act_fn}")
    for path in LINEARS:
        _check_linear(f"{name}.{path}", layer.get_submodule(path))


def _check_linear(name: str, linear: Any) -> None:
    if type(linear) not in (nn.Linear, NVFP4Linear) or "weight" not in linear._parameters:
        raise ValueError(f"{name} is a {type(linear).__name__}, whose forward decode_natively would not call")
    weight = linear.weight
    _check_tensor(name, weight)
    if linear.bias is not None:
        raise ValueError(f"{name} has a bias, which decode_natively does not take: leave this model to transformers")
    if type(weight) is not NVFP4Tensor:
        raise ValueError(f"{name} is dense: quantize_(model.model, NVFP4WeightOnlyConfig()) first")
    if weight.activation_spec is not None or weight.transposed:
        raise ValueError(f"{name} quantizes its activations (W4A4): decode_natively takes weights alone")
    if not all(part.is_contiguous() for part in _PARTS(weight)) or weight.spec.hadamard_sign is not None:
        raise ValueError(f"{name} is a view of another weight, or Hadamard-transformed: quantize it by itself")


def _check_module(name: str, module: nn.Module) -> None:
    """ValueError for a module whose call is more than its class's forward."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    if not all(getattr(hook, "__qualname__", "").startswith(_CAPTURING) for hook in hooks):
        raise ValueError(f"{name} has hooks, which decode_natively would not call: remove them first")
    if type(module) not in (*_OTHERS, nn.Linear, NVFP4Linear) or "forward" in vars(module):
        raise ValueError(f"{name} is a {type(module).__name__} with a forward that decode_natively would not call")
    if name.endswith("norm"):
        _check_tensor(name, module.weight)


def _check_tensor(name: str, weight: Any) -> None:
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        raise ValueError(f"{name} is {weight.dtype} on {weight.device}: decode_natively takes bfloat16 on the CPU")


def _check_alike(plan: Plan) -> None:
    """ValueError for layers of different sizes or constants: the op has one of each."""
    shapes = [tuple(weight.shape) for weight in plan._weights]
    numbers: Mapping[str, set[Any]] = {
        "variance_epsilon": {each.variance_epsilon for each in plan._norms},
        "scaling": {each.scaling for each in plan._attentions},
        "head_dim": {each.head_dim for each in plan._attentions},
        "sizes": {tuple(shapes[i : i + 7]) for i in range(0, len(shapes), 7)},
        "sizes of norms": {(tuple(each.shape), each.is_contiguous()) for each in plan._norm_weights},
    }
    for name, values in numbers.items():
        if len(values) != 1:
            raise ValueError(f"decode_natively takes layers that are alike, and {name} of this model are {values}")
