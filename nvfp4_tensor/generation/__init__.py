"""Text generation with transformers models: native decoding on a CPU, and a key-value cache in NVFP4."""

import nvfp4_tensor.dispatch  # noqa: F401  first: registers the tensor's operators and silences torchao's log lines
from nvfp4_tensor.generation.cache import nvfp4_cache
from nvfp4_tensor.generation.step import decode_natively

__all__ = ["decode_natively", "nvfp4_cache"]
