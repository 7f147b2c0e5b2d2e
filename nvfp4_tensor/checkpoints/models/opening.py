"""Open a checkpoint of any format as a transformers model with its tokenizer, and read text as tokens."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nvfp4_tensor._compat.torchao_import import quietly
from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, read
from nvfp4_tensor.checkpoints.formats.gguf.reading import GGUFCheckpoint
from nvfp4_tensor.checkpoints.formats.gguf.tokenizer import tokenizer_of
from nvfp4_tensor.checkpoints.models.loading import load_open
from nvfp4_tensor.checkpoints.sources.reading import open_any


def _transformers() -> Any:
    missing = [name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"running a model needs {', '.join(missing)}: pip install {' '.join(missing)}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # checkpoints are paths; transformers reads this at import
    with quietly():  # transformers imports it later, and its messages would be printed
        importlib.import_module("torchao.prototype.mx_formats")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def open_model(path: Path | Checkpoint, config_from: Path | None = None, *, progress: bool = False) -> nn.Module:
    """Return the model of a checkpoint in eval mode on the CPU. Quantized weights stay quantized.

    Args:
        path: its folder or file, or the open checkpoint.
        config_from: a checkpoint that has the configuration; a single .safetensors file has none.

    Raises:
        ImportError: transformers or accelerate is missing.
        ValueError: there is no configuration, or transformers does not know the architecture.
    """
    transformers = _transformers()
    from accelerate import init_empty_weights

    opened = contextlib.nullcontext(path) if isinstance(path, Checkpoint) else read(path)
    with opened as checkpoint:
        if config_from is None:
            config = _config(transformers, checkpoint)
        else:
            with open_any(config_from) as other:
                config = _config(transformers, other)
        dtype = config.dtype if config.dtype in (torch.float16, torch.float32) else torch.bfloat16
        with init_empty_weights(include_buffers=False):
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        load_open(model, checkpoint, progress=progress)
    return model.eval()


def _config(transformers: Any, checkpoint: Checkpoint) -> Any:
    settings, path = dict(checkpoint.config), checkpoint.path
    kind = settings.pop("model_type", None)
    if kind is None:
        raise ValueError(f"{path} has no config.json to make a model from: pass config_from=PATH with one")
    if kind not in transformers.CONFIG_MAPPING:
        raise ValueError(f"{path}: transformers {transformers.__version__} has no model of type {kind!r}")
    return transformers.CONFIG_MAPPING[kind].from_dict(settings)


def untie_head(model: Any) -> str:
    """Copy the weight of the output layer if it is shared with the embedding, and return the name of the layer.

    Raises:
        ValueError: the model has no output layer that is a linear.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    names = [name for name, module in model.named_modules() if module is head and isinstance(module, nn.Linear)]
    if not names:
        raise ValueError(f"{type(model).__name__} has no output layer that is a linear: omit quantize_lm_head=True")
    if head.weight is embedding.weight:
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
    model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = False
    return names[0]


def open_tokenizer(*paths: Path | None) -> Any:
    """Return the tokenizer of the first path that has one: a folder, or a GGUF.

    Raises:
        ImportError: transformers or accelerate is missing.
        ValueError: no path has a tokenizer.
    """
    transformers = _transformers()
    given = [path for path in paths if path is not None]
    for path in given:
        if path.is_dir() and any((path / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
            return transformers.AutoTokenizer.from_pretrained(path)
        if path.is_file() and path.suffix == ".gguf":
            opened = GGUFCheckpoint(path)
            with opened:
                tokenizer = tokenizer_of(path, opened.fields)
            if tokenizer is not None:
                tokenizer.name_or_path = str(path)  # as from_pretrained sets it
                return tokenizer
    raise ValueError(f"no tokenizer in {', '.join(map(str, given))}: pass config_from=PATH with one")


def read_tokens(text: Path, tokenizer: Any, count: int) -> Tensor:
    """Return the first ``count`` tokens of a text file, int64 (count,), or all of a shorter text.

    Raises:
        ValueError: the text has fewer than two tokens, or is not UTF-8.
    """
    try:
        with text.open(encoding="utf-8") as file:
            content = file.read(32 * count)  # a token has a few characters
    except UnicodeDecodeError as error:
        raise ValueError(f"{text} is not text in UTF-8: {error}") from None
    ids: Tensor = tokenizer(content, return_tensors="pt", add_special_tokens=False).input_ids[0][:count].long()
    if len(ids) < 2:
        raise ValueError(f"{text} has {len(ids)} tokens: expected two at least, better a few thousand")
    return ids


def windows_of(tokens: Tensor, window: int, batch: int = 1) -> list[Tensor]:
    """Split tokens (count,) into windows, some at a time: (batch, window), the last full ones with fewer rows.

    What is left is a shorter window (1, ...), but a single last token is dropped.
    """
    full = len(tokens) // window * window
    batches = list(tokens[:full].view(-1, window).split(batch)) if full else []
    return [*batches, tokens[full:].unsqueeze(0)] if len(tokens) - full > 1 else batches
