"""What AdamW's moments in four bits cost in loss: a small Llama from scratch with each kind of state and weight.

    python -m benchmarks.accuracy.optimizer_states --out FOLDER                  # minutes on an H200
    python -m benchmarks.accuracy.optimizer_states --device cpu --size tiny --batch 2 --length 64 --steps 40

The arithmetic is bfloat16 by autocast. All runs of a seed start from the same weights and see the same batches of
Python sources; an increase is relative to float32 weights and states with that seed. Ablations run last, with the first
seed only. On CUDA each step is one replay of a CUDA graph, and several processes share the
GPU. The result file is written after each run, and the same command continues it. With --budget, no run starts that
would end later.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks.accuracy.state_trainer import StateTrainer
from benchmarks.accuracy.training_quality import earlier_runs
from benchmarks.harness import at_least, commit, record, result_path, save, table
from nvfp4_tensor.numerics import optimizer_step
from tutorials.train_llama import SHAPES, Settings, corpus

BASE = "float32 weights, float32 states"
_CODED = {"coded": True, "dtype": torch.bfloat16}
_QUANTIZED = {**_CODED, "quantized": True}
VARIANTS: dict[str, dict[str, Any]] = {
    BASE: {},
    "float32 weights, states in four bits": {"coded": True},
    "float32 states, 0.87 times the learning rate": {"rate": optimizer_step.UNBIASED},
    "NVFP4 weights, states in four bits": _QUANTIZED,
    "bfloat16 weights, states in four bits": _CODED,
    "float32 weights and states, recipe nvidia": {"recipe": "nvidia"},
}
"""With every seed."""
ABLATIONS: dict[str, dict[str, Any]] = {
    "NVFP4 weights, states in four bits, 0.5 times the learning rate": {**_QUANTIZED, "rate": 0.5},
    "NVFP4 weights, states in four bits, decay to zero": {**_QUANTIZED, "to_zero": True},
    "NVFP4 weights, float32 states": {**_QUANTIZED, "write": "stochastic"},
    "NVFP4 weights, float32 states, error feedback": {**_QUANTIZED, "write": "feedback"},
    "NVFP4 weights, float32 states, to nearest": {**_QUANTIZED, "write": "nearest"},
    "NVFP4 weights, float32 states, fresh scales": {**_QUANTIZED, "write": "fresh"},
    "NVFP4 weights, states in four bits, 0.25 times the learning rate": {**_QUANTIZED, "rate": 0.25},
    "bfloat16 weights, bfloat16 states": {"dtype": torch.bfloat16},
}
"""With the first seed."""
ALL = {**VARIANTS, **ABLATIONS}
VALIDATION_WINDOWS, VALIDATION_BATCH = 512, 32
RATE = 1.2e-3


def train_one(variant: str, settings: Settings, texts: tuple[Tensor, Tensor]) -> dict:
    """Train to the end and return the validation loss in nats per byte."""
    start = time.perf_counter()
    trainer = StateTrainer(settings, texts, **ALL[variant])
    trainer.train()
    trainer.settings = dataclasses.replace(settings, batch=VALIDATION_BATCH)
    windows = VALIDATION_WINDOWS if settings.device == "cuda" else 2 * VALIDATION_BATCH
    validation = trainer.validate(windows)
    seconds = time.perf_counter() - start
    return {"variant": variant, "seed": settings.seed, "validation": validation, "seconds": seconds}


def _work(queue: Any, results: Any, settings: Settings, texts: tuple[Tensor, Tensor], deadline: float) -> None:
    torch.set_num_threads(1)
    longest = 0.0
    while (job := queue.get()) is not None:
        variant, seed = job
        if time.time() + longest > deadline:
            continue
        try:
            run = train_one(variant, dataclasses.replace(settings, seed=seed), texts)
            longest = max(longest, run["seconds"])
        except Exception as error:  # one variant's error does not stop the others
            run = {"variant": variant, "seed": seed, "error": f"{type(error).__name__}: {error}"}
        results.put(run)
    results.put(None)


def rows_of(runs: list[dict]) -> list[list[str]]:
    """Return the table's rows: mean loss, and the mean increase over seeds paired with the base, with its error."""
    losses: dict[str, dict[int, float]] = {variant: {} for variant in ALL}
    for run in runs:
        losses[run["variant"]][run["seed"]] = run["validation"]
    rows = []
    for variant, by_seed in losses.items():
        if not by_seed:
            continue
        increases = [100 * (loss / losses[BASE][seed] - 1) for seed, loss in by_seed.items() if seed in losses[BASE]]
        mean = f"{statistics.mean(increases):+.2f} %" if increases else ""
        error = f"{statistics.stdev(increases) / math.sqrt(len(increases)):.2f} %" if len(increases) > 1 else ""
        rows.append([variant, f"{statistics.mean(by_seed.values()):.4f}", mean, error, str(len(by_seed))])
    return rows


def jobs_of(options: argparse.Namespace, runs: list[dict]) -> list[tuple[str, int]]:
    """Return (variant, seed) of what is left to run: all variants of one seed after another, then ablations."""
    done = {(run["variant"], run["seed"]) for run in runs}
    jobs = [(variant, seed) for seed in range(options.seeds) for variant in options.variants if variant in VARIANTS]
    ablations = [(variant, 0) for variant in options.variants if variant in ABLATIONS]
    return [job for job in [*jobs, *ablations] if job not in done]


def study(options: argparse.Namespace, settings: Settings, path: Path) -> dict:
    """Run what the result file at ``path`` lacks, save after each run, and return the file's content."""
    start = time.time()
    runs = earlier_runs(path, dataclasses.asdict(settings))
    jobs = jobs_of(options, runs)
    texts = corpus(options.folder, options.limit)
    for text in texts:
        text.share_memory_()
    context = mp.get_context("spawn")
    queue, results = context.Queue(), context.Queue()
    for job in [*jobs, *[None] * options.processes]:
        queue.put(job)
    arguments = (queue, results, settings, texts, start + options.budget)
    for _ in range(options.processes):
        context.Process(target=_work, args=arguments, daemon=True).start()
    content = record(torch.device(options.device), settings=dataclasses.asdict(settings), runs=runs)
    working = options.processes
    while working:
        run = results.get()
        if run is None:
            working -= 1
            continue
        if "validation" in run:
            runs.append({**run, "commit": commit()})
            path.write_text(json.dumps(content, indent=1) + "\n")
        print(f"[{time.time() - start:.0f} s] {run}", flush=True)
    if left := jobs_of(options, runs):
        print(f"{len(left)} of {len(jobs)} runs are left: run the same command again")
    return content


def subject_of(size: str, learning_rate: float) -> str:
    """Return the name of the result file, which has the learning rate if it is not the usual one."""
    return f"optimizer_states_{size}" + ("" if learning_rate == RATE else f"_{learning_rate:g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_cuda = torch.cuda.is_available()
    parser.add_argument("--seeds", type=at_least(1), default=3)
    parser.add_argument("--variants", nargs="+", choices=list(ALL), default=list(ALL), metavar="VARIANT")
    parser.add_argument("--processes", type=at_least(1), default=5 if on_cuda else 1)
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no run starts")
    parser.add_argument("--size", choices=list(SHAPES), default="25m")
    parser.add_argument("--steps", type=at_least(1), default=800)
    parser.add_argument("--batch", type=at_least(1), default=8)
    parser.add_argument("--length", type=at_least(2), default=1024)
    parser.add_argument("--learning-rate", type=float, default=RATE, help="another one has a result file of its own")
    parser.add_argument("--device", default="cuda" if on_cuda else "cpu")
    parser.add_argument("--folder", type=Path, default=Path(sysconfig.get_path("purelib")), help="where the texts are")
    parser.add_argument("--limit", type=at_least(1), default=64_000_000, help="bytes of text")
    parser.add_argument("--out", help="folder of the results (default: benchmarks/results)")
    options = parser.parse_args()
    fields = ("size", "steps", "batch", "length", "learning_rate", "device")
    settings = Settings(recipe="bf16", **{field: getattr(options, field) for field in fields})
    path = result_path(torch.device(options.device), subject_of(options.size, options.learning_rate), options.out)
    content = study(options, settings, path)
    text = table(["weights and states", "loss", "increase", "standard error", "seeds"], rows_of(content["runs"]))
    print(text)
    save(path, content, text)


if __name__ == "__main__":
    main()
