"""The tutorial's trainer with steps that need nothing from the host: on CUDA, each is one replay of a CUDA graph.

Eager NVFP4 training of a small model waits for Python. The starts of windows and the learning rates are on the device
here, so that steps do not wait for it, and several processes can keep a GPU busy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from nvfp4_tensor import training
from nvfp4_tensor.training.distillation.captured_step import CapturedStep
from tutorials.train_llama import Settings, Trainer


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
        self._rate, self.losses = torch.zeros((), device=device), torch.zeros(settings.steps, device=device)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate
            group["capturable"] = device.type == "cuda"

    def start_from(self, other: GraphTrainer) -> None:
        """Take the weights, the optimizer's state and the step of a trainer whose model has the same parameters."""
        self.model.load_state_dict(other.model.state_dict())
        for mine, its in zip(self.model.parameters(), other.model.parameters(), strict=True):
            self.optimizer.state[mine] = {name: value.clone() for name, value in other.optimizer.state[its].items()}
        self.step = other.step

    def train(self, until: int | None = None) -> None:
        """Train all steps that are left, or those before ``until``. On CUDA, this returns before the device has
        finished."""
        settings, take = self.settings, self._captured()
        while self.step < (settings.steps if until is None else until):
            if settings.late_bf16 and self.step == round(settings.steps * (1 - settings.late_bf16)):
                training.set_recipe(self.model, forward="bf16")
                take = self._captured()
            self.losses[self.step] = take((self._all_starts[self.step], self._rates[self.step]))
            self.step += 1

    def _captured(self) -> Callable[[Sequence[Tensor]], Tensor]:
        """The step, captured anew on CUDA; the replays of an earlier graph have finished."""
        if self.losses.device.type != "cuda":
            return self._step
        torch.cuda.synchronize()
        return CapturedStep(self._step, self.losses.device, lambda: None)

    def _step(self, inputs: Sequence[Tensor]) -> Tensor:
        """Train one step of AdamW with gradients clipped to norm 1, like Trainer.train_step, on the device alone."""
        starts, rate = inputs
        self._rate.copy_(rate)
        loss = self._loss(self._windows(self.training_text, starts))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()
