"""torchao's QATConfig over our configs: prepare trains by a recipe, convert quantizes with the config itself.

torchao maps a base config to fake quantization by its class, from a closed list of its own classes. Its registry of
what quantize_ does by a config is open: QATConfig's entry is wrapped here, and everything that is not ours goes on to
torchao's. Importing this module does it; so does asking nvfp4_tensor for one of its configs.
"""

from __future__ import annotations

from torch import nn
from torchao.quantization import transform_module
from torchao.quantization.qat import QATConfig, QATStep
from torchao.quantization.transform_module import register_quantize_module_handler

from nvfp4_tensor.quantization import NVFP4Config, NVFP4WeightOnlyConfig
from nvfp4_tensor.training import NVFP4TrainingLinear, Recipe, WeightForDx
from nvfp4_tensor.training.config import trainable

_handlers = transform_module._QUANTIZE_CONFIG_HANDLER
_torchaos = _handlers[QATConfig]


def recipe_of(config: NVFP4WeightOnlyConfig) -> Recipe:
    """What a model converted with ``config`` will compute, in the forward; the backward is dense, straight through."""
    x = config.activation if isinstance(config, NVFP4Config) else None
    w_for_dx = WeightForDx.DENSE if config.weight.rotation is not None else WeightForDx.EXACT
    return Recipe(name=f"QAT of {type(config).__name__}", x=x, w=config.weight, w_for_dx=w_for_dx)


@register_quantize_module_handler(QATConfig)
def _prepare_or_convert(module: nn.Module, config: QATConfig) -> nn.Module:
    base = config.base_config
    if not isinstance(base, NVFP4WeightOnlyConfig):
        return _torchaos(module, config)
    if isinstance(base, NVFP4Config) and base.step is not None:
        raise ValueError("QATConfig has steps of its own: give it an NVFP4Config without step")
    if config.step == QATStep.PREPARE:
        return NVFP4TrainingLinear.convert(trainable(module), recipe_of(base))
    if not isinstance(module, NVFP4TrainingLinear):
        return module  # as torchao does: only what was prepared is converted
    return _handlers[type(base)](module.to_dense(), base)
