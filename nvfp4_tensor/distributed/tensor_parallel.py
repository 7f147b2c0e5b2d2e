"""Tensor parallelism of linears that train in NVFP4: plans for ``parallelize_module``.

For quantized linears, whose weights are NVFP4Tensors, PyTorch's own ColwiseParallel and RowwiseParallel serve.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from nvfp4_tensor.distributed.bits import axis_of
from nvfp4_tensor.numerics.layout import BLOCK
from nvfp4_tensor.training.module import NVFP4TrainingLinear
from nvfp4_tensor.training.places import Place


def share_weight(linear: NVFP4TrainingLinear, dim: int, mesh: DeviceMesh) -> None:
    """Let a linear take its weight for one piece of several, cut along dim by the ranks of a mesh of one dimension.

    Raises:
        ValueError: the whole weight, which the linear still has, does not divide into whole blocks a rank.
    """
    axis = axis_of(mesh)
    size, features = linear.weight.shape[dim], ("outputs", "inputs")[dim]
    if size % (BLOCK * axis.ranks):
        raise ValueError(
            f"{linear} has {size} {features}, which {axis.ranks} ranks cannot share in whole blocks of {BLOCK}"
        )
    linear.place = dataclasses.replace(linear.place or Place(), **{features: axis})


class _Parallel(ParallelStyle):
    """A linear whose weight is a DTensor, and whose products are those of local tensors."""

    weight_dim: int
    """The dimension of the weight that ranks share."""

    def __init__(self, input_layout: Placement, output_layout: Placement, use_local_output: bool) -> None:
        super().__init__()
        self.input_layout, self.output_layout, self.use_local_output = input_layout, output_layout, use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, NVFP4TrainingLinear):
            raise TypeError(
                f"{type(self).__name__} is for linears that train in NVFP4, not {module}: convert it by "
                "quantize_(model, NVFP4TrainingConfig()), or give PyTorch's own plan"
            )
        share_weight(module, self.weight_dim, device_mesh)
        weight = distribute_tensor(module.weight.detach(), device_mesh, [Shard(self.weight_dim)])
        module.weight = nn.Parameter(weight, module.weight.requires_grad)
        if module.bias is not None:
            placement: Placement = Shard(0) if self.weight_dim == 0 else Replicate()
            bias = distribute_tensor(module.bias.detach(), device_mesh, [placement])
            module.bias = nn.Parameter(bias, module.bias.requires_grad)
        module.register_forward_pre_hook(lambda _, inputs: (self._local_input(inputs[0], device_mesh), *inputs[1:]))
        module.register_forward_hook(lambda linear, inputs, y: self._output(linear, y, device_mesh))
        return module

    def _local_input(self, x: Tensor, mesh: DeviceMesh) -> Tensor:
        """x as the products take it, local; its gradient is that of the whole."""
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [self.input_layout], run_check=False)
        wanted: Placement = Replicate() if self.weight_dim == 0 else Shard(x.dim() - 1)
        gradient: Placement = Partial() if self.weight_dim == 0 else wanted
        return x.redistribute(placements=[wanted]).to_local(grad_placements=[gradient])

    def _output(self, linear: nn.Module, y: Tensor, mesh: DeviceMesh) -> Tensor:
        made: Placement = Shard(y.dim() - 1) if self.weight_dim == 0 else Partial()
        whole: Any = DTensor.from_local(y, mesh, [made], run_check=False).redistribute(placements=[self.output_layout])
        if self.weight_dim == 1 and linear.bias is not None:  # once, and not on each rank
            whole = whole + linear.bias
        return whole.to_local() if self.use_local_output else whole


class NVFP4ColwiseParallel(_Parallel):
    """Each rank has some of the outputs: the training linear's ``ColwiseParallel``.

    Its codes and random bits are those of one rank: the amax of dy and of w goes over the ranks.

    Args:
        input_layouts: of an input that is no DTensor: Replicate() by default, Shard(1) for a sequence-parallel one.
        output_layouts: what is returned; Shard(-1), as it is made, by default.
        use_local_output: whether that is the local tensor (by default) or the DTensor.

    Raises:
        TypeError: a module that does not train in NVFP4.
        ValueError: outputs that the ranks cannot share in blocks of 16.
    """

    weight_dim = 0

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(input_layouts or Replicate(), output_layouts or Shard(-1), use_local_output)


class NVFP4RowwiseParallel(_Parallel):
    """Each rank has some of the inputs, and the products are summed: the training linear's ``RowwiseParallel``.

    Its codes and random bits are those of one rank: the amax of x and of w goes over the ranks.

    Args:
        input_layouts: of an input that is no DTensor: Shard(-1) by default.
        output_layouts: what is returned; Replicate() by default, Shard(1) for a sequence-parallel one.
        use_local_output: whether that is the local tensor (by default) or the DTensor.

    Raises:
        TypeError: a module that does not train in NVFP4.
        ValueError: inputs that the ranks cannot share in blocks of 16.
    """

    weight_dim = 1

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(input_layouts or Shard(-1), output_layouts or Replicate(), use_local_output)
