"""Merge LoRA adapters into NVFP4 weights, by stochastic rounding on the grids that the weights have."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from nvfp4_tensor.numerics.choices import RoundingMode
from nvfp4_tensor.numerics.random_state import rng_state_of
from nvfp4_tensor.quantization.linear import PRE_SCALE
from nvfp4_tensor.quantization.weights import shared_amax
from nvfp4_tensor.tensor.arguments import resolve_rng_state
from nvfp4_tensor.tensor.fp8 import NOT_MERGED, FP8Tensor
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.tensor.tiles import requantize
from nvfp4_tensor.training.weights.base import scale_groups
from nvfp4_tensor.training.weights.headroom import move_to_per_tensor_scale
from nvfp4_tensor.training.weights.write_back import write_back


@torch.no_grad()
def merge_low_rank(
    w: NVFP4Tensor,
    a: Tensor,
    b: Tensor,
    scaling: float = 1.0,
    *,
    round_mode: RoundingMode | str = "stochastic",
    rng_state: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> NVFP4Tensor:
    """Return decode(w) + scaling * b @ a, computed in float32 and rounded.

    Stochastic rounding is :func:`write_back`'s: it keeps the sum in expectation on the grid that w has, so its noise is
    in proportion to the delta. Other modes quantize the sum anew by ``w.spec``; rounding to nearest loses a delta of
    less than half a step. Codes and scales are new; everything else is as in w.

    Args:
        w: (N, K), not transposed, without a Hadamard transform, with one per-tensor scale.
        a, b: (r, K) and (N, r), floating point, on the device of w.
        scaling: the factor of the product; lora_alpha / r for peft's adapters.
        round_mode: "stochastic", or another rounding mode instead of that of ``w.spec``.
        rng_state, generator: the source of random bits, as for :func:`quantize`.

    Raises:
        TypeError: if w is not an NVFP4Tensor.
        ValueError: if w is not supported, or shapes do not fit.

    >>> w = quantize(torch.randn(32, 64))
    >>> merged = merge_low_rank(w, torch.randn(4, 64), torch.zeros(32, 4))
    """
    _check_weight(w, "w")
    if a.dim() != 2 or b.dim() != 2 or (b.shape[0], a.shape[1]) != w.shape or a.shape[0] != b.shape[1]:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)} are not (r, K) and (N, r) of w {tuple(w.shape)}")
    delta, mode = (b.float() @ a.float()) * scaling, RoundingMode.of(round_mode)
    if mode == RoundingMode.STOCHASTIC:
        rng_state = resolve_rng_state(delta, w.spec.with_round_mode(mode), rng_state, generator)
        return write_back(w, delta, rng_state=rng_state)
    return _requantized(w, w.dequantize(torch.float32) + delta, mode)


@torch.no_grad()
def merge_lora(
    model: nn.Module, *, round_mode: RoundingMode | str = "stochastic", seed: int | None = None
) -> nn.Module:
    """Merge peft's active LoRA adapters into the weights, in place, and return the model without adapters.

    To an NVFP4 weight, the sum of the adapters' deltas is added in float32, and the result is rounded once, as by
    :func:`merge_low_rank`. Specs, static activation scales and backends do not change. Linears that share a per-tensor
    scale go on sharing one.

    peft merges dense weights (linears, embeddings, convolutions, attention, DoRA and the like), trainable tokens and
    modules_to_save. In contrast, peft's ``merge_and_unload()`` with ``get_apply_tensor_subclass`` rounds once per
    adapter, in the weight's dtype, by that config; and it leaves adapters within modules_to_save in place, which are
    merged here.

    Args:
        model: the result of ``peft.get_peft_model`` or ``PeftModel.from_pretrained``.
        round_mode: "stochastic", "rne", "away" or "zero", instead of that of each weight's spec.
        seed: together with a layer's name, it determines the random bits. By default, it is sampled from torch's
            generator.

    Raises:
        ImportError: if peft is not installed.
        TypeError: if the model is not a PeftModel.
        ValueError: if adapters are not LoRA; an NVFP4 weight has other adapters than plain LoRA of a linear (DoRA, or a
            bias); a weight is not supported, or another module shares it; or an adapter is merged, disabled or not
            finite, or peft cannot merge it. The model is unchanged in these cases.

    >>> model = merge_lora(model, seed=0)
    """
    import peft

    if not isinstance(model, peft.PeftModel):
        raise TypeError(
            f"merge_lora takes a peft.PeftModel, not a {type(model).__name__}: use merge_low_rank for a and b"
        )
    mode = RoundingMode.of(round_mode)
    layers = _checked_layers(model, mode)
    if seed is None:
        seed = int(torch.randint(2**63 - 1, ()))
    coded = {name: each for name, each in model.named_parameters() if isinstance(each, NVFP4Tensor)}
    adapted = {}
    for name, layer in layers.items():
        if isinstance(getattr(layer.get_base_layer(), "weight", None), NVFP4Tensor):
            layer.merge = lambda **_: None  # merged here, and not again when peft merges the others
            if _adapters(layer):
                adapted[f"{name}.base_layer.weight"] = layer
    groups = {name: group for group in scale_groups(model, coded) for name in group}
    for group in dict.fromkeys(groups.get(name, (name,)) for name in adapted):
        _merge_group({name: coded[name] for name in group}, adapted, mode, seed)
    _unwrap_saved_modules(model)
    return model.merge_and_unload()


def _merge_group(weights: dict[str, NVFP4Tensor], adapted: dict[str, Any], mode: RoundingMode, seed: int) -> None:
    """Merge a weight, or weights that share a per-tensor scale and go on sharing one, of which some have adapters.

    Those without adapters keep their codes: where the sums of others need a larger scale, it is 2, 4, ... times larger.
    """
    deltas = {name: _delta(adapted[name]) for name in weights if name in adapted}
    new = dict(weights)
    if mode == RoundingMode.STOCHASTIC:
        for name, delta in deltas.items():
            rng_state = rng_state_of("merge", seed, name.removesuffix(".base_layer.weight"), 0, delta.device)
            new[name] = write_back(weights[name], delta, rng_state=rng_state)
        largest = max(w.per_tensor_scale.item() for w in new.values())
    else:
        sums = {name: weights[name].dequantize(torch.float32) + delta for name, delta in deltas.items()}
        first, scale = next(iter(weights.values())), None
        amax = shared_amax(sums.values(), first.spec).to(first.device)
        if len(sums) < len(weights):
            held = first.per_tensor_scale
            scale = held * 2.0 ** math.ceil(math.log2(max((amax / (held * first.spec.largest_value)).item(), 1.0)))
            amax = scale * first.spec.largest_value
        for name, values in sums.items():
            each = _requantized(weights[name], values, mode, amax)
            new[name] = each if scale is None else each._replace(per_tensor_scale=scale.to(each.device))
        largest = new[next(iter(sums))].per_tensor_scale.item()
    for name, w in new.items():
        if (power := largest / w.per_tensor_scale.item()) > 1:
            move_to_per_tensor_scale(w, power)
        if name in deltas:
            weights[name].copy_(w)


def _unwrap_saved_modules(model: nn.Module) -> None:
    """Replace each ModulesToSaveWrapper by the module that it runs, because peft merges no adapter inside one."""
    from peft.utils.other import ModulesToSaveWrapper

    for name, wrapper in reversed(list(model.named_modules())):  # inner ones first
        if isinstance(wrapper, ModulesToSaveWrapper):
            active = wrapper.active_adapters
            model.set_submodule(name, wrapper.modules_to_save[active[0]] if active else wrapper.original_module)


def _adapters(layer: Any) -> list[str]:
    return [name for name in layer.active_adapters if name in layer.lora_A]


def _delta(layer: Any) -> Tensor:
    """Return the sum of the active adapters' deltas, float32 (N, K)."""
    products = [
        (layer.lora_B[name].weight.float() @ layer.lora_A[name].weight.float()) * layer.scaling[name]
        for name in _adapters(layer)
    ]
    return torch.stack(products).sum(dim=0) if len(products) > 1 else products[0]


def _checked_layers(model: nn.Module, mode: RoundingMode) -> dict[str, Any]:
    """Return the LoRA layers by name; raise a ValueError if an adapter cannot be merged."""
    from peft.tuners.lora import LoraLayer, LoraModel
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    if type(model.base_model) is not LoraModel:
        raise ValueError(
            f"merge_lora merges LoRA, not {type(model.base_model).__name__}: dequantize NVFP4 weights and call the "
            "model's merge_and_unload()"
        )
    model.base_model._check_merge_allowed()
    layers = {name: m for name, m in model.named_modules() if isinstance(m, BaseTunerLayer)}
    lora = {name: m for name, m in layers.items() if isinstance(m, LoraLayer)}
    if not lora:
        raise ValueError(f"{type(model).__name__} has no LoRA layer to merge")
    tokens = {name: m for name, m in layers.items() if isinstance(m, TrainableTokensLayer)}
    for name, layer in layers.items():
        _check_adapters(name, layer)
        if name in lora:
            _check_lora(name, layer, mode)
        elif name in tokens:
            tokens[name]._check_overlapping_tokens(layer.active_adapters)
        else:
            raise ValueError(f"{name} is a {type(layer).__name__} and not LoRA: unload it, or merge it with peft")
    _check_shared(model, lora, tokens)
    return lora


def _check_adapters(name: str, layer: Any) -> None:
    """Check the conditions for adapters of all kinds."""
    from peft.tuners.lora.layer import Linear
    from peft.utils.other import AuxiliaryTrainingWrapper

    if layer.merged:
        raise ValueError(f"{name} was merged already by peft: unmerge it, or unload() the model")
    if layer.disable_adapters:
        raise ValueError(f"the adapters of {name} are disabled: call enable_adapter_layers() of the model")
    for parameter_name, parameter in layer.named_parameters():
        parts = parameter_name.split(".")
        active = "base_layer" not in parts and set(parts) & set(layer.active_adapters)
        if active and not parameter.isfinite().all():
            raise ValueError(f"adapter {parameter_name!r} of {name} has NaN or infinity: train or load it again")
    base = layer.get_base_layer()
    if isinstance(base, AuxiliaryTrainingWrapper):
        raise ValueError(f"{name} is an adapter on a {type(base).__name__}, which peft does not merge: remove one")
    if any(isinstance(p, NVFP4Tensor) for p in base.parameters()) and not isinstance(layer, Linear):
        raise ValueError(
            f"{name} is a {type(layer).__name__} on an NVFP4 weight, but merge_lora merges only linears: dequantize "
            "its weight and merge it with peft"
        )


def _check_lora(name: str, layer: Any, mode: RoundingMode) -> None:
    base, variants = layer.get_base_layer(), layer.lora_variant
    weight = getattr(base, "weight", None)
    if isinstance(weight, FP8Tensor):
        raise ValueError(f"{name} has a weight in FP8: {NOT_MERGED}")
    if not isinstance(weight, NVFP4Tensor):
        _check_dense(name, layer)
        return
    _check_weight(weight, f"the weight of {name}")
    if PRE_SCALE in base._buffers:
        raise ValueError(f"{name} multiplies its inputs by {PRE_SCALE} (AWQ): dequantize its weight and merge")
    if mode == RoundingMode.EDEN:
        raise ValueError("EDEN does not support weights: use round_mode='stochastic' or 'rne'")
    for adapter in _adapters(layer):
        if adapter in variants:
            kind = type(variants[adapter]).__name__
            raise ValueError(f"{name} is not plain LoRA but {kind}: dequantize its weight and merge")
        if layer.lora_bias.get(adapter) or getattr(layer, "fan_in_fan_out", False):
            raise ValueError(
                f"{name} has a lora_bias or a transposed weight: dequantize its weight and merge it with peft"
            )


def _check_dense(name: str, layer: Any) -> None:
    """Raise a ValueError if peft cannot merge the layer; for variants of LoRA, try it on a copy of the weight."""
    if not type(layer).__module__.endswith("lora.layer"):
        raise ValueError(f"{name} is a {type(layer).__name__}, neither dense nor NVFP4: merge it with peft")
    base = layer.get_base_layer()
    for adapter in layer.active_adapters:
        if adapter in layer.lora_variant:
            variant = layer.lora_variant[adapter]
            try:
                variant.merge_safe(layer, adapter, base.weight.detach().clone())
            except (NotImplementedError, RuntimeError, ValueError) as error:
                raise ValueError(f"{name} is {type(variant).__name__}, which peft does not merge: {error}") from error
        if layer.lora_bias.get(adapter) and getattr(base, "bias", None) is None:
            raise ValueError(f"{name} has a lora_bias, but no bias to merge it into: add a bias of zeros to the linear")


def _check_shared(model: nn.Module, lora: Iterable[str], tokens: Iterable[str]) -> None:
    """Raise a ValueError if a merge would change a tied weight that a module without the adapter reads.

    Trainable tokens replace rows, and peft ties them, so all modules that share a weight may have them.
    """
    names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    owners = [(f"{name}.",) for name in lora] + [tuple(name.removesuffix("token_adapter") for name in tokens)]
    for owner in owners:
        for shared in names.values():
            others = [name for name in shared if not name.startswith(owner)]
            if others and len(others) < len(shared):
                own = next(name for name in shared if name.startswith(owner))
                raise ValueError(f"{own} is tied to {others[0]}, which the merge would change: untie them")


def _check_weight(w: Any, name: str) -> None:
    if not isinstance(w, NVFP4Tensor):
        raise TypeError(f"{name} is not an NVFP4Tensor but a {type(w).__name__}: quantize it first")
    if w.spec.hadamard_sign is not None:
        raise ValueError(f"{name} is Hadamard-transformed, but adapters are not: quantize without hadamard_sign")
    if w.dim() != 2 or w.transposed or w.per_tensor_scale.dim():
        raise ValueError(
            f"{name} has to be one matrix (N, K), not transposed, with one per-tensor scale, and is {w!r}: merge each "
            "matrix before stacking or transposing"
        )


def _requantized(w: NVFP4Tensor, values: Tensor, mode: RoundingMode, amax: Tensor | None = None) -> NVFP4Tensor:
    new = requantize(w, values, w.spec.with_round_mode(mode), amax=None if amax is None else amax.to(w.device))
    return w._replace(qdata=new.qdata, scale=new.scale, per_tensor_scale=new.per_tensor_scale)
