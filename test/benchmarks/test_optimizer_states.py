"""The benchmark of optimizer states: that its step is the optimizer's, and its table."""

import math

import pytest
import torch

from benchmarks.accuracy.optimizer_states import BASE, VARIANTS, StateTrainer, rows_of
from nvfp4_tensor import NVFP4Tensor
from tutorials.train_llama import Settings

pytestmark = pytest.mark.slow

SETTINGS = Settings(recipe="bf16", size="tiny", steps=3, batch=1, length=32)


def texts():
    text = (torch.arange(5000) % 97).to(torch.uint8)
    return text, text[:400]


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_each_variant_trains_as_it_says(variant):
    trainer = StateTrainer(SETTINGS, texts(), **VARIANTS[variant])
    trainer.train()
    assert trainer.losses.isfinite().all() and math.isfinite(trainer.losses.sum())
    weight = trainer.model.layers[0].q.weight
    assert isinstance(weight, NVFP4Tensor) == ("NVFP4" in variant or "half" in variant)
    assert trainer.model.head.weight.dtype == VARIANTS[variant].get("dtype", torch.float32)


def test_increases_are_paired_by_seed():
    other = "float32 weights, states in four bits"
    losses = {(BASE, 0): 2.0, (BASE, 1): 4.0, (other, 0): 2.02, (other, 1): 4.12}
    runs = [{"variant": variant, "seed": seed, "validation": loss} for (variant, seed), loss in losses.items()]
    rows = rows_of([*runs, {"variant": other, "seed": 2, "error": "out of memory"}])
    assert rows == [
        [BASE, "3.0000", "+0.00 %", "0.00 %", "2"],
        [other, "3.0700", "+2.00 %", "1.00 %", "2"],
    ]
