"""Llamas for torchtitan's own command line, on text that every machine has: the sources of the Python library.

    torchrun --nproc-per-node 2 -m benchmarks.speed.titan_train --module benchmarks.speed.titan_llama \\
        --config llama_1b --compile.enable --bf16_forward_from 29 \\
        --override.imports 'nvfp4_tensor.integrations.torchtitan.nvfp4_linear={"recipe":"nvidia"}' | tee nvidia.log
    python -m benchmarks.speed.titan_runs bf16.log nvidia.log        # a table of runs, and their losses

Without ``--override.imports`` it is a run in bfloat16. A token is a byte; vocabulary and shapes are the Llama's.
"""

from __future__ import annotations

import json
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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

from nvfp4_tensor.training import set_recipe

_FOLDER = tempfile.TemporaryDirectory(prefix="titan_llama_")
"""What torchtitan reads and writes, as long as the process lives."""


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
    folder = _FOLDER.name
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
