"""Generate the tables of docs/guides/supported_models.md by running tiny models: python -m benchmarks.families

Every model is quantized in memory, while loading and as a folder, saved and loaded: results/families.md. Some decode,
with a cache, and become GGUF files: results/supported_models.md, where a cell is "yes", or the exception and the
beginning of its message. ``make exhaustive`` runs all rows again and compares them with the tables, ``make test`` some.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import nvfp4_tensor.integrations.transformers as nvfp4
from benchmarks.tiny_configs import tiny_config
from nvfp4_tensor import NVFP4Tensor, checkpoints, quantize_model
from nvfp4_tensor.generation import decode_natively, nvfp4_cache
from nvfp4_tensor.generation.cache_argument import CACHE
from nvfp4_tensor.quantization.model_plan import ModelPlan

TABLE = Path(__file__).parent / "results" / "families.md"
COLUMNS = ("family", "class", "NVFP4", "routes", "saved", "stays dense")

OTHERS = {
    **{family: f"{name}ForConditionalGeneration" for family, name in {
        "llava": "Llava", "llava_next": "LlavaNext", "llava_onevision": "LlavaOnevision", "qwen2_vl": "Qwen2VL",
        "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "qwen3_vl_moe": "Qwen3VLMoe", "paligemma": "PaliGemma",
        "idefics3": "Idefics3", "smolvlm": "SmolVLM", "internvl": "InternVL", "mistral3": "Mistral3", "blip-2": "Blip2",
        "qwen2_audio": "Qwen2Audio", "voxtral": "Voxtral", "granite_speech": "GraniteSpeech", "whisper": "Whisper",
        "t5": "T5", "mt5": "MT5", "umt5": "UMT5", "t5gemma": "T5Gemma", "m2m_100": "M2M100", "bart": "Bart",
    }.items()},
    "wav2vec2": "Wav2Vec2ForCTC", "bert": "BertForMaskedLM", "distilbert": "DistilBertForMaskedLM",
    "deberta-v2": "DebertaV2ForMaskedLM", "modernbert": "ModernBertForMaskedLM", "clip": "CLIPModel",
    "vit": "ViTForImageClassification",
}  # fmt: skip
"""The most used families that are no causal language models: images and text, audio, encoder and decoder, encoders."""

ROWS = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items(), *OTHERS.items()]
"""(family, class) of each row."""

_OWN_CLASS = ("emu3", "mllama", "musicgen", "musicgen_melody")
"""Causal families that AutoModelForCausalLM does not load."""
_FLOAT32 = ("xlnet", "xlstm", "reformer")
"""Families that transformers does not run in bfloat16."""
NOT_RUN = {
    "gemma3n": "needs timm",
    "gemma4_assistant": "reads another model's cache",
    "gemma4_unified_assistant": "reads another model's cache",
}
"""Families whose models are not built, or not run, here, and why."""


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


def class_of(family: str, name: str) -> Any:
    """Return the class whose from_pretrained loads a row's model."""
    is_causal = (family, name) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() and family not in _OWN_CLASS
    return transformers.AutoModelForCausalLM if is_causal else getattr(transformers, name)


def make(family: str, name: str, folder: Path, **changes: Any) -> torch.dtype:
    """Save a tiny model with random weights, and return its dtype."""
    torch.manual_seed(0)
    model_class, config = getattr(transformers, name), tiny_config(family, **changes)
    nested = (each for each in vars(config).values() if type(each) is model_class.config_class)
    dtype = torch.float32 if family in _FLOAT32 else torch.bfloat16
    model = model_class(config if type(config) is model_class.config_class else next(nested, config)).to(dtype)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return dtype


def output(model: PreTrainedModel) -> Tensor:
    """Return the first output of a model for 16 tokens, an image or a sound."""
    torch.manual_seed(0)
    accepts, config, tokens = inspect.signature(model.forward).parameters, model.config, torch.arange(3, 19)[None]
    inputs: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    if "input_values" in accepts:
        inputs["input_values"] = torch.randn(1, 4000)
    elif "input_features" in accepts and config.is_encoder_decoder:
        inputs["input_features"] = torch.randn(1, config.num_mel_bins, 2 * config.max_source_positions)
    elif config.model_type in ("clip", "vit", "blip-2"):
        inputs["pixel_values"] = torch.randn(1, 3, 32, 32)
    if config.model_type == "blip-2":
        inputs["input_ids"] = torch.cat([torch.ones(1, config.num_query_tokens, dtype=torch.int64), tokens], 1)
    if config.model_type.startswith("musicgen"):  # one row per codebook
        inputs["input_ids"] = tokens.expand(config.num_codebooks, -1)
    inputs = {n: v.to(model.dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in inputs.items()}
    with torch.no_grad():
        found = model(**{name: value for name, value in inputs.items() if name in accepts})[0]
    if not found.isfinite().all():
        raise ValueError("outputs are not finite")
    return found


def difference(one: PreTrainedModel, other: PreTrainedModel) -> str:
    """Return "equal" if two models have the same NVFP4 weights, to the bit, and the same dense ones."""
    mine, theirs = one.state_dict(), other.state_dict()
    layers = [{name for name, each in state.items() if isinstance(each, NVFP4Tensor)} for state in (mine, theirs)]
    if layers[0] != layers[1]:
        return f"other layers: {_short(layers[0] ^ layers[1])}"
    unequal = [name for name in mine if name not in theirs or not _is_equal(mine[name], theirs[name])]
    return f"other bits: {_short(unequal)}" if unequal else "equal"


def _is_equal(one: Tensor, other: Tensor) -> bool:
    if not isinstance(one, NVFP4Tensor):
        return torch.equal(one, other)
    parts = [(each.qdata, each.scale.view(torch.uint8), each.per_tensor_scale) for each in (one, other)]
    same = one.transposed == other.transposed
    return same and all(torch.equal(a, b) for a, b in zip(*parts, strict=True))


def _short(names: Any) -> str:
    """Return what the names of modules end with, without the numbers of layers."""
    found = (re.sub(r"\.weight$", "", name) for name in sorted(names))
    ends = dict.fromkeys(".".join(part for part in name.split(".")[-3:] if not part.isdigit()) for name in found)
    return ", ".join(list(ends)[:3]) + (f" and {len(ends) - 3} more" if len(ends) > 3 else "")


def _stays_dense(plan: ModelPlan) -> str:
    reasons: dict[str, list[str]] = {}
    for name in plan.dense:
        if f"left dense ({plan[name].reason})" in plan.left_dense():
            reasons.setdefault(re.sub(r" \(\d.*|in files, ", "", plan[name].reason), []).append(name)
    return "; ".join(f"{_short(names)} ({reason})" for reason, names in reasons.items())


def row(family: str, name: str) -> list[str]:
    """Return the cells of a row: what is NVFP4, whether the routes and a saved model agree, and what stays dense."""
    if NOT_RUN.get(family, "").startswith("needs"):
        return [family, name, "not run", NOT_RUN[family], "", ""]
    with tempfile.TemporaryDirectory() as path, quiet():
        folder = Path(path)
        dtype, auto = make(family, name, folder / "dense"), class_of(family, name)

        def load(part: str, **options: Any) -> PreTrainedModel:
            return auto.from_pretrained(folder / part, dtype=dtype, **options).eval()

        model = load("dense")
        plan = quantize_model(model)
        cells = [family, name, f"{len(plan.quantized)} of {len(plan)}"]
        loading = load("dense", quantization_config=nvfp4.NVFP4TensorConfig())
        loading.save_pretrained(folder / "saved")
        saved = load("saved")
        routes = {"loading": difference(model, loading)}
        try:
            checkpoints.quantize(folder / "dense", folder / "folder", progress=False)
            routes["folder"] = difference(model, load("folder"))
        except ValueError as error:
            routes["folder"] = " ".join(str(error).replace(f"{folder}/", "").split())
        differing = [f"{route}: {found}" for route, found in routes.items() if found != "equal"]
        cells.append("; ".join(differing).replace("|", "/") or "equal")
        cells.append(difference(loading, saved))
        if cells[-1] == "equal" and family in NOT_RUN:
            cells[-1] = f"equal, {NOT_RUN[family]}"
        elif cells[-1] == "equal" and not torch.equal(output(loading), output(saved)):
            cells[-1] = "other outputs"
    return [*cells, _stays_dense(plan)]


def table(rows: list[list[str]]) -> str:
    """Return the Markdown table."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    head = f"Made by `python -m benchmarks.families` with transformers {transformers.__version__}.\n\n"
    return head + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def read() -> dict[tuple[str, str], list[str]]:
    """Return the rows of the table, by family and class."""
    lines = [
        line.split(" | ") for line in TABLE.read_text().replace("| \n", "|\n").splitlines() if line.startswith("| ")
    ]
    rows = [[cell.strip("| ") for cell in cells] for cells in lines[2:]]
    return {(cells[0], cells[1]): cells for cells in rows}


# --- decoding, caches and GGUF ---------------------------------------------------------------------------------------

DECODING = Path(__file__).parent / "results" / "supported_models.md"
DECODERS = {
    "Llama": "llama", "Mistral": "mistral", "Qwen2": "qwen2", "Qwen3": "qwen3", "Gemma": "gemma", "Gemma 2": "gemma2",
    "Gemma 3 (text)": "gemma3_text", "Phi-3": "phi3", "SmolLM3": "smollm3", "OLMo 2": "olmo2", "Granite": "granite",
    "GLM-4": "glm4", "Cohere": "cohere", "StarCoder2": "starcoder2", "StableLM": "stablelm", "GPT-2": "gpt2",
    "GPT-NeoX": "gpt_neox", "OPT": "opt", "Falcon": "falcon", "Mixtral": "mixtral", "Qwen3-MoE": "qwen3_moe",
    "OLMoE": "olmoe", "gpt-oss": "gpt_oss", "DeepSeek-V3": "deepseek_v3",
}  # fmt: skip
"""What the table calls a family, and transformers."""
_CHANGES = {
    "mistral": {"sliding_window": None}, "gemma3_text": {"num_hidden_layers": 6}, "mixtral": {"hidden_size": 128},
    "qwen3_moe": {"hidden_size": 128, "norm_topk_prob": True}, "gpt_oss": {"hidden_size": 128},
}  # fmt: skip
"""Of tiny configs, so that each has a layer that attends to all tokens, and experts of whole tiles."""
_PROMPT = torch.arange(3, 19)[None]
_WORDS = 18
"""Of an error message."""


def load(folder: Path, **options: Any) -> PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).eval()


def text(model: PreTrainedModel, **options: Any) -> Tensor:
    return model.generate(_PROMPT, max_new_tokens=8, min_new_tokens=8, do_sample=False, **options)


def _native_decoding(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "tokens are decoded by transformers")
        if (made := text(decode_natively(load(folder / "nvfp4")))).shape[1] != _PROMPT.shape[1] + 8:
            raise ValueError(f"{made.shape[1]} tokens")


def _cache(folder: Path) -> None:
    model = load(folder / "nvfp4")
    text(model, **{CACHE: nvfp4_cache(model.config)})


def _gguf(folder: Path) -> None:
    checkpoints.quantize(folder / "dense", folder / "model.gguf", to="gguf", tokenizer=None, progress=False)
    checkpoints.load(load(folder / "dense"), folder / "model.gguf")


CHECKS = {"native decoding": _native_decoding, "NVFP4 cache": _cache, "GGUF": _gguf}


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


def decoding_row(family: str) -> list[str]:
    """Return the outcomes of a family's checks."""
    with tempfile.TemporaryDirectory() as name, quiet():
        folder, kind = Path(name), DECODERS[family]
        make(kind, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind], folder / "dense", **_CHANGES.get(kind, {}))
        load(folder / "dense", quantization_config=nvfp4.NVFP4TensorConfig()).save_pretrained(folder / "nvfp4")
        return [outcome(check, folder) for check in CHECKS.values()]


def decoding_page(rows: dict[str, list[str]], version: str = transformers.__version__) -> str:
    """Return the table of decoding. Errors are numbered, because many families share one."""
    errors = list(dict.fromkeys(cell for cells in rows.values() for cell in cells if ": " in cell))
    lines = [f"| family | {' | '.join(CHECKS)} |", "|" + " --- |" * (len(CHECKS) + 1)]
    for family, cells in rows.items():
        shown = [f"no ({errors.index(cell) + 1})" if cell in errors else cell for cell in cells]
        lines.append(f"| {family} | {' | '.join(shown)} |")
    notes = [f"{number}. `{error}`" for number, error in enumerate(errors, 1)]
    head = f"Made by `python -m benchmarks.families` with transformers {version}."
    return "\n".join([head, "", *lines, "", "Errors, shortened:", "", *notes, ""])


def read_decoding(text: str) -> dict[str, list[str]]:
    """Return the rows from which that table was made."""
    errors = dict(re.findall(r"^(\d+)\. `(.*)`$", text, re.MULTILINE))
    table = [line.strip("| \n").split(" | ") for line in re.findall(r"^\| .*$", text, re.MULTILINE)][2:]
    return {
        family: [errors[cell[4:-1]] if cell.startswith("no (") else cell for cell in cells] for family, *cells in table
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", help="print these rows and write nothing")
    chosen = parser.parse_args().families
    rows, decoding = [], {}
    for family, name in ROWS:
        if not chosen or family in chosen:
            rows.append(row(family, name))
            print(*rows[-1], sep=" | ", flush=True)
    for name, family in DECODERS.items():
        if not chosen or family in chosen:
            decoding[name] = decoding_row(name)
            print(name, *decoding[name], sep=" | ", flush=True)
    if not chosen:
        TABLE.write_text(table(rows))
        DECODING.write_text(decoding_page(decoding))


if __name__ == "__main__":
    main()
