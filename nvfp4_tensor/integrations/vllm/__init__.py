"""NVFP4 checkpoints in vLLM 0.33 by our kernels, on compute capability 8.0 to 9.0 and on CPUs.

vLLM finds this package by its entry point ``vllm.general_plugins``: with nvfp4-tensor in vLLM's environment, ``vllm
serve MODEL`` needs nothing else. ``NVFP4_TENSOR_SERVING=0`` leaves vLLM as it is, ``w4a16`` keeps activations dense.
Linears and experts of ModelOpt's and compressed-tensors's NVFP4 checkpoints are served; ours are ModelOpt's.
"""

from __future__ import annotations

from nvfp4_tensor.integrations import serving


def register() -> None:
    """Install the plug-in in this process, once: see :func:`serving.register`."""
    serving.register("vLLM", "nvfp4_tensor.integrations.vllm.plugin")


__all__ = ["register"]
