"""The benchmark of optimizer states: that its step is the optimizer's, and its table."""

import argparse
import math

import pytest
import torch

from benchmarks.accuracy.optimizer_states import ABLATIONS, ALL, BASE, RATE, VARIANTS, jobs_of, rows_of, subject_of
from benchmarks.accuracy.state_trainer import WRITES, StateTrainer, written_to
from nvfp4_tensor import NVFP4Tensor, QuantizeSpec, quantize
from nvfp4_tensor.training.weights import coded_moments
from tutorials.train_llama import Settings

pytestmark = pytest.mark.slow

SETTINGS = Settings(recipe="bf16", size="tiny", steps=3, batch=1, length=32)


def texts():
    text = (torch.arange(5000) % 97).to(torch.uint8)
    return text, text[:400]


@pytest.mark.parametrize("variant", list(ALL))
def test_each_variant_trains_as_it_says(variant):
    trainer = StateTrainer(SETTINGS, texts(), **ALL[variant])
    trainer.train()
    assert trainer.losses.isfinite().all() and math.isfinite(trainer.losses.sum())
    weight = trainer.model.layers[0].q.weight
    assert isinstance(weight, NVFP4Tensor) == ("NVFP4" in variant)
    assert trainer.model.head.weight.dtype == ALL[variant].get("dtype", torch.float32)


def test_increases_are_paired_by_seed():
    other = "float32 weights, states in four bits"
    losses = {(BASE, 0): 2.0, (BASE, 1): 4.0, (other, 0): 2.02, (other, 1): 4.12}
    runs = [{"variant": variant, "seed": seed, "validation": loss} for (variant, seed), loss in losses.items()]
    rows = rows_of(runs)
    assert rows == [
        [BASE, "3.0000", "+0.00 %", "0.00 %", "2"],
        [other, "3.0700", "+2.00 %", "1.00 %", "2"],
    ]


def test_another_learning_rate_has_a_file_of_its_own():
    assert subject_of("25m", RATE) == "optimizer_states_25m"
    assert subject_of("25m", 4e-4) == "optimizer_states_25m_0.0004"


def test_what_is_done_is_not_run_again():
    options = argparse.Namespace(seeds=2, variants=list(ALL))
    jobs = jobs_of(options, [])
    assert len(jobs) == len(set(jobs)) == 2 * len(VARIANTS) + len(ABLATIONS)
    assert {variant for variant, _ in jobs[-len(ABLATIONS) :]} == set(ABLATIONS)
    done = [{"variant": variant, "seed": seed} for variant, seed in jobs[:3]]
    assert jobs_of(options, done) == jobs[3:]


@pytest.mark.parametrize("write", WRITES)
def test_ablations_write_what_they_say(write):
    """Updates of a fiftieth of a step: stochastic writes keep their mean, those to nearest lose them."""
    torch.manual_seed(0)
    w = quantize(torch.full((64, 256), 1.0), QuantizeSpec())
    coded_moments.make_headroom(w)
    before = w.dequantize(torch.float32)
    for _ in range(50):
        written_to(w, w.dequantize(torch.float32) - 1.0 / 150, write)
    moved = (before - w.dequantize(torch.float32)).mean().item()
    assert moved == 0 if write == "nearest" else abs(moved - 1 / 3) < 0.02
