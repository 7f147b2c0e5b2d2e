"""Collectives on NVFP4Tensors, as called by DTensor, torch.distributed.checkpoint and users.

Each inner tensor is sent separately, as bytes. All ranks need tensors of the same shape and spec.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives
from torch import Tensor

from nvfp4_tensor._compat.frames import caller_frame_locals
from nvfp4_tensor.dispatch.table import IN_DDP, implements, unsupported
from nvfp4_tensor.dispatch.writes import count_write
from nvfp4_tensor.sharding import fsdp_transport
from nvfp4_tensor.tensor.description import Args, Kwargs, Op, Types
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

c10d, functional = torch.ops.c10d, torch.ops._c10d_functional


def _bytes_of(t: NVFP4Tensor) -> list[Tensor]:
    """Return 1-D views of the inner tensors, into which a collective can write."""
    if t.window is not None:
        raise unsupported("a collective", "a part of a tensor has no codes of its own", f"use t.clone() first{IN_DDP}")
    return [data.view(-1).view(torch.uint8) for data in t._parts()]


def _for_each_inner_tensor(tensors: Sequence[Tensor], call: Callable[[list[Tensor]], Any]) -> Any:
    """Call a collective on each inner tensor in turn, wait for all except the last, and return the last one's work."""
    *first, last = zip(*map(_bytes_of, tensors), strict=True)  # type: ignore[arg-type]  # all are NVFP4Tensors
    for data in first:
        call(list(data))[-1].wait()
    return call(list(last))[-1]


def _asynchronous(func: Op, args: Args) -> Args:
    """Return the arguments with async_op set, because NCCL returns a null pointer as the work of a call without it.

    The caller waits for the work that we return, as with any other backend.
    """
    index = [argument.name for argument in func._schema.arguments].index("async_op")
    return (*args[:index], True, *args[index + 1 :])


@implements(c10d.broadcast_.default)
def _broadcast_(func: Op, types: Types, args: Args, kwargs: Kwargs) -> tuple[list[Tensor], Any]:
    tensors, *rest = _asynchronous(func, args)
    # Raise before other ranks receive data of the wrong size.
    if caller_frame_locals("_broadcast_tensors", "_state_dict_utils.py") is not None:
        why = "broadcast_from_rank0=True makes dense buffers on the other ranks, which cannot receive codes"
        raise unsupported(func, why, "load the full state dict on every rank, or load a sharded checkpoint")
    for t in tensors:
        count_write(t)
    return list(tensors), _for_each_inner_tensor(tensors, lambda data: func(data, *rest, **kwargs))


@implements(c10d.scatter_.default)
def _scatter_(func: Op, types: Types, args: Args, kwargs: Kwargs) -> tuple[list[Tensor], Any]:
    (output,), inputs, *rest = _asynchronous(func, args)
    inputs = [[t.clone() if isinstance(t, NVFP4Tensor) and t.window is not None else t for t in row] for row in inputs]
    tensors = [output, *(t for row in inputs for t in row)]
    for t in tensors[1:]:
        _check_alike(func, output, t)

    def scatter(data: list[Tensor]) -> Any:
        return func(data[:1], [data[1:]] if len(data) > 1 else [], *rest, **kwargs)

    count_write(output)
    return [output], _for_each_inner_tensor(tensors, scatter)


def _check_alike(func: Op, a: Tensor, b: Tensor) -> None:
    if not isinstance(a, NVFP4Tensor) or not isinstance(b, NVFP4Tensor):
        raise unsupported(func, "all tensors of a scatter must be NVFP4Tensors")
    if a.shape != b.shape or a.__tensor_flatten__()[0] != b.__tensor_flatten__()[0] or a.spec != b.spec:
        raise unsupported(func, f"{a!r} and {b!r} are stored differently")


@implements(functional.all_gather_into_tensor.default)
def _all_gather(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    """Concatenate along the first dimension, with one per-tensor scale if it is the same on all ranks."""
    t, world, *group = args
    if t.transposed:
        raise unsupported(func, "it is transposed, but ranks join along stored rows", "use t.contiguous() first")

    def gathered(data: Tensor) -> Tensor:
        return functional.wait_tensor(func(data.contiguous(), world, *group, **kwargs))

    inputs, metadata = fsdp_transport.all_gather_inputs(t, world)
    qdata, scale, factor = map(gathered, inputs)
    if metadata.has_one_scale:
        factor = _one_or_per_row(factor, t)
    scale = fsdp_transport.swizzle_gathered(qdata, scale, metadata)
    amax = None if t.activation_amax is None else t.activation_amax.clone()
    return t._replace(qdata=qdata, scale=scale, per_tensor_scale=factor, activation_amax=amax)


def _one_or_per_row(factors: Tensor, t: NVFP4Tensor) -> Tensor:
    """Return the per-tensor scale that all ranks share, or one per row. A trace has no values and assumes equality."""
    if type(factors) is not Tensor or factors.is_meta or bool((factors == factors[0]).all()):
        return factors[0]
    return factors.repeat_interleave(t.numel() // max(t.columns, 1))


_WAITS = [functional.wait_tensor.default]
if hasattr(functional, "_wrap_tensor_autograd"):  # torch 2.11 and 2.12
    _WAITS.append(functional._wrap_tensor_autograd.default)


@implements(_WAITS)
def _wait_tensor(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    """Return the tensor: ``_all_gather`` has waited, and no other functional collective returns an NVFP4Tensor."""
    return args[0]
