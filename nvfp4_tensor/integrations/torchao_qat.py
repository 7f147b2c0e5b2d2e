"""torchao's QATConfig with our configs: prepare trains with a recipe, convert quantizes with the config.

torchao chooses fake quantization by the class of the base config, from a fixed list. Its registry of quantize_ handlers
is open, so this module wraps the handler of QATConfig, which still handles torchao's own configs. Importing this
module, or accessing one of the configs of nvfp4_tensor, registers the wrapper.
"""

from __future__ import annotations

from torch import nn
from torchao.quantization import transform_module
from torchao.quantization.qat import QATConfig, QATStep
from torchao.quantization.transform_module import register_quantize_module_handler

from nvfp4_tensor.quantization import NVFP4Config, NVFP4WeightOnlyConfig
from nvfp4_tensor.quantization.callers import once_per_call
from nvfp4_tensor.training import NVFP4TrainingLinear, Recipe, WeightForDx
from nvfp4_tensor.training.config import converted

_handlers = transform_module._QUANTIZE_CONFIG_HANDLER
_torchao_handler = _handlers[QATConfig]


def recipe_of(config: NVFP4WeightOnlyConfig) -> Recipe:
    """Return a recipe with the forward of a model converted with ``config`` and a dense, straight-through backward."""
    x = config.activation if isinstance(config, NVFP4Config) else None
    w_for_dx = WeightForDx.DENSE if config.weight.rotation is not None else WeightForDx.EXACT
    return Recipe(name=f"QAT of {type(config).__name__}", x=x, w=config.weight, w_for_dx=w_for_dx)


@register_quantize_module_handler(QATConfig)
def _prepare_or_convert(module: nn.Module, config: QATConfig) -> nn.Module:
    base = config.base_config
    if not isinstance(base, NVFP4WeightOnlyConfig):
        return _torchao_handler(module, config)
    if isinstance(base, NVFP4Config) and base.step is not None:
        raise ValueError("QATConfig has steps of its own: give it an NVFP4Config without step")
    if config.step == QATStep.PREPARE:
        return converted(module, config, recipe_of(base))
    once_per_call(module, config, lambda model, chosen, is_all: _check_prepared_with(base, chosen))
    if not isinstance(module, NVFP4TrainingLinear):
        return module  # as in torchao, only prepared modules are converted
    return _handlers[type(base)](module.to_dense(), base)


def _check_prepared_with(base: NVFP4WeightOnlyConfig, chosen: list[nn.Module]) -> None:
    """Raise a ValueError if a linear of the call trained for another config."""
    wanted = recipe_of(base)
    for each in chosen:
        if isinstance(each, NVFP4TrainingLinear) and (each.recipe.x, each.recipe.w) != (wanted.x, wanted.w):
            raise ValueError(
                f"this model trained for weights of ({each.recipe.w}) and activations of ({each.recipe.x or 'dense'}), "
                f"which {type(base).__name__} would not give: convert with the config of the prepare step"
            )
