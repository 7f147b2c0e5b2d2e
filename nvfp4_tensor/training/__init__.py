"""Training in NVFP4: recipes, the linear that follows one, and what is built on them."""

import nvfp4_tensor.tensor  # noqa: F401  first, for it imports torchao without the lines that torchao prints
from nvfp4_tensor.training.autograd import linear
from nvfp4_tensor.training.config import NVFP4TrainingConfig, set_recipe, to_dense, weights_changed
from nvfp4_tensor.training.filters import Filter, keep_dense, keep_last
from nvfp4_tensor.training.module import NVFP4TrainingLinear
from nvfp4_tensor.training.recipe import RECIPES, Recipe, WeightForDx
from nvfp4_tensor.training.ste import ste
from nvfp4_tensor.training.summary import Summary, summary

__all__ = [
    "RECIPES",
    "Filter",
    "NVFP4TrainingConfig",
    "NVFP4TrainingLinear",
    "Recipe",
    "Summary",
    "WeightForDx",
    "keep_dense",
    "keep_last",
    "linear",
    "set_recipe",
    "ste",
    "summary",
    "to_dense",
    "weights_changed",
]
