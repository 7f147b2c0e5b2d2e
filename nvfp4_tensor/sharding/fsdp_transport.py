"""Send the shards of an NVFP4Tensor through FSDP2's all-gather, and join what arrives.

A shard is a range of rows. Codes are sent as they are stored, and so are block scales if the shard has a multiple of
128 rows, which is a number of complete tiles. Otherwise the scales are sent in row order and swizzled on arrival. A
shard is an NVFP4Tensor, whose class imports this module.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from nvfp4_tensor._compat.frames import caller_frame_locals
from nvfp4_tensor.numerics import layout
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES, TILE_ROWS

DIFFERENT_SCALES = (
    "shards of an NVFP4 weight have different per-tensor scales, quantized by each rank alone: write the full weight, "
    "w.copy_(distribute_tensor(quantize(full), w.device_mesh, w.placements)), or train in bfloat16 with "
    "enable_nvfp4_all_gather"
)


class GatherMetadata(NamedTuple):
    """What all ranks know about a gather without communication."""

    is_swizzled: bool
    """Whether block scales are sent swizzled, as they are stored."""
    has_one_scale: bool
    """Whether the full tensor has one per-tensor scale. Scales per row or per matrix are sharded with the codes."""
    activation_amax: Tensor | None
    ungathered: tuple[Tensor, ...] = ()
    """With one rank, all inputs after the first: FSDP2 then accepts only one, and nothing is sent."""


def all_gather_inputs(shard: Any, world: int) -> tuple[tuple[Tensor, ...], GatherMetadata]:
    """Return the tensors of a shard to gather along their first dimension, and the metadata to join them.

    A single per-tensor scale is gathered too, which detects shards with different ones.
    """
    is_swizzled = world == 1 or math.prod(shard.qdata.shape[:-1]) % TILE_ROWS == 0
    scale = shard.scale
    if not is_swizzled:
        with own_memory(shard.device):
            scale = shard.unswizzled_scale().contiguous()
    has_one_scale = shard.per_tensor_scale.dim() == 0
    inputs = (
        shard.qdata.contiguous(),
        scale.contiguous().view(torch.uint8),
        shard.per_tensor_scale.view(1) if has_one_scale else shard.per_tensor_scale.contiguous(),
    )
    return inputs, GatherMetadata(is_swizzled, has_one_scale, shard.activation_amax)


def _join_outputs(outputs: tuple[Tensor, ...], metadata: GatherMetadata) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, swizzled block scales and per-tensor scale of the full tensor.

    Different per-tensor scales fail an asynchronous device-side assertion. This reads no tensor of the shard: another
    stream may have allocated it, and may reuse its memory.
    """
    qdata, scale, per_tensor_scale = (*outputs, *metadata.ungathered)
    if metadata.has_one_scale:
        scales = per_tensor_scale.view(-1)
        per_tensor_scale = scales[0]
        if len(scales) > 1:
            torch._assert_async((scales == per_tensor_scale).all(), DIFFERENT_SCALES)
    return qdata, swizzle_gathered(qdata, scale, metadata), per_tensor_scale


def swizzle_gathered(qdata: Tensor, scale: Tensor, metadata: GatherMetadata) -> Tensor:
    """Return the gathered block scales in the layout of the full tensor with these codes."""
    if not metadata.is_swizzled:
        scale = layout.swizzle(scale.reshape(math.prod(qdata.shape[:-1]), scale.shape[-1]))
    return scale.view(torch.float8_e4m3fn)


def pre_all_gather(
    shard: Any,
    mesh: DeviceMesh,
    outer_size: torch.Size,
    outer_stride: tuple[int, ...],
    module: nn.Module,
    mp_policy: object,
) -> tuple[tuple[Tensor, ...], GatherMetadata]:
    """Implement FSDP2's hook of that name for a shard of a parameter of ``outer_size`` in ``module``.

    Raises:
        ValueError: if the number of ranks does not divide the rows, or another dimension than the first is sharded.
    """
    world = mesh.size()
    check_shard(shard.shape, outer_size, world, module)
    inputs, metadata = all_gather_inputs(shard, world)
    record_stream(*inputs)
    return (inputs, metadata) if world > 1 else (inputs[:1], metadata._replace(ungathered=inputs[1:]))


@contextlib.contextmanager
def own_memory(device: torch.device) -> Iterator[None]:
    """Compute in a stream between what the current one did and will do, so that memory comes from no other stream.

    FSDP2 may begin a gather too early and drop it: between backwards of several forwards without gradient
    synchronization. It then frees the output before NCCL has written it, for what its own stream allocates next.
    Tensors that outlive the block need :func:`record_stream` after it.
    """
    if device.type != "cuda":
        yield
        return
    current, own = torch.cuda.current_stream(device), _own_stream(device)
    own.wait_stream(current)
    with torch.cuda.stream(own):
        yield
    current.wait_stream(own)


@functools.cache
def _own_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # as FSDP2's


def check_shard(shape: torch.Size, outer_size: torch.Size, world: int, module: nn.Module, block_rows: int = 1) -> None:
    """Raise the same ValueError on all ranks if FSDP2 shards a parameter in a way that codes do not support.

    Unsupported are uneven shards, shards of another dimension than the first, and resharding to a smaller group after
    the forward. The message suggests padding to a multiple of ``block_rows`` per rank.
    """
    caller = caller_frame_locals("all_gather_inputs", "_fsdp_param.py")
    after = getattr(caller["self"], "post_forward_mesh_info", None) if caller is not None else None
    if (
        after is not None and after.shard_mesh_size != world
    ):  # before FSDP2 raises an AssertionError about its own lists
        raise ValueError(
            f"the NVFP4 weight of {module} would be resharded to groups of {after.shard_mesh_size} of {world} ranks "
            "after the forward, which FSDP2 supports only for plain tensors: use reshard_after_forward=True or False"
        )
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


def post_all_gather(
    shard: Any,
    outputs: tuple[Tensor, ...],
    metadata: GatherMetadata,
    param_dtype: torch.dtype,
    out: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """Implement FSDP2's hook of that name: return the full tensor and its own storages, or None after filling ``out``.

    The full tensor decodes to ``param_dtype``. Its codes, and scales that were sent swizzled, are the gathered tensors,
    which FSDP2 frees and refills. Scales that are swizzled here have a storage of their own for FSDP2 to free.
    """
    if out is not None:
        _refill(getattr(out, "_local_tensor", out), outputs, metadata)
        return None
    qdata, scale, per_tensor_scale = _join_outputs(outputs, metadata)
    dtype = {"orig_dtype": param_dtype} if param_dtype in HIGH_PRECISION_DTYPES else {}
    amax = metadata.activation_amax
    record_stream(amax)
    full = shard._replace(qdata=qdata, scale=scale, per_tensor_scale=per_tensor_scale, activation_amax=amax, **dtype)
    return full, () if metadata.is_swizzled else (scale,)


def _refill(full: Any, outputs: tuple[Tensor, ...], metadata: GatherMetadata) -> None:
    _, scale, per_tensor_scale = _join_outputs(outputs, metadata)
    if metadata.ungathered:
        full.scale = scale
    elif not metadata.is_swizzled:
        with torch.autograd._unsafe_preserve_version_counter(full.scale):  # saved for backward; the values are equal
            full.scale.copy_(scale)
    full.per_tensor_scale = per_tensor_scale
    record_stream(metadata.activation_amax)
    full.activation_amax = metadata.activation_amax


def record_stream(*tensors: Tensor | None) -> None:
    """Keep memory for what the current stream does now: another one may have allocated it."""
    for t in tensors:
        if t is not None and t.is_cuda:
            t.record_stream(torch.cuda.current_stream(t.device))
