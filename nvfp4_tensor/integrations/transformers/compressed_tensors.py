"""Load compressed-tensors' NVFP4 checkpoints with NVFP4 weights instead of decompressed ones. Opt-in."""

from __future__ import annotations

from typing import Any

from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer
from transformers.utils.quantization_config import CompressedTensorsConfig, QuantizationConfigMixin

from nvfp4_tensor.checkpoints.formats import compressed_tensors
from nvfp4_tensor.integrations.transformers.config import CheckpointConfig
from nvfp4_tensor.integrations.transformers.from_checkpoint import CheckpointQuantizer

METHOD = "compressed-tensors"


class CompressedTensorsNVFP4Config(CheckpointConfig):
    """The quantization_config of a checkpoint in compressed-tensors' layout."""

    checkpoint_format = compressed_tensors.FORMAT
    tensor_names = ("weight", "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")


def read_compressed_tensors(natively: bool = True) -> None:
    """Load compressed-tensors' NVFP4 checkpoints as NVFP4, instead of decompressing them at the first call.

    This replaces transformers' reader for checkpoints in which every group is NVFP4; other checkpoints still use it.
    ``natively=False`` restores it. The package compressed-tensors is not needed.

    Example::

        nvfp4.read_compressed_tensors()
        model = AutoModelForCausalLM.from_pretrained("RedHatAI/Llama-3.1-8B-Instruct-NVFP4")
    """
    AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = _Config if natively else CompressedTensorsConfig
    AUTO_QUANTIZER_MAPPING[METHOD] = _quantizer if natively else CompressedTensorsHfQuantizer  # type: ignore[assignment]


class _Config(CompressedTensorsConfig):
    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], *args: Any, **kwargs: Any) -> QuantizationConfigMixin:
        config = CompressedTensorsNVFP4Config if is_nvfp4(config_dict) else CompressedTensorsConfig
        return config.from_dict(config_dict, *args, **kwargs)


def _quantizer(config: QuantizationConfigMixin, **kwargs: Any) -> HfQuantizer:
    if isinstance(config, CompressedTensorsNVFP4Config):
        return CheckpointQuantizer(config, **kwargs)
    return CompressedTensorsHfQuantizer(config, **kwargs)  # type: ignore[arg-type]


def is_nvfp4(config: dict[str, Any]) -> bool:
    """Return whether every group of a quantization_config has NVFP4 weights."""
    groups = (config.get("config_groups") or {}).values()
    weights = [(group.get("weights") or {}) for group in groups]
    kinds = {(each.get("num_bits"), each.get("type"), each.get("group_size")) for each in weights}
    return kinds == {(4, "float", 16)}
