"""Llamas for torchtitan's own command line, on text that every machine has: the sources of the Python library.

    torchrun --nproc-per-node 2 -m benchmarks.speed.titan_train --module benchmarks.speed.titan_llama \\
        --config llama_1b --compile.enable --bf16_forward_from 29 \\
        --override.imports 'nvfp4_tensor.integrations.torchtitan.nvfp4_linear={"recipe":"nvidia"}' | tee nvidia.log
    python -m benchmarks.speed.titan_llama bf16.log nvidia.log        # a table of runs, and their losses

Without ``--override.imports`` it is a run in bfloat16. A token is a byte; vocabulary and shapes are the Llama's.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from benchmarks.harness import Report, record, result_path, save, seconds, table
from nvfp4_tensor.training import set_recipe

STEP = re.compile(
    r"step:\s+(\d+)\s+loss:\s+([0-9.]+)\s+grad_norm:\s+([0-9.]+)\s+memory:\s+(-?[0-9.]+)GiB.*?tps: ([0-9,]+)"
)
"""What torchtitan prints of a step."""


class LateBf16Trainer(Trainer):
    """torchtitan's trainer, that gives the forward back to bfloat16 late in a run."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        bf16_forward_from: int = 0
        """The first step whose forward is in bfloat16, its backward still by the recipe; 0: none"""

    def train_step(self, data_iterator: Iterator[tuple[dict[str, Tensor], Tensor]]) -> None:
        assert isinstance(self.config, LateBf16Trainer.Config)
        if self.step == self.config.bf16_forward_from:
            for part in self.model_parts:
                set_recipe(part, forward="bf16")
        super().train_step(data_iterator)


def llama_1b() -> LateBf16Trainer.Config:
    """1.2 billion parameters, 16,384 tokens a rank and step."""
    return _config("1B", batch=4, length=4096, steps=40, learning_rate=3e-4)


def llama_debug() -> LateBf16Trainer.Config:
    """torchtitan's smallest, for a CPU."""
    return _config("debugmodel", batch=4, length=64, steps=6, learning_rate=8e-4)


def _config(flavor: str, batch: int, length: int, steps: int, learning_rate: float) -> LateBf16Trainer.Config:
    """FSDP2 over all ranks; causal attention without documents' masks, the one that runs everywhere."""
    start, spec = llama3_debugmodel(), model_registry(flavor)
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    folder = tempfile.mkdtemp(prefix="titan_llama_")
    _write_tokenizer(Path(folder))
    DATASETS["python_library"] = DatasetConfig(
        path=sysconfig.get_path("stdlib"), loader=_library, sample_processor=lambda sample: sample["text"]
    )
    config = LateBf16Trainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),  # in chunks it needs torch 2.13
        model_spec=spec,
        optimizer=default_adamw(lr=learning_rate),
        lr_scheduler=start.lr_scheduler,
        training=start.training,
        dataloader=HuggingFaceTextDataLoader.Config(dataset="python_library"),
        metrics=start.metrics,
        hf_assets_path=folder,
        dump_folder=folder,
    )
    config.lr_scheduler.warmup_steps = max(steps // 6, 2)
    config.training.local_batch_size, config.training.seq_len, config.training.steps = batch, length, steps
    config.training.disable_cuda_graphs = True
    config.activation_checkpoint = None
    config.parallelism.spmd_backend = "partial_dtensor"  # the one that FSDP2 of torch 2.11 to 2.13 takes
    config.validator.enable = config.checkpoint.enable = False
    config.debug.seed = 0
    return config


def _library(folder: str, limit: int = 8_000_000) -> Dataset:
    """A sample a source file, the same ones in the same order wherever the library lies."""
    texts = []
    for path in sorted(Path(folder).rglob("*.py"), key=lambda path: path.relative_to(folder).as_posix()):
        if {"site-packages", "dist-packages"} & set(path.parts):
            continue
        texts.append(path.read_text(errors="ignore")[:100_000])
        limit -= len(texts[-1])
        if limit <= 0:
            break
    return Dataset.from_dict({"text": texts}).shuffle(seed=0)


def _write_tokenizer(folder: Path) -> None:
    """A token for each byte."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


# --- runs compared ---------------------------------------------------------------------------------------------------


def steps_of(log: str) -> list[dict[str, float]]:
    """Of the first rank that printed them: step, loss, gradient norm, memory in GiB, tokens a second and rank.

    Raises:
        ValueError: no step is there.
    """
    found: dict[int, dict[str, float]] = {}
    for step, loss, norm, memory, rate in STEP.findall(re.sub(r"\x1b\[[0-9;]*m", "", log)):
        row = {"step": int(step), "loss": float(loss), "grad_norm": float(norm)}
        found.setdefault(
            int(step), row | {"memory_gib": float(memory), "tokens_a_second": float(rate.replace(",", ""))}
        )
    if not found:
        raise ValueError("no line of the log is torchtitan's of a step")
    return [found[step] for step in sorted(found)]


def summary(steps: list[dict[str, float]], tokens: int, first: int, last: int) -> dict[str, float]:
    """Medians over steps ``first`` to ``last``, the loss a mean over the last five of them.

    Raises:
        ValueError: none of them was run.
    """
    part = [row for row in steps if first <= row["step"] <= last]
    if not part:
        raise ValueError(f"no step from {first} to {last} is among the {len(steps)} of the log: see --parts")
    rate = statistics.median(row["tokens_a_second"] for row in part)
    return {
        "first": first,
        "last": last,
        "seconds": tokens / rate,
        "tokens_a_second": rate,
        "memory_gib": max(row["memory_gib"] for row in part),
        "loss": statistics.mean(row["loss"] for row in part[-5:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path, nargs="+", help="what torchtitan printed, a run a file")
    parser.add_argument("--tokens", type=int, default=16384, help="of a rank and step (%(default)s)")
    parser.add_argument("--parts", default="11-28,33-40", help="steps whose medians are shown (%(default)s)")
    parser.add_argument("--output", help="folder of results, benchmarks/results by default")
    args = parser.parse_args()
    runs = {log.stem: steps_of(log.read_text()) for log in args.logs}
    parts = [tuple(int(end) for end in part.split("-")) for part in args.parts.split(",")]
    summaries = {name: [summary(steps, args.tokens, *part) for part in parts] for name, steps in runs.items()}
    report = Report()
    rows = [_row(name, part) for name, found in summaries.items() for part in found]
    report(table(["run", "steps", "step", "tokens/s a rank", "memory GiB", "loss"], rows))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    content = record(device, arguments={"tokens": args.tokens, "parts": args.parts}, summaries=summaries, runs=runs)
    save(result_path(device, "torchtitan", args.output), content, report.text)


def _row(name: str, part: dict[str, Any]) -> list[str]:
    return [
        name,
        f"{part['first']} to {part['last']}",
        seconds(part["seconds"]),
        f"{part['tokens_a_second']:,.0f}",
        f"{part['memory_gib']:.2f}",
        f"{part['loss']:.4f}",
    ]


if __name__ == "__main__":
    main()
