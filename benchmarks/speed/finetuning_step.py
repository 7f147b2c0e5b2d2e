"""A step that trains all weights of a Llama, by the tutorial's trainer and by bfloat16 AdamW, and its memory.

    python -m benchmarks.speed.finetuning_step --out FOLDER         # Llama 8B's shape and others, on an H200: a minute
    python -m benchmarks.speed.finetuning_step --shapes tiny --device cpu --steps 2

Weights are random. Both recompute layers in the backward and compute the loss in chunks. ``nvfp4`` is
tutorials/finetune_8b_24gb.py, whose allocator is limited to --memory GiB; ``bf16`` is torch's fused AdamW on bfloat16
weights with bfloat16 moments and gradients, 8 bytes per parameter, with as much memory as there is. The plan of
``plan_finetuning`` stands beside the most that torch's allocator reserved.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import at_least, record, result_path, save, table
from nvfp4_tensor import training
from tutorials.finetune_8b_24gb import Finetuner, Settings

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Case:
    """A Llama's sizes and the tokens of a step."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocabulary: int
    batch: int
    length: int
    loss_chunk: int = 512
    tied: bool = False

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden, intermediate_size=self.intermediate, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=max(self.heads // 4, 1), vocab_size=self.vocabulary,
            max_position_embeddings=self.length, tie_word_embeddings=self.tied,
        )  # fmt: skip

    def settings(self) -> Settings:
        return Settings(batch=self.batch, length=self.length, loss_chunk=self.loss_chunk)


CASES = {
    "8b": Case(4096, 14336, 32, 32, 128256, batch=4, length=2048),
    "8b, 1 x 4096": Case(4096, 14336, 32, 32, 128256, batch=1, length=4096, loss_chunk=1024),
    "3b, 8 x 2048": Case(3072, 8192, 28, 24, 128256, batch=8, length=2048, tied=True),
    "tiny": Case(64, 128, 2, 4, 96, batch=2, length=24, loss_chunk=20),
}


class Bf16Finetuner(Finetuner):
    """The trainer with bfloat16 weights and moments, and a clip by this step's norm."""

    def __init__(self, model: nn.Module, tokens: Tensor, settings: Settings) -> None:
        self.settings, self.tokens, self.model, self.step = settings, tokens, model, 0
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0, fused=True)

    def train_step(self) -> float:
        loss = self.loss(self._batch())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.item()


def build(case: Case, kind: str, device: str) -> Finetuner:
    """Return a trainer of a new model, made on the device."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(case.config())
    finally:
        torch.set_default_dtype(torch.float32)
    tokens = torch.randint(case.vocabulary, (1 << 16,), generator=torch.Generator().manual_seed(0))
    settings = case.settings()
    return Finetuner(model, tokens, settings, device) if kind == "nvfp4" else Bf16Finetuner(model, tokens, settings)


def measure(name: str, kind: str, device: str, steps: int, memory: float) -> dict[str, Any]:
    """Return seconds of each step but the first, and the peaks of the allocator in bytes."""
    case = CASES[name]
    finetuner = build(case, kind, device)
    on_cuda = device == "cuda"
    if on_cuda:
        gc.collect()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory * GIB / total) if kind == "nvfp4" else 1.0)
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        finetuner.train_step()
        seconds.append(time.perf_counter() - start)
    row: dict[str, Any] = {"case": name, "kind": kind, "seconds": seconds[1:], **dataclasses.asdict(case)}
    if on_cuda:
        row["allocated"], row["reserved"] = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    if kind == "nvfp4":
        with torch.device("meta"):
            model = LlamaForCausalLM(case.config())
        plan = training.plan_finetuning(model, case.batch * case.length, loss_chunk=case.loss_chunk, on_cuda=on_cuda)
        row["plan"] = dataclasses.asdict(plan)
    return row


def cells_of(row: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    planned = sum(size for part, size in row["plan"].items() if part != "context") / GIB if "plan" in row else None
    reserved = row["reserved"] / GIB if "reserved" in row else None
    return [
        f"{row['case']}, {row['kind']}",
        str(row["batch"] * row["length"]),
        f"{statistics.median(row['seconds']):.3f}",
        f"{row['allocated'] / GIB:.2f}" if "allocated" in row else "",
        f"{reserved:.2f}" if reserved else "",
        f"{planned:.2f}" if planned else "",
        f"{100 * (planned / reserved - 1):+.1f} %" if planned and reserved else "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_cuda = torch.cuda.is_available()
    parser.add_argument("--shapes", nargs="+", choices=list(CASES), default=[name for name in CASES if name != "tiny"])
    parser.add_argument("--bf16", nargs="*", default=["8b"], help="shapes that bfloat16's AdamW trains too")
    parser.add_argument("--steps", type=at_least(1), default=4)
    parser.add_argument("--memory", type=float, default=24.0, help="GiB of the NVFP4 trainer's allocator")
    parser.add_argument("--device", default="cuda" if on_cuda else "cpu")
    parser.add_argument("--out", help="folder of the results (default: benchmarks/results)")
    options = parser.parse_args()
    device = torch.device(options.device)
    path = result_path(device, "finetuning_step", options.out)
    header = ["shape, trainer", "tokens", "s a step", "allocated, GiB", "reserved, GiB", "planned, GiB", "plan's error"]
    rows: list[dict[str, Any]] = []
    for name in options.shapes:
        for kind in ("nvfp4", "bf16") if name in options.bf16 else ("nvfp4",):
            try:
                rows.append(measure(name, kind, options.device, options.steps, options.memory))
            except torch.OutOfMemoryError as error:
                print(f"{name}, {kind}: {error}")
            gc.collect()
            if options.device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.set_per_process_memory_fraction(1.0)
            content = record(device, memory=options.memory, rows=rows)
            save(path, content, table(header, [cells_of(row) for row in rows]))
            print(rows[-1:] and cells_of(rows[-1]), flush=True)
    print(table(header, [cells_of(row) for row in rows]))


if __name__ == "__main__":
    main()
