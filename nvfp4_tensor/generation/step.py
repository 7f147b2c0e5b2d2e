"""Native decoding of transformers models: one op per token on a CPU, one graph per token on CUDA (graph_decoder.py)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation import GenerationMode
from transformers.modeling_outputs import BaseModelOutputWithPast, MoeModelOutputWithPast

from nvfp4_tensor.generation.architectures import Block, Rotary
from nvfp4_tensor.generation.cache_argument import CACHE, NAMES, cache_in
from nvfp4_tensor.generation.cpu_arguments import DENSE_SIZE_STEP
from nvfp4_tensor.generation.families import FAMILIES, family_of
from nvfp4_tensor.generation.fixed_cache import (
    FixedCache,
    append_one,
    buffers_of,
    dtype_of,
    has_buffers,
    has_room,
    length_of,
)
from nvfp4_tensor.generation.graph_decoder import CACHES, KWARGS, GraphCaches, GraphDecoder, MaskKeeper, is_given
from nvfp4_tensor.generation.model_state import changes_itself
from nvfp4_tensor.generation.plan import Plan

_ARGUMENTS = {"attention_mask", "position_ids", *NAMES, "use_cache", "return_dict", "tokenizer"}
"""The arguments of a forward that the op supports. ``generate`` passes the tokenizer of its ``stop_strings`` too."""


def decode_natively(model: PreTrainedModel, enable: bool = True) -> PreTrainedModel:
    """Generate text at the speed of memory: one CUDA graph per token on a GPU, one native op per token on a CPU.

    After this call, a token after the prompt is computed natively by ``generate``, by a call of the model, and by
    :func:`nvfp4_tensor.generation.generate`. Everything else still uses transformers: prompts, padded batches, beam
    search, assistant models, other caches, training and autocast. ``generate`` gets a cache with fixed buffers for
    greedy search and sampling, unless another one is requested. On CUDA, ``nvfp4_cache(config, max_tokens=...)`` serves
    too. Results are rounded where the model rounds, except inside attention, which accumulates in float32. Nothing is
    compiled.

    On CUDA, up to 16 texts take one replay of a graph, from the embeddings to the logits. Models of the families in
    ``nvfp4_tensor.generation.families`` run natively; for others, the graph contains the model's own forward. Weights
    may be NVFP4 or dense. On a CPU, the step is for one text and NVFP4 weights.

    Before each token, the model is checked for changes. After a change that the step does not support (an adapter, a
    hook, another module, dtype, activation or attention), tokens use transformers until the change is undone, and one
    warning has the reason. New weights, norms and rotations are used without a warning. Copies and pickles of the model
    decode natively too.

    Args:
        model: a causal language model of transformers. On a CPU a bfloat16 model of one of those families, in which the
            weight of each linear of its layers must be an :class:`NVFP4Tensor` without ``activation_spec``
            (``quantize_(model.model, NVFP4WeightOnlyConfig(experts=True))``). The output layer may be NVFP4 or dense; a
            dense one also gets a faster product for one token.
        enable: False restores the model's own forward, and frees graphs and the buffers of caches.

    Returns:
        The model.

    Raises:
        TypeError: not a causal language model of transformers, or on a CPU one of another family.
        ValueError: the step does not support a weight, activation or size of the model; on CUDA, a model on several
            devices, with hooks, or without a cache of keys and values.

    Example::

        decode_natively(model).generate(prompt, max_new_tokens=100)
    """
    if enable and hasattr(model, "get_base_model"):
        raise TypeError(
            f"decode_natively supports models of transformers, not a {type(model).__name__} of peft: merge its "
            "adapters, or pass model.get_base_model(), whose tokens use transformers while it has adapters"
        )
    if enable and isinstance(model, PreTrainedModel) and model.device.type == "cuda":
        _check_generates(model)
        graphs = GraphDecoder(_restore(model))
        graphs.install()
        return model
    if not enable:
        return _restore(model)
    return _decode_on_cpu(model)


def _check_generates(model: PreTrainedModel) -> None:
    if not model.can_generate() or not isinstance(model.get_output_embeddings(), nn.Module):
        raise TypeError(f"decode_natively supports models of transformers that generate text, not {type(model)}")


def _restore(model: Any) -> Any:
    """Remove what an earlier call has set."""
    inner, head = getattr(model, "model", None), getattr(model, "get_output_embeddings", lambda: None)()
    ours = (NativeDecoder, _Caches, _Head, GraphDecoder, GraphCaches, MaskKeeper)
    for module, name in ((inner, "forward"), (head, "forward"), (model, "forward"), (model, CACHES), (model, KWARGS)):
        if module is not None and isinstance(vars(module).get(name), ours):
            delattr(module, name)
    return model


def _decode_on_cpu(model: Any) -> Any:
    inner = getattr(model, "model", None)
    if family_of(inner) is None:
        *names, last = (each.name for each in FAMILIES.values())
        supported = f"{', '.join(names)} or {last}"
        raise TypeError(
            f"decode_natively supports a {supported} of transformers with an output layer, not {type(model)}"
        )
    assert isinstance(inner, nn.Module)
    decoder: Any = NativeDecoder(inner)
    _restore(model)
    inner.forward = decoder
    caches: Any = _Caches(model)
    setattr(model, CACHES, caches)
    _speed_up_head(model)
    return model


def _speed_up_head(model: Any) -> None:
    head: Any = model.get_output_embeddings()
    if _is_dense_head(head) and "forward" not in vars(head):
        head.forward = _Head(head)


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
    is_plain = weight.dtype == torch.bfloat16 and weight.is_cpu and weight.is_contiguous()
    return bool(is_plain and weight.shape[1] % DENSE_SIZE_STEP == 0)


class _Caches:
    """Replace the method of ``generate`` that creates the cache: native decoding needs a static one."""

    def __init__(self, model: Any) -> None:
        self.model, self._refused = model, None

    def __call__(self, config: Any, arguments: dict[str, Any], mode: Any, batch_size: int, length: int) -> Any:
        if (
            (decoder := self._decoder()) is not None
            and mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
            and batch_size * config.num_return_sequences == 1
            and config.cache_implementation is None
            and config.use_cache is not False
            and not config.is_assistant
            and cache_in(arguments) is None
            and not torch.is_grad_enabled()
            and "prepare_inputs_for_generation" not in vars(self.model)  # set by peft's prefixes, for a dynamic cache
            and not torch.is_autocast_enabled("cpu")  # under which keys and values differ in dtype
            and decoder.plan() is not None
        ):
            arguments[CACHE] = FixedCache(len(self.model.model.layers), length)
            return None
        return type(self.model)._prepare_cache_for_generation(self.model, config, arguments, mode, batch_size, length)

    def _decoder(self) -> NativeDecoder | None:
        """Return the decoder of the inner model, which is a new one if either it or the output layer was replaced."""
        inner = self.model.model
        if "forward" not in vars(inner) and self._refused is not inner:
            try:
                _decode_on_cpu(self.model)
            except (AttributeError, TypeError, ValueError) as error:
                self._refused = inner
                warnings.warn(f"tokens are decoded by transformers, not natively: {error}", stacklevel=4)
        _speed_up_head(self.model)
        decoder = vars(inner).get("forward")
        return decoder if isinstance(decoder, NativeDecoder) else None


class NativeDecoder:
    """The forward of an inner model: the op for one token after a prompt, and the model's own forward otherwise."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._plan: Plan | None = Plan(inner)
        self._rotations: list[_Rotations | None] = []
        self._warned: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy or a pickle, which makes its own plan."""
        return {"inner": self.inner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.inner, self._plan, self._rotations, self._warned = state["inner"], None, [], set()

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

    def _natively(self, input_ids: Any = None, **others: Any) -> Any:
        """Return the output of one token, or None, without side effects, for calls that need transformers."""
        config, cache = self.inner.config, cache_in(others)
        if not _is_one_token(input_ids, cache, others) or _requests_more(config):
            return None
        position, position_ids = length_of(cache), others.get("position_ids")
        if position_ids is not None and position_ids.numel() != 1:
            return None
        plan = self.plan()
        if plan is None or not _fits(cache, position, plan.description.blocks):
            return None
        if not _sees_all(others.get("attention_mask"), position, plan.description.blocks):
            return None
        x = self._embedded(input_ids)
        if x.dtype != torch.bfloat16:
            return None
        at = position if position_ids is None else int(position_ids)
        rotations = [self._rotation(i, x, at) for i in range(len(plan.description.rotaries))]
        hidden: Tensor = torch.ops.nvfp4.decode_step(
            x[0], *plan.constants, *buffers_of(cache), [cos for cos, _ in rotations],
            [sin for _, sin in rotations], position,
        )  # fmt: skip
        append_one(cache)
        output = MoeModelOutputWithPast if plan.description.has_router_logits else BaseModelOutputWithPast
        return output(last_hidden_state=hidden[None], **{CACHE: cache})

    def _embedded(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.inner.embed_tokens(input_ids)
        multiplier = getattr(self.inner, "embedding_multiplier", None)  # Granite; Gemma's embedding has its own
        return x if multiplier is None else x * multiplier

    def _rotation(self, index: int, x: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin (dim,) of a rotary embedding.

        They are computed up to the next power of two; one at a time costs 0.1 ms each.
        """
        assert self._plan is not None
        rotary = self._plan.description.rotaries[index]
        if changes_itself(rotary.module):
            cos, sin = rotary.cos_sin(x, torch.tensor([[position]], dtype=torch.int64))
            return cos[0, 0], sin[0, 0]
        self._rotations += [None] * (index + 1 - len(self._rotations))
        known = self._rotations[index]
        if known is None or position >= len(known.cos) or not known.holds(rotary):
            known = self._rotations[index] = _Rotations(rotary, x, 1 << (position + 1).bit_length())
        return known.cos[position], known.sin[position]


class _Rotations:
    """cos and sin (count, dim) of the first positions, and the frequencies that they were computed from."""

    def __init__(self, rotary: Rotary, x: Tensor, count: int) -> None:
        cos, sin = rotary.cos_sin(x, torch.arange(count)[None])
        self.cos, self.sin = cos[0], sin[0]
        self._module, self._frequencies = rotary.module, rotary.frequencies.clone()
        self._scaling = rotary.scaling

    def holds(self, rotary: Rotary) -> bool:
        frequencies = rotary.frequencies
        return (
            rotary.module is self._module
            and rotary.scaling == self._scaling
            and frequencies.dtype == self._frequencies.dtype
            and torch.equal(frequencies, self._frequencies)
        )


def _is_one_token(input_ids: Any, cache: Any, others: dict[str, Any]) -> bool:
    """Return whether the call decodes one token on the CPU and requests only its hidden state."""
    if not isinstance(input_ids, Tensor) or input_ids.shape != (1, 1) or not has_buffers(cache):
        return False
    return (
        input_ids.is_cpu
        and dtype_of(cache) == torch.bfloat16
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not any(is_given(value) for name, value in others.items() if name not in _ARGUMENTS)
        and others.get("return_dict") is not False
    )


def _requests_more(config: Any) -> bool:
    """Return whether the configuration requests outputs that the op does not compute."""
    return bool(config.output_hidden_states or config.output_attentions or config.return_dict is False)


def _fits(cache: Any, position: int, blocks: Sequence[Block]) -> bool:
    """Return whether the cache fits the model, and has room for one token."""
    windows = [each.attention.window for each in blocks]
    return len(cache.layers) == len(windows) and has_room(cache, position, windows)


def _sees_all(mask: Any, position: int, blocks: Sequence[Block]) -> bool:
    """Return whether the token attends to all earlier ones in its windows, that is, the prompt was not padded."""
    if isinstance(mask, dict):
        return all(_sees_all(each, position, blocks) for each in mask.values())
    if mask is None:
        return True
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4) or mask.numel() != mask.shape[-1]:
        return False
    length = mask.shape[-1]
    if length <= position and (mask.dim() == 2 or all(each.attention.window != length for each in blocks)):
        return False
    seen = mask.reshape(-1)[: position + 1]
    if mask.dim() == 2:
        return bool(seen.all())
    return bool(seen.all() if seen.dtype == torch.bool else (seen == 0).all() and seen.is_floating_point())
