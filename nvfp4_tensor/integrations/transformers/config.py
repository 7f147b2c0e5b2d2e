"""What from_pretrained takes as quantization_config: how to quantize, or what a checkpoint says of itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar

from transformers.utils.quantization_config import QuantizationConfigMixin

from nvfp4_tensor.checkpoints.formats import modelopt
from nvfp4_tensor.checkpoints.io.folder import SafetensorsFormat
from nvfp4_tensor.numerics.choices import Choice
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.quantization import NVFP4Config, NVFP4WeightOnlyConfig

METHOD = "nvfp4_tensor"


class NVFP4TensorConfig(QuantizationConfigMixin):
    """Quantize a model's linears to NVFP4 while ``from_pretrained`` loads it, one weight at a time.

    Args:
        config: what ``quantize_`` takes too: an NVFP4WeightOnlyConfig (W4A16; the default), or an NVFP4Config (W4A4,
            the amax of each activation taken anew at each call).
        modules_to_not_convert: names of linears to leave dense, as transformers matches them: whole names, their ends,
            or regular expressions. By default the output layer, what is tied to the embedding, routers of experts and
            encoders of other media. In any case those stay dense whose inputs are no multiple of 16, which no server
            reads.
        share_scales: quantize weights that servers fuse (q, k and v; gate and up) by one amax, so that the model can be
            saved as it is. False takes each its own, as ``quantize_`` does: saving may then be refused.
        quantize_lm_head: quantize the output layer too, which is then read at 4.5 bits a weight. Where it shares the
            embedding's weight it gets a copy of its own in NVFP4, and the embedding stays as it is:
            ``tie_word_embeddings`` of the model's config becomes False. vLLM loads no quantized output layer; llama.cpp
            and this library do.

    Raises:
        TypeError: config is none of ours.
        ValueError: it has a ``step``, which needs a dense model and data.

    Example::

        import nvfp4_tensor.integrations.transformers as nvfp4

        config = nvfp4.NVFP4TensorConfig(NVFP4WeightOnlyConfig(four_over_six=True))
        model = AutoModelForCausalLM.from_pretrained(name, quantization_config=config)
        model.save_pretrained(folder)  # ModelOpt's layout
    """

    def __init__(
        self,
        config: NVFP4WeightOnlyConfig | dict[str, Any] | None = None,
        modules_to_not_convert: Iterable[str] | None = None,
        share_scales: bool = True,
        *,
        quantize_lm_head: bool = False,
        quant_method: str = METHOD,
    ) -> None:
        if quant_method != METHOD:
            raise ValueError(f"the quant_method of an NVFP4TensorConfig is {METHOD!r}, got {quant_method!r}")
        self.quant_method: str = METHOD  # type: ignore[assignment]  # the enum has transformers' own methods alone
        self.config = _config_of(config) if isinstance(config, dict) else config or NVFP4WeightOnlyConfig()
        self.modules_to_not_convert = None if modules_to_not_convert is None else list(modules_to_not_convert)
        self.share_scales = share_scales
        self.quantize_lm_head = quantize_lm_head
        if not isinstance(self.config, NVFP4WeightOnlyConfig):
            raise TypeError(
                f"config is an NVFP4WeightOnlyConfig or an NVFP4Config of nvfp4_tensor, not {type(config).__name__}"
            )
        if any(getattr(self.config, name, None) for name in ("step", "weighted", "percentile", "headroom")):
            raise ValueError(
                "step, weighted, percentile and headroom belong to calibration, which needs a dense model and data: "
                "load the model without quantization_config, calibrate(model, batches), then attach_quantizer(model)"
            )

    def get_apply_tensor_subclass(self) -> NVFP4WeightOnlyConfig:
        """The config that quantizes a merged weight: peft asks for it."""
        return self.config

    @property
    def activation(self) -> QuantizeSpec | None:
        """How products quantize activations; None for W4A16."""
        return self.config.activation if isinstance(self.config, NVFP4Config) else None

    def to_dict(self) -> dict[str, Any]:
        """In JSON's types; ``NVFP4TensorConfig(**to_dict())`` is the same."""
        config: dict[str, Any] = {"weight": _spec_to_dict(self.config.weight)}
        if isinstance(self.config, NVFP4Config):
            config["activation"] = _spec_to_dict(self.config.activation)
            config["product_backend"] = _plain(self.config.product_backend)
        return {**self.__dict__, "config": config}


class CheckpointConfig(QuantizationConfigMixin):
    """The ``quantization_config`` that a checkpoint has in its config.json, as it stands there.

    Linears get the NVFP4 weights that the checkpoint holds; activations are quantized where it says so (W4A4), by the
    amax of each call unless it has an ``input_scale``.

    Args:
        quantize_activations: False runs a W4A4 checkpoint weight-only, as servers do off Blackwell: faster there, and
            more accurate. It is ours, and for loading alone: set it in the model's config before from_pretrained.
        others: kept as they are.
    """

    checkpoint_format: ClassVar[SafetensorsFormat]
    tensor_names: ClassVar[tuple[str, ...]]
    """The names that a linear's tensors may have there, instead of "weight" and beside it."""

    @classmethod
    def keys_of(cls, name: str) -> dict[str, str]:
        """By the full name of each tensor that a quantized parameter may have there: its own name."""
        stem = name.removesuffix("weight")
        return {f"{stem}{each}": each for each in cls.tensor_names}

    def __init__(self, *, quant_method: str, quantize_activations: bool = True, **others: Any) -> None:
        self.quant_method: str = quant_method  # type: ignore[assignment]
        self.quantize_activations = quantize_activations
        self.__dict__.update(others)

    def to_dict(self) -> dict[str, Any]:
        """As it stands in config.json."""
        return {name: value for name, value in super().to_dict().items() if name != "quantize_activations"}

    def get_apply_tensor_subclass(self) -> NVFP4WeightOnlyConfig:
        """The config that quantizes a merged weight: peft asks for it, for all weights alike, so it is weight-only."""
        return NVFP4WeightOnlyConfig()


class ModelOptConfig(CheckpointConfig):
    """That of a checkpoint in ModelOpt's layout."""

    checkpoint_format = modelopt.FORMAT
    tensor_names = ("weight", "weight_scale", "weight_scale_2", "input_scale")

    @classmethod
    def keys_of(cls, name: str) -> dict[str, str]:
        """See the class; experts that are one tensor have keys of their own."""
        stem = f"{name.rpartition('.')[0]}." if "." in name else ""
        return {key: key.removeprefix(stem) for key in modelopt.keys_of(name).values()}


def _plain(value: Any) -> Any:
    """A choice by its name, anything else as it is."""
    return value.name.lower() if isinstance(value, Choice) else value


def _spec_to_dict(spec: QuantizeSpec) -> dict[str, Any]:
    """The fields of a spec in JSON's types: the ceiling, which others decide, and what differs from the plain spec."""
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    plain = QuantizeSpec()
    written = {name for name, value in fields.items() if value != getattr(plain, name)} | {"scale_ceiling"}
    return {name: _plain(value) for name, value in fields.items() if name in written}


def _config_of(fields: dict[str, Any]) -> NVFP4WeightOnlyConfig:
    """The inverse of what to_dict writes."""
    weight = QuantizeSpec(**fields["weight"])
    if "activation" not in fields:
        return NVFP4WeightOnlyConfig(weight_spec=weight)
    activation = QuantizeSpec(**fields["activation"])
    return NVFP4Config(weight_spec=weight, activation_spec=activation, product_backend=fields["product_backend"])
