"""Text generation with transformers models: native decoding on GPUs and CPUs, and a key-value cache in NVFP4."""

import nvfp4_tensor.dispatch  # noqa: F401  first: registers the tensor's operators and silences torchao's log lines
from nvfp4_tensor.generation.cache import nvfp4_cache
from nvfp4_tensor.generation.step import decode_natively
from nvfp4_tensor.generation.text import generate

__all__ = ["decode_natively", "generate", "nvfp4_cache"]
