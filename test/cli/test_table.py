"""The demo's recipes and their rows."""

import pytest
import torch
from helpers.bigram import Bigram

from nvfp4_tensor.cli.demo import table


def test_lm_head_alone_stays_dense():
    names = [name for name, module in Bigram().named_modules() if table.is_quantized_layer(module, name)]
    assert names == ["up"]


@pytest.mark.parametrize("name", table.RECIPES)
def test_each_recipe_gives_a_row(name):
    net, ticks = Bigram().bfloat16(), []
    row = table.run_recipe(
        name, net, torch.tensor([0, 1, 2, 3]), torch.tensor([[0]]), lambda ids: str(ids.tolist()),
        window=4, new_tokens=3, end_token=3, tick=lambda: ticks.append(1),
    )  # fmt: skip
    assert row.continuation == "[1, 2]" and row.perplexity == pytest.approx(8 / 5)
    assert row.bits_per_weight == 16 if name == "bf16" else row.bits_per_weight < 16
    assert row.quantization_seconds == 0 if name == "bf16" else row.quantization_seconds > 0
    assert type(net.up.weight.data) is torch.Tensor  # the caller's model is untouched
    assert len(ticks) == (0 if name == "bf16" else 1) + 1 + 3


def test_table_is_aligned_markdown():
    row = table.Row("bf16", 13.1, 269_000_000, 16.0, 0.0, "Paris")
    lines = table.format_table([row, table.Row("W4A4, nearest", 1.0, 1, 4.5, 1.5, "Rome")]).splitlines()
    assert len({len(line) for line in lines[:4]}) == 1
    assert "13.100 | 269.0 MB |" in lines[2] and lines[3].endswith("1.50 s |")
    assert lines[-2:] == ["bf16           'Paris'", "W4A4, nearest  'Rome'"]
