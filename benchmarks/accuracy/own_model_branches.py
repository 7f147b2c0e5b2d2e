"""What NVFP4 costs the model of own_model while it trains: the last twentieth of its steps again, by other means.

    python -m benchmarks.accuracy.own_model_branches --folder build/own_model

Every branch begins from the weights at 95 % of own_model's training and sees the same batches at the same learning
rate. Branches of a recipe keep AdamW's moments; the others begin with new ones, ``adamw`` among them, with which they
are to be compared: ``nvfp4_adamw`` has moments in four bits, ``nvfp4_weights`` weights in NVFP4 too, and ``qlora``
trains peft's adapters of rank 16 at ten times the learning rate.

Increases are of the negative log likelihood a token over own_model's end, in bfloat16 on the texts it is judged on: of
the trained weights in the arithmetic that trained them, in bfloat16, and deployed in W4A4 (weights and activations
quantized as the recipe's forward does, by default to nearest).
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torchao.quantization import quantize_

from benchmarks.accuracy.own_model import BRANCH
from benchmarks.accuracy.subjects import Evaluation, OwnModel, peak_gb
from benchmarks.harness import record, result_path, save, table, with_earlier
from nvfp4_tensor import NVFP4Config, NVFP4WeightOnlyConfig, QuantizeSpec, training
from tutorials.train_llama import Settings, Trainer

RECIPES = ("bf16", "nvidia", "accurate", "unbiased")


def adapters(trainer: Trainer) -> None:
    """Freeze the linears of the blocks in NVFP4, and train peft's adapters alone."""
    import peft

    quantize_(trainer.model.layers, NVFP4WeightOnlyConfig())
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules=["q", "k", "v", "o", "gate", "up", "down"])
    trainer.model = peft.get_peft_model(trainer.model, config)
    trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)


def coded(trainer: Trainer) -> None:
    trainer.optimizer = training.NVFP4AdamW(trainer.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)


def coded_weights(trainer: Trainer) -> None:
    training.to_nvfp4_parameters(trainer.model, filter_fn=training.keep_dense("head"))
    coded(trainer)


MEANS: dict[str, Callable[[Trainer], None]] = {
    "adamw": lambda trainer: None, "nvfp4_adamw": coded, "nvfp4_weights": coded_weights, "qlora": adapters,
}  # fmt: skip
RATES = {"qlora": 10.0}


class Logits:
    """A model of tutorials/train_llama.py, called as one of transformers."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, ids: Tensor, use_cache: bool) -> Any:
        with torch.autocast(ids.device.type, torch.bfloat16):
            return SimpleNamespace(logits=self.model(ids))


def forward_of(recipe: str) -> NVFP4Config:
    """W4A4 as the recipe's forward quantizes, to nearest where it does not."""
    forward = training.RECIPES.get(recipe)
    return NVFP4Config(weight_spec=(forward and forward.w) or QuantizeSpec(),
                       activation_spec=(forward and forward.x) or QuantizeSpec())  # fmt: skip


def deployed(model: nn.Module, recipe: str) -> nn.Module:
    """A copy in W4A4. Linears that servers join share a scale, which training did not."""
    model = training.to_dense(copy.deepcopy(model)).eval()
    quantize_(model, forward_of(recipe), filter_fn=training.keep_dense("head"))
    return model


def run(name: str, settings: Settings, branch: dict[str, Any], texts: dict[str, Tensor], judged: Evaluation) -> Any:
    """One branch, from the weights where it begins."""
    recipe = name if name in RECIPES else "bf16"
    settings = dataclasses.replace(settings, recipe=recipe, compile=False,
                                   learning_rate=settings.learning_rate * RATES.get(name, 1.0))  # fmt: skip
    trainer, device = Trainer(settings, texts["training"], texts["training"]), torch.device(settings.device)
    if name in RECIPES:
        trainer.load_state_dict({**branch, "settings": dataclasses.asdict(settings)})
    else:
        trainer.model.load_state_dict(branch["model"])
        trainer.step = branch["step"]
        MEANS[name](trainer)
    began = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    while trainer.step < settings.steps:
        loss = trainer.train_step()
    loss.item()
    seconds, memory = time.perf_counter() - began, peak_gb(device)
    found = {"trained": judged.of(Logits(trainer.model))}
    if name != "qlora":
        dense = training.to_dense(copy.deepcopy(trainer.model)).eval()
        found["bfloat16"] = judged.of(Logits(dense))
    if name in (*RECIPES, "adamw"):
        found["W4A4"] = judged.of(Logits(deployed(trainer.model, recipe)))
    return {"name": name, "steps": settings.steps - branch["step"], "seconds": seconds, "memory_gb": memory,
            "judged": found}  # fmt: skip


def report(rows: list[dict[str, Any]], label: str) -> str:
    """The table of the rows."""
    lines = []
    for row in rows:
        for arithmetic, texts in row["judged"].items():
            cells = [f"{each['increase']:+.4f} +- {each['standard_error']:.4f}" for each in texts.values()]
            lines.append([row["name"], arithmetic, *cells, f"{row['seconds']:.0f} s", f"{row['memory_gb']:.1f}"])
    names = [f"{name}: nats" for name in rows[0]["judged"]["trained"]]
    heads = ("branch", "judged in", *names, "trained in", "peak GB")
    return f"{label}; the last {rows[0]['steps']} steps by other means\n{table(heads, lines)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/own_model"), help="of own_model (%(default)s)")
    parser.add_argument("--branches", nargs="+", choices=(*RECIPES, *MEANS), default=[*RECIPES, *MEANS])
    parser.add_argument("--budget", type=float, help="seconds after which no branch begins")
    parser.add_argument("--device", help="by default, that of own_model")
    parser.add_argument("--out", type=Path, help="of results, instead of benchmarks/results")
    options = parser.parse_args()
    start, subject = time.perf_counter(), OwnModel(options.folder)
    texts, branch = torch.load(options.folder / "texts.pt"), torch.load(options.folder / BRANCH)
    settings = Settings(**branch["settings"])
    settings = dataclasses.replace(settings, device=options.device or settings.device)
    device = torch.device(settings.device)
    judged = Evaluation(subject.model.to(device), {name: each.long() for name, each in texts["evaluation"].items()})
    path, rows = result_path(device, f"{subject.name}_branches", options.out), []
    for name in options.branches:
        if options.budget is not None and time.perf_counter() - start > options.budget:
            print("the budget is spent: name the other branches in another call")
            break
        row = run(name, settings, branch, texts, judged)
        print(report([row], subject.label), flush=True)
        rows = with_earlier(path, [row], "name", model=subject.label)
        save(path, record(device, model=subject.label, rows=rows), report(rows, subject.label))


if __name__ == "__main__":
    main()
