"""Write text token by token: tokens are chosen on the device, and the host reads them a few steps behind."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import StaticLayer

from nvfp4_tensor._compat.frames import warn_user
from nvfp4_tensor.generation.cache_argument import cache_argument
from nvfp4_tensor.generation.choice import Chooser, Sampling
from nvfp4_tensor.generation.decoder import MAX_BATCH, Decoder, Padding, padding_of
from nvfp4_tensor.generation.ended_texts import Narrowed, narrow, narrowed_of, padding_of_rows
from nvfp4_tensor.generation.fixed_cache import FixedCache, append, keeps_all_keys, length_of
from nvfp4_tensor.generation.layer import Layer

AHEAD = 4
"""Number of steps that a GPU is given ahead of the token that the host reads, so that neither waits for the other."""


def generate(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    max_new_tokens: int,
    attention_mask: Tensor | None = None,
    cache: Cache | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_tokens: int | Sequence[int] | None = None,
    seed: int | Sequence[int] = 0,
) -> Iterator[Tensor]:
    """Write text after each prompt, and yield it token by token.

    On CUDA each token is one replay of a CUDA graph, the choice of the token included, for up to 256 prompts; the host
    waits for nothing but the tokens that it yields, and those trail the GPU by up to four steps. On a CPU, and for
    models that cannot be captured, tokens are computed when they are asked for. Call :func:`decode_natively` before: it
    keeps graphs from call to call, and on a CPU makes one operator of a token.

    The same seed writes the same text, however many tokens are asked for.

    Args:
        model: a causal language model of transformers, in evaluation mode.
        ids: prompts, int64 (B, S) on the device of the model. Shorter ones have padding before them.
        max_new_tokens: the largest number of tokens to write.
        attention_mask: (B, S), 0 for padding, as tokenizers with ``padding_side="left"`` return it; with a cache of
            earlier tokens, (B, those + S). None: no padding.
        cache: the tokens before ``ids``: that of an earlier call, or an empty one, such as
            ``nvfp4_cache(model.config, max_tokens=...)`` for long texts. Afterwards it has all tokens but the last one
            that was yielded, with which ``ids`` of the next call begin; of a text that ended before the others, what
            the model went on with. None: one for this call, in the model's dtype.
        temperature: 0 chooses the most likely token; otherwise tokens are drawn after division of logits by it.
        top_k: draw from the k most likely tokens.
        top_p: draw from the smallest set of most likely tokens whose probabilities add up to at least this number.
        stop_tokens: tokens that end a text: by default the model's end-of-sequence tokens (``eos_token_id``), () for
            none. The iterator ends after all texts have ended; one that has ended before repeats its last token, and
            costs nothing once half of the rows have.
        seed: of the random numbers. Each row of the batch has its own; a list of a seed for each row writes the texts
            that these seeds write alone.

    Yields:
        Tensor: int64 (B,) on the CPU, the next token of each text.

    Raises:
        ValueError, TypeError: an argument is not valid, padding is not before the prompts, or the cache is of another
            batch size.
        RuntimeError: while iterating, logits have a NaN.

    Example::

        decode_natively(model)
        for token in generate(model, tokenizer(text, return_tensors="pt").input_ids.to("cuda"), max_new_tokens=100):
            print(tokenizer.decode(token), end="", flush=True)
    """
    if not isinstance(ids, Tensor):
        raise TypeError(
            "ids must be a tensor, int64 (B, S), such as tokenizer(text, return_tensors='pt').input_ids, not a "
            f"{type(ids).__name__}"
        )
    if ids.dim() != 2 or ids.dtype != torch.int64 or not ids.numel():
        raise ValueError(f"ids must be prompts of one length, int64 (B, S), got {ids.dtype} {tuple(ids.shape)}")
    if ids.device != model.device:
        raise ValueError(f"ids are on {ids.device}, and the model on {model.device}: call ids.to(model.device)")
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be a positive integer, got {max_new_tokens!r}")
    if model.training:
        raise ValueError("the model is in training mode: call model.eval() first")
    if cache is not None and _batch_of(cache) not in (None, len(ids)):
        raise ValueError(f"the cache is of {_batch_of(cache)} texts, and ids of {len(ids)}: give the ids of each text")
    before = 0 if cache is None else length_of(cache)
    padding = None if attention_mask is None else _padding(attention_mask, ids, before)
    _check_room(cache, ids.shape[1] + max_new_tokens - 1)
    sampling = Sampling(temperature, top_k, top_p, seed)
    if not isinstance(seed, int) and len(seed) != len(ids):
        raise ValueError(f"seed must be an int, or one for each of the {len(ids)} texts, got {len(seed)}")
    if stop_tokens is None:
        stop_tokens = _end_of_sequence(model)
    stops = [stop_tokens] if isinstance(stop_tokens, int) else list(stop_tokens)
    open_writer = functools.partial(_Writer, model, ids, sampling, max_new_tokens, cache, padding)
    return _texts(open_writer, torch.tensor(stops, dtype=torch.int64, device="cpu"))


def _padding(mask: Tensor, ids: Tensor, before: int) -> Padding | None:
    shape = len(ids), before + ids.shape[1]
    if not isinstance(mask, Tensor) or tuple(mask.shape) != shape or mask.device != ids.device:
        found = f"{tuple(mask.shape)} on {mask.device}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask must be {shape} on {ids.device}, one column for each token, got {found}")
    is_left, padding = padding_of(mask)
    if not is_left:
        raise ValueError("attention_mask has padding after or in a prompt: set tokenizer.padding_side = 'left'")
    if padding is not None and padding.most == mask.shape[1]:
        raise ValueError(f"attention_mask is 0 in all of text {int(padding.starts.argmax())}: a prompt needs a token")
    return padding


def _end_of_sequence(model: PreTrainedModel) -> int | Sequence[int]:
    """Return the tokens with which the model ends a text, as its own ``generate`` finds them; () if it has none."""
    settings = getattr(model, "generation_config", None) or model.config.get_text_config(decoder=True)
    found: int | Sequence[int] | None = getattr(settings, "eos_token_id", None)
    return () if found is None else found


def _texts(open_writer: Callable[[], _Writer], stops: Tensor) -> Iterator[Tensor]:
    """Yield tokens until all texts have ended."""
    writer = open_writer()  # with what others may use until the first token is asked for
    last = writer.ended.long()
    try:
        for tokens in writer:
            if (tokens < 0).any():
                rows = (tokens < 0).nonzero().flatten().tolist()
                raise RuntimeError(f"the logits of rows {rows} have a NaN: the model does not compute numbers")
            last = tokens = torch.where(writer.ended, last, tokens)
            writer.ended = writer.ended | torch.isin(tokens, stops)
            writer.yielded += 1
            yield tokens
            if writer.ended.all():
                return
    finally:
        writer.close()


class _Writer:
    """Writes ``count`` tokens per prompt and iterates over them, (B,) on the CPU."""

    def __init__(
        self, model: Any, ids: Tensor, sampling: Sampling, count: int, cache: Any, padding: Padding | None
    ) -> None:
        self.model, self.ids, self.sampling, self.count, self.given = model, ids, sampling, count, cache
        self.padding, self.start = padding, 0 if cache is None else length_of(cache)
        batch, length = ids.shape[0], ids.shape[1] + count
        self.decoder = _decoder_of(model) if batch <= MAX_BATCH else None
        self.lock: Any = contextlib.nullcontext() if self.decoder is None else self.decoder.lock
        with torch.inference_mode(False), self.lock:
            if self.decoder is None:
                self.chooser = Chooser(sampling, batch, count, ids.device)
            else:
                self.chooser = self.decoder.new_chooser(sampling, batch, count)
            self.chooser.in_use = True
            if cache is None and self.decoder is not None:
                cache = self.decoder.new_cache(length)
            elif cache is None and keeps_all_keys(model.config):
                cache = FixedCache(model.config.get_text_config(decoder=True).num_hidden_layers, length)
            self.cache: Any = DynamicCache(config=model.config) if cache is None else cache
        # What was computed ahead is removed from a cache that was given.
        can_drop = self.given is None or all(isinstance(layer, Layer) for layer in cache.layers)
        ahead = AHEAD if _runs_ahead(ids) and can_drop else 0
        with torch.inference_mode(False), torch.device("cpu"):  # whatever the caller's mode and default device are
            self._slots = [torch.empty((batch,), dtype=torch.int64, pin_memory=ids.is_cuda) for _ in range(ahead + 1)]
            self._latest = torch.zeros((batch,), dtype=torch.int64)
            self.ended, self.yielded = torch.zeros((batch,), dtype=torch.bool), 0
        self._next: Tensor | None = None
        self._last: Any = None

    def __iter__(self) -> Iterator[Tensor]:
        pending: deque[tuple[Tensor, Any, list[int] | None]] = deque()
        for i in range(self.count):
            with self.lock:
                self._advance(i)
            pending.append(self._read(i))
            if len(pending) == len(self._slots):
                yield self._arrived(*pending.popleft())
        while pending:
            yield self._arrived(*pending.popleft())

    def close(self) -> None:
        """Let other texts use the chooser, and remove tokens that nobody has read from a cache that was given."""
        self.chooser.in_use = False
        if self.given is not None:
            kept = self.start + (self.ids.shape[1] + self.yielded - 1 if self.yielded else 0)
            if length_of(self.given) > kept:
                _drop_tokens(self.given, kept)

    def _arrived(self, slot: Tensor, event: Any, texts: list[int] | None) -> Tensor:
        """Return the tokens of all texts: the latest of those that had ended before."""
        if event is not None:
            event.synchronize()
        if texts is None:
            self._latest = slot.clone()
        else:
            self._latest = self._latest.index_copy(0, torch.tensor(texts, dtype=torch.int64, device="cpu"), slot)
        return self._latest

    @torch.no_grad()
    def _advance(self, i: int) -> None:
        """Choose token i. ``_next`` has the next input, None if the runner of a graph has it."""
        if i == self.chooser.end:
            self.chooser.load_more(i)
        if i == 0:
            self._next = self.chooser(self._logits(self.ids, self.start))
            return
        position = self.start + self.ids.shape[1] + i - 1
        runner = self._runner(position, i)
        if runner is None or self.decoder is None:
            assert self._next is not None
            self._next = self.chooser(self._logits(self._next[:, None], position))
            return
        if self._next is not None:
            runner.feed(self._next)
        runner.launch(position, None, padding_of_rows(self.cache, self.padding))
        append(self.cache)
        self.decoder.count()
        self._last, self._next = runner, None

    def _runner(self, position: int, i: int) -> Any:
        """Return the runner for token i. The model may have changed, or have got hooks, since the last one."""
        decoder, runner = self.decoder, None
        if decoder is not None and decoder.plan() is not None and decoder.takes(self.cache):
            self._leave_out_ended_texts(i)
            padding = padding_of_rows(self.cache, self.padding)
            runner = decoder.runner(self.cache, self.chooser, position, padding)
        if runner is not None and runner is not self._last:
            runner.restart()
        if self._next is None and runner is not self._last:
            self._next = self._last.tokens
        if runner is None and (narrowed := narrowed_of(self.cache)) is not None:
            assert self._next is not None
            self._next = narrowed.spread(self._next)
            narrowed.undo()
            self._choose_for(None, len(self.ids), i)
        return runner

    def _leave_out_ended_texts(self, i: int) -> None:
        """Go on with fewer rows from token i on, once half of them are of texts that have ended."""
        if self._last is None or not self.ended.any():
            return
        before = narrow(self.cache, self.ended.tolist())
        if before is not None:
            tokens = self._last.tokens if self._next is None else self._next
            self._next = tokens.index_select(0, torch.tensor(before, dtype=torch.int64, device=tokens.device))
            self._choose_for(narrowed_of(self.cache), len(before), i)

    def _choose_for(self, narrowed: Narrowed | None, rows: int, i: int) -> None:
        """Let another chooser choose token i and those that follow."""
        assert self.decoder is not None
        self.chooser.in_use = False
        with torch.inference_mode(False):
            self.chooser = self.decoder.new_chooser(self.sampling, rows, self.count)
        self.chooser.load(self.sampling, None if narrowed is None else narrowed.order[:rows], i)
        self.chooser.in_use = True

    def _logits(self, tokens: Tensor, position: int) -> Tensor:
        options: dict[str, Any] = {"logits_to_keep": 1}
        if self.padding is not None:
            places = torch.arange(position + tokens.shape[1], device=tokens.device) - self.padding.starts[:, None]
            options |= {"attention_mask": (places >= 0).long(), "position_ids": places[:, position:].clamp(min=0)}
        known = inspect.signature(type(self.model).forward).parameters
        options = {name: each for name, each in options.items() if name in known or name == "attention_mask"}
        forward = self.model if self.decoder is None else self.decoder
        output = forward(input_ids=tokens, use_cache=True, **{cache_argument(self.model): self.cache}, **options)
        logits: Tensor = output.logits[:, -1]
        return logits

    def _read(self, i: int) -> tuple[Tensor, Any, list[int] | None]:
        """Return where the chosen tokens will be on the CPU, the event after which they are there, and their texts."""
        narrowed = narrowed_of(self.cache)
        texts = None if narrowed is None else narrowed.order[: narrowed.rows]
        slot = self._slots[i % len(self._slots)][: None if texts is None else len(texts)]
        slot.copy_(self.chooser.chosen[: len(slot)], non_blocking=True)
        return slot, torch.cuda.current_stream(self.ids.device).record_event() if self.ids.is_cuda else None, texts


def _drop_tokens(cache: Any, kept: int) -> None:
    """Remove all tokens from ``kept`` on. After an error some layers may not have them."""
    for layer in cache.layers:
        try:
            if (extra := int(layer.get_seq_length()) - kept) > 0:
                layer.crop(-extra)
        except (AttributeError, RuntimeError):  # linear attention; full windows; static layers before transformers 5.24
            warn_user("the cache has tokens of a text that ended with an error: reset() it")
            return


def _batch_of(cache: Any) -> int | None:
    """Return the number of texts in a cache, None if it is empty or does not show it."""
    for layer in cache.layers if length_of(cache) else ():
        if isinstance(layer, Layer):
            return layer.batch
        if isinstance(keys := getattr(layer, "keys", None), Tensor):
            return keys.shape[0]
    return None


def _check_room(cache: Any, tokens: int) -> None:
    """Raise if a static cache has no room for so many tokens more: a GPU would end with an error of an index."""
    rooms = [each.max_cache_len for each in cache.layers if type(each) is StaticLayer] if cache is not None else []
    if rooms and length_of(cache) + tokens > min(rooms):
        raise ValueError(
            f"the static cache has {length_of(cache)} of {min(rooms)} tokens, and the text up to {tokens} more: make "
            "it with a larger max_cache_len, or set a smaller max_new_tokens"
        )


def _runs_ahead(ids: Tensor) -> bool:
    """Return whether tokens of these prompts are computed while the host does something else."""
    return ids.is_cuda


def _decoder_of(model: Any) -> Decoder | None:
    """Return the decoder that decode_natively gave the model, or on CUDA one for this text; None for none."""
    decoder = vars(model).get("forward")
    if isinstance(decoder, Decoder):
        return decoder
    if model.device.type != "cuda":
        return None
    try:
        return Decoder(model)
    except ValueError:
        return None
