"""The demo: a real model in NVFP4, and what stochastic rounding does, in one table and one picture."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from nvfp4_tensor import checkpoints
from nvfp4_tensor._compat.torchao_import import quietly
from nvfp4_tensor.cli.demo.measure import perplexity
from nvfp4_tensor.cli.demo.model import QUESTION, evaluation_tokens, load_model, prompt_tokens
from nvfp4_tensor.cli.demo.picture import draw_picture, means, sweep
from nvfp4_tensor.cli.demo.table import RECIPES, Row, continuations, head, is_quantized_layer, run_recipe
from nvfp4_tensor.cli.models import open_model

with quietly():
    from torchao.quantization import quantize_

TOKENS, WINDOW = 4096, 1024
NEW_TOKENS = 16
DRAWS = 4096
SWEEP_BLOCKS = 64
ROUND_TRIP = "weight-only, four-over-six"
"""The recipe that is saved as a checkpoint and loaded again."""


def run(output: Path, device: str = "cpu") -> list[Row]:
    """Measure every recipe, draw the picture, print the table and leave all of it in ``output``."""
    output.mkdir(parents=True, exist_ok=True)
    print("loading SmolLM2-135M-Instruct ...", flush=True)
    model, tokenizer = load_model()
    model.to(device)
    print(f"\nPerplexity of {TOKENS} tokens of Python's help topics, windows of {WINDOW}; {QUESTION!r}\n\n{head()}")
    rows = measure_all(model, tokenizer)
    said = continuations(rows)
    (output / "table.md").write_text("\n".join([head(), *map(str, rows), "", said, ""]))
    (output / "table.json").write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=2) + "\n")
    print(f"\n{said}\n")
    print(round_trip(model, evaluation_tokens(tokenizer, WINDOW).to(device)), end="\n\n", flush=True)
    picture = output / "stochastic_rounding.png"
    paint(picture, device)
    print(f"written: {output / 'table.md'}, {output / 'table.json'}, {picture}")
    return rows


def measure_all(model: nn.Module, tokenizer: Any) -> list[Row]:
    """All recipes of the table under one progress bar, each row printed above it as soon as it is known."""
    device = next(model.parameters()).device
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
            bar.write(str(row))
            sys.stdout.flush()
    return rows


@dataclasses.dataclass(frozen=True)
class RoundTrip:
    """A model saved as a checkpoint and loaded again: the perplexity of some tokens before and after."""

    format: str
    nbytes: int
    seconds: float
    tokens: int
    before: float
    after: float

    def __str__(self) -> str:
        verdict = "the same" if self.before == self.after else "NOT THE SAME"
        return (
            f"{ROUND_TRIP}, saved as {self.format} ({self.nbytes / 1e6:.1f} MB) and loaded again in "
            f"{self.seconds:.1f} s: perplexity of {self.tokens} tokens "
            f"{self.before:.4f} and {self.after:.4f}, {verdict}"
        )


def round_trip(model: nn.Module, tokens: Tensor) -> RoundTrip:
    """Through a ModelOpt folder, as servers read it; ``model`` is quantized in place, tokens are (count,).

    The codes stay as they are (``different="keep"``); for a server :func:`checkpoints.quantize` gives q, k and v one
    per-tensor scale.
    """
    quantize_(model, RECIPES[ROUND_TRIP], filter_fn=is_quantized_layer)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "SmolLM2-NVFP4"
        start = time.perf_counter()
        checkpoints.save(model, path, different="keep", progress=False)
        again = open_model(path).to(tokens.device)
        seconds = time.perf_counter() - start
        nbytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    before, after = (perplexity(each, tokens, WINDOW) for each in (model, again))
    return RoundTrip("modelopt", nbytes, seconds, len(tokens), before, after)


def paint(path: Path, device: str) -> None:
    """The picture, its draws under a progress bar."""
    torch.manual_seed(0)
    x = sweep(SWEEP_BLOCKS).to(device)
    with tqdm(total=DRAWS, desc="stochastic draws", unit="draw", mininterval=0.5) as bar:
        mean_of = means(x, DRAWS, bar.update)
    draw_picture(path, x.cpu(), {n: mean.cpu() for n, mean in mean_of.items()})
