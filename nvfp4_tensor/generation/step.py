"""Text generation on a CPU: one op per token for all layers of a Llama, instead of about forty ops per layer."""

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
"""Types of rotary embeddings that depend on the length of the text."""
_ARGUMENTS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "return_dict"}
"""The arguments of a model's forward that the op supports."""
_CACHES = "_prepare_cache_for_generation"


def decode_natively(model: PreTrainedModel, enable: bool = True) -> PreTrainedModel:
    """Generate text on a CPU with one native op per token, for a Llama or Mistral with NVFP4 weights.

    After this call, decoding one token at batch size 1 uses ``torch.ops.nvfp4.decode_llama``. Everything else still
    uses transformers: prompts, batches, padded prompts, beam search, assistant models, other caches, and a Mistral's
    tokens beyond its sliding window. The op needs a static cache, which ``generate`` creates for greedy search and
    sampling unless another cache is requested. Results are rounded where the model rounds, except inside attention,
    which accumulates in float32. Nothing is compiled.

    Before each token, the model is checked for changes. After a change that the op does not support (an adapter, a
    hook, another module, dtype, activation or attention), tokens use transformers until the change is undone, and one
    warning has the reason. New weights, norms and rotations are used without a warning. Copies and pickles of the model
    decode natively too.

    Args:
        model: a bfloat16 model on the CPU. The weight of each linear of its layers must be an :class:`NVFP4Tensor`
            without ``activation_spec`` (``quantize_(model.model, NVFP4WeightOnlyConfig())``). The output layer may be
            NVFP4 or dense; a dense one also gets a faster product for one token.
        enable: False restores the model's own forward.

    Returns:
        The model.

    Raises:
        TypeError: the model is not a Llama or Mistral of transformers.
        ValueError: the op does not support a weight, bias, activation or size of the model.

    Example::

        decode_natively(model).generate(prompt, max_new_tokens=100)
    """
    inner = getattr(model, "model", None)
    if type(inner) not in MODELS:
        names = " or ".join(each.__name__.removesuffix("Model") for each in MODELS)
        raise TypeError(f"decode_natively supports a {names} of transformers with an output layer, not {type(model)}")
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
    """The forward of a dense output layer. One row uses an op that reads the weight once, in memory order."""

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
    """Replace the method of ``generate`` that creates the cache: native decoding needs a static one."""

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
            and "prepare_inputs_for_generation" not in vars(self.model)  # set by peft's prefixes, for a dynamic cache
            and not torch.is_autocast_enabled("cpu")  # under which keys and values differ in dtype
            and decoder.plan() is not None
        ):
            arguments["past_key_values"] = StaticCache(self.model.config.get_text_config(decoder=True), length)
            return None
        return type(self.model)._prepare_cache_for_generation(self.model, config, arguments, mode, batch_size, length)


class NativeDecoder:
    """The forward of a LlamaModel: the op for one token after a prompt, and the model's own forward otherwise."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._plan: Plan | None = Plan(inner)
        self._rotations: _Rotations | None = None
        self._warned: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy or a pickle, which makes its own plan."""
        return {"inner": self.inner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.inner, self._plan, self._rotations, self._warned = state["inner"], None, None, set()

    def plan(self) -> Plan | None:
        """Return the plan of the current model, or None, with one warning, if the op does not support it."""
        if self._plan is None or not self._plan.holds(self.inner.config):
            try:
                self._plan = Plan(self.inner)
            except (ValueError, AttributeError) as error:  # AttributeError: a module of another class has other fields
                self._plan = None
                if str(error) not in self._warned:
                    self._warned.add(str(error))
                    warnings.warn(f"tokens are decoded by transformers, not natively: {error}", stacklevel=2)
        return self._plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        y = self._natively(*args, **kwargs) if len(args) < 2 else None
        return type(self.inner).forward(self.inner, *args, **kwargs) if y is None else y

    def _natively(self, input_ids: Any = None, past_key_values: Any = None, **others: Any) -> Any:
        """Return the output of one token, or None, without side effects, for calls that need transformers."""
        config = self.inner.config
        if not _is_one_token(input_ids, past_key_values, others) or _requests_more(config):
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
            _update_fields(layers)
        return BaseModelOutputWithPast(last_hidden_state=hidden[None], past_key_values=past_key_values)

    def _rotation(self, x: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin (dim,). They are computed up to the next power of two; one at a time costs 0.1 ms each."""
        rotary = self.inner.rotary_emb
        if rotary.rope_type in _CHANGING:
            cos, sin = rotary(x, position_ids=torch.tensor([[position]]))
            return cos[0, 0], sin[0, 0]
        known = self._rotations
        if known is None or position >= len(known.cos) or not known.holds(rotary):
            known = self._rotations = _Rotations(rotary, x, 1 << (position + 1).bit_length())
        return known.cos[position], known.sin[position]


class _Rotations:
    """cos and sin (count, dim) of the first positions, and the frequencies that they were computed from."""

    def __init__(self, rotary: Any, x: Tensor, count: int) -> None:
        cos, sin = rotary(x, position_ids=torch.arange(count)[None])
        self.cos, self.sin = cos[0], sin[0]
        self._frequencies = rotary.inv_freq.clone()
        self._scaling = rotary.attention_scaling

    def holds(self, rotary: Any) -> bool:
        frequencies = rotary.inv_freq
        return (
            rotary.attention_scaling == self._scaling
            and frequencies.dtype == self._frequencies.dtype
            and torch.equal(frequencies, self._frequencies)
        )


def _is_one_token(input_ids: Any, cache: Any, others: dict[str, Any]) -> bool:
    """Return whether the call decodes one token on the CPU and requests only its hidden state."""
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


def _requests_more(config: Any) -> bool:
    """Return whether the configuration requests outputs that the op does not compute."""
    return bool(config.output_hidden_states or config.output_attentions or config.return_dict is False)


def _fits(layers: list[Any], position: int, plan: Plan, config: Any) -> bool:
    """Return whether the cache fits the model, and the position is within the sliding window."""
    window = getattr(config, "sliding_window", None)
    kinds = {type(each) for each in layers}
    return len(layers) == plan.layers and len(kinds) == 1 and (window is None or position < window)


def _update_fields(layers: list[Any]) -> None:
    for each in layers:
        each.is_compileable = False  # otherwise generate makes a 4-D mask, 0.3 ms per token
        if each.is_sliding:
            each.cumulative_length_int += 1


def _sees_all(mask: Tensor | None, position: int) -> bool:
    """Return whether the token attends to all earlier ones, that is, the prompt was not padded."""
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
