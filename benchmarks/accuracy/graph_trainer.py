"""The tutorial's trainer with steps that need nothing from the host: on CUDA, each is one replay of a CUDA graph.

Eager NVFP4 training of a small model waits for Python. Batches, learning rates and losses are tensors here, which the
step indexes by its own number, so that one graph serves all steps and several processes can keep a GPU busy.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from nvfp4_tensor import training
from tutorials.train_llama import Settings, Trainer

EAGER_STEPS = 3
"""Steps before a capture, on its stream: libraries allocate their workspaces, and the optimizer its state."""


class GraphTrainer(Trainer):
    """A :class:`Trainer` of the same steps. ``losses`` (steps,) float32 on the device holds the training losses."""

    def __init__(
        self,
        settings: Settings,
        training_text: Tensor,
        validation_text: Tensor,
        recipe: training.Recipe | None = None,
    ) -> None:
        super().__init__(settings, training_text, validation_text, recipe)
        starts, rates = [], []
        for self.step in range(settings.steps):
            starts.append(self._starts())
            rates.append(self.learning_rate())
        self.step = 0
        device = torch.device(settings.device)
        self._all_starts, self._rates = torch.stack(starts).to(device), torch.tensor(rates, device=device)
        self._rate, self._index = torch.zeros((), device=device), torch.zeros(1, dtype=torch.int64, device=device)
        self.losses = torch.zeros(settings.steps, device=device)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate
            group["capturable"] = device.type == "cuda"
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._eager_steps = EAGER_STEPS

    def start_from(self, other: GraphTrainer) -> None:
        """Take the weights, the optimizer's state and the step of a trainer whose model has the same parameters."""
        self.model.load_state_dict(other.model.state_dict())
        for mine, its in zip(self.model.parameters(), other.model.parameters(), strict=True):
            self.optimizer.state[mine] = {name: value.clone() for name, value in other.optimizer.state[its].items()}
        self.step = other.step
        self._index.fill_(self.step)

    def train(self, until: int | None = None) -> None:
        """Train all steps that are left, or those before ``until``. On CUDA, this returns before the device has
        finished."""
        settings = self.settings
        while self.step < (settings.steps if until is None else until):
            if settings.late_bf16 and self.step == round(settings.steps * (1 - settings.late_bf16)):
                training.set_recipe(self.model, forward="bf16")
                self._forget_graph()
            self._next()
            self.step += 1

    def _forget_graph(self) -> None:
        if self._graph is not None:
            torch.cuda.synchronize()  # its replays use its memory until they have finished
        self._graph, self._eager_steps = None, EAGER_STEPS

    def _next(self) -> None:
        if self._side is None:
            self._step()
        elif self._eager_steps:
            self._eager_steps -= 1
            self._on_side_stream(self._step)
        else:
            if self._graph is None:
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph, stream=self._side):
                    self._step()
            self._graph.replay()

    def _on_side_stream(self, run: Callable[[], object]) -> None:
        assert self._side is not None
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            run()
        torch.cuda.current_stream().wait_stream(self._side)

    def _step(self) -> None:
        """Train one step of AdamW with gradients clipped to norm 1, like Trainer.train_step, on the device alone."""
        (starts,) = self._all_starts.index_select(0, self._index)
        self._rate.copy_(self._rates.index_select(0, self._index)[0])
        loss = self._loss(self._windows(self.training_text, starts))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.index_copy_(0, self._index, loss.detach()[None])
        self._index += 1
