"""What gradients that travel as NVFP4 cost in loss: a small Llama on two ranks, reduced in float32 and as NVFP4.

    python -m benchmarks.accuracy.gradient_wire                        # two processes on a CPU
    python -m benchmarks.accuracy.gradient_wire --device cuda --size 20m --batch 64 --length 1024 --steps 800

DistributedDataParallel; both runs begin with the same weights and see the same batches, half of each a rank.
"""

from __future__ import annotations

import argparse
import dataclasses
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import record, save
from nvfp4_tensor.distributed import reduce_gradients_in_nvfp4
from tutorials.train_llama import Settings, Trainer, corpus


class HalfOfEach(Trainer):
    """A trainer whose batches are this rank's part of the whole's."""

    def _batch(self) -> Tensor:
        return super()._batch().chunk(dist.get_world_size())[dist.get_rank()]


def run(settings: Settings, on_the_wire: bool, text: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Train to the end: the validation loss, and the bytes that a rank sent for gradients."""
    trainer = HalfOfEach(settings, *text)
    model = DistributedDataParallel(trainer.model, broadcast_buffers=False)
    trainer.model = model  # type: ignore[assignment]
    reduction = reduce_gradients_in_nvfp4(model, settings.seed) if on_the_wire else None
    for _ in range(settings.steps):
        loss = trainer.train_step()
    elements, world = sum(p.numel() for p in model.parameters()), dist.get_world_size()
    dense = 2 * 4 * elements * (world - 1) // world * settings.steps  # a ring's reduce-scatter and all-gather
    return {
        "gradients": "NVFP4" if on_the_wire else "float32",
        "seed": settings.seed,
        "training": loss.item(),
        "validation": trainer.validate(),
        "bytes": reduction.sent_bytes if reduction else dense,
    }


def work(rank: int, world: int, settings: Settings, options: argparse.Namespace, queue: Any) -> None:
    """One rank: all runs, one after the other."""
    on_gpus = settings.device == "cuda"
    if on_gpus:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    device = f"cuda:{rank}" if on_gpus else "cpu"
    store = dist.FileStore(options.store, world)
    dist.init_process_group("nccl" if on_gpus else "gloo", store=store, rank=rank, world_size=world)
    text = corpus(options.text, 20_000_000)
    for seed in range(options.seeds):
        for on_the_wire in (False, True):
            result = run(dataclasses.replace(settings, seed=seed, device=device), on_the_wire, text)
            if rank == 0:
                queue.put(result)
    dist.barrier()
    dist.destroy_process_group()


def table(runs: list[dict]) -> str:
    """One row a run, and the increase over float32 of the same seed."""
    lines = [
        "| gradients | seed | validation loss | increase, % | bytes sent a rank |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    dense = {one["seed"]: one["validation"] for one in runs if one["gradients"] == "float32"}
    for one in runs:
        increase = 100 * (one["validation"] / dense[one["seed"]] - 1)
        name, loss, sent = one["gradients"], one["validation"], one["bytes"] / 1e6
        lines.append(f"| {name} | {one['seed']} | {loss:.4f} | {increase:.2f} | {sent:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--recipe", default="bf16")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--output", type=Path, default=Path("gradient_wire.json"))
    options = parser.parse_args()
    names = "device", "size", "steps", "batch", "length", "recipe", "learning_rate"
    settings = Settings(**{name: getattr(options, name) for name in names})
    with tempfile.TemporaryDirectory() as folder:
        options.store = f"{folder}/store"
        queue = mp.get_context("spawn").SimpleQueue()
        context = mp.spawn(work, (options.ranks, settings, options, queue), nprocs=options.ranks, join=False)
        runs = []
        while len(runs) < 2 * options.seeds:
            context.join(timeout=1)  # raises what a rank raised
            while not queue.empty():
                runs.append(queue.get())
                print(runs[-1], flush=True)
        while not context.join():
            pass
    text = table(runs)
    print(text)
    save(options.output, record(torch.device(options.device), settings=dataclasses.asdict(settings), runs=runs), text)


if __name__ == "__main__":
    main()
