"""The graph trainer with other weights and optimizer states: what optimizer_states compares.

Coded states are stepped by the operators that ship. Weights in NVFP4 with float32 states are the ablations: AdamW's
update of the decoded weight, written back by a few lines of plain torch with one of :data:`WRITES`.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor, nn

from benchmarks.accuracy.graph_trainer import GraphTrainer
from nvfp4_tensor import NVFP4Tensor, training
from nvfp4_tensor.numerics import layout, optimizer_step, reference
from nvfp4_tensor.numerics.choices import ScaleRounding
from nvfp4_tensor.numerics.random_state import rng_state_of
from nvfp4_tensor.training.weights import coded_moments
from tutorials.train_llama import Settings

BETAS, WEIGHT_DECAY, EPS = (0.9, 0.95), 0.1, 1e-8
WRITES = ("stochastic", "feedback", "nearest", "fresh")
"""How an NVFP4 weight with float32 states is written: as write_back does; with error feedback; to nearest; with block
scales that are computed anew at every step."""


class StateTrainer(GraphTrainer):
    """A :class:`GraphTrainer` with these options.

    coded: moments in four bits. dtype: of dense weights. quantized: linears of the layers are NVFP4 weights, without
    master copies. write: their moments are float32, and they are written so. rate: of the learning rate. to_zero: the
    learning rate decays to 0 and not to a tenth.
    """

    def __init__(
        self,
        settings: Settings,
        texts: tuple[Tensor, Tensor],
        *,
        coded: bool = False,
        dtype: torch.dtype = torch.float32,
        quantized: bool = False,
        write: str | None = None,
        rate: float = 1.0,
        to_zero: bool = False,
        recipe: str = "bf16",
    ) -> None:
        changes = {"learning_rate": settings.learning_rate * rate, "recipe": recipe}
        super().__init__(dataclasses.replace(settings, **changes), *texts)
        if to_zero:
            top = self.settings.learning_rate
            warmup = max(round(settings.warmup * settings.steps), 1)
            self._rates[warmup:] = (self._rates[warmup:] - 0.1 * top) / 0.9
        self._coded, self._write = coded, write
        if dtype != torch.float32:
            self.model.to(dtype)
        if quantized:
            training.to_nvfp4_parameters(
                self.model.layers, filter_fn=lambda module, name: isinstance(module, nn.Linear)
            )
        if coded or dtype != torch.float32:
            self.optimizer = torch.optim.AdamW(
                self.model.parameters(), lr=self._rate, betas=BETAS, weight_decay=WEIGHT_DECAY,
                fused=True, capturable=settings.device == "cuda",
            )  # fmt: skip
        if coded:
            self._prepare(torch.device(settings.device))

    def _prepare(self, device: torch.device) -> None:
        rows, adam, last = [], [], math.inf
        for step, lr in enumerate(self._rates.tolist(), 1):
            group = {"lr": lr, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
            rows.append(coded_moments.numbers_of(group, step))
            unbias = 1 / (1 - BETAS[0] ** step), 1 / math.sqrt(1 - BETAS[1] ** step)
            adam.append([lr, *unbias, min(1.0, last / lr) if lr else 1.0])
            last = lr
        self._numbers = torch.tensor(rows, device=device)
        self._adam = torch.tensor(adam, device=device)
        self._states = []
        for p in self.model.parameters():
            state = coded_moments.new_state(p)
            if self._write and isinstance(p, NVFP4Tensor):
                state = {name: torch.zeros(p.shape, device=device) for name in coded_moments.DENSE}
            self._states.append((p, state))
        states = [rng_state_of(self.settings.seed, str(i), 0, device) for i in range(len(self._states))]
        self._random = torch.stack(states)

    def _step(self) -> None:
        if not self._coded:
            super()._step()
            return
        (starts,) = self._all_starts.index_select(0, self._index)
        loss = self._loss(self._windows(self.training_text, starts))
        loss.backward()
        norm = torch.stack(torch._foreach_norm([p.grad for p, _ in self._states])).norm()
        (numbers,) = self._numbers.index_select(0, self._index)
        (adam,) = self._adam.index_select(0, self._index)
        numbers[0] = (1.0 / (norm + 1e-6)).clamp(max=1.0)
        self._random[:, 1] += 1
        for i, (p, state) in enumerate(self._states):
            with torch.no_grad():
                if self._write and isinstance(p, NVFP4Tensor):
                    ablated_step(p, p.grad.float() * numbers[0], state, adam, self._write)
                else:
                    coded_moments.step_parameter(p, p.grad, state, numbers, self._random[i])
            p.grad = None
        self.losses.index_copy_(0, self._index, loss.detach()[None])
        self._index += 1


def ablated_step(w: NVFP4Tensor, grad: Tensor, state: dict[str, Tensor], numbers: Tensor, write: str) -> None:
    """Step an NVFP4 weight (R, K), K a multiple of 16, with float32 moments, and write it as one of WRITES.

    numbers: float32 (4,): the learning rate, what unbiases the moments, and what a rising rate leaves of the momentum.
    """
    m, v = (state[name] for name in coded_moments.DENSE)
    rate, unbias_m, unbias_v, kept = numbers.unbind()
    if write == "feedback":
        m.mul_(kept)
    m.lerp_(grad, 1 - BETAS[0])
    v.lerp_(grad * grad, 1 - BETAS[1])
    per_update = (v.sqrt() * unbias_v + EPS) / (rate * unbias_m)
    before = w.dequantize(torch.float32)
    after = before * (1 - rate * WEIGHT_DECAY) - m / per_update
    written_to(w, after, write)
    if write == "feedback":
        m.add_((after - w.dequantize(torch.float32)) * per_update * (1 - 1 / BETAS[0]))


def written_to(w: NVFP4Tensor, values: Tensor, write: str) -> None:
    """Round values (R, K) to the codes and block scales of w; its per-tensor scale stays."""
    units = (values / w.per_tensor_scale).unflatten(-1, (-1, layout.BLOCK))
    magnitude, largest = units.abs(), units.abs().amax(dim=-1)
    if write == "fresh":
        s_bytes = reference.to_e4m3(largest / 6, ScaleRounding.UP, largest)
        s = s_bytes.view(torch.float8_e4m3fn).float()
    else:
        old = layout.scale_values(w.unswizzled_scale())
        nearest = write == "nearest"
        random = torch.full_like(largest, 32768.0) if nearest else torch.rand_like(largest) * 65536
        s, bound, kept = optimizer_step._grid(old, largest, random.long())
        bound, kept = bound.unsqueeze(-1), kept.unsqueeze(-1)
        kept = kept.clamp(max=1.0) if nearest else kept
        magnitude = torch.minimum(magnitude, bound) + (magnitude - bound).clamp(min=0) * kept
        s_bytes = s.to(torch.float8_e4m3fn).view(torch.uint8)
    y = torch.where(s.unsqueeze(-1) > 0, magnitude / s.unsqueeze(-1), 0.0).clamp(max=layout.E2M1_MAX)
    per_step = torch.where(y < 2, 2.0, torch.where(y < 4, 1.0, 0.5))
    first = torch.where(y < 2, 0.0, torch.where(y < 4, 2.0, 4.0))
    codes = (y * per_step + (0.5 if write == "nearest" else torch.rand_like(y))).floor() + first
    codes = codes.clamp(max=7).long() | torch.signbit(units).long() << 3
    w.qdata.copy_(layout.pack(codes.to(torch.uint8).flatten(1)))
    w.scale.view(torch.uint8).copy_(layout.swizzle(s_bytes).view(torch.uint8))
