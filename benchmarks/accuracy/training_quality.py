"""What each recipe costs in loss: a small Llama trained in bfloat16 and by each recipe, on two texts, seeds paired.

    python -m benchmarks.accuracy.training_quality --size 25m --steps 1600 --batch 8 --learning-rate 6e-4
    python -m benchmarks.accuracy.training_quality --device cpu --size tiny --batch 2 --length 64 --steps 40

All linears of the blocks are quantized unless the variant says otherwise. The texts are the Python sources and the C
and C++ headers of the environment that runs this, in bytes, less than one epoch. All runs of a seed see the same
batches; an increase is relative to bfloat16 with that seed and text.

Recipes train the last part of the steps alone (--branch): all variants of a seed and text start from one run in
bfloat16, with its weights and optimizer states. What differs at the end is then what they cost, and not also that two
runs from scratch part ways.

Several processes share a GPU, each step is one replay of a CUDA graph, and the result file is written after each run.
The same command continues a file: runs that it has are not repeated. With --budget, no run starts that would end later.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks import harness
from benchmarks.accuracy.graph_trainer import GraphTrainer
from benchmarks.accuracy.recipe_table import VARIANTS, table
from benchmarks.harness import at_least, commit, record, result_path, save
from nvfp4_tensor.training import RECIPES, Recipe, WeightForDx
from tutorials.train_llama import SHAPES, Settings, corpus

TEXTS = {"Python": (".py",), "C++": (".h", ".hpp", ".cuh")}
"""Text -> suffixes of its files."""

VALIDATION_WINDOWS, VALIDATION_BATCH = 512, 32


def recipe_without(part: str) -> Recipe:
    """Return NVIDIA's recipe without one of its parts."""
    nvidia = RECIPES["nvidia"]
    if part == "stochastic":
        changes = {"dy": nvidia.dy.replace(round_mode="rne"), "dy_t": nvidia.dy_t.replace(round_mode="rne")}
    elif part == "hadamard":
        changes = {name: getattr(nvidia, name).replace(hadamard_sign=None) for name in ("dy_t", "x_t")}
    else:
        changes = {"w": nvidia.w.replace(block_rows=1), "w_for_dx": WeightForDx.EXACT}
    return nvidia.replace(name=f"nvidia without {part}", **changes)


@dataclasses.dataclass(frozen=True)
class Job:
    """One training run."""

    variant: str
    text: str
    seed: int

    def __str__(self) -> str:
        return f"{self.text}, seed {self.seed}, {self.variant}"


@dataclasses.dataclass(frozen=True)
class Run(Job):
    """A run and its result: the validation loss in nats per byte, and seconds."""

    validation: float
    seconds: float


def trunk_of(job: Job, settings: Settings, text: tuple[Tensor, Tensor], branch: float) -> GraphTrainer:
    """Return a trainer that has trained in bfloat16 up to where the variants of a text and seed branch off.

    branch: the part of the steps that is left.
    """
    trainer = GraphTrainer(dataclasses.replace(settings, seed=job.seed, recipe="bf16"), *text)
    trainer.train(until=round(settings.steps * (1 - branch)))
    return trainer


def train_one(job: Job, settings: Settings, text: tuple[Tensor, Tensor], trunk: GraphTrainer) -> Run:
    """Train to the end without checkpoints, from where the trunk ended."""
    changes = dict(VARIANTS[job.variant])
    without = changes.pop("without", None)
    settings = dataclasses.replace(settings, seed=job.seed, **changes)
    start = time.perf_counter()
    trainer = GraphTrainer(settings, *text, recipe=recipe_without(without) if without else None)
    trainer.start_from(trunk)
    trainer.train()
    trainer.settings = dataclasses.replace(settings, batch=VALIDATION_BATCH)
    validation = trainer.validate(VALIDATION_WINDOWS)
    return Run(**dataclasses.asdict(job), validation=validation, seconds=time.perf_counter() - start)


# --- all runs --------------------------------------------------------------------------------------------------------

Texts = dict[str, tuple[Tensor, Tensor]]
NOT_STARTED = "not started: the budget is spent"


def _work(
    rank: int, queue: Any, results: Any, settings: Settings, texts: Texts, deadline: float | None, branch: float
) -> None:
    """Take lists of jobs, with one trunk each, from the queue until it gives None. A job that fails stops no other."""
    torch.set_num_threads(1)
    if settings.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    longest = 0.0
    while (jobs := queue.get()) is not None:
        trunk = None
        for job in jobs:
            if deadline is not None and time.time() + longest > deadline:
                results.put((job, NOT_STARTED))
                continue
            try:
                if trunk is None:
                    trunk = trunk_of(job, settings, texts[job.text], branch)
                run = train_one(job, settings, texts[job.text], trunk)
            except Exception as error:  # whatever one variant raises is reported beside the others' results
                results.put((job, f"{type(error).__name__}: {error}"))
            else:
                longest = max(longest, run.seconds)
                results.put((job, run))
    results.put(None)


def groups_of(jobs: list[Job]) -> list[list[Job]]:
    """Return the jobs in lists for one process each: those of one text and seed, which share a trunk."""
    groups: dict[tuple[str, int], list[Job]] = {}
    for job in jobs:
        groups.setdefault((job.text, job.seed), []).append(job)
    return list(groups.values())


def jobs_of(options: argparse.Namespace, done: set[Job]) -> list[Job]:
    """Return what is left to run. Seeds come one after another, so that an interrupted study has complete ones."""
    jobs = [Job(variant, text, seed) for seed in range(options.seeds) for text in TEXTS for variant in options.variants]
    return [job for job in jobs if job not in done]


def earlier_runs(path: Path, settings: dict[str, Any]) -> list[dict]:
    """Return the runs of a file to continue; raise a ValueError if its settings differ."""
    if not path.exists():
        return []
    content, mine = json.loads(path.read_text()), settings
    if differing := [name for name, value in content["settings"].items() if mine.get(name) != value]:
        raise ValueError(f"{path} has other settings ({', '.join(differing)}): choose another --out")
    return content["runs"]


def study(options: argparse.Namespace, settings: Settings, path: Path) -> dict:
    """Run all variants, texts and seeds, and return the content of the result file."""
    start = time.time()
    all_settings = {**dataclasses.asdict(settings), "branch": options.branch}
    runs = earlier_runs(path, all_settings)
    jobs = jobs_of(options, {Job(run["variant"], run["text"], run["seed"]) for run in runs})
    texts = {job.text: corpus(options.folder, options.limit, TEXTS[job.text]) for job in jobs}
    for text in sum(texts.values(), ()):
        text.share_memory_()
    context = mp.get_context("spawn")
    queue, results = context.Queue(), context.Queue()
    for group in [*groups_of(jobs), *[None] * options.processes]:
        queue.put(group)
    deadline = None if options.budget is None else start + options.budget
    arguments = (queue, results, settings, texts, deadline, options.branch)
    workers = [context.Process(target=_work, args=(rank, *arguments), daemon=True) for rank in range(options.processes)]
    for worker in workers:
        worker.start()
    content = record(torch.device(settings.device), settings=all_settings, runs=runs)
    working, finished = options.processes, 0
    while working:
        result = results.get()
        if result is None:
            working -= 1
            continue
        job, run = result
        finished += 1
        said = run
        if isinstance(run, Run):
            runs.append({**dataclasses.asdict(run), "commit": commit()})
            path.write_text(json.dumps(content, indent=1) + "\n")
            said = f"{run.validation:.4f} in {run.seconds:.0f} s"
        if said != NOT_STARTED:
            print(f"[{finished}/{len(jobs)}, {time.time() - start:.0f} s] {job}: {said}", flush=True)
    left = len(jobs) - sum(1 for job in jobs if any(Job(r["variant"], r["text"], r["seed"]) == job for r in runs))
    if left:
        print(f"{left} of {len(jobs)} runs are left: run the same command again")
    return content


def main() -> None:
    parser = harness.parser(__doc__)
    on_cuda = torch.cuda.is_available()
    parser.add_argument("--seeds", type=at_least(1), default=3)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--processes", type=at_least(1), default=6 if on_cuda else 1, help="they share the GPUs")
    parser.add_argument("--budget", type=float, help="seconds after which no run starts")
    parser.add_argument("--size", choices=list(SHAPES), default="2m")
    parser.add_argument("--steps", type=at_least(1), default=700)
    parser.add_argument("--batch", type=at_least(1), default=4)
    parser.add_argument("--length", type=at_least(2), default=1024)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--branch", type=float, default=0.25, help="the part of the steps that recipes train")
    parser.add_argument("--folder", type=Path, default=Path(sysconfig.get_path("purelib")), help="where the texts are")
    parser.add_argument("--limit", type=at_least(1), default=64_000_000, help="bytes of each text")
    options = parser.parse_args()
    fields = ("size", "steps", "batch", "length", "learning_rate", "device")
    settings = Settings(**{field: getattr(options, field) for field in fields})
    subject = f"training_quality_{options.size}_last_{options.branch:g}"
    path = result_path(torch.device(options.device), subject, options.out)
    content = study(options, settings, path)
    text = table(content["runs"])
    print(text)
    save(path, content, text)


if __name__ == "__main__":
    main()
