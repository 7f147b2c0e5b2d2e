"""DistillConfig: what is trained, from which codes, and by which loss."""

from __future__ import annotations

import dataclasses

from nvfp4_tensor._compat.pickles import pin
from nvfp4_tensor.numerics.choices import Choice
from nvfp4_tensor.quantization.config import NVFP4Config, NVFP4WeightOnlyConfig


@pin
class Trains(Choice):
    """Which parameters :func:`distill` trains."""

    WEIGHTS = 0
    """The quantized weights, and the norms and biases: all parameters of one dimension."""
    ADAPTERS = 1
    """Only the adapters of a peft model ("lora_" in the name): they undo what quantizing the base lost."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """The config of :func:`distill`.

    Args:
        base_config: the format: NVFP4Config (weights and activations, the default) or NVFP4WeightOnlyConfig. None for a
            model that is quantized already.
        static: calibrate the activation scales on the batches before training, as servers need them. By default, each
            call computes its own.
        trains: a :class:`Trains`, or its name.
        nvfp4_masters: let :class:`NVFP4AdamW` update the codes themselves, without float32 copies of the weights.
        reverse: the share of KL(quantized || dense) in the loss; the rest is KL(dense || quantized).
        hidden: the weight of the relative squared error of the hidden states, averaged over layers, beside the KL.
        learning_rate: the largest learning rate. It rises over ``warmup`` of the steps, and falls to 0 as a cosine.
        warmup: a share of the steps.
        betas, weight_decay: of AdamW.
        batches_per_step: batches whose gradients one step averages.
        seed: the seed of the order of batches, which changes with each pass over them.
        compile: compile the layers of both models, and the loss, by torch.compile: for runs of more than a minute.

    Raises:
        ValueError: a number out of range, or weights that are rounded stochastically.
        TypeError: base_config has another type.
    """

    base_config: NVFP4WeightOnlyConfig | None = None
    static: bool = False
    trains: Trains | str = Trains.WEIGHTS
    nvfp4_masters: bool = False
    reverse: float = 0.0
    hidden: float = 0.0
    learning_rate: float = 1e-4
    warmup: float = 0.05
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    batches_per_step: int = 1
    seed: int = 0
    compile: bool = False

    def __post_init__(self) -> None:
        base = NVFP4Config() if self.base_config is None else self.base_config
        if not isinstance(base, NVFP4WeightOnlyConfig):
            raise TypeError(f"base_config must be an NVFP4WeightOnlyConfig or NVFP4Config, not {type(base).__name__}")
        object.__setattr__(self, "trains", Trains.of(self.trains))
        for name in ("reverse", "warmup"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a share, from 0 to 1, got {getattr(self, name)!r}")
        for name in ("learning_rate", "hidden", "weight_decay"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be finite and not negative, got {getattr(self, name)!r}")
        if not isinstance(self.batches_per_step, int) or self.batches_per_step < 1:
            raise ValueError(f"batches_per_step is a whole number from 1 on, got {self.batches_per_step!r}")
        if base.weight.is_stochastic:
            raise ValueError(
                f"distill needs weights that are rounded to nearest, got {base.weight}: use round_mode='rne'"
            )
        if base.step is not None or base.weighted:
            raise ValueError("step and weighted are for calibrate: calibrate first, and pass its model and a teacher")
        if self.static and (base.activation is None or base.activation.row_scaled):
            raise ValueError("static=True needs activations in NVFP4 with one scale per tensor: NVFP4Config()")
