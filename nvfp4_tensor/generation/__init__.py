"""Text generation with transformers models: native decoding on GPUs and CPUs, and a key-value cache in NVFP4."""

# First: both silence torchao's log lines, and the second one registers the tensor's operators.
import nvfp4_tensor._compat.transformers_import
import nvfp4_tensor.dispatch  # noqa: F401

# isort: split
from nvfp4_tensor.generation.cache import nvfp4_cache
from nvfp4_tensor.generation.step import decode_counts, decode_natively
from nvfp4_tensor.generation.text import generate

__all__ = ["decode_counts", "decode_natively", "generate", "nvfp4_cache"]
