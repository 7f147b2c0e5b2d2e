"""NVFP4 linears and experts in SGLang 0.5.23 by our kernels, on compute capability 8.0 to 9.0.

SGLang finds this package by its entry point ``sglang.srt.plugins``.
``NVFP4_TENSOR_SERVING=0`` leaves SGLang as it is, ``w4a16`` keeps activations dense.
"""

from __future__ import annotations

from nvfp4_tensor.integrations import serving


def register() -> None:
    """Install the plug-in in this process, once: see :func:`serving.register`."""
    serving.register("SGLang", "nvfp4_tensor.integrations.sglang.plugin")


__all__ = ["register"]
