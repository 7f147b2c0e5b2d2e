"""The forward of a causal language model on CUDA: one graph for one token per text, its own forward otherwise."""

from __future__ import annotations

import inspect
import warnings
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

from nvfp4_tensor.generation.cache_argument import CACHE, NAMES, cache_in
from nvfp4_tensor.generation.choice import ROWS, Chooser, Sampling
from nvfp4_tensor.generation.fixed_cache import (
    Buffers,
    FixedCache,
    append_one,
    batch_of,
    capacity_of,
    dtype_of,
    has_buffers,
    has_codes,
    length_of,
)
from nvfp4_tensor.generation.graph_plan import GraphPlan
from nvfp4_tensor.generation.runner import Runner, addresses_of

MAX_BATCH = 256
"""The largest number of texts that are decoded together."""
RUNNERS = 8
"""The largest number of graphs, one for each cache and way to choose tokens. The oldest gives way."""
RESTLESS = 8
"""After so many changes of the model, at one token after the other, no more graphs are captured."""
_ARGUMENTS = {"attention_mask", "position_ids", *NAMES, "use_cache", "return_dict", "logits_to_keep", "tokenizer"}
"""The arguments of a model's forward that the step supports. ``generate`` passes the tokenizer of ``stop_strings``."""
CACHES, KWARGS = "_prepare_cache_for_generation", "_update_model_kwargs_for_generation"


class GraphDecoder:
    """The forward of a ``...ForCausalLM``.

    Args:
        model: a causal language model of transformers.

    Raises:
        ValueError: no step of the model can be captured. The message has the reason.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._reset(GraphPlan(model))
        self._warn_about_own_forward()

    def _reset(self, plan: GraphPlan | None) -> None:
        # generate reads which arguments a model's forward has.
        self.__signature__ = inspect.signature(type(self.model).forward.__get__(self.model))
        self._plan = plan
        self._runners: dict[tuple[Chooser | None, bool, tuple[int, ...]], Runner] = {}
        self._pool: Any = None
        self._buffers: list[Buffers] = []
        self._latest: tuple[Any, Runner] | None = None
        self._known: tuple[Tensor, int | None, Padding | None] | None = None
        self._warned: set[str] = set()
        self._failed: GraphPlan | None = None
        self._changes = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy or a pickle, which makes its own plan."""
        return {"model": self.model}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.model = state["model"]
        self._reset(None)

    def install(self) -> None:
        """Replace the model's forward and the two methods of ``generate`` that concern it."""
        caches: Any = GraphCaches(self)
        kwargs: Any = MaskKeeper(self)
        self.model.forward = self
        setattr(self.model, CACHES, caches)
        setattr(self.model, KWARGS, kwargs)

    def plan(self) -> GraphPlan | None:
        """Return the plan of the current model, or None, with one warning, if there is none."""
        if self._plan is not None and self._plan.holds():
            if self._changes > RESTLESS:
                self._failed = None  # the model has come to rest
            self._changes = 0
        else:
            self._renew()
        return self._usable()

    def _usable(self) -> GraphPlan | None:
        return None if self._plan is self._failed else self._plan

    def _renew(self) -> None:
        """Make another plan, unless the model has changed at each of the last tokens: capturing it again is futile."""
        self._changes += self._plan is not None
        if self._changes > RESTLESS:
            self._failed = self._plan
            self._warn("tokens are decoded by transformers, not by a CUDA graph: the model changes at every token")
            return
        self._plan = None
        self._runners.clear()
        self._latest = self._pool = None
        try:
            self._plan = GraphPlan(self.model)
            self._warn_about_own_forward()
        except ValueError as error:
            self._warn(f"tokens are decoded by transformers, not by a CUDA graph: {error}")

    def _warn_about_own_forward(self) -> None:
        if self._plan is not None and self._plan.reason is not None:
            self._warn(f"tokens are decoded by transformers' forward, not natively: {self._plan.reason}")

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=3)

    def own_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's own forward."""
        return type(self.model).forward(self.model, *args, **kwargs)

    def new_cache(self, length: int) -> FixedCache:
        """Return an empty cache for ``length`` tokens, in the buffers of an earlier one that is not used any more."""
        free = next((each for each in self._buffers if not each.in_use), None)
        if free is None:
            free = Buffers()
            self._buffers = [*self._buffers[-1:], free]
        layers = self.model.config.get_text_config(decoder=True).num_hidden_layers
        return FixedCache(layers, length, free)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        calls_own = torch.compiler.is_compiling() or len(args) > 1
        output = None if calls_own else self._natively(*args, **kwargs)
        return self.own_forward(*args, **kwargs) if output is None else output

    def _natively(self, input_ids: Any = None, **others: Any) -> Any:
        """Return the output for one token per text, or None, without side effects, for calls that need transformers."""
        cache = cache_in(others)
        if not self._is_one_token(input_ids, cache, others):
            return None
        position, position_ids = length_of(cache), others.get("position_ids")
        mask = others.get("attention_mask")
        if position >= capacity_of(cache) or not self._is_left_padded(mask, position):
            return None
        if position_ids is not None and tuple(position_ids.shape) not in ((1, 1), tuple(input_ids.shape)):
            return None
        padding = None if mask is None else self.padding_of(mask)
        runner = self.launch(cache, input_ids, position, position_ids, padding)
        if runner is None:
            return None
        append_one(cache)
        return self._output(runner.logits.clone()[:, None], cache)

    def launch(
        self,
        cache: Any,
        tokens: Tensor,
        position: int,
        position_ids: Tensor | None = None,
        padding: Padding | None = None,
    ) -> Runner | None:
        """Run one token per text, or return None if the model is not one that can be run.

        The model is compared with its plan after the launch, while the device computes: a graph only reads memory that
        its plan keeps alive, so what it computed for a changed model is dropped.
        """
        for _ in range(2):
            runner = self.runner(cache, None, position, padding)
            if runner is None or runner.plan.requests_more:
                return None
            runner.feed(tokens)
            runner.launch(position, position_ids, None if padding is None else padding.starts)
            if self.plan() is runner.plan:
                return runner
        return None

    def runner(
        self, cache: Any, chooser: Chooser | None = None, position: int = 0, padding: Padding | None = None
    ) -> Runner | None:
        """Return the runner for the cache's buffers, which is made and captured the first time, or None.

        It is that of the last plan, which may not hold any more.
        """
        padded = padding is not None
        if self._plan is None:
            self._renew()
        plan = self._usable()
        if plan is None or len(cache.layers) != plan.layers:
            return None
        if plan.description is None and (padded or type(cache) is not FixedCache):
            return None
        if has_codes(cache) and not (plan.reads_codes and _is_before_ring(padding, cache, position)):
            return None
        now = (weakref.ref(cache), cache.moves, chooser, padded, plan) if type(cache) is FixedCache else None
        if now is not None and self._latest is not None and self._latest[0] == now:
            return self._latest[1]  # without looking at all addresses
        addresses = addresses_of(cache)
        # The kernel of all layers is for one text without padding; for more, one graph serves both.
        reads_starts = padded or (addresses[0] > 1 and plan.description is not None)
        key = (chooser, reads_starts, addresses)
        if key in self._runners:
            self._latest = None if now is None else (now, self._runners[key])
            return self._runners[key]
        if not plan.holds():
            self._renew()
            plan = self._usable()
            if plan is None:
                return None
        while len(self._runners) >= RUNNERS:
            del self._runners[next(iter(self._runners))]
            self._latest = None
        try:
            self._runners[key] = Runner(plan, cache, addresses[0], chooser, reads_starts, self._graph_pool(plan))
        except Exception as error:  # of any kind: a model's own code may do what a capture forbids
            if plan.device.type != "cuda":
                raise
            self._failed, self._pool = plan, None
            self._warn(f"tokens are decoded by transformers, not by a CUDA graph, which cannot be captured: {error}")
            return None
        return self._runners[key]

    def _graph_pool(self, plan: GraphPlan) -> Any:
        """Return the memory pool that all graphs share: they do not run at the same time."""
        if self._pool is None and plan.device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def new_chooser(self, sampling: Sampling, batch: int, count: int) -> Chooser:
        """Return a chooser for ``count`` tokens, an earlier one where it fits, whose graph is used again."""
        for chooser, *_ in self._runners:
            fits = chooser is not None and (chooser.kind, chooser.batch) == (sampling.kind, batch)
            if chooser is not None and fits and chooser.count >= min(count, ROWS) and not chooser.in_use:
                chooser.load(sampling)
                return chooser
        device = next(self.model.parameters()).device
        return Chooser(sampling, batch, count, device)

    def takes(self, cache: Any) -> bool:
        """Return whether a runner can write to the cache: it has buffers, or codes, of the model's dtype and device."""
        if not (has_buffers(cache) or has_codes(cache)):
            return False
        plan, device = self._plan, cache.layers[0].device
        return plan is None or (plan.device, plan.dtype) == (device, dtype_of(cache))

    def _is_one_token(self, input_ids: Any, cache: Any, others: dict[str, Any]) -> bool:
        """Return whether the call decodes one token of each text on the model's device, and requests only logits."""
        return (
            isinstance(input_ids, Tensor)
            and input_ids.dim() == 2
            and input_ids.shape[1] == 1
            and 1 <= input_ids.shape[0] <= MAX_BATCH
            and input_ids.dtype == torch.int64
            and self.takes(cache)
            and cache.layers[0].device == input_ids.device
            and batch_of(cache) == input_ids.shape[0]
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled(input_ids.device.type)
            and not any(is_given(value) for name, value in others.items() if name not in _ARGUMENTS)
            and isinstance(others.get("logits_to_keep", 0), int)
            and others.get("use_cache") is not False
            and others.get("return_dict") is not False
        )

    def _is_left_padded(self, mask: Any, position: int) -> bool:
        """Return whether each text sees all tokens from its first one on: a prompt has padding only before it."""
        if mask is None:
            return True
        if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] != position + 1:
            return False
        if not self.knows(mask):
            is_left, padding = padding_of(mask)
            if not is_left:
                return False
            self.know(mask, padding)
        return True

    def knows(self, mask: Any) -> bool:
        """Return whether the padding of a mask is known without reading it from the device."""
        known = self._known
        return known is not None and known[0] is mask and known[1] is not None and known[1] == _version(mask)

    def know(self, mask: Tensor, padding: Padding | None) -> None:
        """Remember where the texts of this mask start."""
        self._known = mask, _version(mask), padding

    def padding_of(self, mask: Tensor) -> Padding | None:
        """Return the padding of the mask that was the last one to be known, None for none."""
        assert self._known is not None and self._known[0] is mask
        return self._known[2]

    def _output(self, logits: Tensor, cache: Any) -> Any:
        description = None if self._plan is None else self._plan.description
        if description is not None and description.has_router_logits:
            return MoeCausalLMOutputWithPast(logits=logits, **{CACHE: cache})
        return CausalLMOutputWithPast(logits=logits, **{CACHE: cache})


def is_given(value: Any) -> bool:
    """Return whether an argument asks for something; a tensor always does."""
    return value is not None and (isinstance(value, Tensor) or bool(value))


class Padding(NamedTuple):
    """Padding before texts."""

    starts: Tensor
    """int64 (B,): the first position of each text in the cache. Nothing writes to it."""
    most: int
    """The largest of them."""


def padding_of(mask: Tensor) -> tuple[bool, Padding | None]:
    """Return whether padding of a mask (B, S) is only before texts, and that padding, None for none."""
    ones = mask != 0
    starts = mask.shape[1] - ones.sum(-1)
    is_left = ((ones.long().cumsum(-1) > 0) == ones).all()
    only_left, most = torch.stack((is_left, starts.max())).tolist()
    return bool(only_left) and most < mask.shape[1], Padding(starts, most) if most else None


def _is_before_ring(padding: Padding | None, cache: Any, position: int) -> bool:
    """Return whether a cache of codes has no padding among its latest tokens, whose order attention does not know."""
    return padding is None or padding.most <= position - cache.layers[0].recent


def _version(mask: Tensor) -> int | None:
    return None if mask.is_inference() else mask._version


class GraphCaches:
    """Replaces the method of ``generate`` that creates the cache: a graph needs one with fixed buffers."""

    def __init__(self, decoder: GraphDecoder) -> None:
        self.decoder = decoder

    def __call__(self, config: Any, arguments: dict[str, Any], mode: Any, batch_size: int, length: int) -> Any:
        decoder, model = self.decoder, self.decoder.model
        device = next(model.parameters()).device
        if (
            mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
            and batch_size * config.num_return_sequences <= MAX_BATCH
            and config.cache_implementation in (None, "static")
            and config.use_cache is not False
            and not config.is_assistant
            and cache_in(arguments) is None
            and not torch.is_grad_enabled()
            and "prepare_inputs_for_generation" not in vars(model)  # set by peft's prefixes, for a dynamic cache
            and not torch.is_autocast_enabled(device.type)  # under which keys and values differ in dtype
            and decoder.plan() is not None
        ):
            arguments[CACHE] = decoder.new_cache(length)
            return None
        return type(model)._prepare_cache_for_generation(model, config, arguments, mode, batch_size, length)


class MaskKeeper:
    """Replaces the method of ``generate`` that makes the next mask, whose padding is that of the last one."""

    def __init__(self, decoder: GraphDecoder) -> None:
        self.decoder = decoder

    def __call__(self, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        decoder, model, mask = self.decoder, self.decoder.model, model_kwargs.get("attention_mask")
        is_known = decoder.knows(mask)
        padding = decoder.padding_of(mask) if is_known else None
        updated = type(model)._update_model_kwargs_for_generation(model, outputs, model_kwargs, *args, **kwargs)
        if is_known:
            decoder.know(updated["attention_mask"], padding)
        return updated
