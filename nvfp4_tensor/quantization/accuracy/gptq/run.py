"""gptq(model, batches, config): quantize a model by GPTQ, one layer at a time."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from nvfp4_tensor._compat.frames import warn_user
from nvfp4_tensor.numerics import reference
from nvfp4_tensor.numerics.choices import RoundingMode
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.quantization.accuracy.gptq.inputs import Fed, Statistics, Watch
from nvfp4_tensor.quantization.accuracy.gptq.rounding import Factor, moved_to_inputs, round_weight
from nvfp4_tensor.quantization.accuracy.gptq.stages import call_model, in_eval_mode, layers_of, list_of, record
from nvfp4_tensor.quantization.callers import Filter
from nvfp4_tensor.quantization.config import NVFP4WeightOnlyConfig
from nvfp4_tensor.quantization.conv1d import as_linear, is_linear
from nvfp4_tensor.quantization.experts import expert_weights
from nvfp4_tensor.quantization.linear import joined_linears, quantizable, shared_parameters
from nvfp4_tensor.quantization.names import refused_by_name
from nvfp4_tensor.quantization.observed_experts import ROUTED, routed_tokens, summary_of
from nvfp4_tensor.quantization.observer import check_observable
from nvfp4_tensor.quantization.shards import refuse_absent
from nvfp4_tensor.quantization.trained import restored, to_dense
from nvfp4_tensor.quantization.weights import WeightRef
from nvfp4_tensor.quantization.whole_model import PlannedFilter, plan_model
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTQConfig:
    """The config of :func:`gptq`.

    Args:
        base_config: the format: weights only (NVFP4WeightOnlyConfig), or weights and activations (NVFP4Config). With
            quantized activations, the Hessian is that of quantized inputs, and the target is the output on unquantized
            inputs. By default weights only, with a scale search.
        damping: the fraction of the mean of the Hessian's diagonal that is added to its diagonal.
        act_order: round blocks, and columns within each block, in descending order of the Hessian's diagonal. False
            rounds them in memory order.
        dense_target_weight: interpolates the target between the weight's output on the quantized model's inputs (0, the
            default) and the dense model's output on the dense model's inputs (1), with which each layer compensates for
            the errors of the layers before it. Values above 0 need more runs of each layer. SmolLM2 gained slightly
            with 8,192 tokens; toy models with fewer tokens gained nothing.
        sequential_within_layer: run a layer again for each of its inputs, so that ``o_proj`` is fitted to the outputs
            of the quantized ``q_proj``, ``k_proj`` and ``v_proj``. By default all inputs of a layer are recorded before
            its first weight changes.

    Raises:
        ValueError: a number out of range, or a spec other than 1x16 blocks rounded to nearest without a transform.
        TypeError: base_config has another type.
    """

    base_config: NVFP4WeightOnlyConfig = dataclasses.field(  # by default that of the table of accuracies
        default_factory=lambda: NVFP4WeightOnlyConfig(scale_search="mse", scale_ceiling=448)
    )
    damping: float = 0.01
    act_order: bool = True
    dense_target_weight: float = 0.0
    sequential_within_layer: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.base_config, NVFP4WeightOnlyConfig):
            raise TypeError(
                f"base_config must be an NVFP4WeightOnlyConfig or NVFP4Config, not {type(self.base_config).__name__}"
            )
        if not 0 < self.damping < float("inf"):
            raise ValueError(f"damping must be positive and finite, for instance 0.01, got {self.damping!r}")
        if not 0 <= self.dense_target_weight <= 1:
            raise ValueError(f"dense_target_weight must be from 0 to 1, got {self.dense_target_weight!r}")
        for name, spec in (("weight", self.base_config.weight), ("activation", self.base_config.activation)):
            if spec is not None and (spec.round_mode != RoundingMode.RNE or spec.hadamard_sign is not None):
                raise ValueError(
                    f"GPTQ needs a {name} spec with round_mode 'rne' and without a Hadamard transform, got {spec}"
                )
        if self.base_config.weight.block_rows != 1:
            raise ValueError(f"GPTQ needs 1x16 blocks: give block_rows=1, not {self.base_config.weight.block_rows}")
        if any(getattr(self.base_config, name, None) for name in ("step", "weighted", "percentile", "headroom")):
            raise ValueError(
                "step, weighted, percentile and headroom are only for calibrate: GPTQ weighs errors by the full "
                "Hessian, and each call computes the amax of its activations"
            )

    @property
    def weight(self) -> QuantizeSpec:
        """The spec of the weights."""
        return self.base_config.weight


REST = "rest"
"""The file with the weights outside of layers."""


def gptq(
    model: nn.Module,
    batches: Iterable[Any],
    config: GPTQConfig | NVFP4WeightOnlyConfig | None = None,
    *,
    filter_fn: Filter | None = None,
    layers: Sequence[nn.Module] | None = None,
    folder: str | Path | None = None,
    progress: bool = True,
) -> nn.Module:
    """Quantize a model in place by GPTQ (arXiv:2210.17323), one layer at a time.

    A model that trained is taken as :func:`training.to_dense` would leave it. Every expert of a transformers model gets
    statistics of all tokens of its layer, in which those that the router sent elsewhere count little: see
    :func:`calibrate`. Linears that servers join (q, k and v; gate and up) share the largest of their per-tensor scales,
    as with ``quantize_model``.

    The model, the hidden states of all batches (two copies with ``dense_target_weight``), the statistics of one layer
    and, with ``dense_target_weight``, the dense inputs of one layer are kept in memory. The dense weights are kept
    until the run is complete: after an exception or an interrupt, the model is restored.

    Args:
        model: the model whose linears and experts, of transformers, are replaced in place. It runs in eval mode.
        batches: the inputs of the model. Each is a tensor, a tuple of arguments or a mapping of keyword arguments. Use
            at least a few thousand tokens, similar to those that the model will process.
        config: a :class:`GPTQConfig`. An NVFP4WeightOnlyConfig or NVFP4Config is used as its base_config.
        filter_fn: selects modules by (module, name): linears, and modules with experts; by default those of
            ``quantize_model``. A shared weight stays dense, with a warning.
        layers: the sequential layers of the model. By default, those of the longest nn.ModuleList that contain most of
            the selected modules. ``[]`` treats the model as one layer: all inputs are recorded before its first weight
            changes.
        folder: a folder for finished layers, from which an interrupted run resumes.
        progress: show a progress bar over the weights.

    Returns:
        The model.

    Raises:
        TypeError: config or a selected module has another type, or a weight is sharded.
        ValueError: no batches, layers that do not form a chain, inputs that are not finite, or a folder of another run.
        RuntimeError: no batch reached a weight.

    Example::

        batches = [tokenizer(text, return_tensors="pt") for text in texts]
        gptq(model, batches, filter_fn=lambda module, name: isinstance(module, nn.Linear) and name != "lm_head")
    """
    if not isinstance(config, GPTQConfig):
        config = GPTQConfig() if config is None else GPTQConfig(base_config=config)
    batches = list_of(batches, "GPTQ needs the inputs of weights")
    with torch.no_grad(), restored(model, only_on_error=True):
        targets = find_targets(model, PlannedFilter(model, plan_model(model)) if filter_fn is None else filter_fn)
        chain = _chain(model, targets, layers)
        finished = None if folder is None else Finished(folder, config, model, targets, batches)
        to_dense(model)
        for each in targets:
            if each.dense.dim() == 2:
                with refused_by_name(each.name.rpartition(".")[0]):
                    check_observable(each.module)
        with in_eval_mode(model), tqdm(total=len(targets), desc="GPTQ", unit="weight", disable=not progress) as bar:
            run = _Run(config, _joined(model, targets), finished, bar.update)
            rest = run.fit_layers(model, chain, targets, batches) if chain else targets
            run.fit(REST, rest, [functools.partial(call_model, model, batch) for batch in batches])
        for module, tokens in run.routed.items():
            setattr(module, ROUTED, tokens.tolist())
    if progress and run.routed:
        tqdm.write(summary_of(routed_tokens(model)), file=sys.stderr)
    return model


def _chain(
    model: nn.Module, targets: Sequence[WeightRef], layers: Sequence[nn.Module] | None
) -> list[tuple[str, nn.Module]]:
    if layers is None:
        return layers_of(model, [target.module for target in targets])
    names = {module: name for name, module in model.named_modules()}
    if len(set(layers)) < len(layers):
        raise ValueError("one of the layers is given twice: give layers=[] to treat the model as one layer")
    if foreign := [layer for layer in layers if layer not in names]:
        raise ValueError(f"layers must be modules of the model, and {type(foreign[0]).__name__} is not one of them")
    return [(names[layer], layer) for layer in layers]


def _joined(model: nn.Module, targets: Sequence[WeightRef]) -> dict[WeightRef, list[WeightRef]]:
    """Return the weights with which each linear that servers join shares a per-tensor scale, including itself."""
    own = {target.module: target for target in targets if target.dense.dim() == 2}
    return {own[linear]: [own[each] for each in group] for linear, group in joined_linears(model, own).items()}


# --- the weights of a model ---


def find_targets(model: nn.Module, filter_fn: Filter | None) -> list[WeightRef]:
    """Return the weights of the modules that the filter selects: linears, and modules with experts of transformers.

    Shared weights are left out, with a warning.
    """
    chosen = {
        module: name
        for name, module in model.named_modules()
        if (is_linear(module) or expert_weights(module) if filter_fn is None else filter_fn(module, name))
    }
    refuse_absent(model, chosen)
    targets = [target for module, name in chosen.items() for target in _targets_of(name, as_linear(module))]
    if not targets:
        raise ValueError(
            f"nothing to quantize in {type(model).__name__}: it has no linear and no experts"
            + (" that filter_fn selects" if filter_fn else "")
        )
    holders = shared_parameters(model)
    shared = [target.name for target in targets if id(target.dense) in holders]
    if shared:
        warn_user(f"left dense, because several modules share the weight: {', '.join(shared)}")
    return [target for target in targets if target.name not in shared]


def _targets_of(name: str, module: nn.Module) -> Iterator[WeightRef]:
    prefix = f"{name}." if name else ""
    experts = expert_weights(module)
    if not experts:
        with refused_by_name(name):
            weight = quantizable(module).weight
        yield WeightRef(f"{prefix}weight", module, "weight", weight)
    for attribute in experts:
        parameter = getattr(module, attribute)
        if type(parameter.data) is not Tensor or parameter.dtype not in HIGH_PRECISION_DTYPES:
            raise ValueError(
                f"{prefix}{attribute} is {parameter.dtype}, or quantized already: start from the dense model"
            )
        yield WeightRef(f"{prefix}{attribute}", module, attribute, parameter)


# --- a run ---


@dataclasses.dataclass
class _Run:
    """The state of one call of gptq."""

    config: GPTQConfig
    joined: Mapping[WeightRef, Sequence[WeightRef]]
    finished: Finished | None
    tick: Callable[[], object]
    routed: dict[nn.Module, Tensor] = dataclasses.field(default_factory=dict)
    """The tokens that the router sent to each expert, by experts' module."""

    def fit_layers(
        self,
        model: nn.Module,
        layers: Sequence[tuple[str, nn.Module]],
        targets: Sequence[WeightRef],
        batches: Sequence[Any],
    ) -> list[WeightRef]:
        """Quantize the layers in sequence. Return the weights outside of them."""
        hidden, calls = record(model, layers, batches)
        dense = list(hidden) if self.config.dense_target_weight else []  # hidden states of the dense model
        left = list(targets)
        for i, (name, layer) in enumerate(layers):
            modules = set(layer.modules())
            own = [target for target in left if target.module in modules]
            left = [target for target in left if target not in own]
            of_layer, fed = [of_batch[i] for of_batch in calls], []
            for batch, states in enumerate(dense):
                with Watch(own) as watch:
                    dense[batch] = of_layer[batch].run(layer, states)
                fed.append(watch)
            runs = [functools.partial(call.run, layer, states) for call, states in zip(of_layer, hidden, strict=True)]
            rows = [states.shape[:-1].numel() for states in hidden]
            self.fit(name, own, runs, fed, rows, sequential=self.config.sequential_within_layer)
            hidden.clear()  # each is freed when its run is
            while runs:
                hidden.append(runs.pop(0)())
        return left

    def fit(
        self,
        name: str,
        targets: Sequence[WeightRef],
        runs: Sequence[Callable[[], object]],
        dense: Sequence[Watch] = (),
        rows: Sequence[int] = (),
        *,
        sequential: bool = False,
    ) -> None:
        """Quantize weights by the inputs that they have in the runs, one run a batch, unless the folder has them.

        dense: their inputs in the dense model, which count for weights whose input has all ``rows`` of a batch.
        sequential: run again for each input of the weights, with those before it quantized.
        """
        if not targets or (self.finished is not None and self.finished.load(name, targets, self.tick)):
            return
        for group in self._groups(targets, runs, dense) if sequential else [targets]:
            collected: dict[Fed, Statistics] = {}
            routed: dict[nn.Module, Tensor] = {}
            for i, run in enumerate(runs):
                with Watch(group) as watch:
                    run()
                self._collect(collected, watch, dense[i] if dense else None, rows[i] if rows else None)
                for module, tokens in watch.routed.items():
                    routed[module] = routed[module] + tokens if module in routed else tokens
            self._quantize(group, collected)
            self.routed |= routed  # each pass over the batches counts the same
        if self.finished is not None:
            self.finished.save(name, targets)

    def _groups(
        self, targets: Sequence[WeightRef], runs: Sequence[Callable[[], object]], dense: Sequence[Watch]
    ) -> list[list[WeightRef]]:
        """Return the weights of each pass over the batches: those that share an input or a scale."""
        groups: list[list[WeightRef]] = []
        left = list(targets)
        for i, run in enumerate(runs):
            if dense:
                watch = dense[i]
            elif left:
                with Watch(left) as watch:
                    run()
            for group in watch.groups():
                reached = [other for target, _ in group for other in self.joined.get(target, [target])]
                if new := [target for target in dict.fromkeys(reached) if target in left]:
                    left = [target for target in left if target not in new]
                    groups.append(new)
        return [*groups, left] if left else groups

    def _collect(self, to: dict[Fed, Statistics], watch: Watch, dense: Watch | None, rows: int | None) -> None:
        """Add the inputs of one batch to the statistics of each weight; weights that share an input share them."""
        activation, share = self.config.base_config.activation, self.config.dense_target_weight
        for group in watch.groups():
            x = watch.rows(group[0])
            assert x is not None
            if group[0] not in to:
                to |= dict.fromkeys(group, Statistics.zeros(group, activation is not None or share > 0))
            same_rows = None if dense is None or len(x) != rows else dense.rows(group[0])
            to[group[0]].add(x, same_rows, watch.weights(group[0]), activation, share)

    def _quantize(self, targets: Sequence[WeightRef], collected: Mapping[Fed, Statistics]) -> None:
        made: dict[WeightRef, dict[int, NVFP4Tensor]] = {}
        shared: dict[WeightRef, Tensor] = {}
        spec, fields = self.config.weight, self.config.base_config.fields
        for each in _by_input(targets, collected):
            with torch.autocast(each.hessian.device.type, enabled=False):  # autocast would round the products
                factor = self._factor(each)
                for target, expert in each.fed:
                    if target in self.joined and target not in shared and not spec.row_scaled:
                        shared |= self._joined_amax(target, each, factor, collected)
                    weight = self._aimed_at(each, (target, expert), factor)
                    amax = shared[target].to(weight.device) if target in shared else self._amax(weight)
                    rounded = round_weight(weight, factor, spec, amax)
                    made.setdefault(target, {})[expert] = rounded._replace(orig_dtype=target.dense.dtype, **fields)
        for target, experts in made.items():
            target.set(target.joined([experts[expert] for expert in range(target.experts)]))
            self.tick()

    def _joined_amax(
        self, target: WeightRef, each: Statistics, factor: Factor, collected: Mapping[Fed, Statistics]
    ) -> dict[WeightRef, Tensor]:
        """Return the largest amax of the linears that servers join with this one, by linear. ``each`` is of its input,
        which the others may not have."""
        every = {}
        for other in self.joined[target]:
            if own := collected.get((other, 0)):
                weight = self._aimed_at(own, (other, 0), factor if own is each else self._factor(own))
                every[other] = self._amax(weight).to(each.hessian.device)
        return dict.fromkeys(every, torch.stack([*every.values()]).amax())

    def _factor(self, each: Statistics) -> Factor:
        try:
            return Factor.of(each.hessian, self.config.damping, act_order=self.config.act_order)
        except ValueError as error:
            names = ", ".join(dict.fromkeys(target.name for target, _ in each.fed))
            raise ValueError(f"{names}: {error}") from None

    def _amax(self, weight: Tensor) -> Tensor:
        row_scaled = self.config.weight.row_scaled
        return reference.row_amax(weight) if row_scaled else torch.ops.nvfp4.amax(weight)

    def _aimed_at(self, each: Statistics, fed: Fed, factor: Factor) -> Tensor:
        """Return the float32 weight (N, K) to round: the dense one, or its best fit to the actual inputs."""
        target, expert = fed
        weight = target.matrix(expert).float()
        if not weight.isfinite().all():
            raise ValueError(f"{target.name} has NaN or Inf: replace these values, or exclude it with filter_fn")
        return weight if each.cross is None else moved_to_inputs(weight, each.cross, each.hessian, factor)


def _by_input(targets: Sequence[WeightRef], collected: Mapping[Fed, Statistics]) -> list[Statistics]:
    """Return the statistics, one per input, experts in order."""
    result: dict[int, Statistics] = {}
    for target in targets:
        for fed in [(target, expert) for expert in range(target.experts)]:
            if fed not in collected:
                raise RuntimeError(
                    f"no batch reached {target.name}, and the model is unchanged: exclude it with filter_fn, or give "
                    "batches that use it"
                )
            result[id(collected[fed])] = collected[fed]
    return list(result.values())


# --- the folder of finished layers ---


class Finished:
    """A folder with one file per finished layer, for one model, one config and one set of batches.

    Raises:
        ValueError: the folder has the layers of another run.
    """

    def __init__(
        self,
        folder: str | Path,
        config: GPTQConfig,
        model: nn.Module,
        targets: Sequence[WeightRef],
        batches: Sequence[Any],
    ) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        # Including norms and embeddings: inputs depend on them.
        weights = digest([[target.name for target in targets], dict(model.named_parameters())])
        settings = {"config": str(config), "weights": weights, "batches": digest(batches)}
        path = self.folder / "settings.json"
        if not path.exists():
            path.with_suffix(".part").write_text(json.dumps(settings, indent=1) + "\n")
            path.with_suffix(".part").replace(path)
        found = json.loads(path.read_text())
        if differs := [name for name, value in settings.items() if found.get(name) != value]:
            raise ValueError(
                f"{self.folder} has the layers of a run with other {', '.join(differs)}: resume with the same ones, or "
                "give another folder"
            )

    def load(self, name: str, targets: Sequence[WeightRef], tick: Callable[[], object]) -> bool:
        """Set the weights of layer ``name``. Return whether it is finished."""
        path = self.folder / f"{name}.pt"
        if not path.exists():
            return False
        weights = torch.load(path, weights_only=True, map_location=targets[0].dense.device)
        if set(weights) != {target.name for target in targets}:
            raise ValueError(f"{path} does not have the weights of {name}: delete it to quantize the layer again")
        for target in targets:
            target.set(weights[target.name])
            tick()
        return True

    def save(self, name: str, targets: Sequence[WeightRef]) -> None:
        """Write the weights of a layer atomically."""
        path = self.folder / f"{name}.pt"
        weights = {target.name: getattr(target.module, target.attribute).data for target in targets}
        torch.save(weights, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)


def digest(value: Any) -> str:
    """Return a hash of the values of tensors and containers of tensors."""
    into = hashlib.blake2b(digest_size=16)
    _digest(value, into)
    return into.hexdigest()


def _digest(value: Any, into: Any) -> None:
    if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        names, context = value.__tensor_flatten__()
        into.update(repr((context, tuple(value.shape), value.stride())).encode())
        _digest([getattr(value, name) for name in names], into)
    elif isinstance(value, Tensor):
        into.update(repr((value.dtype, tuple(value.shape))).encode())
        into.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        for name, item in value.items():
            into.update(repr(name).encode())
            _digest(item, into)
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        for item in value:
            _digest(item, into)
    else:
        into.update(repr(value).encode())
