"""Block formats in plain torch, for validation: NVFP4, MXFP4, MXFP6, MXFP8, MXINT8, int4 and user-defined formats.

:func:`cast` converts a tensor to a format, :func:`upcast` decodes it, :func:`matmul` multiplies.
"""

from nvfp4_tensor.emulation.blocks import Block, BlockTensor
from nvfp4_tensor.emulation.casting import cast, upcast
from nvfp4_tensor.emulation.elements import ELEMENTS, Element
from nvfp4_tensor.emulation.formats import FORMATS, BlockFormat
from nvfp4_tensor.emulation.modes import CastMode, ComputeMode, ScaleMode
from nvfp4_tensor.emulation.products import matmul
from nvfp4_tensor.emulation.scales import SCALES, Scale

__all__ = [
    "ELEMENTS",
    "FORMATS",
    "SCALES",
    "Block",
    "BlockFormat",
    "BlockTensor",
    "CastMode",
    "ComputeMode",
    "Element",
    "Scale",
    "ScaleMode",
    "cast",
    "matmul",
    "upcast",
]
