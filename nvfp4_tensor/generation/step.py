"""Text written on a CPU: one token at a time through all layers of a Llama, by one op instead of some forty a layer."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.mistral.modeling_mistral import MistralModel

from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

_MODELS = (LlamaModel, MistralModel)
_STEP = 32
"""The op takes hidden sizes and heads of a multiple of so many elements."""
_CHANGING = ("dynamic", "longrope")
"""Rotations that depend on how long the text is."""
_LAYER = (
    "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


def decode_natively(model: PreTrainedModel) -> PreTrainedModel:
    """Let a Llama or Mistral with NVFP4 weights write text on a CPU by one native op a token. Returns the model.

    From then on a token that follows others, batch 1, goes through ``torch.ops.nvfp4.decode_llama``; everything else,
    a prompt for instance, goes through transformers as before. The token needs a static cache, which ``generate`` of
    this model makes from now on unless it is told otherwise. Results are those of the model, rounded at the same places
    but inside of attention, which is summed in float32. Nothing is compiled. Hooks inside of the layers are not called.

    A dense output layer too has a faster product for one token. To undo all of it: ``del model.model.forward``, the
    same of ``model.lm_head`` if that is dense, and ``model.generation_config.cache_implementation = None``.

    Args:
        model: bfloat16, on the CPU, every linear of its layers an :class:`NVFP4Tensor` without ``activation_spec``
            (``quantize_(model.model, NVFP4WeightOnlyConfig())``); the output layer may be dense or NVFP4.

    Raises:
        TypeError: not a Llama or Mistral of transformers.
        ValueError: a weight, bias, activation or size that the op does not take; it says which.

    Example::

        decode_natively(model).generate(prompt, max_new_tokens=100)
    """
    inner = getattr(model, "model", None)
    if type(inner) not in _MODELS:
        names = " or ".join(each.__name__.removesuffix("Model") for each in _MODELS)
        raise TypeError(f"decode_natively takes a {names} of transformers with an output layer, not {type(model)}")
    assert isinstance(inner, nn.Module)
    decoder: Any = NativeDecoder(inner)
    inner.forward = decoder
    head: Any = model.get_output_embeddings()
    if _is_dense_head(head):
        head.forward = functools.partial(_head, head)
    if model.generation_config is not None:
        model.generation_config.cache_implementation = "static"
    return model


def _is_dense_head(head: Any) -> bool:
    if type(head) is not nn.Linear or head.bias is not None or type(head.weight.data) is not Tensor:
        return False
    weight = head.weight
    return bool(
        weight.dtype == torch.bfloat16 and weight.is_cpu and weight.is_contiguous() and not weight.shape[1] % _STEP
    )


def _head(head: nn.Linear, x: Tensor) -> Tensor:
    """The dense output layer: on one row by an op of ours, which reads its weight once, as it lies."""
    if x.numel() != x.shape[-1] or x.dtype != head.weight.dtype or torch.is_grad_enabled() or not _is_dense_head(head):
        return nn.Linear.forward(head, x)
    y: Tensor = torch.ops.nvfp4.linear_row(x.reshape(1, -1), head.weight)
    return y.view(*x.shape[:-1], -1)


class NativeDecoder:
    """The forward of a LlamaModel: the op for one token that follows others, and for all else the model's own."""

    def __init__(self, inner: Any) -> None:
        _check_config(inner.config)
        modules = list(_modules(inner))
        for name, module in modules:
            _check(name, module)
        self.inner = inner
        self.otherwise = functools.partial(type(inner).forward, inner)
        self.held: list[tuple[dict[str, Any], Tensor]] = [(each._parameters, each.weight) for _, each in modules]
        """Where the weights were found, and which: one replaced since then would be missed."""
        self.tensors = [tensor for _, each in modules for tensor in _stored(each.weight)]
        self.rotations = torch.empty(0), torch.empty(0)
        self.eps = inner.norm.variance_epsilon
        self.scaling = inner.layers[0].self_attn.scaling

    def __call__(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        cache: Any = kwargs.get("past_key_values")
        if input_ids is None or not _is_one_token(input_ids, cache, kwargs):
            return self.otherwise(input_ids, **kwargs)
        position = int(cache.layers[0].cumulative_length)
        if position >= cache.layers[0].max_cache_len or not _sees_all(kwargs.get("attention_mask"), position):
            return self.otherwise(input_ids, **kwargs)
        if any(parameters["weight"] is not weight for parameters, weight in self.held):
            raise RuntimeError("a weight was replaced after decode_natively(model): call it again")
        hidden = self._step(input_ids, cache.layers, position, kwargs.get("position_ids"))
        return BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=cache)

    def _step(self, input_ids: Tensor, layers: list[Any], position: int, position_ids: Tensor | None) -> Tensor:
        for each in layers:
            each.is_compileable = False  # or generate makes a mask of four dimensions, 0.3 ms a token
        x = self.inner.embed_tokens(input_ids)
        cos, sin = self._rotation(x, position if position_ids is None else int(position_ids))
        hidden: Tensor = torch.ops.nvfp4.decode_llama(
            x[0], self.tensors, [each.keys for each in layers], [each.values for each in layers],
            cos, sin, position, self.eps, self.scaling,
        )  # fmt: skip
        torch._foreach_add_([each.cumulative_length for each in layers], 1)
        return hidden[None]

    def _rotation(self, x: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """cos and sin (dim,), of all positions up to the next power of two: one by one they take 0.1 ms each."""
        if self.inner.rotary_emb.rope_type in _CHANGING:
            cos, sin = self.inner.rotary_emb(x, position_ids=torch.tensor([[position]]))
            return cos[0, 0], sin[0, 0]
        if position >= len(self.rotations[0]):
            positions = torch.arange(1 << (position + 1).bit_length())
            cos, sin = self.inner.rotary_emb(x, position_ids=positions[None])
            self.rotations = cos[0], sin[0]
        cos, sin = self.rotations
        return cos[position], sin[position]


def _modules(inner: Any) -> Iterator[tuple[str, Any]]:
    """The op's order."""
    for i, layer in enumerate(inner.layers):
        for name in _LAYER:
            yield f"model.layers.{i}.{name}", layer.get_submodule(name)
    yield "model.norm", inner.norm


def _check_config(config: Any) -> None:
    if config.hidden_act not in ("silu", "swish"):
        raise ValueError(f"decode_natively knows the activation silu, and this model's is {config.hidden_act}")
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = {"hidden_size": config.hidden_size, "head_dim": dim}
    for name, size in sizes.items():
        if size % _STEP:
            raise ValueError(f"decode_natively takes sizes that are multiples of {_STEP}, and {name} is {size}")


def _check(name: str, module: Any) -> None:
    """ValueError for a norm or a linear that the op does not take."""
    weight = module.weight
    if module._forward_hooks or module._forward_pre_hooks:
        raise ValueError(f"{name} has hooks, which decode_natively would not call: remove them first")
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        raise ValueError(f"{name} is {weight.dtype} on {weight.device}: decode_natively takes bfloat16 on the CPU")
    if "proj" not in name:
        return
    if type(module).forward is not nn.Linear.forward:
        raise ValueError(f"{name} is a {type(module).__name__}, whose forward decode_natively would not call")
    if module.bias is not None:
        raise ValueError(f"{name} has a bias, which decode_natively does not take: leave this model to transformers")
    if not isinstance(weight, NVFP4Tensor):
        raise ValueError(f"{name} is dense: quantize_(model.model, NVFP4WeightOnlyConfig()) first")
    if weight.activation_spec is not None or weight.transposed:
        raise ValueError(f"{name} quantizes its activations (W4A4): decode_natively takes weights alone")


def _stored(weight: Tensor) -> list[Tensor]:
    if not isinstance(weight, NVFP4Tensor):
        return [weight.detach()]
    return [weight.qdata.contiguous(), weight.scale.contiguous(), weight.row_scale()]


def _is_one_token(input_ids: Tensor, cache: Any, kwargs: dict[str, Any]) -> bool:
    """One token that follows others, on the CPU, and nothing asked for beside its hidden state."""
    layers: list[Any] = cache.layers if type(cache) is StaticCache else []
    return (
        input_ids.shape == (1, 1)
        and input_ids.is_cpu
        and bool(layers)
        and all(type(each) is StaticLayer and each.is_initialized for each in layers)
        and layers[0].keys.dtype == torch.bfloat16
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and kwargs.get("inputs_embeds") is None
        and not kwargs.get("output_hidden_states")
        and not kwargs.get("output_attentions")
    )


def _sees_all(mask: Tensor | None, position: int) -> bool:
    """Whether the token attends to all before it: the prompt was not padded."""
    if mask is None:
        return True
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
        return False
    seen = mask.reshape(-1)[: position + 1]
    return bool((seen == 0).all() if seen.is_floating_point() else seen.all())
