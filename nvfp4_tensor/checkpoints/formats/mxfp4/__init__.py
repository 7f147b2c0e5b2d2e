"""MXFP4 checkpoints, read as NVFP4."""

from nvfp4_tensor.checkpoints.formats.mxfp4.values import to_nvfp4

__all__ = ["to_nvfp4"]
