"""The number of repetitions in a test."""

import os


def times(n: int) -> range:
    """Return a range of n repetitions, or fewer under a sanitizer, where a product takes a minute."""
    return range(min(n, int(os.environ.get("NVFP4_TEST_REPEATS", n))))
