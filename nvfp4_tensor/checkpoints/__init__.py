"""Read, write and convert NVFP4 checkpoints in the formats of other libraries, without rounding."""

import nvfp4_tensor.dispatch  # noqa: F401  first: it registers the tensor's operators, and silences torchao's import
from nvfp4_tensor.checkpoints.checkpoint import FORMATS, Checkpoint, Entry, Format, detect, read
from nvfp4_tensor.checkpoints.convert import convert
from nvfp4_tensor.checkpoints.formats import mxfp4
from nvfp4_tensor.checkpoints.models.loading import load
from nvfp4_tensor.checkpoints.models.saving import save
from nvfp4_tensor.checkpoints.parts import LinearParts, parts_of, tensor_of
from nvfp4_tensor.checkpoints.plain_state_dict import from_plain, to_plain
from nvfp4_tensor.checkpoints.quantizing import quantize

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
    "mxfp4",
    "parts_of",
    "quantize",
    "read",
    "save",
    "tensor_of",
    "to_plain",
]
