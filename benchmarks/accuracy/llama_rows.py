"""llama.cpp's 4-bit formats as rows of the perplexity table, where ``llama-cpp-python`` is installed.

It quantizes the demo's GGUF anew (all of it, the embedding too, in what formats each type mixes), or reads what
``checkpoints.save`` wrote, and is judged on the same tokens in the same windows. Its quantizer refuses NVFP4 as the
type of a file, and takes it as that of named tensors: the row is a Q8_0 whose blocks' weights are its NVFP4.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torchao.quantization import quantize_
from tqdm import tqdm

from nvfp4_cli.demo.model import evaluation_tokens, gguf_path, load_model
from nvfp4_cli.demo.table import is_quantized_layer
from nvfp4_tensor import NVFP4WeightOnlyConfig, QuantizeSpec, checkpoints

OWN_NVFP4 = "LLAMA_FTYPE_MOSTLY_Q8_0 with NVFP4 in blk."

ROWS: dict[str, tuple[str, str | None]] = {
    "llama_q8_0": ("llama.cpp Q8_0", "LLAMA_FTYPE_MOSTLY_Q8_0"),
    "llama_q4_0": ("llama.cpp Q4_0", "LLAMA_FTYPE_MOSTLY_Q4_0"),
    "llama_q4_k_m": ("llama.cpp Q4_K_M", "LLAMA_FTYPE_MOSTLY_Q4_K_M"),
    "llama_nvfp4": ("llama.cpp's own NVFP4", OWN_NVFP4),
    "llama_reads": ("our scale search, read by llama.cpp", None),
}
"""Name -> (what the table calls it, llama.cpp's type; None: our file)."""


def is_installed() -> bool:
    """Whether llama-cpp-python is."""
    return importlib.util.find_spec("llama_cpp") is not None


def run(name: str, tokens: int, window: int) -> dict[str, Any]:
    """A row as ``perplexity.run_row`` gives it."""
    import llama_cpp

    model, tokenizer = load_model()
    parameters = sum(p.numel() for p in model.parameters())
    ids = evaluation_tokens(tokenizer, tokens)
    with tempfile.TemporaryDirectory() as folder:
        path, start = Path(folder) / f"{name}.gguf", time.perf_counter()
        kind = ROWS[name][1]
        if kind is None:
            _write(model, tokenizer, path)
        else:
            _let_it_quantize(kind, path)
        seconds, bits = time.perf_counter() - start, 8 * os.path.getsize(path) / parameters
        del model
        llama = llama_cpp.Llama(
            str(path), n_ctx=window, n_batch=window, logits_all=True, verbose=False, n_threads=torch.get_num_threads()
        )
        found = []
        for part in tqdm(ids.split(window), desc=name, unit="window"):
            llama.reset()
            llama.eval(part.tolist())
            logits = torch.from_numpy(llama.scores[: len(part) - 1])
            found.append(cross_entropy(logits, part[1:], reduction="none"))
    return {"losses": torch.cat(found), "bits": bits, "seconds": seconds, "tokens": tokens}


def _write(model: nn.Module, tokenizer: Any, path: Path) -> None:
    """Our weights, a scale each; what is not quantized in bfloat16."""
    spec = QuantizeSpec(scale_search="mse", scale_ceiling=448)
    quantize_(model, NVFP4WeightOnlyConfig(weight_spec=spec), filter_fn=is_quantized_layer)
    checkpoints.save(model, path, format="gguf", tokenizer=tokenizer, progress=False, mismatched_scales="keep")


def _let_it_quantize(kind: str, path: Path) -> None:
    import llama_cpp

    how = llama_cpp.llama_model_quantize_default_params()
    how.allow_requantize, how.nthread = True, torch.get_num_threads()
    how.ftype = getattr(llama_cpp, kind.split()[0])
    if kind == OWN_NVFP4:
        named = llama_cpp.llama_model_tensor_override
        # Of a tensor's name the first pattern found in it decides; an empty one ends the list.
        how.tt_overrides = (named * 2)(named(rb"^blk\.", llama_cpp.GGML_TYPE_NVFP4), named(None, 0))
    if llama_cpp.llama_model_quantize(str(gguf_path()).encode(), str(path).encode(), how):
        raise RuntimeError(f"llama.cpp did not quantize {gguf_path()}: its own messages say why")
