"""Which weights a graph of torch.compile reads by their parts, as plain inputs, and which it writes.

A graph input that is a tensor subclass is unwrapped in Python at each call: 22 us per weight in torch 2.11, 3 in 2.13.
The parts of a weight (``weight.qdata``, ...) are plain inputs, which cost nothing, and are read from the weight at
each call, so that they are never out of date. But torch does not know that a subclass and its parts share storage: in
one graph, a write into the weight would be lost on a product that reads the parts. So a product that follows a write
reads the weight itself, and a write that follows such a product breaks the graph.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from nvfp4_tensor.tensor.description import Op
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor


class _Trace:
    """The storages of codes, as numbers, that one trace reads by their parts or writes."""

    def __init__(self) -> None:
        self.read: set[int] = set()
        self.written: set[int] = set()


_traces: weakref.WeakKeyDictionary[FakeTensorMode, _Trace] = weakref.WeakKeyDictionary()


def _trace(mode: FakeTensorMode) -> _Trace:
    return _traces.setdefault(mode, _Trace())


@torch.compiler.assume_constant_result
def reads_parts(weight: NVFP4Tensor) -> bool:
    """Return whether the trace of Dynamo may read the parts of this matrix, and note that it does.

    Dynamo calls this with the weight itself, not with its fake. Its guards ensure that later weights have the same
    fields, other than tensors.
    """
    context = TracingContext.try_get()
    mode = None if context is None else context.fake_mode
    parts = [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]
    if (
        mode is None
        or torch.compiler.is_exporting()  # an exported program has parameters as inputs, and no parts of them
        or not _lifts_tensors_of_modules()
        or weight.transposed
        or weight.window is not None
        or weight.qdata.dim() != 2
        or any(type(part) is not torch.Tensor or part.requires_grad or not part.is_contiguous() for part in parts)
    ):
        return False
    fake = mode.fake_tensor_converter._get_memo(weight.qdata)
    if fake is None or mode.fake_tensor_converter._get_memo(weight) is None:  # not an input of the graph
        return False
    storage, trace = fake.untyped_storage()._cdata, _trace(mode)
    if storage in trace.written:
        return False
    trace.read.add(storage)
    return True


def _lifts_tensors_of_modules() -> bool:
    """Return whether tensors of modules are inputs of graphs, not constants; an option before torch 2.13."""
    return torch.__version__ >= "2.13" or torch._dynamo.config.inline_inbuilt_nn_modules


def check_write(func: Op, written: list[Any]) -> None:
    """Note that ``func`` writes to tensors in a trace.

    Raises:
        NotImplementedError: the graph has already read the parts of one of them. Dynamo then ends the graph before the
            write, or raises an error with ``fullgraph=True``.
    """
    for t in written:
        if isinstance(t, NVFP4Tensor) and isinstance(qdata := t._stored().qdata, FakeTensor):
            storage, trace = qdata.untyped_storage()._cdata, _trace(qdata.fake_mode)
            if storage in trace.read:
                raise NotImplementedError(
                    f"{func} writes into an NVFP4 weight after a product of it in the same compiled graph: write "
                    "outside of the compiled function, or before the product, or compile without fullgraph=True"
                )
            trace.written.add(storage)
