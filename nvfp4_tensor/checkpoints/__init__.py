"""Checkpoints that others made, and checkpoints that others take: read, written, converted, byte for byte."""

from nvfp4_tensor.checkpoints.common import (
    FORMATS,
    Checkpoint,
    Entry,
    Format,
    LinearParts,
    detect,
    parts_of,
    read,
    tensor_of,
)
from nvfp4_tensor.checkpoints.convert import convert
from nvfp4_tensor.checkpoints.quantizing import quantize

__all__ = [
    "FORMATS",
    "Checkpoint",
    "Entry",
    "Format",
    "LinearParts",
    "convert",
    "detect",
    "parts_of",
    "quantize",
    "read",
    "tensor_of",
]
