"""Load NVFP4 and MXFP4 checkpoints of compressed-tensors and AutoRound with NVFP4 weights. Opt-in.

transformers decompresses the former at the first call, and needs the package auto-round for the latter: without it,
they are ours from the start.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from nvfp4_tensor.checkpoints.formats import auto_round, compressed_tensors
from nvfp4_tensor.integrations.transformers.config import CheckpointConfig
from nvfp4_tensor.integrations.transformers.from_checkpoint import CheckpointQuantizer


def is_fp4(config: Mapping[str, Any]) -> bool:
    """Return whether a group of compressed-tensors' quantization_config has NVFP4 or MXFP4, and the others FP8."""
    groups = list((config.get("config_groups") or {}).values())
    fp4 = [group for group in groups if compressed_tensors.group_size(group)]
    return bool(fp4) and all(group in fp4 or compressed_tensors.is_fp8(group) for group in groups)


OURS: dict[str, Callable[[Mapping[str, Any]], bool]] = {"compressed-tensors": is_fp4, "auto-round": auto_round.is_fp4}
"""By quant_method: whether a quantization_config is of a kind that we read."""

UNREAD = tuple(method for method in ("auto-round",) if importlib.util.find_spec("auto_round") is None)
"""The methods of :data:`OURS` that transformers cannot load here."""

_THEIRS: dict[str, tuple[Any, Any]] = {
    method: (AUTO_QUANTIZATION_CONFIG_MAPPING[method], AUTO_QUANTIZER_MAPPING[method]) for method in OURS
}


def read_compressed_tensors(natively: bool = True) -> None:
    """Load compressed-tensors' NVFP4 and MXFP4 checkpoints as NVFP4, instead of decompressing them at the first call.

    This replaces transformers' reader for checkpoints of AutoRound, and for those whose groups are NVFP4 or MXFP4, and
    maybe FP8, which stays FP8. Other checkpoints still use it. ``natively=False`` restores it. The packages
    compressed-tensors and auto-round are not needed.

    Example::

        nvfp4.read_compressed_tensors()
        model = AutoModelForCausalLM.from_pretrained("RedHatAI/Llama-3.1-8B-Instruct-NVFP4")
    """
    for method in OURS:
        read_natively(method, natively or method in UNREAD)


def read_natively(method: str, natively: bool = True) -> None:
    """Load checkpoints of a quant_method of :data:`OURS` as NVFP4 where we read their kind, or as transformers does."""
    config, quantizer = _THEIRS[method]
    if natively:
        config, quantizer = _dispatching(method)
    AUTO_QUANTIZATION_CONFIG_MAPPING[method], AUTO_QUANTIZER_MAPPING[method] = config, quantizer


def _dispatching(method: str) -> tuple[Any, Any]:
    """Return a config class and a quantizer that are ours or theirs by what a quantization_config says."""
    config, quantizer = _THEIRS[method]

    class Config(config):  # type: ignore[valid-type, misc]
        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], *args: Any, **kwargs: Any) -> QuantizationConfigMixin:
            chosen = CheckpointConfig if OURS[method](config_dict) else config
            return chosen.from_dict(config_dict, *args, **kwargs)

    def choose(found: QuantizationConfigMixin, **kwargs: Any) -> HfQuantizer:
        return (
            CheckpointQuantizer(found, **kwargs) if isinstance(found, CheckpointConfig) else quantizer(found, **kwargs)
        )

    return Config, choose
