"""What ``torchao.quantization.quantize_`` takes: NVFP4 weights, with NVFP4 activations or without."""

from __future__ import annotations

import dataclasses
import functools
import numbers
from typing import Any

from torchao.core.config import AOBaseConfig
from torchao.quantization.quantize_.common.quantization_step import QuantizationStep

from nvfp4_tensor._compat.pickles import pin
from nvfp4_tensor.numerics.choices import FourOverSix, ProductBackend, RoundingMode, ScaleRounding, ScaleSearch
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.tensor.arguments import stored_spec

_SHARED = ("round_mode", "scale_rounding", "four_over_six", "scale_search", "scale_ceiling", "random_bits")
"""The arguments that weights and activations share."""


@functools.partial(pin, loadable=False)
@dataclasses.dataclass(kw_only=True)
class NVFP4WeightOnlyConfig(AOBaseConfig):
    """NVFP4 weights, activations as they come (W4A16), for nn.Linear of any size.

    Args:
        round_mode, block_rows, scale_rounding, four_over_six, scale_search, scale_ceiling, random_bits: as in
            :class:`QuantizeSpec`, for the weight.
        weight_spec: the whole spec, instead of these. Without a Hadamard transform, which only cancels in pairs.
        weighted: let the squared errors of the scale search count by the mean square of the input that each column is
            multiplied with. For :func:`calibrate`, or torchao's two steps, which see inputs.
        step: None, or torchao's two steps towards what a calibration gives: "prepare" observes what each linear is fed,
            "convert" quantizes by what was observed (linears not prepared are left alone).
        experts: True quantizes the experts of a model of transformers too, all of them whatever the filter: parameters
            (E, N, K), each expert with a per-tensor scale, without a calibration. None leaves them dense and warns,
            False does not warn.

    Raises:
        ValueError: a value outside these, or an argument beside a spec that takes its place.
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

    def __post_init__(self) -> None:
        given = [field.name for field in dataclasses.fields(self) if getattr(self, field.name) != field.default]
        if idle := [name for name in given if name in self._replaced()]:
            raise ValueError(f"{', '.join(idle)} would change nothing beside the specs given: put it into them instead")
        stored_spec(self.weight)
        self._check_transforms()
        if self.weighted and self.weight.scale_search is None:
            raise ValueError("weighted changes a scale search alone: give scale_search='mse' for the weight beside it")
        if self.step is not None:
            if self.step not in ("prepare", "convert"):  # torchao's enum of strings has steps of other algorithms too
                raise ValueError(f"step is None, 'prepare' or 'convert', got {self.step!r}")
            self.step = QuantizationStep(self.step)
        self._check_step()

    def _check_step(self) -> None:
        if self.step is not None and not self.weighted:
            raise ValueError("step would change nothing: without weighted=True, weights need no calibration")

    def _check_calibrated(self) -> None:
        """Without a step only quantize_ can tell: calibrate makes the steps of the same config itself."""
        if self.weighted and self.step is None:
            raise ValueError('weighted needs inputs: give the config to calibrate, or with step="prepare" first')

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

    @property
    def activation(self) -> QuantizeSpec | None:
        """How activations are quantized; None for weights alone."""
        return None

    def _spec(self, **changes: Any) -> QuantizeSpec:
        """The spec of the shared arguments: one object for all weights, which a compiled model's guards compare."""
        arguments = {name: getattr(self, name) for name in _SHARED} | changes
        return QuantizeSpec.unpack(QuantizeSpec(**arguments).pack())


@functools.partial(pin, loadable=False)
@dataclasses.dataclass(kw_only=True)
class NVFP4Config(NVFP4WeightOnlyConfig):
    """NVFP4 weights and activations (W4A4): weights once, activations at each call with the amax of that call.

    Args:
        round_mode, scale_rounding, four_over_six, scale_search, scale_ceiling, random_bits: for the weight and the
            activation.
        block_rows: for the weight; an activation always has 1x16 blocks.
        activation_round_mode, row_scaled: for the activation alone.
        weight_spec, activation_spec: the whole specs, instead of these.
        weighted, experts: as in :class:`NVFP4WeightOnlyConfig`.
        step: None, or torchao's two steps towards static activation scales: "prepare" observes what each linear is
            fed, "convert" quantizes with the amax observed (linears not prepared are left alone). See also
            :func:`calibrate`.
        product_backend: what multiplies: AUTO, SCALED_MM or FBGEMM, or their names in lower case. Experts' products
            always go to torch's scaled_grouped_mm, where that runs.
        percentile: for "convert" and :func:`calibrate`: the percentile of the magnitudes observed that becomes the
            amax, 99.9 for instance; None for the largest.
        headroom: for "convert" and :func:`calibrate`: let the amax leave room above what was observed, as far as the
            block scales of all but 1 % of the blocks keep their full precision. Larger inputs then do not saturate,
            and lone outliers (1 block in 10,000) do not decide.

    Gradients pass the quantization of an activation straight through, in reverse mode. What forward mode and second
    derivatives multiply by the weight comes to the same product as an activation does and is quantized like one, by a
    static amax too, which clips it: take these of a weight-only model. So is the gradient of ``x @ weight``, a product
    across the blocks, which sums along them.

    Raises:
        ValueError: a value outside these, an argument that would change nothing, or Hadamard transforms that are not
            the same for both.
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
        if self.percentile is not None:
            number = isinstance(self.percentile, numbers.Real) and not isinstance(self.percentile, bool)
            if not number or not 0 < self.percentile <= 100:
                raise ValueError(f"percentile is a number above 0 and up to 100, got {self.percentile!r}")
            if self.headroom:
                raise ValueError("percentile and headroom each choose the amax: give one of them")

    def _check_step(self) -> None:
        if self.activation.row_scaled and not self.weighted and self.step is not None:
            raise ValueError("step would change nothing: activations with row_scaled have an amax a row, at each call")
        if self.step == QuantizationStep.PREPARE or self.activation.row_scaled:
            self._check_amax_is_used()

    def _check_calibrated(self) -> None:
        super()._check_calibrated()
        if self.step is None:
            self._check_amax_is_used()

    def _check_amax_is_used(self) -> None:
        for name in ("percentile", "headroom"):
            if getattr(self, name):
                raise ValueError(f'{name} would change nothing here: give it with step="convert", or to calibrate')

    def _replaced(self) -> tuple[str, ...]:
        of_weight = () if self.weight_spec is None else ("block_rows",)
        of_activation = () if self.activation_spec is None else ("activation_round_mode", "row_scaled")
        return (*of_weight, *of_activation, *(_SHARED if of_weight and of_activation else ()))

    def _check_transforms(self) -> None:
        stored_spec(self.activation)
        if self.weight.hadamard_sign != self.activation.hadamard_sign:
            raise ValueError(
                "weight_spec and activation_spec need the same hadamard_sign: the transform only cancels in pairs"
            )

    @property
    def activation(self) -> QuantizeSpec:
        """How activations are quantized: ``activation_spec``, or what the other arguments say."""
        if self.activation_spec is not None:
            return self.activation_spec
        changes = {} if self.activation_round_mode is None else {"round_mode": self.activation_round_mode}
        return self._spec(row_scaled=self.row_scaled, **changes)
