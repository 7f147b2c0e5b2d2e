"""A checkpoint of any format as a model that runs, with its tokenizer, and text as tokens."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nvfp4_tensor import checkpoints
from nvfp4_tensor._compat.torchao_import import quietly
from nvfp4_tensor.checkpoints.formats.gguf.reading import GGUFCheckpoint
from nvfp4_tensor.checkpoints.formats.gguf.tokenizer_reading import tokenizer_of

_PACKAGES = ("transformers", "accelerate")


def check_packages(purpose: str, packages: tuple[str, ...] = _PACKAGES) -> None:
    """Raises an ImportError that names what is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"{purpose} needs {', '.join(missing)}: pip install {' '.join(missing)}")


def _transformers() -> Any:
    check_packages("running a model")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # checkpoints are paths; read when transformers is imported
    with quietly():  # transformers imports it later, and it would speak
        importlib.import_module("torchao.prototype.mx_formats")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def open_model(path: Path, config_from: Path | None = None, *, progress: bool = False) -> nn.Module:
    """The model of a checkpoint, quantized weights as they are, in eval mode on the CPU.

    Args:
        config_from: where the configuration is, if not in the checkpoint (a single .safetensors file has none).

    Raises:
        ValueError: there is no configuration, or transformers does not know the architecture.
    """
    transformers = _transformers()
    from accelerate import init_empty_weights

    config = _config(transformers, path if config_from is None else config_from)
    dtype = config.dtype if config.dtype in (torch.float16, torch.float32) else torch.bfloat16
    with init_empty_weights(include_buffers=False):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    checkpoints.load(model, path, progress=progress)
    return model.eval()


def _config(transformers: Any, path: Path) -> Any:
    with checkpoints.read(path) as checkpoint:
        settings = dict(checkpoint.config)
    kind = settings.pop("model_type", None)
    if kind is None:
        raise ValueError(f"{path} has no config.json, so no model can be made: name a folder that has, --config-from")
    if kind not in transformers.CONFIG_MAPPING:
        raise ValueError(f"{path}: transformers {transformers.__version__} has no model of type {kind!r}")
    return transformers.CONFIG_MAPPING[kind].from_dict(settings)


def untie_head(model: Any) -> str:
    """The name of a model's output layer, which has a weight of its own from now on.

    Raises:
        ValueError: it has no such layer.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    names = [name for name, module in model.named_modules() if module is head and isinstance(module, nn.Linear)]
    if not names:
        raise ValueError(f"{type(model).__name__} has no output layer that is a linear: leave --head out")
    if head.weight is embedding.weight:
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
    model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = False
    return names[0]


def open_tokenizer(*paths: Path | None) -> Any:
    """The tokenizer of the first path that has one: a folder, or a GGUF.

    Raises:
        ValueError: none has.
    """
    transformers = _transformers()
    for path in paths:
        if path is None:
            continue
        if path.is_dir() and any((path / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
            return transformers.AutoTokenizer.from_pretrained(path)
        if path.is_file() and path.suffix == ".gguf":
            with checkpoints.read(path, "gguf") as opened:
                assert isinstance(opened, GGUFCheckpoint)
                tokenizer = tokenizer_of(path, opened.fields)
            if tokenizer is not None:
                return tokenizer
    raise ValueError(
        f"no tokenizer in {', '.join(str(path) for path in paths if path)}: name a folder that has one, --config-from"
    )


def tokens_of(text: Path, tokenizer: Any, count: int) -> Tensor:
    """The first ``count`` tokens of a text file, int64 (count,), fewer where it is shorter.

    Raises:
        ValueError: fewer than two tokens, or no text in UTF-8.
    """
    try:
        with text.open(encoding="utf-8") as file:
            content = file.read(32 * count)  # a token is a few characters
    except UnicodeDecodeError as error:
        raise ValueError(f"{text} is no text in UTF-8: {error}") from None
    ids: Tensor = tokenizer(content, return_tensors="pt", add_special_tokens=False).input_ids[0][:count].long()
    if len(ids) < 2:
        raise ValueError(f"{text} has {len(ids)} tokens: at least two are needed, a few thousand tell something")
    return ids


def windows_of(tokens: Tensor, window: int) -> list[Tensor]:
    """Tokens (count,) in pieces (1, window), the last one shorter; one of a single token is left out."""
    return [piece.unsqueeze(0) for piece in tokens.split(window) if len(piece) > 1]
