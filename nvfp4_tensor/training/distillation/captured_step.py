"""Faster steps: layers compiled by torch.compile, and a step without the host, replayed as a CUDA graph."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from nvfp4_tensor._compat.cuda_graphs import capturing
from nvfp4_tensor._compat.frames import warn_user

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


@contextlib.contextmanager
def compiled_blocks(models: Iterable[nn.Module]) -> Iterator[None]:
    """Compile the repeated blocks of models: the modules of outermost ModuleLists. Like ones share their code."""
    blocks: list[nn.Module] = []
    for model in models:
        inside: set[nn.Module] = set()
        for each in model.modules():
            if isinstance(each, nn.ModuleList) and each not in inside:
                inside.update(each.modules())
                blocks += [block for block in each if block._compiled_call_impl is None]
    try:
        for block in blocks:
            block.compile()
        yield
    finally:
        for block in blocks:
            block._compiled_call_impl = None


@contextlib.contextmanager
def _same_masks(packed: bool) -> Iterator[None]:
    """Let transformers leave out causal masks in a capture, as it does in other steps, unless the batch is packed.

    Whether positions are packed, or a mask hides nothing, is decided from values, which a capture cannot read. So it
    makes masks there, which take a slower attention, and a second compilation.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    before: dict[str, Any] = {
        name: getattr(masking, name, None) for name in ("is_tracing", "find_packed_sequence_indices")
    }
    if masking is None or packed or None in before.values():
        yield
        return
    masking.is_tracing = lambda tensor=None: tensor is not None and before["is_tracing"](tensor)
    masking.find_packed_sequence_indices = lambda *_, **__: None
    try:
        yield
    finally:
        vars(masking).update(before)


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
            self._capture(tree_unflatten(self._inputs, tree))
        for own, each in zip(self._inputs, leaves, strict=True):
            if isinstance(own, Tensor):
                own.copy_(each, non_blocking=True)
        if self._graph is None:
            return self._step(batches)
        self._graph.replay()
        self._replayed()
        return self._loss

    def _capture(self, batches: Sequence[Any]) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            # A tuple may have positions at any place.
            packed = any("position_ids" in each if isinstance(each, Mapping) else not isinstance(each, Tensor)
                         for each in batches)  # fmt: skip
            with _same_masks(packed), capturing(graph, self._stream.device, stream=self._stream):
                self._loss = self._step(batches)
            self._graph = graph
        except RuntimeError as error:
            warn_user(
                f"the model waits for the device ({str(error).splitlines()[0]}): distill launches its steps "
                "one by one, which takes longer for small models",
            )

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)
