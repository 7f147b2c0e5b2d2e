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
from nvfp4_tensor.checkpoints.loading import load
from nvfp4_tensor.checkpoints.plain import from_plain, to_plain
from nvfp4_tensor.checkpoints.quantizing import quantize
from nvfp4_tensor.checkpoints.saving import save

__all__ = [
    "FORMATS",
    "Checkpoint",
    "Entry",
    "Format",
    "LinearParts",
    "convert",
    "detect",
    "from_plain",
    "load",
    "parts_of",
    "quantize",
    "read",
    "save",
    "tensor_of",
    "to_plain",
]
