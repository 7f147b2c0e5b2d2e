"""Let transformers find the quantization of ModelOpt's older checkpoints, which config.json does not describe."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.utils import cached_file

from nvfp4_tensor.checkpoints.formats import modelopt

_WHERE = ("cache_dir", "force_download", "proxies", "token", "revision", "local_files_only", "subfolder")
_OPTIONAL = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "gated_repo", "connection_errors")}


def read_hf_quant_config() -> None:
    """Add an NVFP4 quantization in hf_quant_config.json to configs without a quantization_config.

    transformers then chooses the quantizer of "modelopt", as for newer checkpoints. Without it, ``from_pretrained``
    reads the codes as weights of another shape, and advises ``ignore_mismatched_sizes=True``, which would initialize
    the weights at random.
    """
    usual: Any = PretrainedConfig.get_config_dict.__func__  # type: ignore[attr-defined]

    @functools.wraps(usual)
    def get_config_dict(
        cls: type[PretrainedConfig], pretrained_model_name_or_path: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        where = {name: kwargs[name] for name in _WHERE if name in kwargs}
        config, unused = usual(cls, pretrained_model_name_or_path, **kwargs)
        if config and not config.get("quantization_config") and kwargs.get("gguf_file") is None:
            found = _quantization(pretrained_model_name_or_path, config.get("_commit_hash"), where)
            if found is not None:
                config = {**config, "quantization_config": found}
        return config, unused

    PretrainedConfig.get_config_dict = classmethod(get_config_dict)  # type: ignore[assignment]


def _quantization(path: Any, commit: str | None, where: dict[str, Any]) -> dict[str, Any] | None:
    """Return the quantization_config of a folder or hub repository; None if it has no NVFP4 in hf_quant_config.json."""
    if Path(path).is_file():
        return None
    file = cached_file(path, modelopt.HF_QUANT_CONFIG, _commit_hash=commit, **where, **_OPTIONAL)
    if file is None:
        return None
    try:
        found = modelopt.FORMAT.quantization(Path(file).parent, {})
    except ValueError:  # FP8 and others, which are not ours
        return None
    return {**found, "quant_method": "modelopt"}


def config_of(path: str | Path, **kwargs: Any) -> PretrainedConfig:
    """Return the config of a ModelOpt checkpoint whose quantization is described only in hf_quant_config.json.

    Args:
        path: the folder of the checkpoint.
        kwargs: arguments of AutoConfig.from_pretrained.

    Example::

        model = AutoModelForCausalLM.from_pretrained(path, config=nvfp4.config_of(path))

    Raises:
        ValueError: neither config.json nor hf_quant_config.json describes a quantization, or it is not NVFP4.
    """
    config = AutoConfig.from_pretrained(path, **kwargs)
    if getattr(config, "quantization_config", None) is None:
        config.quantization_config = {**modelopt.FORMAT.quantization(Path(path), {}), "quant_method": "modelopt"}
    return config
