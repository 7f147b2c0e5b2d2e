"""A matrix seen as one long row, as FSDP2 and others flatten every parameter they are given and seldom read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from nvfp4_tensor.dispatch.table import aten
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.tensor.protocol import Args, Kwargs, Op, Types

View: TypeAlias = Callable[[NVFP4Tensor, Sequence[int]], NVFP4Tensor]
"""What gives a tensor another shape."""


class FlatView(NVFP4Tensor):
    """``source.view(-1)``: made when something reads it, for a row's scales in tiles of 128 rows take 8 bytes a value.

    Until then it holds nothing but its source. What it then is, an NVFP4Tensor that is a copy, refuses to be written
    to. Rows that do not consist of whole blocks raise at that time.
    """

    source: NVFP4Tensor
    _view: View

    def __new__(cls, source: NVFP4Tensor, view: View) -> FlatView:  # type: ignore[misc]  # of a tensor, not of parts
        self = torch.Tensor._make_wrapper_subclass(
            cls, (source.numel(),), dtype=source.dtype, device=source.device, requires_grad=False
        )
        self.source = source
        self._view = view
        return self

    def read(self) -> NVFP4Tensor:
        """The row itself."""
        return self._view(self.source, (self.source.numel(),))

    def share_memory_(self) -> FlatView:
        self.source.share_memory_()
        return self

    def is_shared(self) -> bool:
        return self.source.is_shared()

    def __deepcopy__(self, memo: dict) -> NVFP4Tensor:
        """The row itself, which nothing else holds."""
        return memo.setdefault(id(self), self.read().clone())

    def __getattr__(self, name: str) -> Any:
        if name in ("source", "_view") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.read(), name)  # a field, of those that its class only declares

    @classmethod
    def __torch_function__(cls, func: Any, types: Types, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        if func in NVFP4Tensor._TORCH_FN_TABLE[NVFP4Tensor]:
            args, kwargs = tree_map(_read, args), tree_map(_read, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Op, types: Types, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        if func in (aten.detach.default, aten.alias.default):
            return cls(func(args[0].source), args[0]._view)
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


def _read(value: Any) -> Any:
    return value.read() if isinstance(value, FlatView) else value


def is_lazy(t: NVFP4Tensor, shape: Sequence[int]) -> bool:
    """Whether ``t.view(shape)`` flattens several rows outside of any trace."""
    return (
        len(shape) == 1
        and t.dim() > 1
        and not t.transposed
        and type(t) is NVFP4Tensor
        and type(t.qdata) is Tensor
        and not torch.compiler.is_compiling()
    )
