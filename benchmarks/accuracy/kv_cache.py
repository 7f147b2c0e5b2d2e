"""What a key-value cache in 4 bits costs in perplexity, and what it saves: SmolLM2-135M at its full context.

    python -m benchmarks.accuracy.kv_cache                    # 8,192 tokens, all caches
    python -m benchmarks.accuracy.kv_cache --tokens 2048      # sooner
    python -m benchmarks.accuracy.kv_cache --caches fp8       # those of such names; a record's other rows stay

One window of the help topics of Python, which the model reads in pieces, each attending to what the cache gives back of
all before it, and of itself: as text is read and written by a server. The model itself is bfloat16. The difference to
bfloat16's cache is paired by token, with its standard error. Bytes are those of keys and values at the end.

Most rows round every token before it is attended to. Others attend to a piece before they round it: NVFP4 with dense
tokens at the end, which is ``nvfp4_cache``'s default, with rotated keys, and transformers' own caches: fp8, of the
first piece alone; int4 by optimum-quanto and hqq, where installed, which round all tokens again whenever their window
of 128 dense ones is full. Emulated formats are cast along the head dimension and kept dense; their bytes are
computed.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Cache, QuantizedCache
from transformers.cache_utils import DynamicCache, DynamicLayer

from benchmarks.harness import Report, at_least, record, result_path, save, table, with_earlier
from nvfp4_cli.demo.model import evaluation_tokens, load_model
from nvfp4_tensor import QuantizeSpec, emulation
from nvfp4_tensor.generation import nvfp4_cache
from nvfp4_tensor.generation.cache_argument import cache_argument

DENSE = "bfloat16"


class EmulatedLayer(DynamicLayer):
    """Keys and values of a block format, decoded and kept dense."""

    def __init__(self, format: str, scale_mode: str | None) -> None:
        super().__init__()
        self.format, self.scale_mode = emulation.FORMATS[format], scale_mode

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = (emulation.cast(x, self.format, scale_mode=self.scale_mode) for x in (key_states, value_states))
        return super().update(keys, values)

    @property
    def nbytes(self) -> int:
        return round((self.keys.numel() + self.values.numel()) * self.format.bits_per_element / 8)


def _emulated(config: Any, format: str, scale_mode: str | None = None) -> Cache:
    return Cache(layers=[EmulatedLayer(format, scale_mode) for _ in range(config.num_hidden_layers)])


def _int4(backend: str, config: Any, axis: int) -> Cache:
    """transformers' own, as it makes it, but for the axis, for which each backend has its own number."""
    return QuantizedCache(backend, config, nbits=4, axis_key=axis, axis_value=axis, q_group_size=64)


def _as_they_are(config: Any, *spec: QuantizeSpec, recent: int) -> Cache:
    """Keys are not rotated."""
    return nvfp4_cache(config, *spec, recent=recent, rotate_keys=False)


def caches() -> dict[str, Callable[[Any], Cache]]:
    """Cache of a model's config, by name; bfloat16's first."""
    found: dict[str, Callable[[Any], Cache]] = {
        DENSE: lambda config: DynamicCache(config=config),
        "NVFP4, four-over-six": lambda config: _as_they_are(config, QuantizeSpec(four_over_six="mse"), recent=0),
        "NVFP4, to nearest": lambda config: _as_they_are(config, QuantizeSpec(), recent=0),
        "NVFP4, scale search": lambda config: _as_they_are(config, recent=0),
        "NVFP4, scale search, keys rotated": lambda config: nvfp4_cache(config, recent=0),
        "NVFP4, the latest 128 dense": lambda config: _as_they_are(config, recent=128),
        "NVFP4, keys rotated, the latest 128 dense": lambda config: nvfp4_cache(config, recent=128),
        "NVFP4, keys rotated, the latest 64 dense": lambda config: nvfp4_cache(config, recent=64),
        "NVFP4, keys rotated, the latest 32 dense": lambda config: nvfp4_cache(config, recent=32),
        "NVFP4, keys rotated, the latest 16 dense": lambda config: nvfp4_cache(config, recent=16),
        "MXFP4, option3 (emulated)": lambda config: _emulated(config, "mxfp4", "option3"),
        "int4, groups of 32 (emulated)": lambda config: _emulated(config, "int4"),
        "fp8 (transformers)": lambda config: QuantizedCache("fp8", config),
    }
    if importlib.util.find_spec("optimum") and importlib.util.find_spec("optimum.quanto"):
        found["int4, groups of 64 (quanto)"] = lambda config: _int4("quanto", config, axis=0)
    if importlib.util.find_spec("hqq"):
        found["int4, groups of 64 (hqq)"] = lambda config: _int4("hqq", config, axis=1)
    return found


def tensors_of(value: Any) -> list[Tensor]:
    """The plain tensors in a tuple or a dict, or within a tensor subclass that says what it is made of."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple):
        return [t for part in value for t in tensors_of(part)]
    if not isinstance(value, Tensor):
        return []
    if type(value) is not Tensor:
        return [t for name in value.__tensor_flatten__()[0] for t in tensors_of(getattr(value, name))]
    return [value]


def stored_bytes(cache: Cache) -> int:
    """Bytes of all keys and values."""
    total = 0
    for layer in cache.layers:
        if hasattr(layer, "nbytes"):
            total += layer.nbytes
        else:
            held = tuple(
                getattr(layer, name, None) for name in ("keys", "values", "_quantized_keys", "_quantized_values")
            )
            total += sum(t.numel() * t.element_size() for t in tensors_of(held))
    return total


def losses(model: torch.nn.Module, ids: Tensor, cache: Cache, piece: int) -> Tensor:
    """Negative log likelihood of each token but the first: float32 (tokens - 1,)."""
    found = []
    with torch.no_grad():
        for start in range(0, len(ids), piece):
            part = ids[start : start + piece]
            logits = model(part.unsqueeze(0), use_cache=True, **{cache_argument(model): cache}).logits[0].float()
            following = ids[start + 1 : start + 1 + len(part)]
            found.append(cross_entropy(logits[: len(following)], following, reduction="none"))
    return torch.cat(found)


def chosen(words: list[str]) -> dict[str, Callable[[Any], Cache]]:
    """bfloat16's cache, and those with one of the words in their names; all where there are no words."""
    return {
        name: make
        for name, make in caches().items()
        if name == DENSE or not words or any(word in name for word in words)
    }


def measure(model: torch.nn.Module, ids: Tensor, piece: int, words: list[str]) -> list[dict]:
    """A row a cache."""
    rows: list[dict] = []
    dense = None
    for name, make in chosen(words).items():
        start, cache = time.perf_counter(), make(model.config)
        loss = losses(model, ids, cache, piece).double()
        seconds = time.perf_counter() - start
        dense = loss if dense is None else dense
        difference = loss - dense
        rows.append(
            {
                "cache": name,
                "perplexity": math.exp(loss.mean()),
                "increase": difference.mean().item(),
                "standard error": difference.std().item() / math.sqrt(len(difference)),
                "bytes": stored_bytes(cache),
                "seconds": seconds,
            }
        )
        print(f"{name}: {rows[-1]['perplexity']:.3f} in {seconds:.0f} s, {rows[-1]['bytes'] / 1e6:.1f} MB", flush=True)
        del cache
    return rows


def text_of(rows: list[dict]) -> str:
    """The table."""
    dense = rows[0]["bytes"]
    header = ("cache", "perplexity", "loss over bf16's", "standard error", "MB", "of bf16's")
    cells = [
        (
            row["cache"], f"{row['perplexity']:.3f}", f"{row['increase']:+.4f}", f"{row['standard error']:.4f}",
            f"{row['bytes'] / 1e6:.1f}", f"{row['bytes'] / dense:.3f}",
        )
        for row in rows
    ]  # fmt: skip
    return table(header, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=at_least(2), default=8192)
    parser.add_argument("--piece", type=at_least(1), default=512, help="tokens that are read at a time")
    parser.add_argument("--out", help="the folder for the record; benchmarks/results by default")
    parser.add_argument("--caches", nargs="*", default=[], metavar="WORD", help="words of the names of those to run")
    options = parser.parse_args()
    model, tokenizer = load_model()
    rows = measure(model, evaluation_tokens(tokenizer, options.tokens), options.piece, options.caches)
    device = torch.device("cpu")
    is_default = all(getattr(options, name) == parser.get_default(name) for name in ("tokens", "piece"))
    name = "kv_cache" if is_default else f"kv_cache_{options.tokens}_by_{options.piece}"
    path = result_path(device, name, options.out)
    rows = with_earlier(rows, path, "cache", tokens=options.tokens, piece=options.piece)
    report = Report()
    report(f"SmolLM2-135M, {options.tokens} tokens in pieces of {options.piece}\n{text_of(rows)}")
    save(path, record(device, tokens=options.tokens, piece=options.piece, rows=rows), report.text)


if __name__ == "__main__":
    main()
