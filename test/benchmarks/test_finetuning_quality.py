"""The benchmark of fine-tuned models: that each contender learns, and the table."""

import argparse
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.accuracy.finetuning_quality import RATES, rows_of, train_one

pytestmark = pytest.mark.slow

CONFIG = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize("kind", list(RATES))
def test_each_contender_learns(kind):
    torch.manual_seed(0)
    state = LlamaForCausalLM(LlamaConfig(**CONFIG)).bfloat16().state_dict()
    state.pop("lm_head.weight")
    text = torch.arange(4000) % 50
    options = argparse.Namespace(device="cpu", steps=12, batch=2, length=24, windows=4)
    run = train_one(kind, 1e-2, (CONFIG, state, {"training": text, "development": text, "test": text}), options)
    assert run["test_before"] == pytest.approx(math.log(96), rel=0.1)
    assert run["test"] == run["development"] < run["test_before"] - (0.02 if kind == "qlora" else 1.0)


def test_the_table_takes_the_rate_of_the_lowest_development_loss():
    runs = [
        {"kind": "adamw", "rate": 1e-4, "development": 2.0, "test": 2.0, "test_before": 3.0, "test_rounded": 2.05},
        {"kind": "nvfp4", "rate": 1e-4, "development": 2.1, "test": 1.9, "test_before": 3.0},
        {"kind": "nvfp4", "rate": 2e-4, "development": 2.05, "test": 2.1, "test_before": 3.0},
        {"kind": "nvfp4", "rate": 5e-5, "development": 2.3, "test": 2.3, "test_before": 3.0},
    ]
    rows = {row[0]: row for row in rows_of(runs)}
    assert rows["nvfp4"][1] == "0.0002 (the end of its range)"
    assert rows["nvfp4"][-1] == f"{100 * (math.exp(0.1) - 1):+.2f} %" and rows["adamw"][-1] == "+0.00 %"
    assert rows["adamw, rounded afterwards"][-1] == f"{100 * (math.exp(0.05) - 1):+.2f} %"
