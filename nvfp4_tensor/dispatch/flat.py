"""A lazy 1-D view of a matrix: FSDP2 and others flatten every parameter, but seldom read the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed  # registers c10d's operators
from torch import Tensor
from torch.utils._pytree import tree_map

from nvfp4_tensor._compat.frames import caller_frame_locals
from nvfp4_tensor.dispatch.table import aten, remembered, unsupported
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.tensor.protocol import Args, Kwargs, Op, Types

c10d = torch.ops.c10d

View: TypeAlias = Callable[[NVFP4Tensor, Sequence[int]], NVFP4Tensor]
"""A function that returns a tensor with another shape."""


class FlatView(NVFP4Tensor):
    """``source.view(-1)``, computed when it is read, because the padded scales of one long row take 8 bytes per value.

    Until then it holds only its source. Reading it creates a copy, which cannot be written to, or raises an error if
    the rows do not consist of complete blocks.
    """

    source: NVFP4Tensor
    _view: View

    def __new__(cls, source: NVFP4Tensor, view: View) -> FlatView:  # type: ignore[misc]  # other arguments
        self = torch.Tensor._make_wrapper_subclass(
            cls, (source.numel(),), dtype=source.dtype, device=source.device, requires_grad=False
        )
        self.source = source
        self._view = view
        return self

    def read(self) -> NVFP4Tensor:
        """Compute the 1-D tensor."""
        self.source._refresh()
        return remembered(self._view(self.source, (self.source.numel(),)), self.source)

    def share_memory_(self) -> FlatView:
        self.source.share_memory_()
        return self

    def is_shared(self) -> bool:
        return self.source.is_shared()

    def __deepcopy__(self, memo: dict) -> NVFP4Tensor:
        """Return the 1-D tensor as an independent copy."""
        return memo.setdefault(id(self), self.read().clone())

    def __getattr__(self, name: str) -> Any:
        if name in ("source", "_view") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.read(), name)  # a field, which the class only declares

    @classmethod
    def __torch_function__(cls, func: Any, types: Types, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        if func in NVFP4Tensor._TORCH_FN_TABLE[NVFP4Tensor]:
            args, kwargs = tree_map(_read, args), tree_map(_read, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Op, types: Types, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        if func in (aten.detach.default, aten.alias.default):
            return cls(func(args[0].source), args[0]._view)
        if func in (aten.cat.default, c10d.broadcast_.default):
            check_not_ddp(func)  # before a flat copy is made, for which some shapes have no layout
        if func is c10d.broadcast_.default:
            raise unsupported(func, "a flat view is a copy, and what it received would be lost", "broadcast the matrix")
        return func(*tree_map(_read, args), **tree_map(_read, kwargs or {}))

    @classmethod
    def __tensor_unflatten__(
        cls,
        tensor_data_dict: dict[str, Any],
        tensor_attributes: dict[str, Any],
        outer_size: Sequence[int] | None,
        outer_stride: Sequence[int] | None,
    ) -> NVFP4Tensor:
        return NVFP4Tensor.__tensor_unflatten__(tensor_data_dict, tensor_attributes, outer_size, outer_stride)


def check_not_ddp(func: Op) -> None:
    """Raise an error that names ``prepare_ddp`` if DistributedDataParallel flattens parameters to broadcast them."""
    if caller_frame_locals("__init__", "nn/parallel/distributed.py") is not None:
        why = "DistributedDataParallel broadcasts parameters in flat buffers, which cannot hold codes"
        raise unsupported(func, why, "call DistributedDataParallel(nvfp4_tensor.distributed.prepare_ddp(model))")


def _read(value: Any) -> Any:
    return value.read() if isinstance(value, FlatView) else value


def is_lazy(t: NVFP4Tensor, shape: Sequence[int]) -> bool:
    """Return whether ``t.view(shape)`` flattens several rows outside of a trace."""
    return (
        len(shape) == 1
        and t.dim() > 1
        and not t.transposed
        and type(t) is NVFP4Tensor
        and type(t.qdata) is Tensor
        and not torch.compiler.is_compiling()
    )
