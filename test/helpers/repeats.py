"""How often a test repeats itself."""

import os


def times(n: int) -> range:
    """How often a test does the same again: under a sanitizer, where a product takes a minute, less often."""
    return range(min(n, int(os.environ.get("NVFP4_TEST_REPEATS", n))))
