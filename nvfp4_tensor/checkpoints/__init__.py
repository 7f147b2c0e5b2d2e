"""Checkpoints that others made, and checkpoints that others take: read, written, converted, byte for byte."""

from nvfp4_tensor.checkpoints.common import FORMATS, Checkpoint, Entry, Format, LinearParts, detect, parts_of, tensor_of

__all__ = ["FORMATS", "Checkpoint", "Entry", "Format", "LinearParts", "detect", "parts_of", "tensor_of"]
