"""Collectives on NVFP4Tensors, as DTensor, torch.distributed.checkpoint and users call them.

Each part travels by itself, as bytes. The ranks' tensors have to be alike: of one shape, stored by one spec.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives
from torch import Tensor

from nvfp4_tensor._compat.frames import caller_frame_locals
from nvfp4_tensor.dispatch.table import implements, unsupported
from nvfp4_tensor.sharding import fsdp_transport
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.tensor.protocol import Args, Kwargs, Op, Types

c10d, functional = torch.ops.c10d, torch.ops._c10d_functional


def _bytes_of(t: NVFP4Tensor) -> list[Tensor]:
    """The parts as they lie in memory, 1-D: a collective writes into them."""
    parts = [getattr(t, name) for name in t.__tensor_flatten__()[0]]
    if not all(part.is_contiguous() for part in parts):
        raise unsupported("a collective", "its parts do not lie together in memory", "clone() it first")
    return [part.view(-1).view(torch.uint8) for part in parts]


def _each_part(tensors: Sequence[Tensor], call: Callable[[list[Tensor]], Any]) -> Any:
    """The work of the last part, begun after those before it have ended."""
    of_parts = list(zip(*map(_bytes_of, tensors), strict=True))  # type: ignore[arg-type]  # all are NVFP4Tensors
    for parts in of_parts[:-1]:
        call(list(parts))[-1].wait()
    return call(list(of_parts[-1]))[-1]


def _asynchronous(func: Op, args: Args) -> Args:
    """The arguments with async_op, for NCCL returns a null pointer as the work of a call without it.

    Who called waits for the work that we return, as for that of any other backend.
    """
    at = [argument.name for argument in func._schema.arguments].index("async_op")
    return (*args[:at], True, *args[at + 1 :])


@implements(c10d.broadcast_.default)
def _broadcast_(func: Op, types: Types, args: Args, kwargs: Kwargs) -> tuple[list[Tensor], Any]:
    tensors, *how = _asynchronous(func, args)
    if (
        caller_frame_locals("_broadcast_tensors", "_state_dict_utils.py") is not None
    ):  # before other ranks get what does not fit
        why = "broadcast_from_rank0=True makes dense buffers on the other ranks, which codes do not fit"
        raise unsupported(func, why, "give every rank the full state dict, or load a checkpoint of shards")
    return list(tensors), _each_part(tensors, lambda parts: func(parts, *how, **kwargs))


@implements(c10d.scatter_.default)
def _scatter_(func: Op, types: Types, args: Args, kwargs: Kwargs) -> tuple[list[Tensor], Any]:
    (output,), inputs, *how = _asynchronous(func, args)
    tensors = [output, *(t for row in inputs for t in row)]
    for t in tensors[1:]:
        _check_alike(func, output, t)

    def scatter(parts: list[Tensor]) -> Any:
        return func(parts[:1], [parts[1:]] if len(parts) > 1 else [], *how, **kwargs)

    return [output], _each_part(tensors, scatter)


def _check_alike(func: Op, a: Tensor, b: Tensor) -> None:
    if not isinstance(a, NVFP4Tensor) or not isinstance(b, NVFP4Tensor):
        raise unsupported(func, "NVFP4 tensors do not travel into dense ones, nor dense ones into them")
    if a.shape != b.shape or a.__tensor_flatten__()[0] != b.__tensor_flatten__()[0] or a.spec != b.spec:
        raise unsupported(func, f"{a!r} and {b!r} are stored differently")


@implements(functional.all_gather_into_tensor.default)
def _all_gather(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    """The first dimensions of all ranks joined; with one per-tensor scale, if it is the same on all."""
    t, world, *group = args
    if t.transposed:
        raise unsupported(func, "it is transposed, and rows are what ranks are joined along", "contiguous() it first")

    def gathered(part: Tensor) -> Tensor:
        return functional.wait_tensor(func(part.contiguous(), world, *group, **kwargs))

    inputs, metadata = fsdp_transport.all_gather_inputs(t, world)
    qdata, scale, factor = map(gathered, inputs)
    if metadata.has_one_scale:
        factor = _one_of(factor, t)
    scale = fsdp_transport.swizzle_gathered(qdata, scale, metadata)
    return t._replace(qdata=qdata, scale=scale, per_tensor_scale=factor)


def _one_of(factors: Tensor, t: NVFP4Tensor) -> Tensor:
    """The per-tensor scale that all ranks have, or one for each row. A trace has no values: it takes them as equal."""
    if type(factors) is not Tensor or factors.is_meta or bool((factors == factors[0]).all()):
        return factors[0]
    return factors.repeat_interleave(t.numel() // max(t.columns, 1))


@implements(functional.wait_tensor.default)
def _wait_tensor(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    """As it is: gathered parts are waited for above, and no other collective gives an NVFP4Tensor."""
    return args[0]


if hasattr(functional, "_wrap_tensor_autograd"):  # torch 2.11 and 2.12

    @implements(functional._wrap_tensor_autograd.default)
    def _wrap_tensor_autograd(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
        return args[0]
