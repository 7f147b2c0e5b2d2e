"""How a token of a model is computed: by the native step of a description, or in a graph by the model's own forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nvfp4_tensor.generation.architectures import Model, Rotary
from nvfp4_tensor.generation.cache_argument import cache_argument
from nvfp4_tensor.generation.families import describe, family_of
from nvfp4_tensor.generation.fixed_cache import (
    FixedCache,
    buffers_of,
    keeps_all_keys,
    static_view,
)
from nvfp4_tensor.generation.fused_layers import FusedLayers, StepArguments, flatten, on_cpu
from nvfp4_tensor.generation.model_state import ModelState, check_modules, unsupported_reason
from nvfp4_tensor.generation.prompt import Prompts, fits
from nvfp4_tensor.generation.ring import DenseBuffers
from nvfp4_tensor.generation.token_step import Rotation, TokenStep
from nvfp4_tensor.quantization.linear import PRE_SCALE
from nvfp4_tensor.tensor.fp8 import FP8Tensor
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

_REQUESTS = ("output_hidden_states", "output_attentions", "output_router_logits")
DTYPES = (torch.bfloat16, torch.float16)

Step = Callable[[Tensor, Tensor, "Tensor | None", Tensor, Any], Tensor]
"""From tokens (B, 1) to the logits (B, vocabulary) behind them.

Further arguments: the number of tokens in the cache, (1,) or on CUDA (B,); the first position that each text sees (B,),
None for 0; positions for the rotary embeddings (B, 1); cos and sin of these positions, None to compute them.
"""


class Plan:
    """How one token of a model is computed, and the state of the model that it depends on.

    Attributes:
        description: the described model, whose native step this is; None: the model's own forward.
        requests_more: whether the config asks for more than logits.
        reason: why a model of a known family takes its own forward, None for other models.

    Args:
        by_operators: on a CPU too, run the operators of a graph one by one. Otherwise all layers are one there, unless
            a linear scales its inputs.

    Raises:
        ValueError: neither is possible. The message has the reason.
        TypeError: on a CPU, a model of no known family.
    """

    def __init__(self, model: Any, by_operators: bool = False) -> None:
        self.model = model
        self.description: Model | None = None
        self.reason: str | None = None
        self._arguments: StepArguments | None = None
        self._tables: dict[int, _Table] = {}
        modules = {name or type(model).__name__: each for name, each in model.named_modules(remove_duplicate=False)}
        self.device = _single_device(model)
        on_cpu = self.device.type == "cpu" and not by_operators
        if not on_cpu:
            check_modules(modules, (model,), patched=True)
        if on_cpu or family_of(model) is not None:
            try:
                self.description = _describe(model, modules)
            except (ValueError, AttributeError) as error:  # AttributeError: a module of another class
                if on_cpu:
                    raise
                self.reason = str(error)
        if on_cpu and self.description is not None and not _needs_operators(modules):
            self._arguments = flatten(self.description)
        if self.description is None:
            _check_own_forward(model, modules)
        else:
            self._step = TokenStep(self.description)
            self.prompts = Prompts(self._step, self._rows_are_independent())
        self.dtype: torch.dtype = model.dtype
        self.requests_more = model.config.return_dict is False or any(
            getattr(model.config, name, False) for name in _REQUESTS
        )
        self.layers: int = model.config.get_text_config(decoder=True).num_hidden_layers
        self._state = ModelState(modules, (model,), model.config)

    def holds(self) -> bool:
        """Return whether the model has not changed since the plan was made."""
        return self._state.holds(self.model.config)

    @property
    def changing_rotaries(self) -> bool:
        """Whether a rotation depends on the length of the text, which is read on the host."""
        return self.description is not None and any(each.changes for each in self.description.rotaries)

    @property
    def takes_one_operator(self) -> bool:
        """Whether one operator of a CPU is the native step, whose rotations are looked up."""
        return self._arguments is not None

    def rotations(self, positions: Tensor) -> list[Rotation]:
        """Return cos and sin (B, rotary) of positions (B, 1) for each of the model's rotary embeddings."""
        assert self.description is not None
        return [self._rotation(i, each, positions) for i, each in enumerate(self.description.rotaries)]

    def _rotation(self, index: int, rotary: Rotary, positions: Tensor) -> Rotation:
        assert self.description is not None
        like = self.description.norm.weight
        if self._arguments is None or rotary.changes:
            cos, sin = rotary.cos_sin(like, positions)
            return cos.flatten(0, 1), sin.flatten(0, 1)
        table, last = self._tables.get(index), int(positions.max())
        if table is None or last >= len(table.cos) or not table.holds(rotary):
            # Up to the next power of two: one at a time costs a CPU 0.1 ms each.
            table = self._tables[index] = _Table(rotary, like, 1 << (last + 1).bit_length())
        return table.cos[positions[:, 0]], table.sin[positions[:, 0]]

    def _rows_are_independent(self) -> bool:
        """Return whether tokens behind a prompt cost and change nothing: no scales of several tokens, no experts."""
        assert self.description is not None
        if self.changing_rotaries or any(each.experts is not None for each in self.description.blocks):
            return False
        parameters = list(self.model.parameters())
        return all(each.activation_spec is None for each in parameters if isinstance(each, NVFP4Tensor)) and all(
            each.spec.activations is None for each in parameters if isinstance(each, FP8Tensor)
        )

    @property
    def reads_prompts(self) -> bool:
        """Whether ``prompts`` read them as the model's forward does."""
        return self._arguments is None and self.description is not None and fits(self.description)

    @property
    def reads_codes(self) -> bool:
        """Whether the native step can attend to a cache of codes: without windows and sinks."""
        return (
            self._arguments is None
            and self.description is not None
            and not any(each.kinds["window"] or "sinks" in each.parts for each in self.description.blocks)
        )

    def bind(self, cache: Any, padded: bool, texts: slice | None = None) -> tuple[Step, Any]:
        """Return the step that appends to the buffers of this cache, and what a graph of it needs besides them.

        Args:
            padded: texts may have padding before them.
            texts: rows of the buffers; None: all.
        """
        if self.description is None:
            return self._bind_own(cache)
        buffers = buffers_of(cache)
        if texts is not None:
            buffers = [DenseBuffers(*(t[texts] for t in each)) for each in buffers]
        fused: Any = None
        if self._arguments is not None:
            fused = on_cpu(self._arguments, buffers)
        elif not padded:
            fused = FusedLayers.of(self.description, buffers)

        def step(tokens: Tensor, position: Tensor, starts: Tensor | None, positions: Tensor, rotations: Any) -> Tensor:
            rotations = self.rotations(positions) if rotations is None else rotations
            return self._step(tokens.flatten(), buffers[0].place_of(position, starts), rotations, buffers, fused)

        return step, fused.plan if isinstance(fused, FusedLayers) else None

    def _bind_own(self, cache: FixedCache) -> tuple[Step, Any]:
        """Bind the model's own forward to a cache, whose length only a graph knows."""
        static, forward, argument = static_view(cache), type(self.model).forward, cache_argument(self.model)
        layers: list[Any] = static.layers
        lengths: list[Tensor] = [layer.cumulative_length for layer in layers]

        def step(tokens: Tensor, position: Tensor, starts: Tensor | None, positions: Tensor, rotations: Any) -> Tensor:
            torch._foreach_copy_(lengths, [position[0]] * len(lengths))
            output = forward(self.model, input_ids=tokens, position_ids=positions, use_cache=True, **{argument: static})
            logits: Tensor = output.logits[:, -1]
            return logits

        return step, lengths


class _Table:
    """cos and sin (count, rotary) of the first positions, and the frequencies that they were computed from."""

    def __init__(self, rotary: Rotary, like: Tensor, count: int) -> None:
        cos, sin = rotary.cos_sin(like, torch.arange(count, device=like.device)[None])
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


def _describe(model: Any, modules: dict[str, nn.Module]) -> Model:
    """Describe the model for its native step, or raise a ValueError with what does not fit."""
    description = describe(model)
    check_modules(modules, (model,))
    names = ("norm_before_attention", "norm_before_feed_forward", "q", "k", "v", "o")
    read: list[Any] = [each for block in description.blocks for each in block.linears(*names)]
    found = {each.weight.dtype for each in (*read, description.norm)}
    if len(found) != 1 or not found <= set(DTYPES):
        kinds = ", ".join(sorted(map(str, found)))
        raise ValueError(f"the native step needs a bfloat16 or float16 model, and this one has {kinds}")
    if description.norm.weight.dtype != description.embedding.dtype:
        raise ValueError("the native step needs an embedding of the model's dtype")
    return description


def _needs_operators(modules: dict[str, nn.Module]) -> bool:
    """Return whether a linear multiplies its inputs by a scale, or is FP8, which only the operators of a graph do."""
    in_fp8 = (isinstance(each._parameters.get("weight"), FP8Tensor) for each in modules.values())
    return any(in_fp8) or any(PRE_SCALE in each._buffers for each in modules.values())


def _single_device(model: Any) -> torch.device:
    devices = {each.device for each in (*model.parameters(), *model.buffers())}
    if len(devices) != 1:
        raise ValueError(
            f"the model is on {len(devices)} devices, and a CUDA graph needs one: {sorted(map(str, devices))}"
        )
    return devices.pop()


def _check_own_forward(model: Any, modules: dict[str, nn.Module]) -> None:
    """Raise a ValueError for a model whose own forward a graph would not repeat."""
    if reason := unsupported_reason(model.config.get_text_config(decoder=True)):
        raise ValueError(reason)
    if training := [name for name, each in modules.items() if each.training]:
        raise ValueError(f"{training[0]} is in training mode: call model.eval() first")
    if model.config.is_encoder_decoder or not keeps_all_keys(model.config):
        raise ValueError("the model has layers other than attention over all tokens, or an encoder")
