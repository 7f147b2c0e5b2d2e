"""from_pretrained of a dense model that becomes NVFP4 weight by weight."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.quantizers_utils import should_convert_module

from nvfp4_tensor.checkpoints.architectures import JOINED_AS, LEFT_DENSE
from nvfp4_tensor.checkpoints.formats.dense import FORMAT as DENSE
from nvfp4_tensor.checkpoints.names import is_matched, joined_with
from nvfp4_tensor.integrations.transformers.config import NVFP4TensorConfig
from nvfp4_tensor.integrations.transformers.experts import keep_origin, origins_in_model
from nvfp4_tensor.integrations.transformers.quantizer import NVFP4HfQuantizer, parameter_of
from nvfp4_tensor.numerics.choices import ProductBackend
from nvfp4_tensor.numerics.layout import BLOCK
from nvfp4_tensor.quantization import NVFP4Config
from nvfp4_tensor.quantization.experts import holds_llama4_experts, is_transposed
from nvfp4_tensor.tensor.arguments import resolve_amax
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor, quantize, quantize_experts


class WhileLoadingQuantizer(NVFP4HfQuantizer):
    """That of an NVFP4TensorConfig."""

    quantization_config: NVFP4TensorConfig

    def __init__(self, quantization_config: NVFP4TensorConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._waiting: dict[str, Tensor] = {}
        self._tied: tuple[str, ...] = ()

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """As the class's own; a ValueError too for a config.json that has such settings in it."""
        super().validate_environment(*args, **kwargs)
        if self.pre_quantized:
            raise ValueError(
                "config.json has the settings of an NVFP4TensorConfig, which quantizes dense weights, and says nothing "
                "of quantized ones: save the model itself (model.save_pretrained), or delete quantization_config there"
            )

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        chosen = self.quantization_config.modules_to_not_convert
        skipped = self.get_modules_to_not_convert(model, chosen, list(model._keep_in_fp32_modules or ()))
        left_dense = LEFT_DENSE if chosen is None else ()
        self.weights = {
            name
            for name, weight in quantizable(model)
            if weight.shape[-1] % BLOCK == 0
            and should_convert_module(name.removesuffix(".weight"), skipped)
            and not is_matched(name, left_dense)
        }
        if self.quantization_config.quantize_lm_head:
            self._take_head(model)
        if not self.weights:
            raise ValueError(
                f"{type(model).__name__} has no linear that becomes NVFP4: expected an nn.Linear whose inputs are a "
                f"multiple of {BLOCK} and that modules_to_not_convert={chosen} does not name (GPT-2's Conv1D is none)"
            )
        if checkpoint_files and any(name in self.weights for name, weight in quantizable(model) if weight.dim() == 3):
            self._name_experts(model, checkpoint_files[0])

    def _take_head(self, model: PreTrainedModel) -> None:
        """The output layer is quantized too; one that shares the embedding's weight gets a weight of its own."""
        head = name_of_head(model)
        self.weights.add(head)
        embedding = model.all_tied_weights_keys.pop(head, None)
        if embedding is not None:
            self._tied = (head, embedding)
            for config in (model.config, model.config.get_text_config()):
                config.tie_word_embeddings = False

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Whether a parameter becomes NVFP4, or the output layer, which is quantized, is made of it."""
        return param_name in self.weights or param_name in self._tied

    def _name_experts(self, model: PreTrainedModel, file: str) -> None:
        """Keep the names that experts have in the files: they are saved under these again."""
        if not file.endswith(".safetensors"):
            return
        with DENSE.read(Path(file).parent) as checkpoint:
            names = [name for name in checkpoint.entries if "experts" in name]
            for parameter, origin in origins_in_model(model, names, checkpoint).items():
                if parameter in self.weights and not origin.is_whole:
                    keep_origin(model, parameter, origin)

    def get_quantize_ops(self) -> ConversionOps:
        """What quantizes a weight that is dense in the checkpoint."""
        return Quantize(self.quantization_config, self.weights, self._waiting, self._tied)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        if self._waiting:
            here = sorted(self._waiting)
            absent = sorted({name for each in here for name in joined_with(each, self.weights)} - {*here})
            raise RuntimeError(f"the checkpoint has {', '.join(here)}, but not {', '.join(absent)}: it is not whole")


class Quantize(ConversionOps):
    """A dense weight on its way into the model becomes NVFP4; those that servers join wait until all of them have come.

    So no more is dense at a time than q, k and v of one layer.

    Attributes:
        tied: the output layer's weight and the embedding's, of which a file has one, and which come apart here.
    """

    def __init__(
        self, config: NVFP4TensorConfig, names: set[str], waiting: dict[str, Tensor], tied: tuple[str, ...] = ()
    ) -> None:
        self.config, self.names, self.waiting, self.tied = config, names, waiting, tied

    @torch.no_grad()
    def convert(  # type: ignore[override]  # all that transformers hands over comes by name
        self, input_dict: dict[str, Any], *, model: PreTrainedModel, full_layer_name: str, **kwargs: Any
    ) -> dict[str, Tensor]:
        (value,) = input_dict.values()
        value = value[0] if isinstance(value, list) else value
        if full_layer_name in self.tied:
            head, embedding = self.tied
            return {embedding: value, head: parameter_of(model, head, *self._quantize([value]))}
        transposed = value.dim() == 3 and is_transposed(model.get_submodule(full_layer_name.rpartition(".")[0]))
        self.waiting[full_layer_name] = value.transpose(-2, -1).contiguous() if transposed else value
        group = joined_with(full_layer_name, self.names) if self.config.share_scales else (full_layer_name,)
        if not self.waiting.keys() >= set(group):
            return {}
        quantized = self._quantize([self.waiting.pop(name) for name in group])
        if transposed:
            quantized = [weight.transpose(-2, -1) for weight in quantized]
        return {name: parameter_of(model, name, each) for name, each in zip(group, quantized, strict=True)}

    def _quantize(self, weights: list[Tensor]) -> list[NVFP4Tensor]:
        """Each by the largest amax of all; of experts, each by its own, which is that of its gate and up together."""
        config = self.config.config
        if weights[0].dim() == 3:
            return [quantize_experts(weights[0], config.weight, activation_spec=self.config.activation)]
        amaxes = [resolve_amax(weight, config.weight, None) for weight in weights]
        amax = torch.stack([each.to(amaxes[0].device) for each in amaxes]).amax()
        fields: dict[str, Any] = {"activation_spec": self.config.activation}
        if isinstance(config, NVFP4Config):
            fields["product_backend"] = ProductBackend.of(config.product_backend)
        return [quantize(weight, config.weight, amax=amax)._replace(**fields) for weight in weights]


def name_of_head(model: PreTrainedModel) -> str:
    """The name of the output layer's weight.

    Raises:
        ValueError: the model has none, or one that NVFP4 does not take.
    """
    head = model.get_output_embeddings()
    for path, module in model.named_modules():
        if module is head and type(module) is nn.Linear and module.in_features % BLOCK == 0:
            return f"{path}.weight"
    raise ValueError(
        f"quantize_lm_head=True quantizes an output layer, an nn.Linear whose inputs are a multiple of {BLOCK}: "
        f"{type(model).__name__} has {head}"
    )


def quantizable(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The weights of linears (N, K) and of experts (E, N, K) of a model, by name; those held (E, K, N) are turned."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and not isinstance(module, NonDynamicallyQuantizableLinear):
            yield f"{path}.weight", module.weight  # a subclass too, as quantize_ takes them: Falcon's
        elif hasattr(module, "is_transposed") or holds_llama4_experts(
            module
        ):  # what transformers makes of a class of experts
            for name, weight in module.named_parameters(recurse=False):
                if weight.dim() == 3 and name in JOINED_AS:
                    yield f"{path}.{name}", weight.transpose(-2, -1) if is_transposed(module) else weight
