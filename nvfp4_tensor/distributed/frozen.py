"""A linear with a sharded NVFP4 weight, which quantizes activations to the same codes as on one rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nvfp4_tensor._compat.modules import change_class, check_forward
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.quantization.linear import PRE_SCALE, NVFP4Linear
from nvfp4_tensor.sharding.layout import LinearSharding, compare_token_counts, local_shard
from nvfp4_tensor.sharding.sequence import GatheredShape, gather_if_sharded, gather_operands, gather_shape_only
from nvfp4_tensor.tensor.arguments import resolve_rng_state
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.training.linear.operands import quantize_operand
from nvfp4_tensor.training.linear.plan import apply_autocast, flatten_tokens


class NVFP4ParallelLinear(NVFP4Linear):
    """An nn.Linear whose frozen NVFP4 weight is a DTensor. The tensor parallel plans create it.

    If products quantize activations (W4A4), amaxes are reduced over the ranks that share them.
    """

    sharding: LinearSharding
    """This rank's shards of the tokens, outputs and inputs."""

    @classmethod
    def convert(cls, linear: nn.Linear, sharding: LinearSharding) -> NVFP4ParallelLinear:
        """Convert a linear in place.

        Raises:
            ValueError: it multiplies its inputs by a scale of AWQ, which is not sharded.
        """
        if PRE_SCALE in linear._buffers:
            raise ValueError(
                f"{linear} multiplies its inputs by {PRE_SCALE} (AWQ), which tensor parallelism does not shard: load "
                "the dense model, or one without AWQ"
            )
        check_forward(linear)
        change_class(linear, cls)
        assert isinstance(linear, NVFP4ParallelLinear)
        linear.sharding = sharding
        return linear

    def forward(self, input: Tensor) -> Tensor:
        weight: Any = local_shard(self.weight)
        # If inputs are sharded, the plan adds the bias once, after the sum over ranks.
        bias = None if self.bias is None or self.sharding.inputs.ranks > 1 else local_shard(self.bias)
        stored: Any = getattr(self.weight, "_local_tensor", self.weight)  # dynamo reads only the fields of parameters
        spec = getattr(stored, "activation_spec", None)  # a dense weight that was loaded later has none
        if spec is None:
            return nn.functional.linear(gather_if_sharded(input, self.sharding), weight, bias)
        x = apply_autocast(input)
        codes, sequence = activations(x.detach(), weight, spec, self.sharding), self.sharding.sequence_of(x)
        if sequence is not None:
            x = gather_shape_only(x, sequence)
        return _Product.apply(flatten_tokens(x), weight, bias, codes).view(*x.shape[:-1], weight.shape[0])


def activations(x: Tensor, weight: NVFP4Tensor, spec: QuantizeSpec, sharding: LinearSharding) -> NVFP4Tensor:
    """Quantize this rank's x (..., K) to codes (M, K) for a product with the weight, as one rank would.

    The codes of sequence shards are gathered.
    """
    rng_state = resolve_rng_state(x, spec, None, None)
    sequence = sharding.sequence_of(x)
    x_sharding = sharding.for_input(x.shape[:-1], local=sequence is not None).x
    if sequence is not None and (spec.row_scaled or weight.activation_amax is not None):
        compare_token_counts(x_sharding, flatten_tokens(x))  # other specs compare with their amaxes
    codes = quantize_operand(flatten_tokens(x), spec, rng_state, 0, x_sharding, amax=weight.activation_amax)
    if sequence is not None:
        codes, _ = gather_operands(codes, None, GatheredShape.of(x, sequence))
    return weight._replace(
        **codes._asdict(),
        columns=x.shape[-1],
        orig_dtype=x.dtype,
        spec=spec,
        activation_spec=None,
        activation_amax=None,
        transposed=False,
    )


class _Product(torch.autograd.Function):
    """codes @ weight^T + bias, with the gradient of x @ weight^T + bias, like every W4A4 product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: NVFP4Tensor, bias: Tensor | None, codes: NVFP4Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return nn.functional.linear(codes, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        dx = dy @ weight.to(dy.dtype) if ctx.needs_input_grad[0] else None
        return dx, None, dy.sum(0, dtype=ctx.bias_dtype) if ctx.needs_input_grad[2] else None, None
