"""All blocks of a described model for one token of each text as one operator: on a CPU, and on Hopper for one text.

    layers = on_cpu(flatten(describe(model)), buffers)
    hidden = layers(x, place, rotations)

A CPU's operator reads a list of tensors and two tables of numbers; ``ops/composite/decode_step.py`` has their layout.
That of Hopper takes a Llama, with a dense cache or one of codes (``ops/composite/decode_layers.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from nvfp4_tensor.generation.architectures import Block, Linear, Model, Norm
from nvfp4_tensor.generation.ring import CodedBuffers, DenseBuffers, Place, StepBuffers
from nvfp4_tensor.numerics.layout import TILE_ROWS
from nvfp4_tensor.ops.composite.decode_step import KINDS, NUMBERS, PARTS, WEIGHTS, NormStyle
from nvfp4_tensor.ops.composite.step import Activation
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

SIZE_STEP, DENSE_SIZE_STEP, MOST_HEAD_DIM = 16, 32, 1024
"""Hidden sizes and head dimensions must be multiples of SIZE_STEP, with a router of DENSE_SIZE_STEP."""

Rotation = tuple[Tensor, Tensor]
"""cos and sin (1 or B, rotary)."""


# --- on a CPU --------------------------------------------------------------------------------------------------------


StepArguments = tuple[list[Tensor], Tensor, Tensor]
"""What ``nvfp4::decode_step`` reads of a model: the tensors of all blocks and of the last norm, not copies; int64
(blocks + 1, kinds); float64 (blocks + 1, numbers)."""


def flatten(model: Model) -> StepArguments:
    """Return the arguments of ``nvfp4::decode_step`` for a description.

    Args:
        model: a bfloat16 model on the CPU, whose linears in blocks (and experts) are weight-only NVFP4.

    Raises:
        ValueError: the op does not support a weight or size of the model. The message has its name.
    """
    hidden = model.embedding.shape[1]
    if hidden % SIZE_STEP:
        raise ValueError(f"decode_natively needs a hidden_size that is a multiple of {SIZE_STEP}, not {hidden}")
    weights: list[Tensor] = []
    kinds, numbers = [], []
    for block in (*model.blocks, Block({"norm_before_attention": model.norm})):
        tensors = dict(_tensors(block, hidden))
        bits = sum(1 << i for i, name in enumerate(PARTS) if name in tensors)
        weights += [t for name in PARTS for t in tensors.get(name, ())]
        eps, style = _alike(block.norms)
        row, floats = block.kinds | {"parts": bits, "norm": style}, block.numbers | {"eps": eps}
        kinds.append([row[name] for name in KINDS])
        numbers.append([floats[name] for name in NUMBERS])
    rows = torch.tensor(kinds, dtype=torch.int64, device="cpu")
    return weights, rows, torch.tensor(numbers, dtype=torch.float64, device="cpu")


def on_cpu(arguments: StepArguments, buffers: Sequence[DenseBuffers]) -> Callable[..., Tensor]:
    """Return all blocks and the last norm of a described model as one operator, with the buffers of one cache.

    From embedded tokens x (B, D), the place where they are written, and the rotations of each of the model's rotary
    embeddings to the hidden states (B, D).
    """
    keys, values = ([each[i] for each in buffers] for i in range(2))

    def layers(x: Tensor, place: Place, rotations: Sequence[Rotation]) -> Tensor:
        cos, sin = [pair[0] for pair in rotations], [pair[1] for pair in rotations]
        hidden: Tensor = torch.ops.nvfp4.decode_step(
            x, *arguments, keys, values, cos, sin, int(place.position), place.starts
        )
        return hidden

    return layers


def _tensors(block: Block, hidden: int) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """Yield the present PARTS of a block."""
    dim = block.kinds["dim"]
    if dim % SIZE_STEP or dim > MOST_HEAD_DIM:
        raise ValueError(
            f"decode_natively needs a head_dim that is a multiple of {SIZE_STEP} up to {MOST_HEAD_DIM}, and head_dim "
            f"is {dim}"
        )
    for part, each in block.parts.items():
        if isinstance(each, Norm):
            yield part, (_norm_weight(each),)
        elif not isinstance(each, Linear):
            yield part, (_dense(part, each),)
        else:
            yield part, _weight(block, part, each, hidden)
            if each.bias is not None:
                yield f"{part}_bias", (_dense(f"{each.name}.bias", each.bias),)


def _weight(block: Block, part: str, linear: Linear, hidden: int) -> tuple[Tensor, ...]:
    name, weight = linear.name, linear.weight
    if part == "router":
        if hidden % DENSE_SIZE_STEP:
            raise ValueError(f"the router {name} needs a hidden_size of a multiple of {DENSE_SIZE_STEP}, not {hidden}")
        return (_dense(name, weight),)
    _check_dtype(name, weight)
    is_of_experts = block.experts is not None and part in ("gate", "down")
    if not isinstance(weight, NVFP4Tensor):
        more = "experts=True" if is_of_experts else ""
        raise ValueError(f"{name} is dense: call quantize_(model.model, NVFP4WeightOnlyConfig({more})) first")
    if weight.activation_spec is not None or weight.transposed != linear.transposed:
        raise ValueError(f"{name} quantizes its activations (W4A4): decode_natively needs a weight-only model")
    parts = weight.qdata, weight.scale, weight.per_tensor_scale
    if not all(part.is_contiguous() for part in parts) or weight.spec.hadamard_sign is not None:
        raise ValueError(
            f"{name} is a view of another weight, or Hadamard-transformed: quantize it separately, without a transform"
        )
    if is_of_experts and parts[0].shape[-2] % TILE_ROWS:
        raise ValueError(
            f"{name} has {parts[0].shape[-2]} rows per expert: decode_natively needs a multiple of {TILE_ROWS}"
        )
    return parts


def _alike(norms: list[Norm]) -> tuple[float, int]:
    """Return eps and the style that all norms of a block have."""
    values = {(norm.eps, _style(norm)) for norm in norms} or {(0.0, 0)}
    if len(values) != 1:
        names = ", ".join(norm.name for norm in norms)
        raise ValueError(f"decode_natively needs equal norms in a layer, and eps and style of {names} are {values}")
    return values.pop()


def _style(norm: Norm) -> int:
    if norm.offset not in (0.0, 1.0):
        raise ValueError(f"{norm.name} adds {norm.offset} to its weight: decode_natively supports 0 and 1")
    plus_one = NormStyle.PLUS_ONE if norm.offset else 0
    return int(plus_one | (0 if norm.rounds_before_weight else NormStyle.ROUND_ONCE))


def _norm_weight(norm: Norm) -> Tensor:
    """Return the weight of a norm, bfloat16, or float32 if the model rounds after it (gpt-oss keeps norms wide)."""
    if norm.weight.dtype == torch.float32 and not norm.rounds_before_weight and norm.weight.device.type == "cpu":
        return norm.weight
    return _dense(norm.name, norm.weight)


def _dense(name: str, tensor: Tensor) -> Tensor:
    _check_dtype(name, tensor)
    if isinstance(tensor, NVFP4Tensor) or not tensor.is_contiguous():
        raise ValueError(f"{name} must be a dense, contiguous tensor for decode_natively")
    return tensor


def _check_dtype(name: str, tensor: Tensor) -> None:
    if tensor.device.type != "cpu" or tensor.dtype != torch.bfloat16:
        raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}: decode_natively needs bfloat16 on the CPU")


# --- on Hopper -------------------------------------------------------------------------------------------------------


class FusedLayers:
    """The blocks and the last norm of a described model, with the buffers of one cache.

    It keeps the kernel's descriptors of weights and buffers, and its scratch memory: 0.2 MB for a model of 8B. One call
    at a time may use them.

    Args:
        model: a model for which :func:`fits` is True.
        buffers: of each layer, for one text.
    """

    def __init__(self, model: Model, buffers: Sequence[StepBuffers]) -> None:
        first = model.blocks[0]
        self.constants = model.norm.eps, first.numbers["scaling"]
        self.rotary = first.kinds["rotary"]
        cache, self.coding = _cache(buffers)
        self.tensors = *_weights(model), *cache
        self.plan: Tensor = torch.ops.nvfp4.decode_layers_plan(model.norm.weight, *self.tensors)

    @classmethod
    def of(cls, model: Model, buffers: Sequence[StepBuffers]) -> FusedLayers | None:
        """Return the layers as one kernel, or None where there is none for the model, the buffers or the device."""
        first = buffers[0].dense[0]
        if not fits(model) or first.shape[0] != 1 or not first.is_cuda:
            return None
        layers = cls(model, buffers)
        return layers if layers.plan.numel() else None

    def __call__(self, x: Tensor, place: Place, rotations: Sequence[Rotation]) -> Tensor:
        """Return the hidden states (1, D) after the last norm of one embedded token x (1, D).

        Args:
            place: of the token, whose position is less than the length of the buffers; without ``starts``.
            rotations: cos and sin (1, head_dim) for each of the model's rotary embeddings.
        """
        cos, sin = (each.flatten() for each in rotations[self.rotary])
        hidden: Tensor = torch.ops.nvfp4.decode_layers(
            x, self.plan, *self.tensors, cos, sin, place.position, *self.constants, *self.coding
        )
        return hidden


_LLAMA = {"norm_before_attention", "norm_before_feed_forward", *WEIGHTS}


def fits(model: Model) -> bool:
    """Return whether the op ``decode_layers`` computes the blocks of this model."""
    first, norms = model.blocks[0], [model.norm, *(norm for block in model.blocks for norm in block.norms)]
    kinds, numbers, rotary = first.kinds, first.numbers, model.rotaries[first.kinds["rotary"]]
    linears: list[Any] = [linear for block in model.blocks for linear in block.linears(*WEIGHTS)]
    biased = [linear for block in model.blocks for linear in block.linears("q", "k", "v") if linear.bias is not None]
    return (
        first.parts.keys() - {"q_norm", "k_norm"} == _LLAMA
        and all(each.parts.keys() == first.parts.keys() for each in model.blocks)
        and all((each.kinds, each.numbers) == (kinds, numbers) for each in model.blocks)
        and (kinds["window"], kinds["activation"]) == (0, Activation.SILU)
        and (numbers["softcap"], numbers["residual"]) == (0.0, 1.0)
        and kinds["rotary"] >= 0
        and rotary.dim == kinds["dim"]
        and not rotary.wide
        and all(norm.constants == (model.norm.eps, 0.0, True) for norm in norms)
        and all(norm.weight.dtype == torch.bfloat16 for norm in norms)
        and all(each.weight.numel() == kinds["dim"] for each in first.linears("q_norm", "k_norm"))
        and all(linear.is_weight_only and linear.weight.per_tensor_scale.numel() == 1 for linear in linears)
        and len(biased) in (0, 3 * len(model.blocks))
        and sum(linear.bias is not None for linear in linears) == len(biased)
    )


def _cache(buffers: Sequence[StepBuffers]) -> tuple[tuple[list[Tensor], ...], tuple[int, bool]]:
    """Return keys, values, codes and front, and how codes are made, as arguments of ``nvfp4::decode_layers``."""
    coded = [each for each in buffers if isinstance(each, CodedBuffers)]
    codes, front = [t for each in coded for t in each.coded], [t for each in coded for t in each.front]
    keys, values = ([each.dense[i] for each in buffers] for i in range(2))
    return (keys, values, codes, front), (coded[0].coding if coded else (0, False))


def _weights(model: Model) -> tuple[list[Tensor], ...]:
    """Return the weights in the order of the arguments of ``nvfp4::decode_layers``."""
    linears = [linear for block in model.blocks for linear in block.linears(*WEIGHTS)]
    weights: list[Any] = [linear.weight for linear in linears]

    def norms(*names: str) -> list[Tensor]:
        found = (block.parts.get(name) for block in model.blocks for name in names)
        return [norm.weight.detach() for norm in found if norm is not None]

    return (
        [*norms("norm_before_attention", "norm_before_feed_forward"), model.norm.weight.detach()],
        [weight.qdata for weight in weights],
        [weight.scale for weight in weights],
        [weight.per_tensor_scale for weight in weights],
        [linear.bias.detach() for linear in linears if linear.bias is not None],
        norms("q_norm", "k_norm"),
    )
