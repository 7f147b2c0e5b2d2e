"""The quantization_config of from_pretrained: how to quantize while loading, or the config of a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from nvfp4_tensor.numerics.choices import Choice
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.quantization import NVFP4Config, NVFP4WeightOnlyConfig


class Method(str):
    """The name of a method, as transformers has it, with the ``value`` of an enum, which diffusers reads."""

    @property
    def value(self) -> str:
        return str(self)


METHOD = Method("nvfp4_tensor")


class NVFP4TensorConfig(QuantizationConfigMixin):
    """Quantize a model's linears to NVFP4 while ``from_pretrained`` loads it, one weight at a time.

    Args:
        config: an NVFP4WeightOnlyConfig (W4A16, the default) or an NVFP4Config (W4A4, with an amax computed at each
            call), as for ``quantize_``.
        modules_to_not_convert: names of linears to leave dense, matched by transformers: full names, suffixes, or
            regular expressions. By default the output layer, linears tied to the embedding, routers of experts and
            encoders of other modalities. Linears whose inputs are not a multiple of 16 always stay dense, because no
            server reads them.
        share_scales: quantize weights that servers fuse (q, k and v; gate and up) with one amax, so that the model can
            be saved without a change. With False, each weight has its own amax, as with ``quantize_`` of one
            linear, and saving requantizes these weights, with a warning.
        quantize_lm_head: also quantize the output layer, to 4.5 bits per weight. If it shares the embedding's weight,
            it gets its own copy in NVFP4, the embedding is not changed, and ``tie_word_embeddings`` of the model's
            config becomes False. vLLM does not load a quantized output layer; llama.cpp and this library do.

    Raises:
        TypeError: config has another type.
        ValueError: config has a field that needs a calibration, such as ``step``.

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
            raise ValueError(f"the quant_method of an NVFP4TensorConfig must be {METHOD!r}, got {quant_method!r}")
        self.quant_method: str = METHOD  # type: ignore[assignment]  # the enum has only transformers' own methods
        self.config = _config_of(config) if isinstance(config, dict) else config or NVFP4WeightOnlyConfig()
        self.modules_to_not_convert = None if modules_to_not_convert is None else list(modules_to_not_convert)
        self.share_scales = share_scales
        self.quantize_lm_head = quantize_lm_head
        if not isinstance(self.config, NVFP4WeightOnlyConfig):
            raise TypeError(
                f"config must be an NVFP4WeightOnlyConfig or NVFP4Config of nvfp4_tensor, not {type(config).__name__}"
            )
        if self.config.weight.row_scaled:
            raise ValueError(
                "save_pretrained stores one per-tensor scale per weight: load the model dense, and quantize_ it with a "
                "row_scaled spec"
            )
        if any(getattr(self.config, name, None) for name in ("step", "weighted", "percentile", "headroom")):
            raise ValueError(
                "step, weighted, percentile and headroom are only for calibration, which needs a dense model and data: "
                "load the model without quantization_config, calibrate(model, batches), then attach_quantizer(model)"
            )

    def get_apply_tensor_subclass(self) -> NVFP4WeightOnlyConfig:
        """Return the config with which peft quantizes a merged weight."""
        return self.config

    @property
    def activation(self) -> QuantizeSpec | None:
        """The spec of activations; None for W4A16."""
        return self.config.activation

    def to_dict(self) -> dict[str, Any]:
        """Return the config as JSON types, such that ``NVFP4TensorConfig(**to_dict())`` is equal to it."""
        values = {field: getattr(self.config, field.name) for field in dataclasses.fields(self.config)}
        given = {field.name: _plain(value) for field, value in values.items() if value != field.default}
        return {**self.__dict__, "config": {"type": type(self.config).__name__, **given}}


class CheckpointConfig(QuantizationConfigMixin):
    """The ``quantization_config`` in the config.json of a checkpoint.

    Linears get the NVFP4 weights of the checkpoint. If the checkpoint quantizes activations (W4A4), their amax is that
    of the ``input_scale``, or is computed at each call if there is none.

    Args:
        quant_method: the name of the checkpoint's format: "modelopt", "compressed-tensors" or "auto-round".
        quantize_activations: False runs a W4A4 checkpoint weight-only, as servers do without FP4 tensor cores, where
            this is faster and more accurate. The field is not part of the file format and only affects loading: set it
            in the model's config before from_pretrained.
        others: other fields, kept unchanged.
    """

    def __init__(self, *, quant_method: str, quantize_activations: bool = True, **others: Any) -> None:
        self.quant_method: str = quant_method  # type: ignore[assignment]
        self.quantize_activations = quantize_activations
        self.__dict__.update(others)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of config.json."""
        return {name: value for name, value in super().to_dict().items() if name != "quantize_activations"}

    def get_apply_tensor_subclass(self) -> NVFP4WeightOnlyConfig:
        """Return the config with which peft quantizes merged weights. It is the same for all, thus weight-only."""
        return NVFP4WeightOnlyConfig()


def _plain(value: Any) -> Any:
    if isinstance(value, Choice):
        return value.name.lower()
    return value.to_dict() if isinstance(value, QuantizeSpec) else value


def _config_of(fields: dict[str, Any]) -> NVFP4WeightOnlyConfig:
    """Return the config that to_dict has written."""
    given: dict[str, Any] = {n: QuantizeSpec(**value) if n.endswith("_spec") else value for n, value in fields.items()}
    return (NVFP4Config if given.pop("type", None) == "NVFP4Config" else NVFP4WeightOnlyConfig)(**given)
