"""Experts over ranks whose products quantize activations: one amax for the rows of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nvfp4_tensor.distributed.bits import axis_of
from nvfp4_tensor.ops.composite import own_amax
from nvfp4_tensor.sharding.layout import all_reduce_amax
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor


@torch.no_grad()
def share_amax(experts: NVFP4Tensor, rows: Tensor, offs: Tensor, mesh: DeviceMesh) -> NVFP4Tensor:
    """Experts for one grouped product, that quantize its rows by the amax of all ranks' rows: as one process would.

    One all-reduce of one number. Without it a rank's rows have the amax of what that rank got; with row_scaled
    activations there is nothing to share.

    Args:
        experts: this rank's, (E, N, K) or transposed, with an ``activation_spec``.
        rows: (M, K), what this rank is about to multiply them by.
        offs: int32 (E,), where the rows of each expert end; rows behind the last do not count.
        mesh: one dimension, whose ranks have the other rows, or the other columns of these; all of them call this.

    Returns:
        the same experts with that amax, sharing their storage.

    Raises:
        ValueError: the experts quantize no activations, or have an amax of their own (one a row, or calibrated); or the
            mesh has several dimensions.

    >>> w = share_amax(experts, rows, offs, mesh)
    >>> y = torch._grouped_mm(rows, w.transpose(-2, -1), offs=offs)
    """
    axis, spec = axis_of(mesh), experts.activation_spec
    if spec is None or spec.row_scaled or experts.activation_amax is not None:
        what = "none" if spec is None else "one a row" if spec.row_scaled else "a calibrated one"
        raise ValueError(f"these experts' activations have {what}, no amax of each call: multiply by them as they are")
    live = torch.arange(len(rows), device=rows.device)[:, None] < offs[-1:]
    amax = own_amax(torch.where(live, rows, 0), spec, None)
    return experts._replace(activation_amax=all_reduce_amax(amax, (axis,)))
