"""Configs for ``torchao.quantization.quantize_``: NVFP4 weights, with or without NVFP4 activations."""

from __future__ import annotations

import dataclasses
import functools
import numbers
from typing import Any

from torchao.core.config import AOBaseConfig
from torchao.quantization.quantize_.common.quantization_step import QuantizationStep

from nvfp4_tensor._compat.pickles import pin
from nvfp4_tensor.numerics.choices import (
    Activations,
    FourOverSix,
    ProductBackend,
    RoundingMode,
    ScaleRounding,
    ScaleSearch,
)
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.tensor.arguments import stored_spec

_SHARED = ("round_mode", "scale_rounding", "four_over_six", "scale_search", "scale_ceiling", "random_bits")
"""The arguments that weights and activations share."""


@functools.partial(pin, loadable=False)
@dataclasses.dataclass(kw_only=True)
class NVFP4WeightOnlyConfig(AOBaseConfig):
    """NVFP4 weights and unquantized activations (W4A16), for nn.Linear of any size.

    torchao's ``quantize_`` passes one module at a time. Where it has one config for all, every selected module is
    checked before the first one changes, and linears that servers join (q, k and v; gate and up) share a per-tensor
    scale, as with ``quantize_model``. Of configs by name (FqnToConfig), each is checked when it is its turn, so that an
    error leaves the modules before it quantized, and has its own scale, as in a call with one linear.

    Args:
        round_mode, block_rows, scale_rounding, four_over_six, scale_search, scale_ceiling, random_bits: as in
            :class:`QuantizeSpec`, for the weight.
        seed: of stochastic rounding of weights. Their random bits then depend on it and on each weight's name, and are
            those of ``checkpoints.quantize(seed=...)`` if files have the same names. By default, torch's generator
            draws them.
        weight_spec: a complete spec that replaces these arguments. It must not have a Hadamard transform, which cancels
            only if the activation has the same one.
        weighted: weigh the squared errors of the scale search by the mean square of each column's input. This requires
            :func:`calibrate`, or torchao's two steps, which observe inputs.
        step: None, "prepare" or "convert": torchao's two-step calibration. "prepare" observes the inputs of each
            linear; "convert" quantizes with the observed statistics and ignores linears that were not prepared.
        experts: True also quantizes the experts of a transformers model, all of them regardless of the filter. These
            are parameters (E, N, K), with one per-tensor scale per expert. A calibration observes them too. None leaves
            them dense and warns; False leaves them dense without a warning.
        activations: None, or "fp8" (an :class:`Activations`): products of 768 and more rows of activations round these
            rows, and the weight while it is decoded, to e4m3 (numerics contract, section 13), which FP8 tensor cores
            multiply faster. Fewer rows, gradients and experts stay W4A16. For Hopper; elsewhere it gives the same
            values in plain torch, slower than without.

    Raises:
        ValueError: an invalid value, or an argument that a given spec replaces.
    """

    round_mode: RoundingMode | str = RoundingMode.RNE
    block_rows: int = 1
    scale_rounding: ScaleRounding | str = ScaleRounding.NEAREST
    four_over_six: FourOverSix | str | bool | None = None
    scale_search: ScaleSearch | str | bool | None = None
    scale_ceiling: int | None = None
    random_bits: int = 16
    weight_spec: QuantizeSpec | None = None
    weighted: bool = False
    experts: bool | None = None
    step: QuantizationStep | str | None = None
    activations: Activations | str | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        self.activations = None if self.activations is None else Activations.of(self.activations)
        given = [field.name for field in dataclasses.fields(self) if getattr(self, field.name) != field.default]
        if unused := [name for name in given if name in self._replaced()]:
            raise ValueError(f"{', '.join(unused)} would have no effect with the given specs: set it in the specs")
        if self.activations is not None and self.activation is not None:
            raise ValueError("NVFP4Config quantizes activations to NVFP4: use NVFP4WeightOnlyConfig(activations='fp8')")
        signs = {None if spec is None else stored_spec(spec).hadamard_sign for spec in (self.weight, self.activation)}
        if len(signs) > 1:
            raise ValueError(
                "a Hadamard transform of the weight needs the same one of the activation, with which it cancels: use "
                "NVFP4Config, with the same hadamard_sign in both specs"
            )
        if self.seed is not None and not self.weight.is_stochastic:
            raise ValueError("seed would have no effect: only round_mode='stochastic' of the weight draws random bits")
        if self.weighted and self.weight.scale_search is None:
            raise ValueError("weighted only affects a scale search: also give scale_search='mse' for the weight")
        if self.step is not None:
            if self.step not in ("prepare", "convert"):  # torchao's enum also has steps of other algorithms
                raise ValueError(f"step must be None, 'prepare' or 'convert', got {self.step!r}")
            self.step = QuantizationStep(self.step)
            if not self.weighted and (self.activation is None or self.activation.row_scaled):
                raise ValueError(
                    "step would have no effect: with row_scaled or weights alone, only weighted=True needs inputs"
                )

    def _check_calibrated(self) -> None:
        """Raise an error if the config needs a calibration. Called by quantize_; calibrate sets the steps itself."""
        if self.step is None:
            self._check_amax_is_used()
            if self.weighted:
                raise ValueError('weighted needs inputs: pass the config to calibrate, or use step="prepare" first')

    def _check_amax_is_used(self) -> None:
        for name in ("percentile", "headroom"):
            if getattr(self, name, None):
                raise ValueError(f'{name} would have no effect here: use it with step="convert" or calibrate')

    def _replaced(self) -> tuple[str, ...]:
        """Return the names of the arguments that the given specs replace."""
        return () if self.weight_spec is None else (*_SHARED, "block_rows")

    @property
    def weight(self) -> QuantizeSpec:
        """The spec of the weights: ``weight_spec``, or a spec made of the other arguments."""
        if self.weight_spec is not None:
            return self.weight_spec
        return self._spec(block_rows=self.block_rows)

    @property
    def activation(self) -> QuantizeSpec | None:
        """The spec of the activations; None if they are not quantized to NVFP4."""
        return None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of an NVFP4Tensor that configure products."""
        return {"product_backend": ProductBackend.AUTO if self.activations is None else ProductBackend.FP8}

    def _spec(self, **changes: Any) -> QuantizeSpec:
        """Return the spec of the shared arguments."""
        return _spec_of(**{name: getattr(self, name) for name in _SHARED} | changes)


@functools.lru_cache(maxsize=None, typed=True)  # 1 and True differ
def _spec_of(**arguments: Any) -> QuantizeSpec:
    """Return the spec of the arguments. All weights share one object, which torch.compile's guards need."""
    return QuantizeSpec.unpack(QuantizeSpec(**arguments).pack())


@functools.partial(pin, loadable=False)
@dataclasses.dataclass(kw_only=True)
class NVFP4Config(NVFP4WeightOnlyConfig):
    """NVFP4 weights and activations (W4A4). Weights are quantized once, activations at each call.

    Args:
        round_mode, scale_rounding, four_over_six, scale_search, scale_ceiling, random_bits: as in
            :class:`QuantizeSpec`, for the weight and the activation.
        block_rows: for the weight; an activation always has 1x16 blocks.
        activation_round_mode, row_scaled: for the activation only.
        weight_spec, activation_spec: complete specs that replace the arguments above.
        weighted, experts, seed: as in :class:`NVFP4WeightOnlyConfig`.
        step: None, "prepare" or "convert": torchao's two-step calibration of static activation scales. "prepare"
            observes the inputs of each linear; "convert" quantizes with the observed amax and ignores linears that were
            not prepared. See also :func:`calibrate`. Without a calibration, each call computes its own amax.
        product_backend: the backend of products: AUTO, SCALED_MM or FBGEMM, or these names in lower case. The products
            of experts use torch's scaled_grouped_mm on devices that have it.
        percentile: for "convert" and :func:`calibrate`: the percentile of the observed magnitudes that becomes the
            amax, for instance 99.9. None uses the largest magnitude.
        headroom: for "convert" and :func:`calibrate`: raise the amax above the observed magnitudes, as far as the block
            scales of 99 % of the blocks keep full precision. Larger inputs then do not saturate, and rare outliers
            (1 block in 10,000) do not determine the amax.

    Gradients pass the quantization of an activation unchanged (straight-through estimator). So derivatives of all
    orders, in reverse and forward mode, are those of a product whose activations are not quantized.

    Raises:
        ValueError: an invalid value, an argument that would have no effect, or different Hadamard transforms.
    """

    activation_round_mode: RoundingMode | str | None = None
    row_scaled: bool = False
    activation_spec: QuantizeSpec | None = None
    product_backend: ProductBackend | str = ProductBackend.AUTO
    percentile: float | None = None
    headroom: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.product_backend = ProductBackend.of(self.product_backend)
        if self.product_backend == ProductBackend.FP8:
            raise ValueError("product_backend 'fp8' is for NVFP4WeightOnlyConfig(activations='fp8')")
        if self.percentile is not None:
            number = isinstance(self.percentile, numbers.Real) and not isinstance(self.percentile, bool)
            if not number or not 50 <= self.percentile <= 100:
                raise ValueError(f"percentile must be a number from 50 to 100, such as 99.9, got {self.percentile!r}")
            if self.headroom:
                raise ValueError("percentile and headroom both choose the amax: give only one of them")
        if self.step == QuantizationStep.PREPARE or self.activation.row_scaled:
            self._check_amax_is_used()

    def _replaced(self) -> tuple[str, ...]:
        of_weight = () if self.weight_spec is None else ("block_rows",)
        of_activation = () if self.activation_spec is None else ("activation_round_mode", "row_scaled")
        return (*of_weight, *of_activation, *(_SHARED if of_weight and of_activation else ()))

    @property
    def activation(self) -> QuantizeSpec:
        """The spec of the activations: ``activation_spec``, or a spec made of the other arguments."""
        if self.activation_spec is not None:
            return self.activation_spec
        changes = {} if self.activation_round_mode is None else {"round_mode": self.activation_round_mode}
        return self._spec(row_scaled=self.row_scaled, **changes)

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of an NVFP4Tensor that configure products."""
        return {"activation_spec": self.activation, "product_backend": self.product_backend}
