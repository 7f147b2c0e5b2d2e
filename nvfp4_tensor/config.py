"""What ``torchao.quantization.quantize_`` takes: NVFP4 weights, with NVFP4 activations or without."""

from __future__ import annotations

import dataclasses
import numbers

import torch
from torchao.core.config import AOBaseConfig
from torchao.quantization.quantize_.common.quantization_step import QuantizationStep
from torchao.quantization.transform_module import register_quantize_module_handler

from nvfp4_tensor.format import HIGH_PRECISION_DTYPES, FourOverSix, ProductBackend, RoundingMode, ScaleRounding
from nvfp4_tensor.fp4_products import check_backend, check_installed
from nvfp4_tensor.observer import ObservedLinear
from nvfp4_tensor.spec import QuantizeSpec
from nvfp4_tensor.tensor import NVFP4Tensor, quantize

_SHARED = ("round_mode", "scale_rounding", "four_over_six", "scale_ceiling", "random_bits")
"""The arguments that weights and activations share."""


@dataclasses.dataclass(kw_only=True)
class NVFP4WeightOnlyConfig(AOBaseConfig):
    """NVFP4 weights, activations as they come (W4A16), for nn.Linear of any size.

    Args:
        round_mode, block_rows, scale_rounding, four_over_six, scale_ceiling, random_bits: as in
            :class:`QuantizeSpec`, for the weight.
        weight_spec: the whole spec, instead of these. Without a Hadamard transform, which only cancels in pairs.

    Raises:
        ValueError: a value outside these, or an argument beside a spec that takes its place.
    """

    round_mode: RoundingMode | str = RoundingMode.RNE
    block_rows: int = 1
    scale_rounding: ScaleRounding | str = ScaleRounding.NEAREST
    four_over_six: FourOverSix | str | bool | None = None
    scale_ceiling: int | None = None
    random_bits: int = 16
    weight_spec: QuantizeSpec | None = None

    def __post_init__(self) -> None:
        given = [field.name for field in dataclasses.fields(self) if getattr(self, field.name) != field.default]
        if idle := [name for name in given if name in self._replaced()]:
            raise ValueError(f"{', '.join(idle)} would change nothing beside the specs given: put it into them instead")
        self._check_transforms()

    def _replaced(self) -> tuple[str, ...]:
        """The arguments that specs take the place of."""
        return () if self.weight_spec is None else (*_SHARED, "block_rows")

    def _check_transforms(self) -> None:
        if self.weight.hadamard_sign is not None:
            raise ValueError(
                "a Hadamard transform only cancels in pairs: use NVFP4Config, with the same hadamard_sign in both specs"
            )

    @property
    def weight(self) -> QuantizeSpec:
        """How weights are quantized: ``weight_spec``, or what the other arguments say."""
        if self.weight_spec is not None:
            return self.weight_spec
        return self._spec(block_rows=self.block_rows)

    def _spec(self, **changes) -> QuantizeSpec:
        """The spec of the shared arguments: one object for all weights, which a compiled model's guards compare."""
        arguments = {name: getattr(self, name) for name in _SHARED} | changes
        return QuantizeSpec.unpack(QuantizeSpec(**arguments).pack())


@dataclasses.dataclass(kw_only=True)
class NVFP4Config(NVFP4WeightOnlyConfig):
    """NVFP4 weights and activations (W4A4): weights once, activations at each call with the amax of that call.

    Args:
        round_mode, scale_rounding, four_over_six, scale_ceiling, random_bits: for the weight and the activation.
        block_rows: for the weight; an activation always has 1x16 blocks.
        activation_round_mode: for the activation alone.
        weight_spec, activation_spec: the whole specs, instead of these.
        step: None, or torchao's two steps towards static activation scales: "prepare" observes what each linear is
            fed, "convert" quantizes with the amax observed (linears not prepared are left alone). See also
            :func:`calibrate`.
        product_backend: what multiplies: AUTO, SCALED_MM or FBGEMM, or their names in lower case. Experts' products
            always go to torch's scaled_grouped_mm, where that runs.
        percentile: for "convert" and :func:`calibrate`: the percentile of the magnitudes observed that becomes the
            amax, 99.9 for instance; None for the largest.

    Gradients pass the quantization of an activation straight through, in reverse mode. What forward mode and second
    derivatives multiply by the weight comes to the same product as an activation does and is quantized like one, by a
    static amax too, which clips it: take these of a weight-only model. So is the gradient of ``x @ weight``, a product
    across the blocks, which sums along them.

    Raises:
        ValueError: a value outside these, an argument that would change nothing, or Hadamard transforms that are not
            the same for both.
    """

    activation_round_mode: RoundingMode | str | None = None
    activation_spec: QuantizeSpec | None = None
    product_backend: ProductBackend | str = ProductBackend.AUTO
    step: QuantizationStep | str | None = None
    percentile: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.product_backend = ProductBackend.of(self.product_backend)
        if self.percentile is not None:
            number = isinstance(self.percentile, numbers.Real) and not isinstance(self.percentile, bool)
            if not number or not 0 < self.percentile <= 100:
                raise ValueError(f"percentile is a number above 0 and up to 100, got {self.percentile!r}")
        if self.step is not None:
            if self.step not in ("prepare", "convert"):  # torchao's enum of strings has steps of other algorithms too
                raise ValueError(f"step is None, 'prepare' or 'convert', got {self.step!r}")
            self.step = QuantizationStep(self.step)
            self._check_percentile_is_used()

    def _check_percentile_is_used(self) -> None:
        """Without a step only quantize_ can tell: calibrate uses the percentile of the same config."""
        if self.percentile is not None and self.step != QuantizationStep.CONVERT:
            raise ValueError('percentile would change nothing here: give it with step="convert", or to calibrate')

    def _replaced(self) -> tuple[str, ...]:
        of_weight = () if self.weight_spec is None else ("block_rows",)
        of_activation = () if self.activation_spec is None else ("activation_round_mode",)
        return (*of_weight, *of_activation, *(_SHARED if of_weight and of_activation else ()))

    def _check_transforms(self) -> None:
        if self.weight.hadamard_sign != self.activation.hadamard_sign:
            raise ValueError(
                "weight_spec and activation_spec need the same hadamard_sign: the transform only cancels in pairs"
            )

    @property
    def activation(self) -> QuantizeSpec:
        """How activations are quantized: ``activation_spec``, or what the other arguments say."""
        if self.activation_spec is not None:
            return self.activation_spec
        return self._spec() if self.activation_round_mode is None else self._spec(round_mode=self.activation_round_mode)


class NVFP4Linear(torch.nn.Linear):
    """An nn.Linear with an NVFP4 weight; only its repr is its own."""

    def extra_repr(self) -> str:
        weight = self.weight
        kind = f"NVFP4 ({weight.describe()})" if isinstance(weight, NVFP4Tensor) else f"dense {weight.dtype}"
        return f"{super().extra_repr()}, weight={kind}"


@register_quantize_module_handler(NVFP4WeightOnlyConfig)
def _quantize_weight(module: torch.nn.Module, config: NVFP4WeightOnlyConfig) -> torch.nn.Module:
    return _quantize_linear(module, config.weight, None)


@register_quantize_module_handler(NVFP4Config)
def _quantize_weight_and_activation(module: torch.nn.Module, config: NVFP4Config) -> torch.nn.Module:
    assert isinstance(config.product_backend, ProductBackend)
    if config.step == QuantizationStep.PREPARE:
        linear = _quantizable(module)
        _check_backend(linear.weight, config.product_backend)  # now, not after the calibration
        return ObservedLinear.observe(linear, config.activation)
    if config.step == QuantizationStep.CONVERT:
        if not isinstance(module, ObservedLinear):
            return module
        _check_same_transform(module, config.activation)
        _check_backend(module.weight, config.product_backend)  # before stop_observing drops what was observed
        fields = {"activation_amax": module.amax_at(config.percentile), "product_backend": config.product_backend}
        return _quantize_linear(module.stop_observing(), config.weight, config.activation, **fields)
    config._check_percentile_is_used()
    return _quantize_linear(module, config.weight, config.activation, product_backend=config.product_backend)


def _quantize_linear(
    module: torch.nn.Module, weight_spec: QuantizeSpec, activation_spec: QuantizeSpec | None, **fields
) -> torch.nn.Module:
    linear = _quantizable(module)
    _check_backend(linear.weight, fields.get("product_backend", ProductBackend.AUTO))
    quantized = quantize(linear.weight.detach(), weight_spec)._replace(activation_spec=activation_spec, **fields)
    linear.weight = torch.nn.Parameter(quantized, requires_grad=False)
    if type(linear) is torch.nn.Linear:
        linear.__class__ = NVFP4Linear
    return linear


def _check_same_transform(module: ObservedLinear, spec: QuantizeSpec) -> None:
    """The amax observed is of the numbers behind the transform: those of another could clip."""
    prepared, now = ("None" if s is None else f"{s:#06x}" for s in (module.hadamard_sign, spec.hadamard_sign))
    if prepared != now:
        raise ValueError(
            f"{module} was prepared with hadamard_sign {prepared}, and its amax does not hold for {now}: convert with "
            "the specs of the prepare step, or prepare and calibrate the dense model again with these"
        )


def _check_backend(weight: torch.Tensor, backend: ProductBackend) -> None:
    """What is known before the first product: a weight still on a CPU may yet move to another device."""
    if weight.device.type == "cuda":
        check_backend(backend, weight.device, weight.dtype)
    elif weight.device.type != "meta":
        check_installed(backend)


def _quantizable(module: torch.nn.Module) -> torch.nn.Linear:
    """The module, if it is a linear with a dense weight that NVFP4 takes."""
    if not isinstance(module, torch.nn.Linear):
        raise TypeError(f"NVFP4 configs quantize nn.Linear, not {module}: leave it out with quantize_'s filter_fn")
    weight = module.weight
    if isinstance(module, ObservedLinear):
        raise ValueError(
            f'{module} is prepared, and what it observed would be lost: finish with NVFP4Config(step="convert"), '
            "or undo it with stop_observing() of each ObservedLinear"
        )
    if isinstance(weight, NVFP4Tensor):
        raise ValueError(f"{module} is NVFP4 already: start from the dense model")
    if torch.nn.utils.parametrize.is_parametrized(module, "weight"):
        raise TypeError(
            f"the weight of {module} is parametrized: remove_parametrizations(module, 'weight') of "
            "torch.nn.utils.parametrize first"
        )
    if type(weight.data) is not torch.Tensor or weight.dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(
            f"{module} has a weight of {type(weight.data).__name__}, {weight.dtype}: NVFP4 takes plain tensors of "
            "bfloat16, float16 or float32, so cast the model first"
        )
    return module
