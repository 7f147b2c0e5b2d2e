"""A training step of a stack of Llama-8B blocks by FSDP2: time, bytes that travel and memory, against bfloat16's.

    torchrun --nproc-per-node 2 -m benchmarks.speed.fsdp_step                  # two GPUs
    torchrun --nproc-per-node 2 -m benchmarks.speed.fsdp_step --layers 2 --width 256 --tokens 64    # on a CPU

"train": forward and backward of each rank's tokens and the all-reduce of amaxes, four steps in a row: in bfloat16, by
a recipe whose weights FSDP2 gathers as they are, and by one that has their codes gathered; "one GPU" is the same stack
there, whole. "bits" is the last with codes that do not know the ranks (two more all-reduces a linear); "gradients in
NVFP4" reduces them so, by an all-to-all. "qlora": frozen weights in bfloat16 and in NVFP4, adapters beside them, one
token a rank, so that memory is that of the weights. Bytes are counted where FSDP2 hands them to the collective: what a
rank puts into all-gathers and reduce-scatters, in one step.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchao.quantization import quantize_

from benchmarks.harness import Report, at_least, record, result_path, save, seconds, table
from benchmarks.speed.training_step import Block
from nvfp4_tensor import NVFP4WeightOnlyConfig, distributed, training

COUNTED = (
    "all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor", "all_to_all_single"
)  # fmt: skip


IN_A_ROW = 4
"""Steps between two waits for the GPU: Python is ahead of it then, as in training."""


class Counter:
    """Bytes that this rank puts into collectives, by name, while it is on."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        for name in COUNTED:
            if hasattr(dist, name):
                setattr(dist, name, self._counted(name, getattr(dist, name)))

    def _counted(self, name: str, real: Callable) -> Callable:
        key = name.rpartition("_")[0]
        key = "all_gather" if key.startswith("all_gather") else "reduce_scatter"  # all_to_all: NVFP4's reduce-scatter

        def call(*args: Any, **how: Any) -> Any:
            sent = how.get("input_tensor", how.get("input", args[1] if len(args) > 1 else None))
            self.bytes[key] = self.bytes.get(key, 0) + sent.numel() * sent.element_size()
            return real(*args, **how)

        return call


class Adapted(nn.Module):
    """A frozen linear with a low-rank one beside it."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        like = {"device": base.weight.device, "dtype": torch.bfloat16}
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False, **like)
        self.up = nn.Linear(rank, base.out_features, bias=False, **like)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def stack(sizes: tuple[int, int, int, int], layers: int, device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    with device:
        return nn.Sequential(*(Block(*sizes).to(torch.bfloat16) for _ in range(layers)))


def linears_of(block: nn.Module) -> list[str]:
    return [name for name, module in block.named_children() if isinstance(module, nn.Linear)]


def trained(model: nn.Sequential, recipe: str, codes: bool, bits: bool, sharded: bool) -> nn.Sequential:
    """The stack by a recipe, sharded block by block."""
    if recipe != "bf16":
        quantize_(model, training.NVFP4TrainingConfig(recipe))
        if codes:
            distributed.enable_nvfp4_all_gather(model)
    if sharded:
        shard(model)
    if bits:
        mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
        distributed.set_token_sharding(model, mesh)
        distributed.seed_rounding(model, seed=0)
    return model


def shard(model: nn.Sequential) -> None:
    for block in model:
        fully_shard(block)
    fully_shard(model)


def adapted(model: nn.Sequential, quantized: bool) -> nn.Sequential:
    """QLoRA of the stack, or LoRA."""
    if quantized:
        quantize_(model, NVFP4WeightOnlyConfig())
    for block in model:
        block.requires_grad_(False)
        for name in linears_of(block):
            setattr(block, name, Adapted(getattr(block, name)))
    shard(model)
    return model


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def memory(device: torch.device, peak: bool = False) -> int:
    if device.type != "cuda":
        return 0
    return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()


def measured(model: nn.Sequential, x: Tensor, counter: Counter, repeats: int, alone: bool = False) -> dict:
    """Median time of a step on the slowest rank, and the bytes and memory of one."""
    device = x.device
    dy = torch.randn_like(x)
    has_codes = any(isinstance(m, training.NVFP4TrainingLinear) for m in model.modules())

    def step() -> None:
        model(x).backward(dy)
        if has_codes and not alone:
            distributed.precompute_amaxes(model)
        model.zero_grad(set_to_none=True)

    for _ in range(3):
        step()
    synchronize(device)
    counter.bytes.clear()
    held = memory(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step()
    synchronize(device)
    sent, peak = dict(counter.bytes), memory(device, peak=True)
    times = []
    for _ in range(repeats):
        dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        for _ in range(IN_A_ROW):
            step()
        synchronize(device)
        times.append((time.perf_counter() - start) / IN_A_ROW)
    slowest = torch.tensor(times, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return {"seconds": statistics.median(slowest.tolist()), "bytes": sent, "held": held, "peak": peak}


def freed(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def run(args: argparse.Namespace, device: torch.device) -> dict[str, dict]:
    sizes = (args.width, args.width * 7 // 2, max(args.width // 128, 1), max(args.width // 512, 1))
    counter = Counter()
    length = min(args.tokens, 4096)
    x = torch.randn(args.tokens // length, length, args.width, device=device, dtype=torch.bfloat16, requires_grad=True)
    results: dict[str, dict] = {}
    for name, recipe, codes, bits, sharded, wire in (
        ("train bf16, one GPU", "bf16", False, False, False, False),
        (f"train {args.recipe}, one GPU", args.recipe, False, False, False, False),
        ("train bf16", "bf16", False, False, True, False),
        ("train bf16, gradients in NVFP4", "bf16", False, False, True, True),
        (f"train {args.recipe}, weights as they are", args.recipe, False, False, True, False),
        (f"train {args.recipe}, codes", args.recipe, True, False, True, False),
        (f"train {args.recipe}, codes, gradients in NVFP4", args.recipe, True, False, True, True),
        (f"train {args.recipe}, codes, bits", args.recipe, True, True, True, False),
    ):
        model = trained(stack(sizes, args.layers, device), recipe, codes, bits, sharded)
        if wire:
            distributed.reduce_gradients_in_nvfp4(model)
        if args.compile:
            for block in model:
                block.compile()
        results[name] = measured(model, x, counter, args.repeats, alone=not sharded)
        del model
        freed(device)
    one = torch.randn(1, 1, args.width, device=device, dtype=torch.bfloat16)
    for name, quantized in (("qlora bf16", False), ("qlora NVFP4", True)):
        model = adapted(stack(sizes, args.layers, device), quantized)
        freed(device)
        results[name] = measured(model, one, counter, args.repeats)
        del model
        freed(device)
    return results


def ratios(results: dict[str, dict], recipe: str) -> dict[str, float]:
    """What the targets are about."""
    dense, codes = results["train bf16"], results[f"train {recipe}, codes"]
    one = results[f"train {recipe}, one GPU"]["seconds"] / results["train bf16, one GPU"]["seconds"]
    qlora, lora = results["qlora NVFP4"], results["qlora bf16"]
    found = {
        "gathered bytes, codes over bf16": codes["bytes"]["all_gather"] / dense["bytes"]["all_gather"],
        "gathered bytes, QLoRA over LoRA": qlora["bytes"]["all_gather"] / lora["bytes"]["all_gather"],
        "step, codes over bf16": codes["seconds"] / dense["seconds"],
        "step on one GPU, over bf16": one,
    }
    if lora["peak"]:
        found["memory held, QLoRA over LoRA"] = qlora["held"] / lora["held"]
        found["peak memory, QLoRA over LoRA"] = qlora["peak"] / lora["peak"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=at_least(1), default=8)
    parser.add_argument("--width", type=at_least(128), default=4096, help="4096: Llama-8B's block")
    parser.add_argument("--tokens", type=at_least(16), default=8192, help="of each rank")
    parser.add_argument("--recipe", choices=list(training.RECIPES), default="nvidia")
    parser.add_argument("--repeats", type=at_least(1), default=15)
    parser.add_argument("--compile", action="store_true", help="each block by torch.compile")
    parser.add_argument("--output", help="folder of results, benchmarks/results by default")
    args = parser.parse_args()
    gpus = torch.cuda.is_available()
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpus else "gloo", device_id=device if gpus else None)
    results = run(args, device)
    if dist.get_rank() == 0:
        report = Report()
        report(
            f"{dist.get_world_size()} ranks, {args.layers} blocks of width {args.width}, {args.tokens} tokens each\n"
        )
        rows = [
            [
                name,
                seconds(row["seconds"]),
                *(f"{row['bytes'].get(key, 0) / 1e6:.1f}" for key in ("all_gather", "reduce_scatter")),
                *(f"{row[key] / 2**30:.2f}" for key in ("held", "peak")),
            ]
            for name, row in results.items()
        ]
        report(table(["", "step", "gathered MB", "reduced MB", "held GiB", "peak GiB"], rows))
        shares = ratios(results, args.recipe)
        report()
        report(table(["", "ratio"], [[name, f"{value:.3f}"] for name, value in shares.items()]))
        path = result_path(device, "fsdp_step", args.output)
        content = record(device, ranks=dist.get_world_size(), arguments=vars(args), results=results, ratios=shares)
        save(path, content, report.text)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
