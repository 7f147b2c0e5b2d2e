"""Tensor parallelism for linears in NVFP4: plans for ``parallelize_module``."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from nvfp4_tensor.distributed.agreement import check_agreement, kind
from nvfp4_tensor.distributed.bits import axis_of
from nvfp4_tensor.distributed.frozen import NVFP4ParallelLinear
from nvfp4_tensor.numerics.layout import BLOCK
from nvfp4_tensor.sharding.layout import LinearSharding, TokenSharding
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.training.linear.module import NVFP4TrainingLinear


def share_weight(linear: NVFP4TrainingLinear, dim: int, mesh: DeviceMesh) -> None:
    """Let a linear treat its weight as one shard along dim, of as many as the ranks of a one-dimensional mesh.

    Call it before sharding the weight.

    Raises:
        ValueError: if the ranks' shards of the full weight do not have complete blocks.
    """
    linear.sharding = _with_features(linear, linear.sharding, dim, mesh, BLOCK)


def _with_features(
    linear: nn.Linear, sharding: LinearSharding, dim: int, mesh: DeviceMesh, multiple: int
) -> LinearSharding:
    """Return the sharding with outputs (dim 0) or inputs (dim 1) sharded; each shard is a ``multiple`` of features."""
    axis = axis_of(mesh)
    size, features = linear.weight.shape[dim], ("outputs", "inputs")[dim]
    if size % (multiple * axis.ranks):
        how = f"in complete blocks of {multiple}" if multiple > 1 else "evenly"
        raise ValueError(
            f"{linear} has {size} {features}, which {axis.ranks} ranks cannot share {how}: use another number of ranks"
        )
    return dataclasses.replace(sharding, outputs=axis) if dim == 0 else dataclasses.replace(sharding, inputs=axis)


class _Parallel(ParallelStyle):
    """Make the weight of a linear a DTensor; its products are those of the local tensors."""

    weight_dim: ClassVar[int]
    """The sharded dimension of the weight."""
    layouts: ClassVar[tuple[Placement, Placement]]
    """The default layouts of the input and the output."""

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.input_layout, self.output_layout = input_layouts or self.layouts[0], output_layouts or self.layouts[1]
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear: Any = module
        weight: Any = getattr(module, "weight", None)
        is_trained = isinstance(module, NVFP4TrainingLinear)
        if is_trained:
            share_weight(linear, self.weight_dim, device_mesh)
        elif isinstance(module, nn.Linear) and isinstance(weight, NVFP4Tensor):
            multiple = BLOCK if self.weight_dim == 1 else 1
            sharding = _with_features(module, LinearSharding(), self.weight_dim, device_mesh, multiple)
            NVFP4ParallelLinear.convert(module, sharding)
        else:
            raise TypeError(
                f"{type(self).__name__} supports linears that train in NVFP4 or have an NVFP4 weight, not {module}: "
                "call quantize_(model, NVFP4TrainingConfig()) first, or use PyTorch's own plan"
            )
        layout = self.input_layout
        if self.weight_dim == 0 and isinstance(layout, Shard) and layout.dim >= 0:
            sequence = TokenSharding(axis_of(device_mesh), layout.dim)
            linear.sharding = dataclasses.replace(linear.sharding, sequence=sequence)
        if self.src_data_rank is not None:  # otherwise there is no communication here
            name = f"a linear of {linear.in_features} inputs and {linear.out_features} outputs"
            what, value = ("the recipe", linear.active_recipe) if is_trained else ("the NVFP4 weight", kind(weight))
            check_agreement(what, {name: value}, device_mesh.get_group())
        self._distribute(module, "weight", Shard(self.weight_dim), device_mesh)
        if module.bias is not None:
            self._distribute(module, "bias", Shard(0) if self.weight_dim == 0 else Replicate(), device_mesh)
        module.register_forward_pre_hook(lambda _, inputs: (self._local_input(inputs[0], device_mesh), *inputs[1:]))
        module.register_forward_hook(lambda linear, inputs, y: self._output(linear, y, device_mesh))
        return module

    def _distribute(self, module: nn.Module, name: str, placement: Placement, mesh: DeviceMesh) -> None:
        full = getattr(module, name)
        sharded = distribute_tensor(full.detach(), mesh, [placement], src_data_rank=self.src_data_rank)
        setattr(module, name, nn.Parameter(sharded, full.requires_grad))

    def _local_input(self, x: Tensor, mesh: DeviceMesh) -> Tensor:
        """Return the local tensor that the products read; its gradient is that of the full x."""
        layout = self.input_layout
        if self.weight_dim == 0 and isinstance(layout, Shard) and 0 <= layout.dim < x.dim() - 1:
            return _sequence_shard(x, layout.dim, mesh) if isinstance(x, DTensor) else x
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [layout], run_check=False)
        wanted: Placement = Replicate() if self.weight_dim == 0 else Shard(x.dim() - 1)
        gradient: Placement = Partial() if self.weight_dim == 0 else wanted
        return x.redistribute(placements=[wanted]).to_local(grad_placements=[gradient])

    def _output(self, linear: nn.Module, y: Tensor, mesh: DeviceMesh) -> Tensor:
        placement: Placement = Shard(y.dim() - 1) if self.weight_dim == 0 else Partial()
        output: Any = DTensor.from_local(y, mesh, [placement], run_check=False)
        output = output.redistribute(placements=[self.output_layout])
        if self.weight_dim == 1 and linear.bias is not None:  # added once, after the sum over ranks
            output = output + linear.bias.to(output.dtype)
        return output.to_local() if self.use_local_output else output


def _sequence_shard(x: DTensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """Return this rank's shard of a sequence, which the linear gathers."""
    if x.shape[dim] % mesh.size():
        raise ValueError(
            f"an input {tuple(x.shape)} has {x.shape[dim]} tokens along dimension {dim}, which {mesh.size()} ranks "
            "cannot share evenly: pad the sequence, or use input_layouts=Replicate()"
        )
    return x.redistribute(placements=[Shard(dim)]).to_local()


class NVFP4ColwiseParallel(_Parallel):
    """``ColwiseParallel`` for linears that train in NVFP4 or have an NVFP4 weight: outputs are sharded over the ranks.

    Codes and random bits are independent of the number of ranks: if a linear trains, the amaxes of dy and of w are
    reduced over the ranks.

    Args:
        input_layouts: the layout of inputs that are not DTensors: Replicate() by default; Shard(1) for sequence
            parallelism, which gathers inputs in NVFP4 if the products read only codes.
        output_layouts: the layout of the output; Shard(-1) by default, which needs no communication.
        use_local_output: return the local tensor (default) instead of a DTensor.

    Raises:
        TypeError: if a module neither trains in NVFP4 nor has an NVFP4 weight.
        ValueError: if the ranks cannot share the outputs evenly, or in blocks of 16 if the linear trains; or if recipes
            or specs of weights differ between ranks.
    """

    weight_dim = 0
    layouts = (Replicate(), Shard(-1))


class NVFP4RowwiseParallel(_Parallel):
    """``RowwiseParallel`` for linears that train in NVFP4 or have an NVFP4 weight: inputs are sharded, products summed.

    Codes and random bits are independent of the number of ranks: the amax of x (of each row, for row-scaled
    activations) is reduced over the ranks and, if a linear trains, that of w.

    Args:
        input_layouts: the layout of inputs that are not DTensors; Shard(-1) by default.
        output_layouts: the layout of the output: Replicate() by default; Shard(1) for sequence parallelism.
        use_local_output: return the local tensor (default) instead of a DTensor.

    Raises:
        TypeError: if a module neither trains in NVFP4 nor has an NVFP4 weight.
        ValueError: if the ranks cannot share the inputs in blocks of 16; or if recipes or specs of weights differ
            between ranks.
    """

    weight_dim = 1
    layouts = (Shard(-1), Replicate())
