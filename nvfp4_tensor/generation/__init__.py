"""Text generation with transformers' models: native decoding steps, and a key-value cache in NVFP4."""

from nvfp4_tensor.generation.cache import nvfp4_cache
from nvfp4_tensor.generation.step import decode_natively

__all__ = ["decode_natively", "nvfp4_cache"]
