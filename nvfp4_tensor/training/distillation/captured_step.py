"""A step that needs nothing from the host, replayed as a CUDA graph: for small models the host is the slower one."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

_EAGER_STEPS = 3
"""Steps before the capture, on its stream: libraries allocate workspaces there, and the optimizer its state."""

Step = Callable[[Sequence[Any]], Tensor]


def can_capture(models: Iterable[nn.Module]) -> bool:
    """Return whether steps of these models may be captured: on one CUDA device, in one process, plainly run."""
    models = list(models)
    devices = {each.device for model in models for each in (*model.parameters(), *model.buffers())}
    return (
        len(devices) == 1
        and next(iter(devices)).type == "cuda"
        and not torch.distributed.is_initialized()
        and not torch.is_autocast_enabled("cuda")
        and not any(getattr(each, "gradient_checkpointing", False) for model in models for each in model.modules())
    )


class CapturedStep:
    """A step of batches: eager three times and for batches of other shapes than the first, else a replay of a graph.

    A model that waits for the device cannot be captured: its steps stay eager, with a warning.

    Args:
        step: computes a loss from batches and updates the model, in memory that stays where it is.
        replayed: called after a replay, which has run no Python.
    """

    def __init__(self, step: Step, device: torch.device, replayed: Callable[[], object]) -> None:
        self._step, self._replayed = step, replayed
        self._stream, self._eager_steps = torch.cuda.Stream(device), _EAGER_STEPS
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Any] | None = None
        self._form: Any = None

    def __call__(self, batches: Sequence[Any]) -> Tensor:
        """Take a step, and return its loss."""
        leaves, tree = tree_flatten(list(batches))
        form = (tree, [(each.shape, each.dtype) if isinstance(each, Tensor) else each for each in leaves])
        self._form = self._form or form
        if self._eager_steps or form != self._form:
            self._eager_steps = max(self._eager_steps - 1, 0)
            with self._on_stream():
                return self._step(batches)
        if self._inputs is None:
            device = self._stream.device
            self._inputs = [each.to(device, copy=True) if isinstance(each, Tensor) else each for each in leaves]
            self._capture(tree)
        for own, each in zip(self._inputs, leaves, strict=True):
            if isinstance(own, Tensor):
                own.copy_(each, non_blocking=True)
        if self._graph is None:
            return self._step(batches)
        self._graph.replay()
        self._replayed()
        return self._loss

    def _capture(self, tree: Any) -> None:
        assert self._inputs is not None
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                self._loss = self._step(tree_unflatten(self._inputs, tree))
            self._graph = graph
        except RuntimeError as error:
            torch.cuda.synchronize(self._stream.device)
            warnings.warn(
                f"the model waits for the device ({str(error).splitlines()[0]}): distill launches its steps "
                "one by one, which takes longer for small models",
                stacklevel=2,
            )

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)
