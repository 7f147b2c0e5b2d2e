"""Tensor parallelism of linears in NVFP4: plans for ``parallelize_module``."""

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
    """Let a linear take its weight for one piece of several, cut along dim by the ranks of a mesh of one dimension.

    Raises:
        ValueError: the whole weight, which the linear still has, does not divide into whole blocks a rank.
    """
    linear.sharding = _share(linear, linear.sharding, dim, mesh, BLOCK)


def _share(linear: nn.Linear, sharding: LinearSharding, dim: int, mesh: DeviceMesh, blocks: int) -> LinearSharding:
    axis = axis_of(mesh)
    size, features = linear.weight.shape[dim], ("outputs", "inputs")[dim]
    if size % (blocks * axis.ranks):
        pieces = f"in whole blocks of {blocks}" if blocks > 1 else "evenly"
        raise ValueError(f"{linear} has {size} {features}, which {axis.ranks} ranks cannot share {pieces}")
    return dataclasses.replace(sharding, outputs=axis) if dim == 0 else dataclasses.replace(sharding, inputs=axis)


class _Parallel(ParallelStyle):
    """A linear whose weight is a DTensor, and whose products are those of local tensors."""

    weight_dim: ClassVar[int]
    """The dimension of the weight that ranks share."""
    layouts: ClassVar[tuple[Placement, Placement]]
    """Of the input and the output, where nothing else is asked for."""

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
        if isinstance(module, NVFP4TrainingLinear):
            linear: NVFP4TrainingLinear | NVFP4ParallelLinear = module
            share_weight(module, self.weight_dim, device_mesh)
        elif isinstance(module, nn.Linear) and isinstance(module.weight, NVFP4Tensor):
            blocks = BLOCK if self.weight_dim == 1 else 1
            linear = NVFP4ParallelLinear.convert(
                module, _share(module, LinearSharding(), self.weight_dim, device_mesh, blocks)
            )
        else:
            raise TypeError(
                f"{type(self).__name__} is for linears that train in NVFP4, or have an NVFP4 weight, not {module}: "
                "convert it by quantize_(model, NVFP4TrainingConfig()) first, or give PyTorch's own plan"
            )
        layout = self.input_layout
        if self.weight_dim == 0 and isinstance(layout, Shard) and layout.dim >= 0:
            sequence = TokenSharding(axis_of(device_mesh), layout.dim)
            linear.sharding = dataclasses.replace(linear.sharding, sequence=sequence)
        if self.src_data_rank is not None:  # else nothing travels here
            _check_alike(linear, device_mesh)
        self._distribute(module, "weight", Shard(self.weight_dim), device_mesh)
        if module.bias is not None:
            self._distribute(module, "bias", Shard(0) if self.weight_dim == 0 else Replicate(), device_mesh)
        module.register_forward_pre_hook(lambda _, inputs: (self._local_input(inputs[0], device_mesh), *inputs[1:]))
        module.register_forward_hook(lambda linear, inputs, y: self._output(linear, y, device_mesh))
        return module

    def _distribute(self, module: nn.Module, name: str, placement: Placement, mesh: DeviceMesh) -> None:
        whole = getattr(module, name)
        pieces = distribute_tensor(whole.detach(), mesh, [placement], src_data_rank=self.src_data_rank)
        setattr(module, name, nn.Parameter(pieces, whole.requires_grad))

    def _local_input(self, x: Tensor, mesh: DeviceMesh) -> Tensor:
        """x as the products take it, local; its gradient is that of the whole."""
        layout = self.input_layout
        if self.weight_dim == 0 and isinstance(layout, Shard) and 0 <= layout.dim < x.dim() - 1:
            return _piece(x, layout.dim, mesh) if isinstance(x, DTensor) else x
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [layout], run_check=False)
        wanted: Placement = Replicate() if self.weight_dim == 0 else Shard(x.dim() - 1)
        gradient: Placement = Partial() if self.weight_dim == 0 else wanted
        return x.redistribute(placements=[wanted]).to_local(grad_placements=[gradient])

    def _output(self, linear: nn.Module, y: Tensor, mesh: DeviceMesh) -> Tensor:
        made: Placement = Shard(y.dim() - 1) if self.weight_dim == 0 else Partial()
        whole: Any = DTensor.from_local(y, mesh, [made], run_check=False).redistribute(placements=[self.output_layout])
        if self.weight_dim == 1 and linear.bias is not None:  # once, and not on each rank
            whole = whole + linear.bias.to(whole.dtype)
        return whole.to_local() if self.use_local_output else whole


def _check_alike(linear: NVFP4TrainingLinear | NVFP4ParallelLinear, mesh: DeviceMesh) -> None:
    """Before anything travels: the same ValueError on all ranks where their recipes, or weights' specs, differ."""
    name = f"a linear of {linear.in_features} inputs and {linear.out_features} outputs"
    if isinstance(linear, NVFP4TrainingLinear):
        check_agreement("the recipe", {name: linear.active_recipe}, mesh.get_group())
    else:
        assert isinstance(linear.weight, NVFP4Tensor)
        check_agreement("the NVFP4 weight", {name: kind(linear.weight)}, mesh.get_group())


def _piece(x: DTensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """This rank's piece of a sequence, which the linear gathers."""
    if x.shape[dim] % mesh.size():
        raise ValueError(
            f"an input {tuple(x.shape)} has {x.shape[dim]} tokens along dimension {dim}, which {mesh.size()} ranks "
            "cannot share evenly: pad the sequence, or give input_layouts=Replicate()"
        )
    return x.redistribute(placements=[Shard(dim)]).to_local()


class NVFP4ColwiseParallel(_Parallel):
    """Each rank has some of the outputs: the ``ColwiseParallel`` of linears in NVFP4, trained or quantized.

    Codes and random bits are those of one rank: where a linear trains, the amax of dy and of w goes over the ranks.

    Args:
        input_layouts: of an input that is no DTensor: Replicate() by default; Shard(1) for a sequence-parallel one,
            which is gathered as NVFP4 where codes are all that the products read.
        output_layouts: what is returned; Shard(-1), as it is made, by default.
        use_local_output: whether that is the local tensor (by default) or the DTensor.

    Raises:
        TypeError: a module that neither trains in NVFP4 nor has an NVFP4 weight.
        ValueError: outputs that the ranks cannot share evenly; in blocks of 16, where it trains. Recipes, or specs of
            weights, that are not the same on all ranks.
    """

    weight_dim = 0
    layouts = (Replicate(), Shard(-1))


class NVFP4RowwiseParallel(_Parallel):
    """Each rank has some of the inputs, and products are summed: the ``RowwiseParallel`` of linears in NVFP4.

    Codes and random bits are those of one rank: the amax of x goes over the ranks, and where a linear trains that of w.
    With row-scaled activations it is the amax of each row.

    Args:
        input_layouts: of an input that is no DTensor: Shard(-1) by default.
        output_layouts: what is returned; Replicate() by default, Shard(1) for a sequence-parallel one.
        use_local_output: whether that is the local tensor (by default) or the DTensor.

    Raises:
        TypeError: a module that neither trains in NVFP4 nor has an NVFP4 weight.
        ValueError: inputs that the ranks cannot share in blocks of 16. Recipes, or specs of weights, that are not the
            same on all ranks.
    """

    weight_dim = 1
    layouts = (Shard(-1), Replicate())
