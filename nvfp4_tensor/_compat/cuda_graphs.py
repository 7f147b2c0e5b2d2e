"""Captures of CUDA graphs that may fail."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, device: torch.device, **options: Any) -> Iterator[None]:
    """Capture what runs on a device, as ``torch.cuda.graph(graph, **options)``, whose failure ends all random draws.

    Garbage is not collected meanwhile: memory and graphs that it frees would invalidate the capture.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, **options):
            yield
    except RuntimeError:
        torch.cuda.synchronize(device)
        generator = torch.cuda.default_generators[device.index]
        generator.graphsafe_set_state(generator.clone_state())  # the capture's refuses draws outside of it
        raise
    finally:
        if collects:
            gc.enable()
