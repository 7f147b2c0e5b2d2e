"""The number of repetitions in a test, and replays of CUDA graphs."""

import os

import torch


def times(n: int) -> range:
    """Return a range of n repetitions, or fewer under a sanitizer, where a product takes a minute."""
    return range(min(n, int(os.environ.get("NVFP4_TEST_REPEATS", n))))


def captured(run):
    """Return a CUDA graph of ``run`` and what it returned."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results
