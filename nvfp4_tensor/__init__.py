"""NVFP4 for PyTorch: identical bits on CPU and Hopper; Blackwell and Ampere kernels compile but have not been run.

``import nvfp4_tensor`` registers the operators ``torch.ops.nvfp4.*`` and loads their kernels. The tensor and the
configs are imported on first use, because they import torchao, which takes longer than torch.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from nvfp4_tensor._compat.pickles import _rebuild, _rebuild_fp8  # noqa: F401  in pickles
from nvfp4_tensor.info import info
from nvfp4_tensor.numerics.choices import (
    Activations,
    FourOverSix,
    FP8Activations,
    ProductBackend,
    RoundingMode,
    ScaleRounding,
    ScaleSearch,
)
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.ops import composite, fakes, native  # noqa: F401  define the ops
from nvfp4_tensor.sizes import ModelSize, model_size

if TYPE_CHECKING:
    from nvfp4_tensor.dispatch.fp8 import FP8Spec, FP8Tensor
    from nvfp4_tensor.quantization import NVFP4Config, NVFP4WeightOnlyConfig, calibrate, quantize_model
    from nvfp4_tensor.tensor.fake_quantize import fake_quantize
    from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor, quantize, quantize_experts

__all__ = [
    "Activations",
    "FP8Activations",
    "FP8Spec",
    "FP8Tensor",
    "FourOverSix",
    "ModelSize",
    "NVFP4Config",
    "NVFP4Tensor",
    "NVFP4WeightOnlyConfig",
    "ProductBackend",
    "QuantizeSpec",
    "RoundingMode",
    "ScaleRounding",
    "ScaleSearch",
    "calibrate",
    "fake_quantize",
    "info",
    "model_size",
    "quantize",
    "quantize_experts",
    "quantize_model",
]

_LATER = {
    **dict.fromkeys(("FP8Spec", "FP8Tensor"), "dispatch.fp8"),
    **dict.fromkeys(("NVFP4Tensor", "fake_quantize", "quantize", "quantize_experts"), "dispatch"),
    **dict.fromkeys(("NVFP4TrainingConfig", "NVFP4TrainingLinear", "Recipe", "WeightForDx"), "training"),
    **dict.fromkeys(
        ("NVFP4Config", "NVFP4Linear", "NVFP4WeightOnlyConfig", "ObservedLinear", "calibrate", "quantize_model"),
        "quantization",
    ),
    **dict.fromkeys(("_loaded_from_conv1d", "_stored_as_conv1d"), "quantization.conv1d"),
    "_no_fast_path": "quantization.observer",
    "InputStatistics": "quantization.observer",
    **dict.fromkeys(("ObservedExperts", "_observe_experts"), "quantization.observed_experts"),
}
"""Names that are public or in pickles, and the subpackage that defines each."""

_ROOMS = ("checkpoints", "distributed", "emulation", "generation", "quantization", "training")
"""Public subpackages, imported on first use."""

try:
    __version__ = version("nvfp4-tensor")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

native.load()


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        return importlib.import_module(f"nvfp4_tensor.{name}")
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"nvfp4_tensor.{_LATER[name]}"), name)
    if name in ("NVFP4Config", "NVFP4WeightOnlyConfig"):  # so that torchao's QATConfig accepts them
        importlib.import_module("nvfp4_tensor.integrations.torchao_qat")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER, *_ROOMS})
