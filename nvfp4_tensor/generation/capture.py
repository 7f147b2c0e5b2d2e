"""Captures of CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nvfp4_tensor._compat.cuda_graphs import capturing


def captured(
    run: Callable[[], Any], device: torch.device, pool: Any, warm_up: Callable[[], object] | None = None
) -> Callable[[], Any]:
    """Capture ``run``, and return a function that replays it and returns its output, the same tensors each time.

    Args:
        pool: the memory pool of all graphs that do not run at the same time.
        warm_up: what to run before, so that libraries allocate their workspaces.
    """
    with torch.cuda.device(device):
        if warm_up is not None:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                warm_up()
            torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, device, pool=pool, capture_error_mode="thread_local"):  # other threads may use CUDA
            output = run()

    def replay() -> Any:
        if torch.cuda.current_device() == device.index:
            graph.replay()
        else:
            with torch.cuda.device(device):
                graph.replay()
        return output

    return replay
