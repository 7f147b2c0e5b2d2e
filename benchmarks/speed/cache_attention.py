"""One decode step's attention: to a cache in NVFP4, read in place, and to a dense one in bfloat16.

    python -m benchmarks.speed.cache_attention                   # heads of SmolLM2 and Llama 1B, 8,192 tokens
    python -m benchmarks.speed.cache_attention --tokens 32768 --threads 2 --layers 4
    python -m benchmarks.speed.cache_attention --device cuda --heads llama-8b --tokens 32768 131072 --batch 1 8

Ours is what a model calls: ``scaled_dot_product_attention`` of the keys and values that an ``NVFP4CacheLayer``
returned, which runs ``nvfp4::attend_codes``. It is compared with torch's ``scaled_dot_product_attention`` over dense
keys and values as transformers calls it (``enable_gqa=True``), and in the form that is fastest: the queries of a group
as rows of one head. Each call takes the next of several layers. The three alternate, and the figure is the median.
`load` says how busy the machine was: with other work on the cores, compare the processor time of one thread.

On CUDA each call is a graph, timed with a cold L2 cache (harness.py), and torch's attention is measured by flash and by
cuDNN, with ``enable_gqa`` and with a group's queries as rows; the ratio is to the fastest. Ours is the operator;
`append` is what a step adds to it, the kernel that quantizes a token. `of copy`: bytes of the cache per second,
relative to a copy's.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks import harness
from benchmarks.harness import COPY, Report, Variant, at_least, record, result_path, save, table
from nvfp4_tensor.generation.cache import NVFP4CacheLayer
from nvfp4_tensor.generation.coded_states import StoredStates

HEADS = {"smollm2": (9, 3, 64), "llama-1b": (32, 8, 64), "llama-8b": (32, 8, 128)}
"""Heads of queries, of keys, and their size."""
OURS, GQA, ROWS = "NVFP4 codes", "bfloat16, enable_gqa", "bfloat16, grouped rows"


def layer_of(heads: int, kv_heads: int, size: int, tokens: int) -> tuple[dict[str, Callable[[], Tensor]], int, int]:
    """Return the contenders of one layer's attention of one token, and the bytes of our cache and of a dense one."""
    keys, values = torch.randn((2, 1, kv_heads, tokens, size)).bfloat16()
    layer = NVFP4CacheLayer()
    layer.update(keys[:, :, :-1], values[:, :, :-1])
    stored = layer.update(keys[:, :, -1:], values[:, :, -1:])
    q = torch.randn((1, heads, 1, size)).bfloat16()
    rows = q.view(1, kv_heads, heads // kv_heads, size)
    calls = {
        OURS: lambda: sdpa(q, *stored, enable_gqa=True),
        GQA: lambda: sdpa(q, keys, values, enable_gqa=True),
        ROWS: lambda: sdpa(rows, keys, values).view_as(q),
    }
    return calls, layer.nbytes, 2 * keys.numel() * 2


def measure(heads: tuple[int, int, int], tokens: int, layers: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row per contender."""
    made = [layer_of(*heads, tokens) for _ in range(layers)]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in made[0][0]}
    for i in range(rounds * layers):
        for name, call in made[i % layers][0].items():
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    results = {name: call().float() for name, call in made[0][0].items()}
    dense = results[ROWS]
    rows = []
    for name, pairs in times.items():
        wall, cpu = ([1e3 * pair[i] for pair in pairs[layers:]] for i in (0, 1))
        rows.append(
            {
                "attention": name,
                "ms": statistics.median(wall),
                "quartiles": statistics.quantiles(wall)[::2],
                "cpu ms": statistics.median(cpu),
                "MB": made[0][1 if name == OURS else 2] / 1e6,
                "difference": ((results[name] - dense).norm() / dense.norm()).item(),
            }
        )
    return rows


def text_of(rows: list[dict[str, Any]]) -> str:
    """Return the table."""
    ours = rows[0]
    header = ("attention", "ms", "quartiles", "x", "cpu ms", "x", "MB", "difference")
    cells = [
        (
            row["attention"], f"{row['ms']:.2f}", "{:.2f} to {:.2f}".format(*row["quartiles"]),
            f"{row['ms'] / ours['ms']:.2f}", f"{row['cpu ms']:.2f}", f"{row['cpu ms'] / ours['cpu ms']:.2f}",
            f"{row['MB']:.2f}", f"{row['difference']:.4f}",
        )
        for row in rows
    ]  # fmt: skip
    return table(header, cells)


# --- CUDA -------------------------------------------------------------------------------------------------------------

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}


def by_backend(backend: SDPBackend, *operands: Tensor, **how: Any) -> Tensor:
    with sdpa_kernel(backend):
        return sdpa(*operands, **how)


def works(call: Callable[[], object]) -> bool:
    try:
        call()
    except RuntimeError:  # the backend does not support it
        return False
    return True


def cuda_variants(heads: tuple[int, int, int], tokens: int, batch: int) -> tuple[list[Variant], float]:
    """Return the contenders of one layer, and the relative difference of ours from dense attention."""
    count, kv_heads, size = heads
    keys, values = (torch.randn((batch, kv_heads, tokens, size), device="cuda").bfloat16() for _ in range(2))
    layer = NVFP4CacheLayer(max_tokens=tokens + 1)
    layer.update(keys[:, :, :-1], values[:, :, :-1])
    stored = layer.update(keys[:, :, -1:], values[:, :, -1:])
    q = torch.randn((batch, count, 1, size), device="cuda").bfloat16()
    rows = q.view(batch, kv_heads, count // kv_heads, size)
    ours = attend_variant(q, *stored)
    variants = [Variant(OURS, ours, layer.nbytes)]
    for name, backend in BACKENDS.items():
        for form, call in (
            (f"{name}, enable_gqa", functools.partial(by_backend, backend, q, keys, values, enable_gqa=True)),
            (f"{name}, grouped rows", functools.partial(by_backend, backend, rows, keys, values)),
        ):
            if works(call):
                variants.append(Variant(form, call, 2 * keys.nbytes))
    variants.append(append_variant(layer, keys, values))
    dense = sdpa(q, keys, values, enable_gqa=True).float()
    return variants, ((ours().float() - dense).norm() / dense.norm()).item()


def attend_variant(q: Tensor, keys: StoredStates, values: StoredStates) -> Callable[[], Tensor]:
    lengths = torch.full((q.shape[0],), keys.stored, device="cuda")
    coded, fresh = (*keys.coded, *values.coded), (keys.fresh, values.fresh)
    how = q.shape[-1] ** -0.5, 0.0, 0, keys.states.rotation is not None
    return functools.partial(torch.ops.nvfp4.attend_codes, q, *coded, lengths, None, None, None, *fresh, *how)


def append_variant(layer: NVFP4CacheLayer, keys: Tensor, values: Tensor) -> Variant:
    """The kernel that quantizes one token of the layer, again and again."""
    coded = [t for states in layer._states for t in states.coded]
    starts = torch.full((keys.shape[0],), layer._states[0].stored - 1, device="cuda")
    new = keys[:, :, -1:], values[:, :, -1:]
    append = functools.partial(torch.ops.nvfp4.append_codes, *new, layer.spec.pack(), *coded, starts, layer.rotate_keys)
    return Variant("append", append)


def measure_on_cuda(heads: tuple[int, int, int], tokens: int, batch: int, repeats: int) -> dict[str, Any]:
    variants, difference = cuda_variants(heads, tokens, batch)
    timings = harness.measure(variants, torch.device("cuda"), repeats=repeats)
    dense = min((t for name, t in timings.items() if name.startswith(tuple(BACKENDS))), key=lambda t: t.median)
    ours = timings[OURS]
    return {
        "tokens": tokens,
        "batch": batch,
        "ours us": 1e6 * ours.median,
        "quartiles us": [1e6 * ours.low, 1e6 * ours.high],
        "append us": 1e6 * timings["append"].median,
        "dense us": {name: 1e6 * t.median for name, t in timings.items() if name.startswith(tuple(BACKENDS))},
        "fastest dense": dense.name,
        "x": dense.median / ours.median,
        "MB": ours.moved / 1e6,
        "dense MB": dense.moved / 1e6,
        "of copy": ours.bandwidth / timings[COPY].bandwidth,
        "dense of copy": dense.bandwidth / timings[COPY].bandwidth,
        "difference": difference,
    }


def cuda_text(rows: list[dict[str, Any]]) -> str:
    header = ("tokens", "batch", "NVFP4 us", "quartiles", "bfloat16 us", "by", "x", "MB", "bfloat16 MB", "of copy",
              "bfloat16 of copy", "append us", "difference")  # fmt: skip
    cells = [
        (
            f"{row['tokens']:,}", f"{row['batch']}", f"{row['ours us']:.1f}",
            "{:.1f} to {:.1f}".format(*row["quartiles us"]), f"{row['dense us'][row['fastest dense']]:.1f}",
            row["fastest dense"], f"{row['x']:.2f}", f"{row['MB']:.1f}", f"{row['dense MB']:.1f}",
            f"{row['of copy']:.2f}", f"{row['dense of copy']:.2f}", f"{row['append us']:.1f}",
            f"{row['difference']:.4f}",
        )
        for row in rows
    ]  # fmt: skip
    return table(header, cells)


def main_on_cuda(options: argparse.Namespace) -> None:
    device, report, found = torch.device("cuda"), Report(), {}
    report(f"{torch.cuda.get_device_name()}, 1 new token")
    for name in options.heads or ["llama-8b"]:
        rows = [
            measure_on_cuda(HEADS[name], tokens, batch, options.rounds)
            for tokens in options.tokens or [32768, 131072]
            for batch in options.batch
        ]
        found[name] = rows
        heads, kv_heads, size = HEADS[name]
        report(f"\n{name}: {heads} heads, {kv_heads} of keys, {size}\n{cuda_text(rows)}")
    save(result_path(device, "cache_attention", options.out), record(device, heads=found), report.text)


# --- both -------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--heads", nargs="*", choices=sorted(HEADS), help="on a CPU SmolLM2's and Llama 1B's")
    parser.add_argument("--tokens", type=at_least(130), nargs="*", help="8192 on a CPU, which takes one number")
    parser.add_argument("--batch", type=at_least(1), nargs="*", default=[1], help="on CUDA")
    parser.add_argument("--layers", type=at_least(1), default=8, help="layers that take turns on a CPU")
    parser.add_argument("--rounds", type=at_least(2), default=10)
    parser.add_argument("--threads", type=at_least(1), default=2)
    parser.add_argument("--out", help="the folder for the record; benchmarks/results by default")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.device == "cuda":
        with torch.no_grad():
            main_on_cuda(options)
        return
    if len(options.tokens or []) > 1:
        parser.error("on a CPU give one number of tokens")
    (tokens,) = options.tokens or [8192]
    load, report, found = os.getloadavg()[0], Report(), {}
    report(f"{tokens} tokens, 1 new, batch 1, threads: {options.threads}; load before: {load:.1f}")
    with torch.no_grad():
        for name in options.heads or ["smollm2", "llama-1b"]:
            found[name] = measure(HEADS[name], tokens, options.layers, options.rounds)
            heads, kv_heads, size = HEADS[name]
            report(f"\n{name}: {heads} heads, {kv_heads} of keys, {size}\n{text_of(found[name])}")
    device = torch.device("cpu")
    path = result_path(device, "cache_attention", options.out)
    save(path, record(device, tokens=tokens, threads=options.threads, load=load, heads=found), report.text)


if __name__ == "__main__":
    main()
