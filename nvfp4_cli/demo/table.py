"""The demo's table: one model quantized in several ways, in the same layers and on the same text."""

from __future__ import annotations

import copy
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nvfp4_tensor._compat.torchao_import import quietly
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

RECIPES: dict[str, AOBaseConfig | GPTQConfig | None] = {
    "bf16": None,
    "nearest": NVFP4WeightOnlyConfig(),
    "stochastic": NVFP4WeightOnlyConfig(round_mode=RoundingMode.STOCHASTIC),
    "four-over-six": NVFP4WeightOnlyConfig(four_over_six=True),
    "GPTQ, scale search": GPTQConfig(),
    "nearest, W4A4": NVFP4Config(),
    "torchao, nearest": TorchaoWeightOnlyConfig(),
}
"""The config of each row: of weights alone, except W4A4's. The second row and torchao's compute the same."""


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
    model_bits_per_weight: float
    linear_bits_per_weight: float
    tokens_per_second: float
    native_tokens_per_second: float | None
    quantization_seconds: float
    continuation: str

    def __str__(self) -> str:
        seconds = f"{self.quantization_seconds:.1f} s" if self.quantization_seconds else "-"
        native = "-" if self.native_tokens_per_second is None else f"{self.native_tokens_per_second:.1f}"
        size, bits = f"{self.model_bytes / 1e6:.1f} MB", f"{self.linear_bits_per_weight:.2f}"
        return _line(
            self.recipe, f"{self.perplexity:.3f}", size, bits, f"{self.tokens_per_second:.1f}", native, seconds
        )


HEAD = ("recipe", "perplexity", "model", "bits/weight", "tokens/s", "natively", "quantized in")
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


def run_recipe(
    name: str, model: nn.Module, tokens: Tensor, prompt: Tensor, decode: Callable[[Tensor], str], *, window: int,
    new_tokens: int, calibration: Sequence[Tensor] = (),
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
    size = model_size(model).total
    loss = perplexity(model, tokens, window)
    continuation, rate = generate(model, prompt, new_tokens)
    try:
        natively = decode_natively(model)  # type: ignore[arg-type]
        generate(natively, prompt, 2)  # warms up
        native = generate(natively, prompt, new_tokens)[1]
    except (TypeError, ValueError):  # it does not support the model's weights
        native = None
    return Row(
        recipe=name,
        perplexity=loss,
        model_bytes=size,
        model_bits_per_weight=8 * size / sum(parameter.numel() for parameter in model.parameters()),
        linear_bits_per_weight=bits_per_weight(model, is_quantized_layer),
        tokens_per_second=rate,
        native_tokens_per_second=native,
        quantization_seconds=seconds,
        continuation=decode(continuation),
    )


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
