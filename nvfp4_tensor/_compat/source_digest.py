"""A digest of this package's code, for torch's caches of compiled graphs."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import torch
import torch.compiler.config


@functools.cache
def source_digest() -> str:
    """Return a digest of this package's code, on which a traced graph depends; torch's cache key lacks it."""
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.blake2b(b"".join(source.read_bytes() for source in sources)).hexdigest()


if torch.__version__ < "2.13":  # its cache does not call _stable_hash_for_caching, so the digest goes into all keys
    torch.compiler.config.cache_key_tag += f"nvfp4_tensor {source_digest()}"
