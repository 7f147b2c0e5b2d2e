"""Training in NVFP4: recipes, linears, filters, reports, and weights that are stored in NVFP4."""

import nvfp4_tensor.dispatch  # noqa: F401  first: the tensor with its operators, and torchao without its log lines
from nvfp4_tensor.quantization.trained import to_dense
from nvfp4_tensor.training.config import NVFP4TrainingConfig, reuse_weight_codes, set_recipe
from nvfp4_tensor.training.distillation import DistillConfig, Trains, distill
from nvfp4_tensor.training.filters import Filter, keep_dense, keep_last_blocks_dense
from nvfp4_tensor.training.linear.function import linear
from nvfp4_tensor.training.linear.grouped import grouped_linear
from nvfp4_tensor.training.linear.module import NVFP4TrainingLinear
from nvfp4_tensor.training.recipe import RECIPES, Recipe, WeightForDx
from nvfp4_tensor.training.reports.diagnostics import Report, diagnose
from nvfp4_tensor.training.reports.summary import Summary, summary
from nvfp4_tensor.training.weights.adamw import NVFP4AdamW
from nvfp4_tensor.training.weights.lora import merge_lora, merge_low_rank
from nvfp4_tensor.training.weights.optimizer import NVFP4Optimizer, to_nvfp4_parameters
from nvfp4_tensor.training.weights.refit import RefitReport, refit_
from nvfp4_tensor.training.weights.write_back import write_back

__all__ = [
    "RECIPES",
    "DistillConfig",
    "Filter",
    "NVFP4AdamW",
    "NVFP4Optimizer",
    "NVFP4TrainingConfig",
    "NVFP4TrainingLinear",
    "Recipe",
    "RefitReport",
    "Report",
    "Summary",
    "Trains",
    "WeightForDx",
    "diagnose",
    "distill",
    "grouped_linear",
    "keep_dense",
    "keep_last_blocks_dense",
    "linear",
    "merge_lora",
    "merge_low_rank",
    "refit_",
    "reuse_weight_codes",
    "set_recipe",
    "summary",
    "to_dense",
    "to_nvfp4_parameters",
    "write_back",
]
