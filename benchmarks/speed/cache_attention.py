"""One decode step's attention on a CPU: to a cache in NVFP4, read in place, and to a dense one in bfloat16.

    python -m benchmarks.speed.cache_attention                   # heads of SmolLM2 and Llama 1B, 8,192 tokens
    python -m benchmarks.speed.cache_attention --tokens 32768 --threads 2 --layers 4

Ours is what a model calls: ``scaled_dot_product_attention`` of the keys and values that an ``NVFP4CacheLayer``
returned, which runs ``nvfp4::attend_codes``. It is compared with torch's ``scaled_dot_product_attention`` over dense
keys and values as transformers calls it (``enable_gqa=True``), and in the form that is fastest: the queries of a group
as rows of one head. Each call takes the next of several layers. The three alternate, and the figure is the median.
`load` says how busy the machine was: with other work on the cores, compare the processor time of one thread.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks.harness import Report, at_least, record, result_path, save, table
from nvfp4_tensor.generation.cache import NVFP4CacheLayer

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="*", choices=sorted(HEADS), default=["smollm2", "llama-1b"])
    parser.add_argument("--tokens", type=at_least(130), default=8192)
    parser.add_argument("--layers", type=at_least(1), default=8, help="layers that take turns")
    parser.add_argument("--rounds", type=at_least(2), default=10)
    parser.add_argument("--threads", type=at_least(1), default=2)
    parser.add_argument("--out", help="the folder for the record; benchmarks/results by default")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    load, report, found = os.getloadavg()[0], Report(), {}
    report(f"{options.tokens} tokens, 1 new, batch 1, threads: {options.threads}; load before: {load:.1f}")
    with torch.no_grad():
        for name in options.heads:
            found[name] = measure(HEADS[name], options.tokens, options.layers, options.rounds)
            heads, kv_heads, size = HEADS[name]
            report(f"\n{name}: {heads} heads, {kv_heads} of keys, {size}\n{text_of(found[name])}")
    device = torch.device("cpu")
    path = result_path(device, "cache_attention", options.out)
    save(path, record(device, tokens=options.tokens, threads=options.threads, load=load, heads=found), report.text)


if __name__ == "__main__":
    main()
