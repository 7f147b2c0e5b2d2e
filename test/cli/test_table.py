"""The demo's recipes and their rows."""

from types import SimpleNamespace

import pytest
import torch
from helpers.bigram import Bigram

from nvfp4_tensor.cli import demo
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


def test_rows_are_lines_of_one_aligned_table():
    rows = [table.Row(name, 13.1, 269_000_000, 16.0, 1.5 * i, "Paris") for i, name in enumerate(table.RECIPES)]
    lines = [*table.head().splitlines(), *map(str, rows)]
    assert len({len(line) for line in lines}) == 1 and {line.count("|") for line in lines} == {len(table.HEAD) + 1}
    cells = [cell.strip() for cell in lines[3].split("|")[1:-1]]
    assert cells == ["weight-only, nearest", "13.100", "269.0 MB", "16.00", "1.50 s"]
    assert table.continuations(rows).splitlines()[0].split("  ")[-1] == "'Paris'"


def test_each_row_is_printed_before_the_next_is_measured(monkeypatch, capsys):
    printed = []

    def decode(ids):
        printed.append(capsys.readouterr().out)
        return ""

    monkeypatch.setattr(demo, "evaluation_tokens", lambda tokenizer, count: torch.arange(count) % 4)
    monkeypatch.setattr(demo, "prompt_tokens", lambda tokenizer: torch.tensor([[0]]))
    rows = demo.measure_all(Bigram().bfloat16(), SimpleNamespace(decode=decode, eos_token_id=3))
    assert [row.recipe for row in rows] == list(table.RECIPES)
    assert printed == ["", *(f"{row}\n" for row in rows[:-1])] and capsys.readouterr().out == f"{rows[-1]}\n"
