"""Flatten the description of a model into the arguments of ``nvfp4::decode_step``.

    step = flatten(describe(model))
    torch.ops.nvfp4.decode_step(x, *step, keys, values, cos, sin, position, starts)

The op reads a list of tensors and two tables of numbers. ``ops/composite/decode_step.py`` has their layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nvfp4_tensor.generation.architectures import Attention, Block, FeedForward, Linear, Mixture, Model, Norm
from nvfp4_tensor.generation.ring import Place
from nvfp4_tensor.numerics.layout import TILE_ROWS
from nvfp4_tensor.ops.composite.decode_step import KINDS, NUMBERS, PARTS, NormStyle
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

SIZE_STEP, DENSE_SIZE_STEP, MOST_HEAD_DIM = 16, 32, 1024
"""Hidden sizes and head dimensions must be multiples of SIZE_STEP, with a router of DENSE_SIZE_STEP."""


class StepArguments(NamedTuple):
    """What the op reads of a model: its arguments between x and the caches.

    Attributes:
        weights: the tensors of all blocks and of the last norm, not copies.
        kinds: int64 (blocks + 1, kinds).
        numbers: float64 (blocks + 1, numbers).
    """

    weights: list[Tensor]
    kinds: Tensor
    numbers: Tensor


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
    rows = [_Row(block, hidden) for block in model.blocks]
    last = dict.fromkeys(KINDS, 0) | {"parts": 1, "norm": _style(model.norm)}
    return StepArguments(
        weights=[*(t for row in rows for t in row.tensors), _norm_weight(model.norm)],
        kinds=torch.tensor(
            [[each[name] for name in KINDS] for each in (*(row.kinds for row in rows), last)], dtype=torch.int64
        ),
        numbers=torch.tensor(
            [*(row.numbers for row in rows), [model.norm.eps, *[0.0] * (len(NUMBERS) - 1)]], dtype=torch.float64
        ),
    )


class CpuLayers:
    """All blocks and the last norm of a described model as one operator, on a CPU."""

    def __init__(self, model: Model) -> None:
        self._arguments = flatten(model)

    def __call__(
        self,
        x: Tensor,
        place: Place,
        rotations: Sequence[tuple[Tensor, Tensor]],
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> Tensor:
        """Return the hidden states (B, D) after the last norm of embedded tokens x (B, D).

        Args:
            place: where the tokens are written.
            rotations: cos and sin (1 or B, rotary) for each of the model's rotary embeddings.
            keys, values: per layer (B, kv_heads, length, head_dim).
        """
        cos, sin = ([pair[i] for pair in rotations] for i in range(2))
        hidden: Tensor = torch.ops.nvfp4.decode_step(
            x, *self._arguments, keys, values, cos, sin, int(place.position), place.starts
        )
        return hidden


class _Row:
    """The tensors, integers and floats of one block."""

    def __init__(self, block: Block, hidden: int) -> None:
        self.tensors: list[Tensor] = []
        self.kinds = dict.fromkeys(KINDS, 0)
        feed_forward = block.feed_forward
        parts = dict(self._attention(block.attention))
        if isinstance(feed_forward, Mixture):
            parts |= self._mixture(feed_forward, hidden)
        else:
            parts |= self._feed_forward(feed_forward)
        norms = {
            "norm_before_attention": block.pre_attention, "norm_after_attention": block.post_attention,
            "norm_before_feed_forward": block.pre_feed_forward, "norm_after_feed_forward": block.post_feed_forward,
            "q_norm": block.attention.q_norm, "k_norm": block.attention.k_norm,
        }  # fmt: skip
        present = [norm for norm in norms.values() if norm is not None]
        eps, self.kinds["norm"] = _alike(present)
        parts |= {name: (_norm_weight(norm),) for name, norm in norms.items() if norm is not None}
        for i, name in enumerate(PARTS):
            if name in parts:
                self.kinds["parts"] |= 1 << i
                self.tensors += parts[name]
        alpha, limit = (getattr(feed_forward, name, 0.0) for name in ("alpha", "limit"))
        self.numbers = [
            eps, block.attention.scaling, block.attention.softcap, block.residual_multiplier, alpha, limit,
        ]  # fmt: skip

    def _attention(self, attention: Attention) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
        dim = attention.head_dim
        if dim % SIZE_STEP or dim > MOST_HEAD_DIM:
            raise ValueError(
                f"decode_natively needs a head_dim that is a multiple of {SIZE_STEP} up to {MOST_HEAD_DIM}, and "
                f"head_dim is {dim}"
            )
        self.kinds |= {
            "heads": attention.heads, "kv_heads": attention.kv_heads, "dim": dim, "window": attention.window,
            "rotary": -1 if attention.rotary is None else attention.rotary,
        }  # fmt: skip
        for name, linear in zip(("q", "k", "v"), attention.qkv, strict=False):
            yield from _linear(name, linear)
        yield from _linear("o", attention.o)
        if attention.sinks is not None:
            yield "sinks", (_dense("sinks", attention.sinks),)

    def _feed_forward(self, feed_forward: FeedForward) -> dict[str, tuple[Tensor, ...]]:
        self.kinds["activation"] = int(feed_forward.activation)
        linears = dict(zip(("gate", "up"), feed_forward.gate_up, strict=False)) | {"down": feed_forward.down}
        return {part: tensors for name, linear in linears.items() for part, tensors in _linear(name, linear)}

    def _mixture(self, mixture: Mixture, hidden: int) -> dict[str, tuple[Tensor, ...]]:
        if hidden % DENSE_SIZE_STEP:
            raise ValueError(
                f"the router of {mixture.name} needs a hidden_size of a multiple of {DENSE_SIZE_STEP}, not {hidden}"
            )
        self.kinds |= {
            "activation": int(mixture.activation), "chosen": mixture.top_k, "routing": int(mixture.routing),
        }  # fmt: skip
        parts = {
            "router": (_dense(mixture.router.name, mixture.router.weight),),
            "gate": _experts(f"{mixture.name}.experts.gate_up_proj", mixture.gate_up, mixture.transposed),
            "down": _experts(f"{mixture.name}.experts.down_proj", mixture.down, mixture.transposed),
        }
        biases = {
            "router_bias": mixture.router.bias, "gate_bias": mixture.gate_up_bias, "down_bias": mixture.down_bias,
        }  # fmt: skip
        dense = {name: (_dense(f"{mixture.name}: {name}", t),) for name, t in biases.items() if t is not None}
        return {**parts, **dense}


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


def _linear(part: str, linear: Linear) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    yield part, _nvfp4(linear.name, linear.weight, False)
    if linear.bias is not None:
        yield f"{part}_bias", (_dense(f"{linear.name}.bias", linear.bias),)


def _experts(name: str, weight: Tensor, transposed: bool) -> tuple[Tensor, ...]:
    if not isinstance(weight, NVFP4Tensor):
        raise ValueError(f"{name} is dense: call quantize_(model.model, NVFP4WeightOnlyConfig(experts=True)) first")
    parts = _nvfp4(name, weight, transposed)
    rows = parts[0].shape[-2]
    if rows % TILE_ROWS:
        raise ValueError(f"{name} has {rows} rows per expert: decode_natively needs a multiple of {TILE_ROWS}")
    return parts


def _nvfp4(name: str, weight: Tensor, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    _check_dtype(name, weight)
    if not isinstance(weight, NVFP4Tensor):
        raise ValueError(f"{name} is dense: call quantize_(model.model, NVFP4WeightOnlyConfig()) first")
    if weight.activation_spec is not None or weight.transposed != transposed:
        raise ValueError(f"{name} quantizes its activations (W4A4): decode_natively needs a weight-only model")
    parts = weight.qdata, weight.scale, weight.per_tensor_scale
    if not all(part.is_contiguous() for part in parts) or weight.spec.hadamard_sign is not None:
        raise ValueError(
            f"{name} is a view of another weight, or Hadamard-transformed: quantize it separately, without a transform"
        )
    return parts


def _check_dtype(name: str, tensor: Tensor) -> None:
    if tensor.device.type != "cpu" or tensor.dtype != torch.bfloat16:
        raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}: decode_natively needs bfloat16 on the CPU")
