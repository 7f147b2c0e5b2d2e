"""NVFP4 checkpoints in vLLM 0.33 by our kernels, on compute capability 8.0 to 9.0 and on CPUs.

vLLM finds this package by its entry point ``vllm.general_plugins``: with nvfp4-tensor in vLLM's environment, ``vllm
serve MODEL`` needs nothing else. ``NVFP4_TENSOR_SERVING=0`` leaves vLLM as it is, ``w4a16`` keeps activations dense.
Linears and experts of ModelOpt's and compressed-tensors's NVFP4 checkpoints are served; ours are ModelOpt's.
"""

from __future__ import annotations

import warnings


def register() -> None:
    """Install the plug-in in this process, once. vLLM calls it in each of its processes.

    If vLLM is not what the plug-in was written for, or anything fails, vLLM stays as it was, with a warning.
    """
    try:
        from nvfp4_tensor.integrations.vllm import plugin

        left = plugin.install()
    except Exception as error:  # an exception would end vLLM
        left = f"{type(error).__name__}: {error}"
    if left:
        warnings.warn(f"nvfp4_tensor leaves vLLM as it is: {left}", stacklevel=2)


__all__ = ["register"]
