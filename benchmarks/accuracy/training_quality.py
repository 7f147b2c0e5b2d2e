"""What each recipe costs in loss: a small Llama trained in bfloat16 and by each recipe, seeds paired.

    python -m benchmarks.accuracy.training_quality --gpus 4 --seeds 3          # what is published
    python -m benchmarks.accuracy.training_quality --gradients                 # bias, variance, cosine of gradients
    python -m benchmarks.accuracy.training_quality --report FILE               # table and picture of a file

All linears of the blocks are quantized, none stays dense unless the variant says so. The text is the Python sources of
the environment that runs this, in bytes, less than one epoch. Every run of a seed starts from the same weights and sees
the same batches; the increase is over bfloat16 of that seed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from benchmarks.harness import commit, record, save
from tutorials.train_llama import Settings, Trainer, corpus

VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {"recipe": "bf16"},
    "nvidia": {"recipe": "nvidia"},
    "accurate": {"recipe": "accurate"},
    "accurate_eden": {"recipe": "accurate_eden"},
    "nvidia_4over6": {"recipe": "nvidia_4over6"},
    "unbiased": {"recipe": "unbiased"},
    "nvidia, nearest gradients": {"recipe": "nvidia", "without": "stochastic"},
    "nvidia, no Hadamard": {"recipe": "nvidia", "without": "hadamard"},
    "nvidia, 1x16 weights": {"recipe": "nvidia", "without": "tiles"},
    "nvidia, 15 % of the blocks dense": {"recipe": "nvidia", "keep_last_blocks_dense": 0.15},
    "nvidia, forward in bf16 for the last 10 %": {"recipe": "nvidia", "late_bf16": 0.1},
}
"""Settings of tutorials/train_llama.py that a variant changes, in the order in which runs are made."""


def recipe_without(part: str):
    """NVIDIA's recipe without one of its parts."""
    from nvfp4_tensor.training import RECIPES, WeightForDx

    nvidia = RECIPES["nvidia"]
    if part == "stochastic":
        changes = {"dy": nvidia.dy.replace(round_mode="rne"), "dy_t": nvidia.dy_t.replace(round_mode="rne")}
    elif part == "hadamard":
        changes = {name: getattr(nvidia, name).replace(hadamard_sign=None) for name in ("dy_t", "x_t")}
    else:
        changes = {"w": nvidia.w.replace(block_rows=1), "w_for_dx": WeightForDx.EXACT}
    return nvidia.replace(name=f"nvidia without {part}", **changes)


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run and what came of it."""

    variant: str
    seed: int
    validation: float
    seconds: float
    points: list[dict]


def train_one(variant: str, settings: Settings, text: tuple[torch.Tensor, torch.Tensor]) -> Run:
    """Train to the end without checkpoints."""
    changes = dict(VARIANTS[variant])
    without = changes.pop("without", None)
    settings = dataclasses.replace(settings, **changes)
    start = time.perf_counter()
    trainer = Trainer(settings, *text, recipe=recipe_without(without) if without else None)
    points, recent, every = [], [], max(settings.steps // 16, 1)
    while trainer.step < settings.steps:
        recent.append(trainer.train_step())
        if trainer.step % every == 0:
            points.append({"step": trainer.step, "training": torch.stack(recent).mean().item()})
            recent.clear()
    validation = trainer.validate(windows=4096)
    return Run(variant, settings.seed, validation, time.perf_counter() - start, points)


def _work(rank: int, queue, results, settings: Settings, folder: Path, limit: int) -> None:
    device = settings.device
    if device == "cuda":
        device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    text = corpus(folder, limit)
    while (job := queue.get()) is not None:
        variant, seed = job
        try:
            run = train_one(variant, dataclasses.replace(settings, seed=seed, device=device), text)
            results.put(dataclasses.asdict(run))
        except Exception as error:  # one variant that fails leaves the others' results
            results.put({"variant": variant, "seed": seed, "error": f"{type(error).__name__}: {error}"})
    results.put(None)


def study(options: argparse.Namespace, settings: Settings) -> list[dict]:
    """All variants and seeds over the devices; what the file holds already is not run again."""
    context = mp.get_context("spawn")
    queue, results = context.Queue(), context.Queue()
    runs = json.loads(options.output.read_text())["runs"] if options.output.exists() else []
    runs = [run for run in runs if "error" not in run]
    done = {(run["variant"], run["seed"]) for run in runs}
    jobs = [(variant, seed) for seed in range(options.seeds) for variant in options.variants]
    jobs = [job for job in jobs if job not in done]
    jobs.sort(key=lambda job: list(VARIANTS).index(job[0]) >= 3)  # those that the target names come first
    for job in [*jobs, *[None] * options.gpus]:
        queue.put(job)
    arguments = (queue, results, settings, options.text, options.limit)
    workers = [context.Process(target=_work, args=(rank, *arguments), daemon=True) for rank in range(options.gpus)]
    for worker in workers:
        worker.start()
    running = options.gpus
    while running:
        run = results.get()
        if run is None:
            running -= 1
            continue
        runs.append({**run, "commit": commit()})
        said = run.get("error") or f"{run['validation']:.4f} in {run['seconds']:.0f} s"
        print(f"{run['variant']}, seed {run['seed']}: {said}", flush=True)
        content = record(torch.device(settings.device), settings=dataclasses.asdict(settings), runs=runs)
        options.output.write_text(json.dumps(content, indent=1) + "\n")
    return runs


def table(content: dict) -> str:
    """Loss, increase over bfloat16 of the same seed, its share of nvidia's over the same seeds, and every seed's."""
    losses: dict[str, dict[int, float]] = {}
    for run in content["runs"]:
        if "validation" in run:
            losses.setdefault(run["variant"], {})[run["seed"]] = run["validation"]
    dense = losses.get("bf16", {})
    increases = {
        variant: {seed: 100 * (loss / dense[seed] - 1) for seed, loss in sorted(by_seed.items()) if seed in dense}
        for variant, by_seed in losses.items()
    }
    nvidia = increases.get("nvidia", {})
    lines = [
        "| variant | validation loss | increase, % | of nvidia's | by seed |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for variant in VARIANTS:
        if not increases.get(variant):
            continue
        by_seed = increases[variant]
        mean = statistics.mean(by_seed.values())
        shared = [seed for seed in by_seed if seed in nvidia]
        share = sum(by_seed[seed] for seed in shared) / sum(nvidia[seed] for seed in shared) if shared else float("nan")
        seeds = ", ".join(f"{value:.2f}" for value in by_seed.values())
        loss = statistics.mean(losses[variant][seed] for seed in by_seed)
        lines.append(f"| {variant} | {loss:.4f} | {mean:.2f} | {share:.2f} | {seeds} |")
    return "\n".join(lines)


def draw(content: dict, path: Path) -> None:
    """Increase over bfloat16 of each variant, a point a seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    dense = {run["seed"]: run["validation"] for run in content["runs"] if run["variant"] == "bf16"}
    done = {(run["variant"], run["seed"]) for run in content["runs"] if "validation" in run}
    named = [name for name in VARIANTS if name != "bf16" and any((name, seed) in done for seed in dense)]
    figure, axes = plt.subplots(figsize=(8, 0.45 * len(named) + 1.2), layout="constrained")
    for row, name in enumerate(named):
        values = [
            100 * (run["validation"] / dense[run["seed"]] - 1)
            for run in content["runs"]
            if run["variant"] == name and "validation" in run and run["seed"] in dense
        ]
        axes.barh(row, statistics.mean(values), color="#8fb8de")
        axes.plot(values, [row] * len(values), "o", color="#1f4e79", markersize=4)
    axes.set_yticks(range(len(named)), named)
    axes.invert_yaxis()
    axes.set_xlabel("increase of the validation loss over bfloat16 of the same seed, %")
    figure.savefig(path, dpi=120)
    plt.close(figure)


# --- gradients -------------------------------------------------------------------------------------------------------


def gradients(device: str, draws: int, tokens: int = 256, width: int = 256) -> list[dict]:
    """Bias, variance and cosine of dx and dw over ``draws`` draws, against dy unquantized, for each way of rounding dy.

    The weight and the activation stay dense: what is seen is dy's rounding alone. ``bias`` is the root mean square of
    (mean - exact) over that of the exact gradient; ``floor`` what an unbiased rounding would show at that many draws.
    """
    from nvfp4_tensor import QuantizeSpec, fake_quantize

    generator = torch.Generator().manual_seed(0)
    dy = torch.randn(tokens, width, generator=generator).to(device) * torch.rand(tokens, 1, generator=generator).to(
        device
    )
    x, w = (torch.randn(size, width, generator=generator).to(device) for size in (tokens, width))
    ways = {
        "nearest": QuantizeSpec(),
        "stochastic, 8 bits": QuantizeSpec(round_mode="stochastic", random_bits=8),
        "stochastic": QuantizeSpec(round_mode="stochastic"),
        "stochastic, scales up": QuantizeSpec(round_mode="stochastic", scale_rounding="up"),
        "EDEN": QuantizeSpec(round_mode="eden"),
    }
    exact = {"dx": dy @ w, "dw": dy.t() @ x}
    rows = []
    for name, spec in ways.items():
        sums = {key: torch.zeros_like(value, dtype=torch.float64) for key, value in exact.items()}
        squares = {key: torch.zeros_like(value, dtype=torch.float64) for key, value in exact.items()}
        for draw in range(draws):
            state = torch.tensor([1, draw], device=device)
            rounded = fake_quantize(dy, spec, rng_state=state, dtype=torch.float32)
            rounded_t = fake_quantize(
                dy.t(), spec, rng_state=torch.tensor([2, draw], device=device), dtype=torch.float32
            )
            for key, value in (("dx", rounded @ w), ("dw", rounded_t @ x)):
                sums[key] += value
                squares[key] += (value - exact[key]).double() ** 2
        for key, true in exact.items():
            size = true.double().pow(2).mean().sqrt()
            error = (squares[key] / draws).mean().sqrt() / size
            bias = (sums[key] / draws - true).pow(2).mean().sqrt() / size
            mean = sums[key] / draws
            cosine = torch.nn.functional.cosine_similarity(mean.flatten(), true.double().flatten(), dim=0)
            rows.append(
                {
                    "rounding": name,
                    "gradient": key,
                    "relative error of a draw": error.item(),
                    "bias": bias.item(),
                    "floor": (error / draws**0.5).item(),
                    "1 - cosine of the mean": 1 - cosine.item(),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1, help="processes, one a GPU (or several, or on the CPU)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--size", default="20m")
    parser.add_argument("--steps", type=int, default=3200)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--learning-rate", type=float, default=1.2e-3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_path("purelib")))
    parser.add_argument("--limit", type=int, default=400_000_000)
    parser.add_argument("--output", type=Path, default=Path("training_quality.json"))
    parser.add_argument("--gradients", action="store_true")
    parser.add_argument("--draws", type=int, default=1024)
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    if options.gradients:
        rows = gradients(options.device, options.draws)
        text = "\n".join(
            ", ".join(f"{key} {value:.6f}" if isinstance(value, float) else str(value) for key, value in row.items())
            for row in rows
        )
        print(text)
        save(options.output, record(torch.device(options.device), draws=options.draws, rows=rows), text)
        return
    if not options.report:
        settings = Settings(
            size=options.size,
            steps=options.steps,
            batch=options.batch,
            length=options.length,
            learning_rate=options.learning_rate,
            device=options.device,
            compile=options.compile,
        )
        study(options, settings)
    path = options.report or options.output
    content = json.loads(path.read_text())
    print(table(content))
    path.with_suffix(".txt").write_text(table(content) + "\n")
    draw(content, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
