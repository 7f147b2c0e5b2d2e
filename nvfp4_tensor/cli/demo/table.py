"""The demo's table: one model under several quantizations, on the same text and the same layers."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from nvfp4_tensor._compat.torchao_import import quietly
from nvfp4_tensor.cli.demo.measure import bits_per_weight, greedy, perplexity
from nvfp4_tensor.numerics.choices import RoundingMode
from nvfp4_tensor.quantization.config import NVFP4Config, NVFP4WeightOnlyConfig
from nvfp4_tensor.sizes import model_size

with quietly():
    from torchao.core.config import AOBaseConfig
    from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig as TorchaoWeightOnlyConfig
    from torchao.quantization import quantize_

RECIPES: dict[str, AOBaseConfig | None] = {
    "bf16": None,
    "weight-only, nearest": NVFP4WeightOnlyConfig(),
    "weight-only, stochastic": NVFP4WeightOnlyConfig(round_mode=RoundingMode.STOCHASTIC),
    "weight-only, four-over-six": NVFP4WeightOnlyConfig(four_over_six=True),
    "W4A4, nearest": NVFP4Config(),
    "torchao weight-only": TorchaoWeightOnlyConfig(),
}
"""Row of the table -> config of ``quantize_``. Weight-only to nearest and torchao's row do the same job."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One recipe's results."""

    recipe: str
    perplexity: float
    model_bytes: int
    bits_per_weight: float
    quantization_seconds: float
    continuation: str

    def __str__(self) -> str:
        seconds = f"{self.quantization_seconds:.2f} s" if self.quantization_seconds else "-"
        size = f"{self.model_bytes / 1e6:.1f} MB"
        return _line(self.recipe, f"{self.perplexity:.3f}", size, f"{self.bits_per_weight:.2f}", seconds)


HEAD = ("recipe", "perplexity", "model", "bits/weight", "quantized in")
_WIDTHS = (max(map(len, RECIPES)), *(max(len(name), len("1000.0 MB")) for name in HEAD[1:]))
"""Known before the first row is: rows are printed one by one."""


def head() -> str:
    """The first two lines of the table, which is Markdown that is aligned to be read as text too; rows follow."""
    rule = ["-" * _WIDTHS[0], *("-" * (width - 1) + ":" for width in _WIDTHS[1:])]
    return _line(*HEAD) + "\n" + _line(*rule)


def continuations(rows: list[Row]) -> str:
    """How each recipe goes on from the prompt, a line each."""
    return "\n".join(f"{row.recipe:<{_WIDTHS[0]}}  {row.continuation!r}" for row in rows)


def _line(first: str, *numbers: str) -> str:
    """The first cell to the left, the numbers to the right."""
    cells = [first.ljust(_WIDTHS[0]), *(cell.rjust(width) for cell, width in zip(numbers, _WIDTHS[1:], strict=True))]
    return "| " + " | ".join(cells) + " |"


def is_quantized_layer(module: nn.Module, name: str) -> bool:
    """Every nn.Linear but lm_head, whose weight is the embedding's too."""
    return isinstance(module, nn.Linear) and not name.endswith("lm_head")


def run_recipe(
    name: str,
    model: nn.Module,
    tokens: Tensor,
    prompt: Tensor,
    decode: Callable[[Tensor], str],
    *,
    window: int,
    new_tokens: int,
    end_token: int | None = None,
    tick: Callable[[], object] = lambda: None,
) -> Row:
    """Quantize a copy of model by recipe ``name`` and measure it; ``tick`` is called for each layer, window, token."""
    model, config = copy.deepcopy(model), RECIPES[name]
    seconds = 0.0
    if config is not None:
        torch.manual_seed(0)  # the stochastic row repeats
        start = time.perf_counter()

        ticked = set()

        def pick(module: nn.Module, name: str) -> bool:
            picked = is_quantized_layer(module, name)
            if picked and name not in ticked:  # our configs ask twice: they check all layers before they change one
                ticked.add(name)
                tick()
            return picked

        quantize_(model, config, filter_fn=pick)
        seconds = time.perf_counter() - start
    return Row(
        recipe=name,
        perplexity=perplexity(model, tokens, window, tick),
        model_bytes=model_size(model).total,
        bits_per_weight=bits_per_weight(model, is_quantized_layer),
        quantization_seconds=seconds,
        continuation=decode(greedy(model, prompt, new_tokens, end_token, tick)),
    )
