"""What AdamW's moments in four bits cost in loss: a small Llama from scratch with each kind of state and weight.

    python -m benchmarks.accuracy.optimizer_states --out FOLDER                  # minutes on an H200
    python -m benchmarks.accuracy.optimizer_states --device cpu --size tiny --batch 2 --length 64 --steps 40

The arithmetic is bfloat16 by autocast. All runs of a seed start from the same weights and see the same batches of
Python sources; an increase is relative to float32 weights and states with that seed. On CUDA each step is one replay of
a CUDA graph, and several processes share the GPU. With --budget, no run starts that would end later.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from benchmarks.accuracy.graph_trainer import GraphTrainer
from benchmarks.harness import at_least, record, result_path, save, table
from nvfp4_tensor import training
from nvfp4_tensor.numerics.random_state import rng_state_of
from nvfp4_tensor.training.weights import coded_moments
from tutorials.train_llama import SHAPES, Settings, corpus

BASE = "float32 weights, float32 states"
VARIANTS: dict[str, dict[str, Any]] = {
    BASE: {},
    "the same, 0.87 times the learning rate": {"rate": coded_moments.UNBIASED},
    "float32 weights, states in four bits": {"coded": True},
    "bfloat16 weights, bfloat16 states": {"dtype": torch.bfloat16},
    "bfloat16 weights, states in four bits": {"coded": True, "dtype": torch.bfloat16},
    "NVFP4 weights, states in four bits": {"coded": True, "dtype": torch.bfloat16, "quantized": True},
    "the same, half the learning rate": {"coded": True, "dtype": torch.bfloat16, "quantized": True, "rate": 0.5},
}
VALIDATION_WINDOWS, VALIDATION_BATCH = 512, 32
BETAS, WEIGHT_DECAY, EPS = (0.9, 0.95), 0.1, 1e-8


class StateTrainer(GraphTrainer):
    """The graph trainer with other weights and states; the step of coded states is the operators that ship."""

    def __init__(
        self,
        settings: Settings,
        texts: tuple[Tensor, Tensor],
        *,
        coded: bool = False,
        dtype: torch.dtype = torch.float32,
        quantized: bool = False,
        rate: float = 1.0,
    ) -> None:
        super().__init__(dataclasses.replace(settings, learning_rate=settings.learning_rate * rate), *texts)
        self._coded = coded
        if dtype != torch.float32:
            self.model.to(dtype)
        if quantized:
            training.to_nvfp4_parameters(
                self.model.layers, filter_fn=lambda module, name: isinstance(module, nn.Linear)
            )
        if coded or dtype != torch.float32:
            self.optimizer = torch.optim.AdamW(
                self.model.parameters(), lr=self._rate, betas=BETAS, weight_decay=WEIGHT_DECAY,
                fused=True, capturable=settings.device == "cuda",
            )  # fmt: skip
        if coded:
            self._prepare(torch.device(settings.device))

    def _prepare(self, device: torch.device) -> None:
        rows = []
        for step, lr in enumerate(self._rates.tolist(), 1):
            group = {"lr": lr, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
            rows.append(coded_moments.numbers_of(group, step))
        self._numbers = torch.tensor(rows, device=device)
        self._states = [(p, coded_moments.new_state(p)) for p in self.model.parameters()]
        states = [rng_state_of(self.settings.seed, str(i), 0, device) for i in range(len(self._states))]
        self._random = torch.stack(states)

    def _step(self) -> None:
        if not self._coded:
            super()._step()
            return
        (starts,) = self._all_starts.index_select(0, self._index)
        loss = self._loss(self._windows(self.training_text, starts))
        loss.backward()
        norm = torch.stack(torch._foreach_norm([p.grad for p, _ in self._states])).norm()
        (numbers,) = self._numbers.index_select(0, self._index)
        numbers[0] = (1.0 / (norm + 1e-6)).clamp(max=1.0)
        self._random[:, 1] += 1
        for i, (p, state) in enumerate(self._states):
            with torch.no_grad():
                coded_moments.step_parameter(p, p.grad, state, numbers, self._random[i])
            p.grad = None
        self.losses.index_copy_(0, self._index, loss.detach()[None])
        self._index += 1


def train_one(variant: str, settings: Settings, texts: tuple[Tensor, Tensor]) -> dict:
    """Train to the end and return the validation loss in nats per byte."""
    start = time.perf_counter()
    trainer = StateTrainer(settings, texts, **VARIANTS[variant])
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
    losses: dict[str, dict[int, float]] = {variant: {} for variant in VARIANTS}
    for run in runs:
        if "validation" in run:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_cuda = torch.cuda.is_available()
    parser.add_argument("--seeds", type=at_least(1), default=3)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--processes", type=at_least(1), default=4 if on_cuda else 1)
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no run starts")
    parser.add_argument("--size", choices=list(SHAPES), default="20m")
    parser.add_argument("--steps", type=at_least(1), default=1000)
    parser.add_argument("--batch", type=at_least(1), default=8)
    parser.add_argument("--length", type=at_least(2), default=1024)
    parser.add_argument("--learning-rate", type=float, default=1.2e-3)
    parser.add_argument("--device", default="cuda" if on_cuda else "cpu")
    parser.add_argument("--folder", type=Path, default=Path(sysconfig.get_path("purelib")), help="where the texts are")
    parser.add_argument("--limit", type=at_least(1), default=64_000_000, help="bytes of text")
    parser.add_argument("--out", help="folder of the results (default: benchmarks/results)")
    options = parser.parse_args()
    start = time.time()
    fields = ("size", "steps", "batch", "length", "learning_rate", "device")
    settings = Settings(recipe="bf16", **{field: getattr(options, field) for field in fields})
    texts = corpus(options.folder, options.limit)
    for text in texts:
        text.share_memory_()
    context = mp.get_context("spawn")
    queue, results = context.Queue(), context.Queue()
    jobs = [(variant, seed) for seed in range(options.seeds) for variant in options.variants]
    for job in [*jobs, *[None] * options.processes]:
        queue.put(job)
    arguments = (queue, results, settings, texts, start + options.budget)
    for _ in range(options.processes):
        context.Process(target=_work, args=arguments, daemon=True).start()
    runs, working = [], options.processes
    while working:
        run = results.get()
        if run is None:
            working -= 1
            continue
        runs.append(run)
        print(f"[{time.time() - start:.0f} s] {run}", flush=True)
    content = record(torch.device(options.device), settings=dataclasses.asdict(settings), runs=runs)
    text = table(["weights and states", "loss", "increase", "standard error", "seeds"], rows_of(runs))
    print(text)
    save(result_path(torch.device(options.device), f"optimizer_states_{options.size}", options.out), content, text)


if __name__ == "__main__":
    main()
