"""NVFP4 in diffusers. Importing this module registers it with from_pretrained and save_pretrained of its models.

After the import, ``from_pretrained(..., quantization_config=NVFP4TensorConfig(...))`` quantizes a transformer while it
is loaded, by the same plan as :func:`quantize_model`. Text encoders are models of transformers and take it too.
``save_pretrained`` writes ModelOpt's tensors, and a configuration by which diffusers loads them again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from diffusers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from diffusers.quantizers.base import DiffusersQuantizer
from torch import Tensor, nn

from nvfp4_tensor.checkpoints.formats import modelopt
from nvfp4_tensor.checkpoints.io.folder import FolderCheckpoint
from nvfp4_tensor.checkpoints.models.saving import ModelCheckpoint
from nvfp4_tensor.checkpoints.names import some, warn_of_activations
from nvfp4_tensor.checkpoints.parts import tensor_of
from nvfp4_tensor.integrations.transformers.config import METHOD, CheckpointConfig, Method, NVFP4TensorConfig
from nvfp4_tensor.integrations.transformers.quantizer import decode_weights, parameter_of
from nvfp4_tensor.integrations.transformers.while_loading import Quantize, plan_of
from nvfp4_tensor.numerics.layout import BLOCK
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

__all__ = ["DiffusersConfig", "DiffusersNVFP4Quantizer", "NVFP4TensorConfig", "attach_quantizer"]

SAVED = Method("modelopt_nvfp4")
"""The quant_method of a saved model: diffusers reads "modelopt" by NVIDIA's library."""


class DiffusersConfig(CheckpointConfig):
    """The quantization_config in the config.json of a model of diffusers with NVFP4 weights."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**{**fields, "quant_method": SAVED})


class DiffusersNVFP4Quantizer(DiffusersQuantizer):
    """Quantize a model of diffusers while it is loaded, or load one with NVFP4 weights; and save it.

    Attributes:
        weights: names of the parameters that are NVFP4, or become NVFP4 when loaded.
    """

    quantization_config: NVFP4TensorConfig | DiffusersConfig
    supports_parallel_loading = False
    is_serializable = True
    is_trainable = True

    def __init__(self, quantization_config: NVFP4TensorConfig | DiffusersConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.pre_quantized = isinstance(quantization_config, DiffusersConfig)  # from_single_file says True in any case
        self.weights: set[str] = set()
        self._checkpoint: FolderCheckpoint | None = None
        self._operation: Quantize | None = None

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raise a ValueError for weights that diffusers would offload before they are quantized."""
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError("NVFP4 weights cannot be offloaded to a disk: use group offloading to 'cpu'")

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: list[str]) -> list[str]:
        """Return the names of the model's parameters that the files have."""
        if not self.pre_quantized:
            return loaded_keys
        file = Path(checkpoint_files[0])  # not what else is in its folder: a variant
        self._checkpoint = modelopt.FORMAT.read(file if len(checkpoint_files) == 1 else file.parent)
        self.weights = {name for name, entry in self._checkpoint.entries.items() if entry.quantized}
        return list(self._checkpoint.entries)

    def maybe_update_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Replace the tensors of NVFP4 weights in a file by the weights."""
        if self._checkpoint is None:
            return state_dict
        entries = self._checkpoint.entries
        return {
            name: tensor_of(self._checkpoint.linear(name), entries[name].dtype) if name in self.weights else tensor
            for name, tensor in state_dict.items()
            if name in entries
        }

    def check_if_quantized_param(
        self, model: ModelMixin, param_value: Tensor, param_name: str, *a: Any, **k: Any
    ) -> bool:
        """Return whether a parameter is, or becomes, NVFP4."""
        return param_name in self.weights

    @torch.no_grad()
    def create_quantized_param(
        self, model: ModelMixin, value: Tensor, name: str, device: torch.device, *args: Any, **kwargs: Any
    ) -> None:
        """Set a parameter, once all weights that share its per-tensor scale are there."""
        if isinstance(value, NVFP4Tensor):
            loaded: dict[str, Tensor] = {name: parameter_of(model, name, value.to(device))}
        else:
            assert self._operation is not None
            loaded = self._operation.load(model, name, value.to(device))
        for each, weight in loaded.items():
            path, _, attribute = each.rpartition(".")
            setattr(model.get_submodule(path), attribute, weight)

    def _process_model_before_weight_loading(self, model: ModelMixin, **kwargs: Any) -> None:
        if isinstance(self.quantization_config, NVFP4TensorConfig):
            plan = plan_of(model, self.quantization_config, {})
            self.weights = {name for name in plan.quantized if plan[name].shape[-1] % BLOCK == 0}
            self._operation = Quantize(self.quantization_config, self.weights, {})

    def _process_model_after_weight_loading(self, model: ModelMixin, **kwargs: Any) -> None:
        if self._operation is not None and self._operation.waiting:
            raise ValueError(
                f"the checkpoint has {some(sorted(self._operation.waiting))}, but not what shares its scale"
            )
        self._checkpoint = self._operation = None
        model.register_to_config(quantization_config=_config_of(model))

    def get_state_dict_and_metadata(
        self, state_dict: dict[str, Any], safe_serialization: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return ModelOpt's tensors, for save_pretrained.

        Raises:
            ValueError: the model has adapters, whose names save_pretrained of diffusers would write.
        """
        if adapted := [name for name in state_dict if ".base_layer." in name]:
            raise ValueError(
                f"{adapted[0]} has adapters: save them by the pipeline's save_lora_weights, and the model after "
                "unload_lora()"
            )
        checkpoint, tensors = ModelCheckpoint(state_dict, {}, "requantize"), dict[str, Tensor]()
        warn_of_activations(checkpoint.entries)
        for name, entry in checkpoint.entries.items():
            if entry.quantized:
                parts = modelopt.FORMAT.encode(name, checkpoint.linear(name), entry)
                tensors |= {key: tensor.clone() if tensor.dim() == 0 else tensor for key, tensor in parts.items()}
            else:
                tensors[name] = checkpoint.dense(name)
        return tensors, {}

    def _dequantize(self, model: ModelMixin) -> ModelMixin:
        decode_weights(model)
        fields = {name: value for name, value in model.config.items() if name != "quantization_config"}
        model._internal_dict = type(model.config)(fields)
        return model


def _config_of(model: nn.Module) -> DiffusersConfig:
    return DiffusersConfig(**modelopt.FORMAT.config_of(ModelCheckpoint(model, {})))


def attach_quantizer(model: ModelMixin) -> ModelMixin:
    """Attach a quantizer to a model of diffusers whose NVFP4 weights were set by ``quantize_model`` or ``load``.

    Afterwards, ``save_pretrained``, ``dequantize`` and peft treat it like a model from ``from_pretrained``.

    Returns:
        The model.

    Raises:
        ValueError: the model has no NVFP4 weights.
    """
    names = {name for name, weight in model.named_parameters() if isinstance(weight, NVFP4Tensor)}
    if not names:
        raise ValueError("the model has no NVFP4 weights: call quantize_model(model) first")
    config = _config_of(model)
    quantizer = DiffusersNVFP4Quantizer(config, pre_quantized=True)
    quantizer.weights = names
    model.hf_quantizer, model.is_quantized, model.quantization_method = quantizer, True, SAVED
    model.register_to_config(quantization_config=config)
    return model


for _method, _config in ((METHOD, NVFP4TensorConfig), (SAVED, DiffusersConfig)):
    AUTO_QUANTIZATION_CONFIG_MAPPING[_method] = _config
    AUTO_QUANTIZER_MAPPING[_method] = DiffusersNVFP4Quantizer
