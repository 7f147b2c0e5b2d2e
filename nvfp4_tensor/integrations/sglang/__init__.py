"""NVFP4 linears and experts in SGLang 0.5.23 by our kernels, on compute capability 8.0 to 9.0.

SGLang finds this package by its entry point ``sglang.srt.plugins``.
``NVFP4_TENSOR_SERVING=0`` leaves SGLang as it is, ``w4a16`` keeps activations dense.
"""

from __future__ import annotations

import warnings


def register() -> None:
    """Install the plug-in in this process. SGLang calls it in each of its processes.

    If SGLang is not what the plug-in was written for, or anything fails, SGLang stays as it was, with a warning.
    """
    try:
        from nvfp4_tensor.integrations.sglang import plugin

        left = plugin.install()
    except Exception as error:  # SGLang would print it, and go on
        left = f"{type(error).__name__}: {error}"
    if left:
        warnings.warn(f"nvfp4_tensor leaves SGLang as it is: {left}", stacklevel=2)


__all__ = ["register"]
