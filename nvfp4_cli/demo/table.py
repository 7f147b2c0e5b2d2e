"""The demo's table: one model quantized in several ways, in the same layers and on the same text."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from nvfp4_tensor._compat.torchao_import import quietly
from nvfp4_tensor.numerics.choices import RoundingMode
from nvfp4_tensor.quantization.config import NVFP4Config, NVFP4WeightOnlyConfig
from nvfp4_tensor.sizes import bits_per_weight, model_size
from nvfp4_tensor.testing.model_quality import perplexity

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
"""The config of each row. The second row and torchao's compute the same."""

_TIMES = {"torchao weight-only": (1.7, 0.45)}
_OTHER_TIMES = (1.0, 0.015)
"""The times of a window of 1,024 tokens and of one generated token, in windows: SmolLM2-135M on two CPU cores. torchao
decodes every weight for each of them."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One recipe's results. ``linear_bits_per_weight`` counts the linears that are quantized."""

    recipe: str
    perplexity: float
    model_bytes: int
    model_bits_per_weight: float
    linear_bits_per_weight: float
    quantization_seconds: float
    continuation: str

    def __str__(self) -> str:
        seconds = f"{self.quantization_seconds:.2f} s" if self.quantization_seconds else "-"
        size = f"{self.model_bytes / 1e6:.1f} MB"
        bits = f"{self.model_bits_per_weight:.2f}", f"{self.linear_bits_per_weight:.2f}"
        return _line(self.recipe, f"{self.perplexity:.3f}", size, *bits, seconds)


HEAD = ("recipe", "perplexity", "model", "bits/weight", "in linears", "quantized in")
_WIDTHS = (max(map(len, RECIPES)), *(max(len(name), len("1000.0 MB")) for name in HEAD[1:]))
"""Fixed before the first row, because rows are printed one by one."""


def head() -> str:
    """The first two lines of the table: Markdown, aligned so that it is also readable as text."""
    rule = ["-" * _WIDTHS[0], *("-" * (width - 1) + ":" for width in _WIDTHS[1:])]
    return _line(*HEAD) + "\n" + _line(*rule)


def continuations(rows: list[Row]) -> str:
    """How each recipe continues the prompt, one per line."""
    return "\n".join(f"{row.recipe:<{_WIDTHS[0]}}  {row.continuation!r}" for row in rows)


def _line(first: str, *numbers: str) -> str:
    """Align the first cell to the left, the numbers to the right."""
    cells = [first.ljust(_WIDTHS[0]), *(cell.rjust(width) for cell, width in zip(numbers, _WIDTHS[1:], strict=True))]
    return "| " + " | ".join(cells) + " |"


def is_quantized_layer(module: nn.Module, name: str) -> bool:
    """True for every nn.Linear except lm_head, whose weight is also the embedding's."""
    return isinstance(module, nn.Linear) and not name.endswith("lm_head")


def work_of(name: str, windows: int, tokens: int) -> tuple[float, float]:
    """The work of a recipe's windows and of its generated tokens, in units of the time of one window of bf16."""
    window, token = _TIMES.get(name, _OTHER_TIMES)
    return window * windows, token * tokens


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
    advance: Callable[[float], object] = lambda work: None,
) -> Row:
    """Quantize a copy of the model by recipe ``name`` and measure it; ``advance`` is called with the work done."""
    model, config = copy.deepcopy(model), RECIPES[name]
    seconds = 0.0
    if config is not None:
        torch.manual_seed(0)  # so that the stochastic row is the same in each run
        start = time.perf_counter()
        quantize_(model, config, filter_fn=is_quantized_layer)
        seconds = time.perf_counter() - start
    window_work, token_work = work_of(name, 1, 1)
    size = model_size(model).total
    return Row(
        recipe=name,
        perplexity=perplexity(model, tokens, window, lambda: advance(window_work)),
        model_bytes=size,
        model_bits_per_weight=8 * size / sum(parameter.numel() for parameter in model.parameters()),
        linear_bits_per_weight=bits_per_weight(model, is_quantized_layer),
        quantization_seconds=seconds,
        continuation=decode(greedy(model, prompt, new_tokens, end_token, lambda: advance(token_work))),
    )


@torch.no_grad()
def greedy(
    model: nn.Module, prompt: Tensor, count: int, end_token: int | None, tick: Callable[[], object] = lambda: None
) -> Tensor:
    """Return the ``count`` most likely next tokens after prompt (1, length), one at a time: int64 (at most count,).

    Stops before ``end_token``. ``tick`` is called after each token.
    """
    from nvfp4_tensor.generation.cache_argument import cache_argument  # imports transformers

    ids, cache, output, argument = prompt, None, [], cache_argument(model)
    for _ in range(count):
        result = model(ids, use_cache=True, **{argument: cache})
        ids, cache = result.logits[:, -1:].argmax(dim=-1), getattr(result, argument)
        tick()
        if ids.item() == end_token:
            break
        output.append(ids.item())
    return torch.tensor(output, dtype=torch.int64)
