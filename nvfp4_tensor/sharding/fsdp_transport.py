"""An NVFP4Tensor on its way through FSDP2's all-gather: codes and block scales travel, and become one tensor again.

A shard is some rows of the whole. Its codes follow one another as they are. So do its block scales where it has whole
tiles of 128 rows; elsewhere they travel in the plain order, and what arrives is swizzled.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from nvfp4_tensor._compat.frames import caller_frame_locals
from nvfp4_tensor.numerics import layout
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES, TILE_ROWS

DIFFERENT_SCALES = (
    "the shards of an NVFP4 weight have different per-tensor scales: each rank wrote to its own. Load or write the "
    "whole weight, or train one in bfloat16 that nvfp4_tensor.distributed.enable_nvfp4_all_gather sends as codes"
)


class Mesh(Protocol):
    """What is asked of a DeviceMesh of one dimension."""

    def size(self) -> int: ...


class Codes(Protocol):
    """What is asked of an NVFP4Tensor."""

    shape: torch.Size
    qdata: Tensor
    scale: Tensor
    per_tensor_scale: Tensor
    activation_amax: Tensor | None

    def unswizzled_scale(self) -> Tensor: ...

    def _replace(self, **changes: Any) -> Any: ...


class Rest(NamedTuple):
    """What every rank has."""

    in_tiles: bool
    one_scale: bool
    """Whether the whole has one per-tensor scale, and not one a row or a matrix, sharded with them."""
    activation_amax: Tensor | None
    beside: tuple[Tensor, ...] = ()
    """On one rank, the parts after the first: FSDP2 takes no more there, and nothing travels."""


def inputs_of(t: Codes, world: int) -> tuple[tuple[Tensor, ...], Rest]:
    """The parts of a shard that travel, each with the dimension that is sharded first; and the rest.

    The one per-tensor scale of a whole travels, too, so that ranks whose shards have different ones notice.
    """
    in_tiles = world == 1 or math.prod(t.qdata.shape[:-1]) % TILE_ROWS == 0
    scale = t.scale if in_tiles else t.unswizzled_scale()
    parts = [t.qdata.contiguous(), scale.contiguous().view(torch.uint8)]
    one_scale = t.per_tensor_scale.dim() == 0
    parts.append(t.per_tensor_scale.view(1) if one_scale else t.per_tensor_scale.contiguous())
    return tuple(parts), Rest(in_tiles, one_scale, t.activation_amax)


def whole_of(outputs: tuple[Tensor, ...], rest: Rest) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, swizzled block scales and per-tensor scale of the whole, of what has arrived.

    Shards of different per-tensor scales are an error: on a GPU in the stream, without waiting for it. Nothing here
    reads a tensor of the shard, which another stream may have made, and may use the memory of again.
    """
    qdata, scale, factor = (*outputs, *rest.beside)
    if rest.one_scale:
        factors = factor.view(-1)
        factor = factors[0]
        if len(factors) > 1:
            torch._assert_async((factors == factor).all(), DIFFERENT_SCALES)
    return qdata, swizzled(qdata, scale, rest), factor


def swizzled(qdata: Tensor, scale: Tensor, rest: Rest) -> Tensor:
    """The block scales that have arrived, as the whole has them."""
    if not rest.in_tiles:
        scale = layout.swizzle(scale.reshape(math.prod(qdata.shape[:-1]), scale.shape[-1]))
    return scale.view(torch.float8_e4m3fn)


def pre_all_gather(t: Codes, mesh: Mesh, outer_size: torch.Size, module: nn.Module) -> tuple[tuple[Tensor, ...], Rest]:
    """What FSDP2's hook of that name returns, for a shard of a parameter of ``outer_size`` in ``module``.

    Raises:
        ValueError: the rows do not divide over the ranks, or other dimensions than the first are sharded.
    """
    world = mesh.size()
    check_shard(t.shape, outer_size, world, module)
    parts, rest = inputs_of(t, world)
    return (parts, rest) if world > 1 else (parts[:1], rest._replace(beside=parts[1:]))


def check_shard(shape: torch.Size, outer_size: torch.Size, world: int, module: nn.Module, block_rows: int = 1) -> None:
    """Raises the same ValueError on all ranks where FSDP2 does with a parameter what it cannot with codes.

    Those are shards that are not even, or not of the first dimension, and shards of a smaller group after the forward.
    block_rows: what the rows of a shard are quantized in, for what to pad to.
    """
    _check_reshard(world, module)
    if outer_size[0] % world:
        padded = layout.ceil_to(outer_size[0], world * block_rows)
        raise ValueError(
            f"an NVFP4 weight of {module} has {outer_size[0]} rows, which {world} ranks cannot share evenly: pad "
            f"them to {padded}, choose another world size, or leave the weight out with "
            "fully_shard(..., ignored_params={weight})"
        )
    if shape[1:] != outer_size[1:]:
        raise ValueError(
            f"an NVFP4 weight {tuple(outer_size)} of {module} is sharded as {tuple(shape)}: only its first dimension "
            "can be, so let shard_placement_fn return Shard(0) for it"
        )


def _check_reshard(world: int, module: nn.Module) -> None:
    """Where FSDP2 would raise an AssertionError about its own lists, after the forward."""
    caller = caller_frame_locals("all_gather_inputs", "_fsdp_param.py")
    after = getattr(caller["self"], "post_forward_mesh_info", None) if caller is not None else None
    if after is not None and after.shard_mesh_size != world:
        raise ValueError(
            f"the NVFP4 weight of {module} would be resharded to groups of {after.shard_mesh_size} of {world} ranks "
            "after the forward, which FSDP2 does for plain tensors alone: give reshard_after_forward=True or False"
        )


def post_all_gather(
    t: Codes, outputs: tuple[Tensor, ...], rest: Rest, param_dtype: torch.dtype, out: Tensor | None
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """What FSDP2's hook of that name returns: the whole and its own storages, or None after filling ``out``.

    The whole decodes to ``param_dtype``. Its codes, and its scales in tiles, are the gathered ones themselves, which
    FSDP2 frees and fills; scales swizzled here have a storage of their own, for FSDP2 to free.
    """
    if out is not None:
        _refill(getattr(out, "_local_tensor", out), outputs, rest)
        return None
    qdata, scale, factor = whole_of(outputs, rest)
    dtype = {"orig_dtype": param_dtype} if param_dtype in HIGH_PRECISION_DTYPES else {}
    _keep(rest.activation_amax)
    whole = t._replace(qdata=qdata, scale=scale, per_tensor_scale=factor, activation_amax=rest.activation_amax, **dtype)
    return whole, () if rest.in_tiles else (scale,)


def _refill(whole: Any, outputs: tuple[Tensor, ...], rest: Rest) -> None:
    _, scale, factor = whole_of(outputs, rest)
    if rest.beside:
        whole.scale = scale
    elif not rest.in_tiles:
        with torch.autograd._unsafe_preserve_version_counter(whole.scale):  # saved for the backward, and the same
            whole.scale.copy_(scale)
    whole.per_tensor_scale = factor
    _keep(rest.activation_amax)
    whole.activation_amax = rest.activation_amax


def _keep(t: Tensor | None) -> None:
    """CPU offload makes it in the stream of the gather; it is read in this one."""
    if t is not None and t.is_cuda:
        t.record_stream(torch.cuda.current_stream(t.device))
