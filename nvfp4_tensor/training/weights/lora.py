"""LoRA adapters folded into NVFP4 weights, the sum rounded stochastically."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nvfp4_tensor.numerics.choices import RoundingMode
from nvfp4_tensor.numerics.random_state import rng_state_of
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor, quantize


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
    """Q(decode(w) + scaling * b @ a), in float32 up to the rounding; all but the codes and scales is as in w.

    To nearest, a delta of less than half a step is lost; stochastically it stays in the mean.

    Args:
        w: (N, K), not transposed, no Hadamard transform, one per-tensor scale.
        a, b: (r, K) and (N, r), floating point, on the device of w.
        scaling: of the product; lora_alpha / r for peft's adapters.
        round_mode: in place of that of ``w.spec``, by which it is quantized else.
        rng_state, generator: as :func:`quantize` takes them.

    Raises:
        TypeError: w is not an NVFP4Tensor.
        ValueError: a w outside these, or shapes that do not fit.

    >>> w = quantize(torch.randn(32, 64))
    >>> merged = merge_low_rank(w, torch.randn(4, 64), torch.zeros(32, 4))
    """
    _check_weight(w, "w")
    if a.dim() != 2 or b.dim() != 2 or (b.shape[0], a.shape[1]) != w.shape or a.shape[0] != b.shape[1]:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)} are not (r, K) and (N, r) of w {tuple(w.shape)}")
    return _requantized(w, (b.float() @ a.float()) * scaling, round_mode, rng_state, generator)


@torch.no_grad()
def merge_lora(
    model: nn.Module, *, round_mode: RoundingMode | str = "stochastic", seed: int | None = None
) -> nn.Module:
    """peft's active LoRA adapters folded into the weights, and the model without them.

    NVFP4 weights become Q(decode(W) + sum of the adapters' deltas), rounded once, in place; specs, static activation
    scales and backends stay. Dense weights are merged by peft. Where ``merge_and_unload()`` of peft is told how to
    quantize (``get_apply_tensor_subclass``), it rounds by that config, once an adapter, in the weight's dtype.

    Args:
        model: what ``peft.get_peft_model`` or ``PeftModel.from_pretrained`` returned.
        round_mode: "stochastic", or "rne", "away", "zero"; in place of that of each weight's spec.
        seed: of the random bits, which go by the layers' names; drawn from torch's generator by default.

    Raises:
        ImportError: peft is not installed.
        TypeError: the model is not peft's.
        ValueError: no LoRA layer, one merged already, one that is not plain LoRA (DoRA, a bias of its own), a weight
            that cannot be merged into, an adapter that is not finite. Nothing has changed then.

    >>> model = merge_lora(model, seed=0)
    """
    import peft

    if not isinstance(model, peft.PeftModel):
        raise TypeError(
            f"merge_lora takes a peft.PeftModel, not a {type(model).__name__}: see merge_low_rank for a pair"
        )
    mode = RoundingMode.of(round_mode)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no LoRA layer to merge")
    for name, layer in layers.items():
        _check_layer(name, layer, mode)
    if seed is None:
        seed = int(torch.randint(2**63 - 1, ()))
    for name, layer in layers.items():
        weight = layer.get_base_layer().weight
        adapters = _adapters(layer)
        if isinstance(weight, NVFP4Tensor):
            rng_state = rng_state_of(seed, name, 0, weight.device)
            if adapters:
                weight.copy_(_requantized(weight, _delta(layer, adapters), mode, rng_state, None))
        else:
            layer.merge(adapter_names=adapters)
    return model.unload()


def _adapters(layer: Any) -> list[str]:
    return [name for name in layer.active_adapters if name in layer.lora_A]


def _delta(layer: Any, adapters: list[str]) -> Tensor:
    """The sum of what the adapters add, float32 (N, K)."""
    products = [
        (layer.lora_B[name].weight.float() @ layer.lora_A[name].weight.float()) * layer.scaling[name]
        for name in adapters
    ]
    return torch.stack(products).sum(dim=0) if len(products) > 1 else products[0]


def _check_layer(name: str, layer: Any, mode: RoundingMode) -> None:
    if layer.merged:
        raise ValueError(f"{name} is merged already, by peft: unmerge it, or unload() the model")
    weight = getattr(layer.get_base_layer(), "weight", None)
    adapters = _adapters(layer)
    for adapter in adapters:
        if any(not p.isfinite().all() for m in (layer.lora_A, layer.lora_B) for p in m[adapter].parameters()):
            raise ValueError(f"adapter {adapter!r} of {name} has NaN or infinity")
    if not isinstance(weight, NVFP4Tensor):
        return
    _check_weight(weight, f"the weight of {name}")
    if mode == RoundingMode.EDEN:
        raise ValueError("EDEN makes no weight that is kept: merge by 'stochastic' or 'rne'")
    for adapter in adapters:
        variant = layer.lora_variant.get(adapter) if hasattr(layer, "lora_variant") else None
        if variant is not None:
            raise ValueError(f"{name} is not plain LoRA but {type(variant).__name__}: dequantize its weight and merge")
        if layer.lora_bias.get(adapter) or getattr(layer, "fan_in_fan_out", False):
            raise ValueError(f"{name} has a lora_bias or a transposed weight: dequantize its weight and merge by peft")


def _check_weight(w: Any, name: str) -> None:
    if not isinstance(w, NVFP4Tensor):
        raise TypeError(f"{name} is not an NVFP4Tensor but a {type(w).__name__}: quantize it first")
    if w.spec.hadamard_sign is not None:
        raise ValueError(f"{name} is Hadamard-transformed, and adapters are not: quantize without hadamard_sign")
    if w.dim() != 2 or w.transposed or w.per_tensor_scale.dim():
        raise ValueError(f"{name} is not one matrix (N, K) as it is stored, with one per-tensor scale: {w!r}")


def _requantized(
    w: NVFP4Tensor,
    delta: Tensor,
    round_mode: RoundingMode | str,
    rng_state: Tensor | None,
    generator: torch.Generator | None,
) -> NVFP4Tensor:
    spec = w.spec.replace(round_mode=round_mode)
    if not spec.is_stochastic:
        rng_state = generator = None
    new = quantize(w.dequantize(torch.float32) + delta, spec, rng_state=rng_state, generator=generator)
    return w._replace(qdata=new.qdata, scale=new.scale, per_tensor_scale=new.per_tensor_scale)
