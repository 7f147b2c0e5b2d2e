"""Block formats in plain torch, for software validation: NVFP4 beside MXFP4, MXFP6, MXFP8, MXINT8, int4 and your own.

:func:`cast` is the door in, :func:`upcast` the door out; :func:`dot` and :func:`matmul` multiply what lies between.
"""

from nvfp4_tensor.emulation.blocks import Block, BlockTensor
from nvfp4_tensor.emulation.casting import cast, upcast
from nvfp4_tensor.emulation.elements import ELEMENTS, Element
from nvfp4_tensor.emulation.formats import FORMATS, BlockFormat
from nvfp4_tensor.emulation.modes import CastMode, ComputeMode, ScaleMode
from nvfp4_tensor.emulation.products import dot, matmul
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
    "dot",
    "matmul",
    "upcast",
]
