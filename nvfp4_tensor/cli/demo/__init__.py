"""The demo: a real model in NVFP4, and what stochastic rounding does, in one table and one picture."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
from tqdm import tqdm

from nvfp4_tensor.cli.demo.model import QUESTION, evaluation_tokens, load_model, prompt_tokens
from nvfp4_tensor.cli.demo.picture import draw_picture, means, sweep
from nvfp4_tensor.cli.demo.table import RECIPES, Row, format_table, is_quantized_layer, run_recipe

TOKENS, WINDOW = 4096, 1024
NEW_TOKENS = 16
DRAWS = 4096
SWEEP_BLOCKS = 64


def run(output: Path, device: str = "cpu") -> list[Row]:
    """Measure every recipe, draw the picture, print the table and leave all of it in ``output``."""
    output.mkdir(parents=True, exist_ok=True)
    print("loading SmolLM2-135M-Instruct ...", flush=True)
    rows = measure_all(device)
    table = format_table(rows)
    (output / "table.md").write_text(table + "\n")
    (output / "table.json").write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=2) + "\n")
    print(f"\nPerplexity of {TOKENS} tokens of Python's help topics, windows of {WINDOW}; {QUESTION!r}\n\n{table}\n")
    picture = output / "stochastic_rounding.png"
    paint(picture, device)
    print(f"written: {output / 'table.md'}, {output / 'table.json'}, {picture}")
    return rows


def measure_all(device: str) -> list[Row]:
    """All recipes of the table, under one progress bar."""
    model, tokenizer = load_model()
    model.to(device)
    tokens = evaluation_tokens(tokenizer, TOKENS).to(device)
    prompt = prompt_tokens(tokenizer).to(device)
    layers = sum(is_quantized_layer(module, name) for name, module in model.named_modules())
    steps = [(0 if config is None else layers) + TOKENS // WINDOW + NEW_TOKENS for config in RECIPES.values()]
    rows = []
    with tqdm(total=sum(steps), unit="step", mininterval=0.5) as bar:
        for i, name in enumerate(RECIPES):
            bar.set_description(name)
            row = run_recipe(
                name, model, tokens, prompt, tokenizer.decode,
                window=WINDOW, new_tokens=NEW_TOKENS, end_token=tokenizer.eos_token_id, tick=bar.update,
            )  # fmt: skip
            rows.append(row)
            bar.update(sum(steps[: i + 1]) - bar.n)  # a continuation may end early
    return rows


def paint(path: Path, device: str) -> None:
    """The picture, its draws under a progress bar."""
    torch.manual_seed(0)
    x = sweep(SWEEP_BLOCKS).to(device)
    with tqdm(total=DRAWS, desc="stochastic draws", unit="draw", mininterval=0.5) as bar:
        mean_of = means(x, DRAWS, bar.update)
    draw_picture(path, x.cpu(), {n: mean.cpu() for n, mean in mean_of.items()})
