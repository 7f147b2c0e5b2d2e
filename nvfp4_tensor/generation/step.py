"""Text written on a CPU: one token at a time through all layers of a Llama, by one op instead of some forty a layer."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer
from transformers.generation import GenerationMode
from transformers.modeling_outputs import BaseModelOutputWithPast

from nvfp4_tensor.generation.plan import MODELS, STEP, Plan

_CHANGING = ("dynamic", "longrope")
"""Rotations that depend on how long the text is."""
_ARGUMENTS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "return_dict"}
"""What the op knows of a model's arguments."""
_CACHES = "_prepare_cache_for_generation"


def decode_natively(model: PreTrainedModel, enable: bool = True) -> PreTrainedModel:
    """Let a Llama or Mistral with NVFP4 weights write text on a CPU by one native op a token. Returns the model.

    From then on a token that follows others, batch 1, goes through ``torch.ops.nvfp4.decode_llama``; everything else
    goes through transformers as before: prompts, batches, padded prompts, beams, assistants, other caches, and a
    Mistral's tokens beyond its sliding window. The token needs a static cache, which ``generate`` makes for greedy
    search and sampling unless it is told otherwise. Results are those of the model, rounded at the same places but
    inside of attention, which is summed in float32. Nothing is compiled.

    Each token looks at the model first. After a change that the op does not know (an adapter, a hook, another module,
    dtype, activation or attention) tokens go through transformers, with one warning that names it, until it is undone.
    New weights, norms and rotations are simply used. Copies and pickles of the model decode natively too.

    Args:
        model: bfloat16, on the CPU, every linear of its layers an :class:`NVFP4Tensor` without ``activation_spec``
            (``quantize_(model.model, NVFP4WeightOnlyConfig())``); the output layer may be dense, which has a faster
            product for one token too, or NVFP4.
        enable: False undoes it.

    Raises:
        TypeError: not a Llama or Mistral of transformers.
        ValueError: a weight, bias, activation or size that the op does not take; it says which.

    Example::

        decode_natively(model).generate(prompt, max_new_tokens=100)
    """
    inner = getattr(model, "model", None)
    if type(inner) not in MODELS:
        names = " or ".join(each.__name__.removesuffix("Model") for each in MODELS)
        raise TypeError(f"decode_natively takes a {names} of transformers with an output layer, not {type(model)}")
    assert isinstance(inner, nn.Module)
    decoder: Any = NativeDecoder(inner) if enable else None
    for module, name in ((inner, "forward"), (model, _CACHES), (model.get_output_embeddings(), "forward")):
        if isinstance(vars(module).get(name), NativeDecoder | _Caches | _Head):
            delattr(module, name)
    if enable:
        inner.forward = decoder
        caches: Any = _Caches(model)
        setattr(model, _CACHES, caches)
        head: Any = model.get_output_embeddings()
        if _is_dense_head(head):
            head.forward = _Head(head)
    return model


class _Head:
    """The forward of a dense output layer: on one row by an op of ours, which reads its weight once, as it lies."""

    def __init__(self, head: nn.Linear) -> None:
        self.head = head

    def __call__(self, x: Tensor) -> Tensor:
        head = self.head
        is_row = x.numel() == x.shape[-1] and x.dtype == head.weight.dtype and not torch.is_grad_enabled()
        if not is_row or torch.is_autocast_enabled("cpu") or not _is_dense_head(head):
            y: Tensor = type(head).forward(head, x)
            return y
        row: Tensor = torch.ops.nvfp4.linear_row(x.reshape(1, -1), head.weight)
        return row.view(*x.shape[:-1], -1)


def _is_dense_head(head: Any) -> bool:
    if type(head) is not nn.Linear or head.bias is not None or type(head.weight.data) is not Tensor:
        return False
    weight = head.weight
    return bool(
        weight.dtype == torch.bfloat16 and weight.is_cpu and weight.is_contiguous() and not weight.shape[1] % STEP
    )


class _Caches:
    """What makes the cache of a call of ``generate``: a static one where tokens are decoded natively."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, config: Any, arguments: dict[str, Any], mode: Any, batch_size: int, length: int) -> Any:
        decoder = vars(self.model.model).get("forward")
        if (
            isinstance(decoder, NativeDecoder)
            and mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
            and batch_size * config.num_return_sequences == 1
            and config.cache_implementation is None
            and config.use_cache is not False
            and not config.is_assistant
            and arguments.get("past_key_values") is None
            and not torch.is_grad_enabled()
            and "prepare_inputs_for_generation" not in vars(self.model)  # peft's, with prefixes, for a dynamic cache
            and not torch.is_autocast_enabled("cpu")  # whose keys and values differ in dtype
            and decoder.plan() is not None
        ):
            arguments["past_key_values"] = StaticCache(self.model.config.get_text_config(decoder=True), length)
            return None
        return type(self.model)._prepare_cache_for_generation(self.model, config, arguments, mode, batch_size, length)


class NativeDecoder:
    """The forward of a LlamaModel: the op for one token that follows others, and for all else the model's own."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._plan: Plan | None = Plan(inner)
        self._rotations: _Rotations | None = None
        self._said: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy or a pickle: the model, of which it makes its own plan."""
        return {"inner": self.inner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.inner, self._plan, self._rotations, self._said = state["inner"], None, None, set()

    def plan(self) -> Plan | None:
        """What the op reads of the model as it is now; None, and one warning, for a model that it does not take."""
        if self._plan is None or not self._plan.holds(self.inner.config):
            try:
                self._plan = Plan(self.inner)
            except (ValueError, AttributeError) as error:  # a module replaced by one of another kind has other fields
                self._plan = None
                if str(error) not in self._said:
                    self._said.add(str(error))
                    warnings.warn(f"tokens go through transformers, and not natively: {error}", stacklevel=2)
        return self._plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        y = self._natively(*args, **kwargs) if len(args) < 2 else None
        return type(self.inner).forward(self.inner, *args, **kwargs) if y is None else y

    def _natively(self, input_ids: Any = None, past_key_values: Any = None, **others: Any) -> Any:
        """The token's output, or None for what transformers has to compute; then nothing has changed."""
        config = self.inner.config
        if not _is_one_token(input_ids, past_key_values, others) or _asks_for_more(config):
            return None
        layers = past_key_values.layers
        position, position_ids = int(layers[0].get_seq_length()), others.get("position_ids")
        if position >= layers[0].max_cache_len or not _sees_all(others.get("attention_mask"), position):
            return None
        if position_ids is not None and position_ids.numel() != 1:
            return None
        plan = self.plan()
        if plan is None or not _fits(layers, position, plan, config):
            return None
        x = self.inner.embed_tokens(input_ids)
        if x.dtype != torch.bfloat16:
            return None
        cos, sin = self._rotation(x, position if position_ids is None else int(position_ids))
        hidden: Tensor = torch.ops.nvfp4.decode_llama(
            x[0], plan.tensors, [each.keys for each in layers], [each.values for each in layers],
            cos, sin, position, plan.eps, plan.scaling,
        )  # fmt: skip
        torch._foreach_add_([each.cumulative_length for each in layers], 1)
        if layers[0].is_compileable or layers[0].is_sliding:
            _note(layers)
        return BaseModelOutputWithPast(last_hidden_state=hidden[None], past_key_values=past_key_values)

    def _rotation(self, x: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """cos and sin (dim,), of all positions up to the next power of two: one by one they take 0.1 ms each."""
        rotary = self.inner.rotary_emb
        if rotary.rope_type in _CHANGING:
            cos, sin = rotary(x, position_ids=torch.tensor([[position]]))
            return cos[0, 0], sin[0, 0]
        known = self._rotations
        if known is None or position >= len(known.cos) or not known.holds(rotary):
            known = self._rotations = _Rotations(rotary, x, 1 << (position + 1).bit_length())
        return known.cos[position], known.sin[position]


class _Rotations:
    """cos and sin (count, dim) of the first positions, and what they were made of."""

    def __init__(self, rotary: Any, x: Tensor, count: int) -> None:
        cos, sin = rotary(x, position_ids=torch.arange(count)[None])
        self.cos, self.sin = cos[0], sin[0]
        self._frequencies = rotary.inv_freq.clone()
        self._scaling = rotary.attention_scaling

    def holds(self, rotary: Any) -> bool:
        now = rotary.inv_freq
        return (
            rotary.attention_scaling == self._scaling
            and now.dtype == self._frequencies.dtype
            and torch.equal(now, self._frequencies)
        )


def _is_one_token(input_ids: Any, cache: Any, others: dict[str, Any]) -> bool:
    """One token that follows others, on the CPU, and nothing asked for besides its hidden state."""
    if not isinstance(input_ids, Tensor) or input_ids.shape != (1, 1) or type(cache) is not StaticCache:
        return False
    first: Any = cache.layers[0] if cache.layers else None
    return (
        input_ids.is_cpu
        and not cache.offloading
        and type(first) in (StaticLayer, StaticSlidingWindowLayer)
        and first.is_initialized
        and first.keys.dtype == torch.bfloat16
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not any(value for name, value in others.items() if name not in _ARGUMENTS)
        and others.get("return_dict") is not False
    )


def _asks_for_more(config: Any) -> bool:
    """Whether the configuration wants what the op does not give."""
    return bool(config.output_hidden_states or config.output_attentions or config.return_dict is False)


def _fits(layers: list[Any], position: int, plan: Plan, config: Any) -> bool:
    """Whether the cache is one of this model, within the window of its attention."""
    window = getattr(config, "sliding_window", None)
    kinds = {type(each) for each in layers}
    return len(layers) == plan.layers and len(kinds) == 1 and (window is None or position < window)


def _note(layers: list[Any]) -> None:
    for each in layers:
        each.is_compileable = False  # or generate makes a mask of four dimensions, 0.3 ms a token
        if each.is_sliding:
            each.cumulative_length_int += 1


def _sees_all(mask: Tensor | None, position: int) -> bool:
    """Whether the token attends to all before it: the prompt was not padded."""
    if mask is None:
        return True
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
        return False
    if mask.numel() != mask.shape[-1] or mask.shape[-1] <= position:
        return False
    seen = mask.reshape(-1)[: position + 1]
    if mask.dim() == 2:
        return bool(seen.all())
    return bool(seen.all() if seen.dtype == torch.bool else (seen == 0).all() and seen.is_floating_point())
