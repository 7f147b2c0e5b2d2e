"""Experts sharded over ranks, whose products quantize activations: one amax for the rows of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nvfp4_tensor.distributed.bits import axis_of
from nvfp4_tensor.ops.composite.quantization import own_amax
from nvfp4_tensor.sharding.layout import all_reduce_amax
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor


@torch.no_grad()
def share_amax(experts: NVFP4Tensor, rows: Tensor, offs: Tensor, mesh: DeviceMesh) -> NVFP4Tensor:
    """Prepare experts for one grouped product, so that it quantizes all ranks' rows with one amax, as one process does.

    This all-reduces one number. Without this call, each rank uses the amax of its own rows. With row_scaled
    activations, the call is not needed.

    Args:
        experts: this rank's experts, (E, N, K) or transposed, with an ``activation_spec``.
        rows: (M, K), the rows to multiply by the experts on this rank.
        offs: int32 (E,), the end of each expert's rows; rows after the last end are ignored.
        mesh: a one-dimensional mesh whose ranks have the other rows, or other columns of these. All its ranks call this
            function.

    Returns:
        the same experts with that amax; they share storage.

    Raises:
        ValueError: if the experts do not quantize activations or have another amax (one per row, or a calibrated one),
            or the mesh has several dimensions.

    >>> w = share_amax(experts, rows, offs, mesh)
    >>> y = torch._grouped_mm(rows, w.transpose(-2, -1), offs=offs)
    """
    axis, spec = axis_of(mesh), experts.activation_spec
    if spec is None or spec.row_scaled or experts.activation_amax is not None:
        amaxes = (
            "are dense" if spec is None else "have one amax per row" if spec.row_scaled else "have a calibrated amax"
        )
        raise ValueError(f"the activations of these experts {amaxes}: multiply without share_amax")
    is_used = torch.arange(len(rows), device=rows.device)[:, None] < offs[-1:]
    amax = own_amax(torch.where(is_used, rows, 0), spec, None)
    return experts._replace(activation_amax=all_reduce_amax(amax, (axis,)))
