"""Exports of torch that have no NVFP4: torch.jit.save would end in a segmentation fault, others in obscure errors."""

from __future__ import annotations

import torch

_tracing_state = torch._C._get_tracing_state


def refuse_export(*_: object) -> None:
    """Raise a RuntimeError: TorchScript or ONNX would read an NVFP4 weight or a linear that trains in NVFP4."""
    raise RuntimeError(
        "torch.jit (trace, script, save) and torch.onnx do not support NVFP4 and FP8 weights: export the model by "
        "torch.export.export(model, args), or dequantize its weights first (training.to_dense for linears that train)"
    )


def check_not_traced() -> None:
    """Raise that error while torch.jit.trace, or the ONNX exporter that uses it, runs the model."""
    if _tracing_state() is not None:
        refuse_export()


def check_not_in_onnx() -> None:
    """Raise that error while torch.onnx.export reads an operator of an exported program."""
    if torch.onnx.is_in_onnx_export():
        refuse_export()
