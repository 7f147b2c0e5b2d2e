"""Generate benchmarks/results/supported_models.md by running tiny random models: python -m benchmarks.supported_models

Every cell is the result of a run on the CPU with the installed transformers: "yes", or the exception and the beginning
of its message. A test runs some families again and compares their rows with the file, which
docs/guides/supported_models.md includes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

import nvfp4_tensor.integrations.transformers as nvfp4
from nvfp4_tensor import NVFP4Tensor, NVFP4WeightOnlyConfig, checkpoints
from nvfp4_tensor.generation import decode_natively, nvfp4_cache
from nvfp4_tensor.generation.cache_argument import CACHE

PAGE = Path(__file__).parent / "results" / "supported_models.md"
_WORDS = 18
"""Of an error message."""

_SIZES = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_LATENT = {
    "kv_lora_rank": 32, "q_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 128,
}  # fmt: skip
_MIXTURE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}

FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "Llama": ("LlamaConfig", {}),
    "Mistral": ("MistralConfig", {"sliding_window": None}),
    "Qwen2": ("Qwen2Config", {}),
    "Qwen3": ("Qwen3Config", {}),
    "Gemma": ("GemmaConfig", {}),
    "Gemma 2": ("Gemma2Config", {"query_pre_attn_scalar": 32}),
    "Gemma 3 (text)": ("Gemma3TextConfig", {"query_pre_attn_scalar": 32, "num_hidden_layers": 6}),
    "Phi-3": ("Phi3Config", {}),
    "SmolLM3": ("SmolLM3Config", {}),
    "OLMo 2": ("Olmo2Config", {}),
    "Granite": ("GraniteConfig", {}),
    "GLM-4": ("Glm4Config", {}),
    "Cohere": ("CohereConfig", {}),
    "StarCoder2": ("Starcoder2Config", {}),
    "StableLM": ("StableLmConfig", {}),
    "GPT-2": ("GPT2Config", {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "GPT-NeoX": ("GPTNeoXConfig", {}),
    "OPT": ("OPTConfig", {"ffn_dim": 256, "word_embed_proj_dim": 128}),
    "Falcon": ("FalconConfig", {"head_dim": None}),
    "Mixtral": ("MixtralConfig", _MIXTURE),
    "Qwen3-MoE": ("Qwen3MoeConfig", _MIXTURE | {"norm_topk_prob": True}),
    "OLMoE": ("OlmoeConfig", _MIXTURE),
    "gpt-oss": ("GptOssConfig", _MIXTURE),
    "DeepSeek-V3": ("DeepseekV3Config", _LATENT),
}
CHECKS = ("quantize", "save and load", "native decoding", "NVFP4 cache", "GGUF")


def make(family: str, folder: Path) -> None:
    """Create a tiny random model of the family, and save it as a dense checkpoint."""
    name, changes = FAMILIES[family]
    torch.manual_seed(0)
    sizes = {key: value for key, value in (_SIZES | changes).items() if value is not None or key == "sliding_window"}
    config = getattr(transformers, name)(**sizes)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def load(folder: Path, **options: object) -> PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).eval()


def quantized_weights(model: nn.Module) -> int:
    return sum(isinstance(weight, NVFP4Tensor) for weight in model.parameters())


def prompt() -> Tensor:
    return torch.arange(3, 19)[None]


def text(model: PreTrainedModel, **options: object) -> Tensor:
    return model.generate(prompt(), max_new_tokens=8, min_new_tokens=8, do_sample=False, **options)


def _quantize(folder: Path) -> None:
    model = load(folder / "dense", quantization_config=nvfp4.NVFP4TensorConfig(NVFP4WeightOnlyConfig()))
    if not quantized_weights(model):
        raise ValueError("no weight is an nn.Linear or a stack of experts")
    with torch.no_grad():
        if not model(prompt()).logits.isfinite().all():
            raise ValueError("logits are not finite")
    model.save_pretrained(folder / "nvfp4")


def _save_and_load(folder: Path) -> None:
    model = load(folder / "dense", quantization_config=nvfp4.NVFP4TensorConfig(NVFP4WeightOnlyConfig()))
    again = load(folder / "nvfp4")
    if quantized_weights(again) != quantized_weights(model):
        raise ValueError(f"{quantized_weights(again)} of {quantized_weights(model)} weights are NVFP4 again")
    with torch.no_grad():
        torch.testing.assert_close(again(prompt()).logits, model(prompt()).logits, rtol=0, atol=0)


def _native_decoding(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "tokens are decoded by transformers")
        if (made := text(decode_natively(load(folder / "nvfp4")))).shape[1] != prompt().shape[1] + 8:
            raise ValueError(f"{made.shape[1]} tokens")


def _cache(folder: Path) -> None:
    model = load(folder / "nvfp4")
    text(model, **{CACHE: nvfp4_cache(model.config)})


def _gguf(folder: Path) -> None:
    checkpoints.quantize(folder / "dense", folder / "model.gguf", to="gguf", tokenizer=None, progress=False)
    checkpoints.load(load(folder / "dense"), folder / "model.gguf")


_RUN: dict[str, Callable[[Path], None]] = dict(
    zip(CHECKS, (_quantize, _save_and_load, _native_decoding, _cache, _gguf), strict=True)
)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings, progress bars and prints."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
        transformers.logging.enable_progress_bar()
        transformers.logging.set_verbosity(verbosity)


def outcome(check: Callable[[Path], None], folder: Path) -> str:
    """Return "yes", or the exception's class and the beginning of its message."""
    try:
        check(folder)
    except Exception as error:
        message = str(error).replace(str(folder) + os.sep, "").replace("|", "/")
        words = re.sub(r"<class '.*?'>|\b\w+(ForCausalLM|LMHeadModel)\b|(?<=not of )'\w+'", "this one", message).split()
        first = " ".join(words[:_WORDS]).replace("`", "'")
        return f"{type(error).__name__}: {first}{' ...' if len(words) > _WORDS else ''}"
    return "yes"


def row(family: str) -> list[str]:
    """Return the outcomes of a family's checks, without those that need a quantized model if there is none."""
    with tempfile.TemporaryDirectory() as name, quiet():
        folder = Path(name)
        make(family, folder / "dense")
        cells: dict[str, str] = {}
        for check, run in _RUN.items():
            runs = check in ("quantize", "GGUF") or cells["quantize"] == "yes"
            cells[check] = outcome(run, folder) if runs else "not run"
    return list(cells.values())


def page(rows: dict[str, list[str]], version: str = transformers.__version__) -> str:
    """Return the tables. Errors are numbered, because many families share one."""
    errors = list(dict.fromkeys(cell for cells in rows.values() for cell in cells if ": " in cell))
    lines = [f"| family | {' | '.join(CHECKS)} |", "|" + " --- |" * (len(CHECKS) + 1)]
    for family, cells in rows.items():
        shown = [f"no ({errors.index(cell) + 1})" if cell in errors else cell for cell in cells]
        lines.append(f"| {family} | {' | '.join(shown)} |")
    notes = [f"{number}. `{error}`" for number, error in enumerate(errors, 1)]
    head = f"Made by `python -m benchmarks.supported_models` with transformers {version}."
    return "\n".join([head, "", *lines, "", "Errors, shortened:", "", *notes, ""])


def read(text: str) -> dict[str, list[str]]:
    """Return the rows from which a file was generated."""
    errors = dict(re.findall(r"^(\d+)\. `(.*)`$", text, re.MULTILINE))
    table = [line.strip("| \n").split(" | ") for line in re.findall(r"^\| .*$", text, re.MULTILINE)][2:]
    return {
        family: [errors[cell[4:-1]] if cell.startswith("no (") else cell for cell in cells] for family, *cells in table
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, help="print these rows and write nothing")
    chosen = parser.parse_args().families
    rows = {}
    for family in chosen or FAMILIES:
        rows[family] = row(family)
        print(family, rows[family], flush=True)
    if not chosen:
        PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
