"""llama.cpp's 4-bit formats as rows of the perplexity table, where ``llama-cpp-python`` is installed.

It quantizes the demo's GGUF anew (all of it, the embedding too, in what formats each type mixes), or reads what
``checkpoints.save`` wrote, and is judged on the same tokens in the same windows. Its quantizer refuses NVFP4 as the
type of a file, and takes it as that of named tensors: the row is a Q8_0 whose blocks' weights are its NVFP4.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torchao.quantization import quantize_

from benchmarks.accuracy.texts import WINDOW
from nvfp4_cli.demo.model import gguf_path
from nvfp4_cli.demo.run import is_quantized_layer
from nvfp4_tensor import NVFP4WeightOnlyConfig, QuantizeSpec, checkpoints
from nvfp4_tensor.checkpoints.models.opening import open_tokenizer

OWN_NVFP4 = "LLAMA_FTYPE_MOSTLY_Q8_0 with NVFP4 in blk."


def is_installed() -> bool:
    """Whether llama-cpp-python is."""
    return importlib.util.find_spec("llama_cpp") is not None


class Llama:
    """llama.cpp's run of the demo's model as a type of it, or with None as our file, called as transformers' is."""

    def __init__(self, model: nn.Module, kind: str | None) -> None:
        import llama_cpp

        parameters = sum(p.numel() for p in model.parameters())
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            if kind is None:
                _write(model, path)
            else:
                _let_it_quantize(kind, path)
            self.bits = 8 * os.path.getsize(path) / parameters
            self._llama = llama_cpp.Llama(
                str(path), n_ctx=WINDOW, n_batch=WINDOW, logits_all=True, verbose=False,
                n_threads=torch.get_num_threads(),
            )  # fmt: skip

    def __call__(self, ids: Tensor, use_cache: bool) -> Any:
        self._llama.reset()
        self._llama.eval(ids[0].tolist())
        return SimpleNamespace(logits=torch.from_numpy(self._llama.scores[: ids.shape[1]])[None].to(ids.device))


def _row(label: str, kind: str | None) -> tuple[str, Callable[[nn.Module, Any], Llama]]:
    return label, lambda model, batches: Llama(model, kind)


ROWS = {
    "llama_q8_0": _row("llama.cpp Q8_0", "LLAMA_FTYPE_MOSTLY_Q8_0"),
    "llama_q4_0": _row("llama.cpp Q4_0", "LLAMA_FTYPE_MOSTLY_Q4_0"),
    "llama_q4_k_m": _row("llama.cpp Q4_K_M", "LLAMA_FTYPE_MOSTLY_Q4_K_M"),
    "llama_nvfp4": _row("llama.cpp's own NVFP4", OWN_NVFP4),
    "llama_reads": _row("our scale search, read by llama.cpp", None),
}


def _write(model: nn.Module, path: Path) -> None:
    """Our weights, a scale each; what is not quantized in bfloat16."""
    spec = QuantizeSpec(scale_search="mse", scale_ceiling=448)
    quantize_(model, NVFP4WeightOnlyConfig(weight_spec=spec), filter_fn=is_quantized_layer)
    checkpoints.save(
        model, path, format="gguf", tokenizer=open_tokenizer(gguf_path()), progress=False, mismatched_scales="keep"
    )


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
