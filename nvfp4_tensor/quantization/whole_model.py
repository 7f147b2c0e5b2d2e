"""quantize_model: quantize a whole model in memory by the rules that files and ``from_pretrained`` use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torchao.core.config import AOBaseConfig
from torchao.quantization import quantize_

from nvfp4_tensor.numerics.layout import BLOCK
from nvfp4_tensor.quantization.callers import Filter
from nvfp4_tensor.quantization.config import NVFP4WeightOnlyConfig
from nvfp4_tensor.quantization.conv1d import is_conv1d, is_linear
from nvfp4_tensor.quantization.conversion import Conversion
from nvfp4_tensor.quantization.experts import expert_weights, is_transposed
from nvfp4_tensor.quantization.model_plan import PARAMETER, Kind, Matrix, ModelPlan, plan_matrices
from nvfp4_tensor.quantization.trained import restored
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor


def quantize_model(
    model: nn.Module,
    config: AOBaseConfig | None = None,
    filter_fn: Filter | None = None,
    *,
    exclude: str | Collection[str] = (),
    include: str | Collection[str] = (),
) -> ModelPlan:
    """Quantize a model in place, and return what was quantized, what stays dense, and why.

    In contrast to torchao's ``quantize_``, which sees one module at a time, it quantizes the same matrices, to the same
    bits, as ``checkpoints.quantize`` and ``from_pretrained``:

    - Output layers, routers, gates, adapters, encoders of images and audio, weights of a few rows, and weights whose
      columns are not a multiple of 16 stay dense (:func:`plan_matrices` has the rules).
    - Linears that servers join (q, k and v; gate and up) share the largest of their per-tensor scales.
    - The experts of transformers models are quantized, unless the config has ``experts=False``.
    - GPT-2's Conv1D becomes an nn.Linear, whose state_dict keeps Conv1D's layout.

    Args:
        model: the model. Its modules and their names stay.
        config: a config for ``quantize_``, by default ``NVFP4WeightOnlyConfig()``.
        filter_fn: selects linears, and modules with experts, by (module, name). It decides alone, in place of the
            rules; linears of any size can be selected.
        exclude: more weights to leave dense: names of modules or parameters, with wildcards ("*.down_proj"), or "re:"
            and a regular expression. A string is one pattern.
        include: weights to quantize although the rules leave them dense ("lm_head").

    Returns:
        A mapping by parameter name. Printed, it is a table.

    Raises:
        ValueError: nothing would be quantized, or a pattern matches no weight. The message has the candidates.
        TypeError: a weight of another tensor class, or a weight that is sharded (shard the quantized model instead).
            If any weight is refused, the model is unchanged.

    Example::

        report = quantize_model(model, NVFP4WeightOnlyConfig(four_over_six=True))
        print(report)
        print(report["model.layers.0.mlp.gate.weight"].reason)  # router of experts
    """
    config = NVFP4WeightOnlyConfig() if config is None else config
    ours, matrices = isinstance(config, NVFP4WeightOnlyConfig), matrices_of(model)
    if not ours or config.experts is False:
        matrices = without_experts(matrices, "experts=False" if ours else f"{type(config).__name__} is for linears")
    plan = plan_model(model, filter_fn, exclude=exclude, include=include, matrices=matrices)
    chosen = PlannedFilter(model, plan)
    if isinstance(config, NVFP4WeightOnlyConfig):
        Conversion(model, chosen.linears, config, experts=chosen.experts).run(model)
    else:
        with restored(model, only_on_error=True):  # other handlers check a linear when it is its turn
            quantize_(model, config, filter_fn=chosen)
    return plan


def plan_model(
    model: nn.Module,
    filter_fn: Filter | None = None,
    *,
    exclude: str | Collection[str] = (),
    include: str | Collection[str] = (),
    matrices: Sequence[Matrix] | None = None,
    selected: Callable[[str], bool] | None = None,
) -> ModelPlan:
    """Plan what :func:`quantize_model` quantizes, without a change of the model.

    Args:
        model, filter_fn, exclude, include: as there.
        matrices: the matrices of the model, by default :func:`matrices_of` it.
        selected: a filter by parameter name, in place of filter_fn.

    Raises:
        ValueError: nothing would be quantized, or a pattern matches no weight.
    """
    matrices = matrices_of(model) if matrices is None else matrices
    exclude, include = ((each,) if isinstance(each, str) else each for each in (exclude, include))
    if filter_fn is not None:
        modules = dict(model.named_modules())
        selected = lambda name: filter_fn(modules[path := _path(name)], path)  # noqa: E731
    plan = plan_matrices(
        matrices, exclude=exclude, include=include, selected=selected, heads=_heads(model), where=type(model).__name__
    )
    if not plan.quantized:
        raise ValueError(f"nothing to quantize in {type(model).__name__}: {plan.candidates()}")
    return plan


def without_experts(matrices: Sequence[Matrix], note: str) -> list[Matrix]:
    """Return the matrices of a model whose experts stay dense, because of ``note``."""
    return [dataclasses.replace(each, note=note) if each.kind is Kind.EXPERTS else each for each in matrices]


def matrices_of(model: nn.Module, ties: Mapping[str, str] | None = None) -> list[Matrix]:
    """Return the parameters of a model that have two or more dimensions, each tensor once.

    ties: names of parameters that will be tied, and the name of each that it will be tied to, in a model on the meta
        device, where they are separate.
    """
    ties = ties or {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    matrices: dict[int, Matrix] = {}
    for path, module in model.named_modules():
        experts = expert_weights(module)
        for attribute, parameter in module._parameters.items():
            if parameter is None or parameter.dim() < 2:
                continue
            name = f"{path}.{attribute}" if path else attribute
            each = _matrix(name, module, attribute, parameter, attribute in experts)
            key = id(parameters.get(ties.get(name, name), parameter))
            matrices[key] = _tied(matrices[key], each) if key in matrices else each
    return list(matrices.values())


def _matrix(name: str, module: nn.Module, attribute: str, parameter: Tensor, is_experts: bool) -> Matrix:
    shape, kind, note = tuple(parameter.shape), Kind.OTHER, type(module).__name__
    if is_linear(module) and attribute == "weight" and not isinstance(module, NonDynamicallyQuantizableLinear):
        shape, kind, note = shape[::-1] if is_conv1d(module) else shape, Kind.LINEAR, ""
    elif is_experts:
        shape = (shape[0], shape[2], shape[1]) if is_transposed(module) else shape
        kind, note = Kind.EXPERTS, ""
    elif sorted(shape)[-2] >= BLOCK and type(module).__module__.split(".")[0] != "torch":
        is_table = isinstance(module, nn.Embedding | nn.modules.conv._ConvNd) or "Embed" in type(module).__name__
        note = note if is_table else f"{PARAMETER}{note}"
    data = getattr(parameter, "_local_tensor", parameter.data)
    if kind is not Kind.OTHER and isinstance(data, NVFP4Tensor) and not parameter.requires_grad:  # codes that trained
        note = "NVFP4 already"
    return Matrix(name, shape, parameter.dtype, kind, note)


def _tied(first: Matrix, other: Matrix) -> Matrix:
    """Return a matrix that has two names. It is a linear only under both names."""
    tied = (*first.tied, other.name)
    if first.kind is other.kind:
        return dataclasses.replace(first, tied=tied)
    note = first.note if first.kind is Kind.OTHER else f"shared with {other.name}, {other.note}"
    return dataclasses.replace(first, tied=tied, kind=Kind.OTHER, note=note)


def _path(name: str) -> str:
    return name.rpartition(".")[0]


def _heads(model: nn.Module) -> set[str]:
    """Return the name of the weight of a transformers model's output layer."""
    find = getattr(model, "get_output_embeddings", None)
    try:
        head = None if find is None else find()
    except (AttributeError, NotImplementedError):
        head = None
    return {f"{path}.weight" for path, module in model.named_modules() if module is head}


class PlannedFilter:
    """A filter for ``quantize_`` and ``gptq`` that selects the linears and experts of a plan.

    Attributes:
        linears: the modules of linears, in the order of the model.
        experts: the names of experts' weights.
    """

    def __init__(self, model: nn.Module, plan: ModelPlan) -> None:
        modules = {f"{path}.": module for path, module in model.named_modules()}

        def module_of(name: str) -> nn.Module:
            return modules[f"{_path(name)}."]

        quantized = [plan[name] for name in plan.quantized]
        linears = [each for each in quantized if is_linear(module_of(each.name))]
        chosen = {module_of(name) for each in linears for name in (each.name, *each.tied)}
        self.linears = [module for module in model.modules() if module in chosen]
        self.experts = {each.name for each in quantized} - {each.name for each in linears}
        self._modules = chosen | {module_of(name) for name in self.experts}

    def __call__(self, module: nn.Module, name: str) -> bool:
        return module in self._modules
