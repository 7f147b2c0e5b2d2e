"""The tensors and constants of a Llama that the decoding op needs, and a check that the model has not changed."""

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
"""Hidden sizes and head dimensions must be multiples of this number."""
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
"""The forwards that the op replaces, to detect classes whose forward was patched."""
_CAPTURING = "install_output_capuring_hook"
"""Transformers leaves such hooks in a model after hidden states were requested. They have no effect by themselves."""

_LAYER = attrgetter("training", "gradient_checkpointing")
_ATTENTION = attrgetter("scaling", "head_dim", "layer_idx", "training", "attention_dropout")
_PARTS = attrgetter("qdata", "scale", "per_tensor_scale")
_FIELDS = attrgetter("__class__", "qdata", "scale", "per_tensor_scale", "orig_dtype", "activation_spec", "transposed")
"""Fields of a weight. Module.to() replaces the tensor inside a parameter, which stays the same object."""


class Plan:
    """The tensors and constants of a model for the op, and the state of the model that they depend on.

    Raises:
        ValueError: the op does not compute this model's forward. The message has the reason.
    """

    def __init__(self, inner: Any) -> None:
        _check_config(inner.config)
        layers = list(inner.layers)
        if reason := _unsupported_reason(inner.config, len(layers)):
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
        self._record_state(inner, list(named.values()))
        self.tensors = self._op_tensors()

    def _op_tensors(self) -> list[Tensor]:
        """Return the tensors in the order of the arguments of ``nvfp4::decode_llama``."""
        tensors: list[Tensor] = []
        for i in range(len(self._layers)):
            parts = [_PARTS(weight) for weight in self._weights[7 * i : 7 * i + 7]]
            first, second = self._norm_weights[2 * i : 2 * i + 2]
            tensors += [first, *chain(*parts[:4]), second, *chain(*parts[4:])]
        return [*tensors, self._norm_weights[-1]]

    def _record_state(self, inner: Any, modules: list[nn.Module]) -> None:
        """Store the state that :meth:`holds` compares, in a few lists: comparing takes tens of ns per element."""
        self._modules = modules
        self._types = list(map(type, modules))
        self._dicts = [vars(each) for each in modules]
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
        self._constants = self._current_constants()

    def _current_constants(self) -> tuple[list[Any], ...]:
        return (
            [each.variance_epsilon for each in self._norms],
            [each.dtype for each in self._norm_weights],
            list(map(_ATTENTION, self._attentions)),
            list(map(_LAYER, self._layers)),
        )

    def _hold_hooks(self) -> bool:
        """Return whether no hook was added. A new hook increments a global id; without that, none is compared."""
        if RemovableHandle.next_id != self._next_id:
            if any(self._hooks) or list(chain.from_iterable(self._idle)) != self._idle_ids:
                return False
            self._next_id = RemovableHandle.next_id
        return True

    def holds(self, config: Any) -> bool:
        """Return whether the model has not changed: its objects are identical, or scalar tensors of equal value."""
        try:
            return (
                list(chain.from_iterable(map(dict.values, self._children))) == self._child
                and list(map(type, self._modules)) == self._types
                and self._hold_hooks()
                and not any(map(contains, self._dicts, repeat("forward")))
                and list(chain.from_iterable(map(dict.values, self._owners))) == self._parameters
                and list(map(_FIELDS, self._weights)) == self._fields
                and self._current_constants() == self._constants
                and _unsupported_reason(config, self.layers) is None
            )
        except (AttributeError, RuntimeError, TypeError):  # dense weights, or other tensors (== is elementwise)
            return False


def _modules(inner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and module of each module whose forward the op replaces."""
    yield "model.layers", inner.layers
    for path, module in inner.layers.named_modules(remove_duplicate=False):
        if path:
            yield f"model.layers.{path}", module
    yield "model.norm", inner.norm
    yield "model.rotary_emb", inner.rotary_emb


def _unsupported_reason(config: Any, layers: int) -> str | None:
    """Return why the op does not support the configuration or the state of the process; None if it does."""
    attention = config._attn_implementation
    is_sdpa = attention == "sdpa" and ALL_ATTENTION_FUNCTIONS.get("sdpa") is sdpa_attention_forward
    if not is_sdpa and not (attention == "eager" and "eager" not in ALL_ATTENTION_FUNCTIONS):
        return f"the attention implementation is {attention!r}, and decode_natively supports 'sdpa' and 'eager'"
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
        raise ValueError(f"decode_natively supports the activation silu, and this model has {config.hidden_act}")
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes: Mapping[str, int] = {"hidden_size": config.hidden_size, "head_dim": dim}
    for name, size in sizes.items():
        if size % STEP:
            raise ValueError(f"decode_natively needs sizes that are multiples of {STEP}, and {name} is {size}")


def _check_layer(name: str, layer: Any, index: int, config: Any) -> None:
    """Raise a ValueError for a layer that is not transformers' own, or that does more than the op."""
    if type(layer) not in _OTHERS or type(layer.self_attn) not in _OTHERS or type(layer.mlp) not in _OTHERS:
        raise ValueError(f"{name} has modules that are not transformers' own, which decode_natively would not call")
    if layer.training and layer.gradient_checkpointing:
        raise ValueError(f"{name} uses gradient checkpointing, which disables the cache: call model.eval() first")
    attention = layer.self_attn
    if attention.training and attention.attention_dropout:
        raise ValueError(f"{name} has attention dropout in training mode: call model.eval() first")
    if attention.layer_idx != index or attention.config is not config:
        raise ValueError(f"{name}.self_attn has layer_idx {attention.layer_idx}, or another config than the model")
    if type(layer.mlp.act_fn) not in (SiLUActivation, nn.SiLU):
        raise ValueError(f"decode_natively supports the activation silu, and {name} has {layer.mlp.act_fn}")
    for path in LINEARS:
        _check_linear(f"{name}.{path}", layer.get_submodule(path))


def _check_linear(name: str, linear: Any) -> None:
    if type(linear) not in (nn.Linear, NVFP4Linear) or "weight" not in linear._parameters:
        raise ValueError(f"{name} is a {type(linear).__name__}, whose forward decode_natively would not call")
    weight = linear.weight
    _check_tensor(name, weight)
    if linear.bias is not None:
        raise ValueError(f"{name} has a bias, which decode_natively does not support: use transformers' forward")
    if type(weight) is not NVFP4Tensor:
        raise ValueError(f"{name} is dense: call quantize_(model.model, NVFP4WeightOnlyConfig()) first")
    if weight.activation_spec is not None or weight.transposed:
        raise ValueError(f"{name} quantizes its activations (W4A4): decode_natively needs a weight-only model")
    if not all(part.is_contiguous() for part in _PARTS(weight)) or weight.spec.hadamard_sign is not None:
        raise ValueError(
            f"{name} is a view of another weight, or Hadamard-transformed: quantize it separately, without a transform"
        )


def _check_module(name: str, module: nn.Module) -> None:
    """Raise a ValueError for a module whose call does more than its class's forward."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    if not all(getattr(hook, "__qualname__", "").startswith(_CAPTURING) for hook in hooks):
        raise ValueError(f"{name} has hooks, which decode_natively would not call: remove them first")
    if type(module) not in (*_OTHERS, nn.Linear, NVFP4Linear) or "forward" in vars(module):
        raise ValueError(f"{name} is a {type(module).__name__} with a forward that decode_natively would not call")
    if name.endswith("norm"):
        _check_tensor(name, module.weight)


def _check_tensor(name: str, weight: Any) -> None:
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        raise ValueError(f"{name} is {weight.dtype} on {weight.device}: decode_natively needs bfloat16 on the CPU")


def _check_alike(plan: Plan) -> None:
    """Raise a ValueError for layers that differ in sizes or constants: the op has one value for all layers."""
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
            raise ValueError(f"decode_natively needs equal layers, and {name} of this model are {values}")
