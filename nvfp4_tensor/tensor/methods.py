"""Methods of torch.Tensor that reach for a storage, which an NVFP4Tensor has one of for each of its parts.

They never come to ``__torch_dispatch__``: torch follows a null pointer, or changes nothing and says nothing.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from nvfp4_tensor._compat.frames import caller_frame_locals
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.tensor.protocol import Args, Kwargs, Op, Types


def _parts(t: NVFP4Tensor) -> list[Tensor]:
    return [getattr(t, name) for name in t.__tensor_flatten__()[0]]


@NVFP4Tensor.implements_torch_function(Tensor.share_memory_)
def _share_memory_(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    for part in _parts(args[0]):
        part.share_memory_()
    return args[0]


@NVFP4Tensor.implements_torch_function(Tensor.is_shared)
def _is_shared(func: Op, types: Types, args: Args, kwargs: Kwargs) -> bool:
    return all(part.is_shared() for part in _parts(args[0]))


@NVFP4Tensor.implements_torch_function(Tensor.data_ptr)
def _data_ptr(func: Op, types: Types, args: Args, kwargs: Kwargs) -> int:
    """That of the codes: by it accelerate and others know one tensor from another, which by 0 are all the same.

    0 for what stages dcp.async_save's tensors: it then copies the parts, and not a storage that is not there.
    """
    if caller_frame_locals("_offload_tensor", "_state_dict_stager.py") is not None:
        return 0
    return args[0].qdata.data_ptr()


@NVFP4Tensor.implements_torch_function(Tensor.data.__set__)  # type: ignore[attr-defined]  # a property of C
def _set_data(func: Op, types: Types, args: Args, kwargs: Kwargs) -> None:
    """The parts of another NVFP4Tensor in place of those of t, whatever its shape, dtype and device."""
    t, new = args
    if not isinstance(new, NVFP4Tensor):
        raise RuntimeError(
            f"the data of an NVFP4Tensor is another NVFP4Tensor, not a {type(new).__name__}: t.copy_(x) quantizes x "
            "into it, and module.weight = torch.nn.Parameter(x) replaces it"
        )
    with torch._C.DisableTorchFunctionSubclass():
        func(t, new)  # shape, strides, dtype and device
    for name, value in new._fields().items():
        setattr(t, name, value)
    t.aliasing, t.place = new.aliasing, new.place


@NVFP4Tensor.implements_torch_function(Tensor.tolist)
def _tolist(func: Op, types: Types, args: Args, kwargs: Kwargs) -> list:
    return args[0].dequantize().tolist()


OFFLOAD = "accelerate's disk_offload writes such an array, which nothing could quantize again: use its cpu_offload"


def _refused(func: Op, types: Types, args: Args, kwargs: Kwargs) -> NoReturn:
    name = func.__name__
    raise RuntimeError(
        f"Tensor.{name} reads or writes one storage of plain elements, which an NVFP4Tensor does not have: "
        f"t.dequantize().{name}(...) does it to a dense copy, and t.copy_(x) quantizes x into t"
        + (f". {OFFLOAD}" if name == "numpy" else "")
    )


NVFP4Tensor.implements_torch_function([
    Tensor.apply_, Tensor.map_, Tensor.map2_, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__,
])(_refused)  # fmt: skip
