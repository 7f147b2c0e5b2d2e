"""The forward of a causal language model: a native step for one token of each text, its own forward otherwise."""

from __future__ import annotations

import inspect
import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import StaticCache
from transformers.generation import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

from nvfp4_tensor._compat.frames import warn_user
from nvfp4_tensor.generation import invariance
from nvfp4_tensor.generation.cache_argument import CACHE, NAMES, cache_in
from nvfp4_tensor.generation.choice import ROWS, Chooser, Sampling
from nvfp4_tensor.generation.ended_texts import Endings, Narrowed, narrow, narrowed_of, padding_of_rows, widen
from nvfp4_tensor.generation.fixed_cache import (
    Buffers,
    FixedCache,
    append,
    batch_of,
    length_of,
    takes_steps,
)
from nvfp4_tensor.generation.plan import Plan
from nvfp4_tensor.generation.runner import Runner, addresses_of

MAX_BATCH = 256
"""The largest number of texts that are decoded together."""
RUNNERS = 16
"""The largest number of graphs, one for each cache, number of texts and way to choose tokens. The oldest gives way."""
RESTLESS = 8
"""After so many changes of the model, at one token after the other, no more graphs are captured."""
_ARGUMENTS = {"attention_mask", "position_ids", *NAMES, "use_cache", "return_dict", "logits_to_keep", "tokenizer"}
"""The arguments of a model's forward that the step supports. ``generate`` passes the tokenizer of ``stop_strings``."""
_TOKEN_BY_TOKEN = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
ENDINGS = "nvfp4_endings"
"""An argument of the forward that ``generate`` hands on, by which a step knows which texts have ended."""
CACHES, KWARGS = "_prepare_cache_for_generation", "_update_model_kwargs_for_generation"


class Decoder:
    """The forward of a ``...ForCausalLM``.

    Args:
        model: a causal language model of transformers.
        by_operators: see :class:`~nvfp4_tensor.generation.plan.Plan`.
        invariant: see :mod:`~nvfp4_tensor.generation.invariance`.

    Raises:
        ValueError, TypeError: the model has no native step, and none that can be captured. The message has the reason.
    """

    rows: int | None = None
    """The number of rows of each step; None: the number of texts."""

    def __init__(self, model: Any, by_operators: bool = False, invariant: bool = False) -> None:
        self.model, self.by_operators, self.invariant = model, by_operators, invariant
        if _has_own_forward(model):
            raise ValueError(
                f"{type(model).__name__} has a forward of its own, which decode_natively would not call: `del "
                "model.forward` first, or call decode_natively(model) before it is set"
            )
        self._reset(self._new_plan())
        self._warn_about_own_forward()

    def _new_plan(self) -> Plan:
        plan = Plan(self.model, self.by_operators)
        if self.invariant:
            self.rows = invariance.rows_of(plan, self.by_operators)
        return plan

    def _reset(self, plan: Plan | None) -> None:
        # generate reads which arguments a model's forward has.
        self.__signature__ = inspect.signature(type(self.model).forward.__get__(self.model))
        self._plan = plan
        self._runners: dict[tuple[Chooser | None, bool, tuple[int, ...]], Runner] = {}
        self._pool: Any = None
        self._buffers: list[Buffers] = []
        self._latest: tuple[Any, Runner] | None = None
        self._known: tuple[Tensor, int | None, Padding | None] | None = None
        self._warned: set[str] = set()
        self._failed: Plan | None = None
        self.counts = DecodeCounts(0, 0)
        self._changes = 0
        self.lock = threading.RLock()  # of what threads share that generate at once: plan, graphs, buffers

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy or a pickle, which makes its own plan."""
        return {"model": self.model, "by_operators": self.by_operators, "invariant": self.invariant}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset(None)

    def install(self) -> None:
        """Replace the model's forward and the two methods of ``generate`` that concern it."""
        self.model.forward = self
        setattr(self.model, CACHES, self.prepare_cache)
        setattr(self.model, KWARGS, self.next_arguments)

    def plan(self) -> Plan | None:
        """Return the plan of the current model, or None, with one warning, if there is none."""
        with self.lock:
            if self._plan is not None and self._plan.holds():
                if self._changes > RESTLESS:
                    self._failed = None  # the model has come to rest
                self._changes = 0
            else:
                self._renew()
            return self._usable()

    def _usable(self) -> Plan | None:
        return None if self._plan is self._failed else self._plan

    def _renew(self) -> None:
        """Make another plan, unless the model has changed at each of the last tokens: capturing it again is futile."""
        self._changes += self._plan is not None
        if self._changes > RESTLESS:
            self._failed = self._plan
            self._warn_that("the model changes at every token")
            return
        self._plan = None
        self._runners.clear()
        self._latest = self._pool = None
        try:
            self._plan = self._new_plan()
            self._warn_about_own_forward()
        except (AttributeError, TypeError, ValueError) as error:  # AttributeError: a module of another class
            self._warn_that(str(error))

    def _warn_that(self, reason: str) -> None:
        how = "natively" if next(self.model.parameters()).is_cpu and not self.by_operators else "by a CUDA graph"
        self._warn(f"tokens are decoded by transformers, not {how}: {reason}")

    def _warn_about_own_forward(self) -> None:
        if self._plan is not None and self._plan.reason is not None:
            self._warn(f"tokens are decoded by transformers' forward, not natively: {self._plan.reason}")

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warn_user(message)

    def new_cache(self, length: int) -> FixedCache:
        """Return an empty cache for ``length`` tokens, in the buffers of an earlier one that is not used any more."""
        layers = self.model.config.get_text_config(decoder=True).num_hidden_layers
        with self.lock:
            free = next((each for each in self._buffers if not each.in_use), None)
            if free is None:
                free = Buffers()
                self._buffers = [*self._buffers[-1:], free]
            return FixedCache(layers, length, free, self.rows)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        calls_own = torch.compiler.is_compiling() or len(args) > 1
        endings = kwargs.pop(ENDINGS, None)
        if not calls_own:
            with self.lock:
                output = self._natively(endings, *args, **kwargs)
                if output is not None:
                    self.count()
                    return output
        if self.invariant and not torch.is_grad_enabled():
            raise RuntimeError(
                "batch_invariant=True serves texts, with padding before them or none, and tokens of greedy search or "
                "sampling, in the cache that generate makes: call decode_natively(model) for other forwards"
            )
        if not calls_own:
            self.counts = self.counts._replace(transformers=self.counts.transformers + 1)
        return type(self.model).forward(self.model, *args, **kwargs)

    __code__ = __call__.__code__
    """Where a forward is defined, which torch.export reads."""

    def count(self) -> None:
        """Count a call that was native."""
        self.counts = self.counts._replace(native=self.counts.native + 1)

    def _natively(self, endings: Endings | None, input_ids: Any = None, **others: Any) -> Any:
        """Return the output for prompts or one token per text, or None, without side effects, for other calls."""
        cache = kept = cache_in(others)
        if self.rows and cache is None and isinstance(input_ids, Tensor):
            cache = self.new_cache(input_ids.shape[-1])
            kept = None if others.pop("use_cache", None) is False else cache
        if not self._is_plain(input_ids, cache, others) or getattr(cache, "rows", None) != self.rows:
            return None
        if isinstance(cache, StaticCache):
            self._warn_that("a StaticCache is transformers' own (give none, or cache_implementation='static')")
            return None
        position, position_ids, mask = length_of(cache), others.get("position_ids"), others.get("attention_mask")
        is_left, padding = self._padding(mask, position + input_ids.shape[1])
        if not is_left:
            if type(cache) is FixedCache and isinstance(mask, Tensor) and mask.dim() == 2:
                self._warn_that("padding is not before the texts (set tokenizer.padding_side = 'left')")
            return None
        if position_ids is not None and tuple(position_ids.shape) not in ((1, input_ids.shape[1]), (*input_ids.shape,)):
            return None
        if padding is not None and padding.most == position + input_ids.shape[1]:
            return None  # a text without tokens so far, in a prompt that is read in chunks
        if input_ids.shape[1] > 1 or not position:
            logits = self._read(cache, input_ids, position_ids, padding, others.get("logits_to_keep", 0))
            return None if logits is None else self._output(logits, kept)
        if not self.takes(cache) or not invariance.keeps(cache, padding):
            return None
        narrowed = _narrowed(cache, input_ids, endings)
        if narrowed is not None:
            input_ids = narrowed.select(input_ids)
            position_ids = None if position_ids is None else narrowed.select(position_ids)
        padding = padding_of_rows(cache, padding)
        if batch_of(cache) != len(input_ids):
            return None
        for _ in range(2):
            runner = self.runner(cache, None, position, padding)
            if runner is None or runner.plan.requests_more:
                return None
            runner.feed(input_ids)
            # Without position_ids the forwards of all families count padding; texts in rows of their own have none.
            runner.launch(position, position_ids, padding, counts_padding=not self.rows)
            # The model is compared with its plan while the device computes: a graph only reads memory that its plan
            # keeps alive, so what it computed for a changed model is dropped.
            if self.plan() is runner.plan:
                break
        else:
            return None
        append(cache)
        logits = runner.logits[: len(input_ids)]
        logits = logits.clone() if narrowed is None else narrowed.spread(logits)
        return self._output(logits[:, None], cache)

    def _read(self, cache: Any, tokens: Tensor, positions: Any, padding: Padding | None, kept: int) -> Tensor | None:
        """Return the logits (B, kept or T, vocabulary) of prompts, None for another model or cache."""
        plan = self.plan()
        if plan is None or plan.requests_more or type(cache) is not FixedCache:
            return None
        if not plan.reads_prompts and not self.rows:
            return None
        widen(cache)
        position = length_of(cache)
        has_begun = cache.layers[0].is_initialized
        if len(cache.layers) != plan.layers or (
            has_begun
            and not (self.takes(cache) and batch_of(cache) == len(tokens) and invariance.keeps(cache, padding))
        ):
            return None
        if self.rows:
            return invariance.read(self.model, plan, tokens, positions, padding, cache, kept or tokens.shape[1])
        starts = None if padding is None else padding.starts
        if positions is None:  # as the families' own forwards count, padding included
            positions = torch.arange(position, position + tokens.shape[1], device=tokens.device)[None]
        return plan.prompts.read(tokens, positions, starts, cache, min(kept or tokens.shape[1], tokens.shape[1]))

    def runner(
        self, cache: Any, chooser: Chooser | None = None, position: int = 0, padding: Padding | None = None
    ) -> Runner | None:
        """Return the runner for the buffers of a cache that takes steps, made and captured the first time, or None.

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
        if type(cache) is FixedCache:
            cache.reserve(position + 1)
        elif not plan.reads_codes:
            return None
        elif padding is not None and padding.most > position - cache.layers[0].recent:
            # The latest tokens are in a ring, where attention has no start.
            self._warn_that(
                f"a padded text has fewer tokens than the {cache.layers[0].recent} that a cache keeps dense"
            )
            return None
        now = (weakref.ref(cache), cache.moves, chooser, padded, plan) if type(cache) is FixedCache else None
        if now is not None and self._latest is not None and self._latest[0] == now:
            return self._latest[1]  # without looking at all addresses
        addresses = addresses_of(cache)
        # The kernel of all layers is for one text without padding; for more, one graph serves both.
        reads_starts = padded or (addresses[0] > 1 and plan.description is not None) or self.invariant
        key = (chooser, reads_starts, addresses)
        if key not in self._runners:
            if not plan.holds():
                self._renew()
                return None if self._usable() is None else self.runner(cache, chooser, position, padding)
            while len(self._runners) >= RUNNERS:
                del self._runners[next(iter(self._runners))]
            if self._pool is None and plan.device.type == "cuda":  # of all graphs, which do not run at the same time
                self._pool = torch.cuda.graph_pool_handle()
            try:
                self._runners[key] = Runner(plan, cache, addresses[0], chooser, reads_starts, self._pool, self.rows)
            except Exception as error:  # of any kind: a model's own code may do what a capture forbids
                if plan.device.type != "cuda":
                    raise
                self._failed, self._pool = plan, None
                self._warn_that(f"it cannot be captured: {error}")
                return None
        self._latest = None if now is None else (now, self._runners[key])
        return self._runners[key]

    def new_chooser(self, sampling: Sampling, batch: int, count: int) -> Chooser:
        """Return a chooser for ``count`` tokens, an earlier one where it fits, whose graph is used again."""
        batch += -batch % (self.rows or 1)
        for chooser, *_ in self._runners:
            fits = chooser is not None and (chooser.kind, chooser.batch) == (sampling.kind, batch)
            if chooser is not None and fits and chooser.count >= min(count, ROWS) and not chooser.in_use:
                chooser.load(sampling)
                return chooser
        device = next(self.model.parameters()).device
        return Chooser(sampling, batch, count, device, self.rows)

    def takes(self, cache: Any) -> bool:
        """Return whether a runner can write to the cache, of the model's dtype and device."""
        if not takes_steps(cache):
            return False
        plan, layer = self._plan, cache.layers[0]
        return plan is None or (plan.device, plan.dtype) == (layer.device, layer.dtype)

    def _is_plain(self, input_ids: Any, cache: Any, others: dict[str, Any]) -> bool:
        """Return whether the call is about tokens on the model's device, and requests only logits."""
        return (
            isinstance(input_ids, Tensor)
            and input_ids.dim() == 2
            and input_ids.shape[1] > 0
            and 1 <= input_ids.shape[0] <= MAX_BATCH
            and input_ids.dtype == torch.int64
            and cache is not None
            and input_ids.device == next(self.model.parameters()).device
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled(input_ids.device.type)
            and not any(isinstance(each, Tensor) or each for name, each in others.items() if name not in _ARGUMENTS)
            and isinstance(others.get("logits_to_keep", 0), int)
            and others.get("use_cache") is not False
            and others.get("return_dict") is not False
        )

    def _padding(self, mask: Any, length: int) -> tuple[bool, Padding | None]:
        """Return whether each text sees all tokens from its first one on, and the padding before texts."""
        if mask is None:
            return True, None
        if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] != length:
            return False, None
        if (known := self._known_of(mask)) is None:
            is_left, padding = padding_of(mask)
            if not is_left:
                return False, None
            self._known = known = mask, _version(mask), padding
        return True, known[2]

    def _known_of(self, mask: Any) -> tuple[Tensor, int | None, Padding | None] | None:
        """Return what is known of the padding of a mask without reading it from the device, None for nothing."""
        known = self._known  # once: another thread may write it
        is_of_mask = known is not None and known[0] is mask and known[1] is not None and known[1] == _version(mask)
        return known if is_of_mask else None

    def prepare_cache(self, config: Any, arguments: dict[str, Any], mode: Any, batch_size: int, length: int) -> None:
        """Create the cache in ``generate``: a step needs one with fixed buffers."""
        model, device = self.model, next(self.model.parameters()).device
        if self.invariant and getattr(config, "prefill_chunk_size", None):
            raise ValueError("batch_invariant=True reads prompts whole: set prefill_chunk_size to None")
        if (
            mode in _TOKEN_BY_TOKEN
            and batch_size * config.num_return_sequences <= MAX_BATCH
            and config.cache_implementation in (None, "static")
            and config.use_cache is not False
            and not config.is_assistant
            and cache_in(arguments) is None
            and not torch.is_grad_enabled()
            and "prepare_inputs_for_generation" not in vars(model)  # set by peft's prefixes, for a dynamic cache
            and not torch.is_autocast_enabled(device.type)  # under which keys and values differ in dtype
            and not self._is_compiled()
            and self.plan() is not None
        ):
            arguments[CACHE] = self.new_cache(length)
        else:
            type(model)._prepare_cache_for_generation(model, config, arguments, mode, batch_size, length)
        stops = getattr(config, "_eos_token_tensor", None)
        if stops is not None and mode in _TOKEN_BY_TOKEN and type(cache_in(arguments)) is FixedCache:
            arguments[ENDINGS] = Endings(stops)

    def _is_compiled(self) -> bool:
        """Return, with a warning, whether ``model.compile()`` lets a compiled forward take all tokens."""
        is_compiled = self.model._compiled_call_impl is not None
        if is_compiled:
            self._warn_that("model.compile() was called (copy.deepcopy(model) is not compiled)")
        return is_compiled

    def next_arguments(self, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Make the next mask in ``generate``, whose padding is that of the last one."""
        model, mask = self.model, model_kwargs.get("attention_mask")
        known = self._known_of(mask)
        updated = type(model)._update_model_kwargs_for_generation(model, outputs, model_kwargs, *args, **kwargs)
        if known is not None:
            self._known = (mask := updated["attention_mask"]), _version(mask), known[2]
        return updated

    def _output(self, logits: Tensor, cache: Any) -> Any:
        description = None if self._plan is None else self._plan.description
        if description is not None and description.has_router_logits:
            return MoeCausalLMOutputWithPast(logits=logits, **{CACHE: cache})
        return CausalLMOutputWithPast(logits=logits, **{CACHE: cache})


def _has_own_forward(model: Any) -> bool:
    """Return whether a forward was set on the model that is neither ours nor, but for autocast, that of its class."""
    own, of_class = vars(model).get("forward"), type(model).forward
    if own is None or isinstance(own, Decoder) or "_original_forward" in vars(model):  # accelerate's, with autocast
        return False
    # accelerate takes its wrappers off with those of transformers.
    return getattr(own, "__func__", None) not in (of_class, inspect.unwrap(of_class))


def _narrowed(cache: Any, tokens: Tensor, endings: Endings | None) -> Narrowed | None:
    """Return which texts of a batch go on, for the next token of each; None for all."""
    if endings is None or len(tokens) == 1 or type(cache) is not FixedCache:
        widen(cache)
        return None
    if (ended := endings.see(tokens)) is not None:
        narrow(cache, ended)
    return narrowed_of(cache)


class DecodeCounts(NamedTuple):
    """How many calls of a model, for a prompt or a token of each text, were computed natively and by transformers."""

    native: int
    transformers: int


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
    return bool(only_left), Padding(starts, most) if most else None


def _version(mask: Tensor) -> int | None:
    return None if mask.is_inference() else mask._version
