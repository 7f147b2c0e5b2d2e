"""The demo's recipes and their rows."""

import re
from types import SimpleNamespace

import pytest
import torch
from helpers.bigram import Bigram
from tqdm import tqdm

from nvfp4_cli.demo import run, table


def test_lm_head_alone_stays_dense():
    names = [name for name, module in Bigram().named_modules() if table.is_quantized_layer(module, name)]
    assert names == ["up"]


@pytest.mark.parametrize("name", table.RECIPES)
def test_each_recipe_gives_a_row(name):
    net, work = Bigram().bfloat16(), []
    row = table.run_recipe(
        name, net, torch.tensor([0, 1, 2, 3]), torch.tensor([[0]]), lambda ids: str(ids.tolist()),
        window=4, new_tokens=3, end_token=3, advance=work.append,
    )  # fmt: skip
    assert row.continuation == "[1, 2]" and row.perplexity == pytest.approx(8 / 5)
    assert row.linear_bits_per_weight == 16 if name == "bf16" else row.linear_bits_per_weight < 16
    assert row.quantization_seconds == 0 if name == "bf16" else row.quantization_seconds > 0
    assert type(net.up.weight.data) is torch.Tensor  # the caller's model is untouched
    assert len(work) == 1 + 3 and sum(work) == pytest.approx(sum(table.work_of(name, 1, 3)))


def test_bits_are_of_the_whole_model_and_of_its_quantized_linears():
    def bits(name):
        row = table.run_recipe(name, net, torch.tensor([0, 1]), torch.tensor([[0]]), str, window=2, new_tokens=1)
        return row.model_bits_per_weight, row.linear_bits_per_weight

    net = Bigram().bfloat16()
    net.up = torch.nn.Linear(16, 128, bias=False, dtype=torch.bfloat16)
    linear, others = 16 * 128, 4 * 16 + 4 * 32
    assert bits("bf16") == (16, 16)
    whole, own = bits("weight-only, nearest")
    assert 4.5 < own < 16 and whole == pytest.approx((own * linear + 16 * others) / (linear + others))


def test_greedy_takes_the_likeliest_and_stops_at_the_end_token():
    assert table.greedy(Bigram(), torch.tensor([[3, 0]]), 5, 3).tolist() == [1, 2]
    assert table.greedy(Bigram(), torch.tensor([[3]]), 2, None).tolist() == [0, 1]


def test_rows_are_lines_of_one_aligned_table():
    rows = [table.Row(name, 13.1, 269_000_000, 16.0, 4.5, 1.5 * i, "Paris") for i, name in enumerate(table.RECIPES)]
    lines = [*table.head().splitlines(), *map(str, rows)]
    assert len({len(line) for line in lines}) == 1 and {line.count("|") for line in lines} == {len(table.HEAD) + 1}
    cells = [cell.strip() for cell in lines[3].split("|")[1:-1]]
    assert cells == ["weight-only, nearest", "13.100", "269.0 MB", "16.00", "4.50", "1.50 s"]
    assert table.continuations(rows).splitlines()[0].split("  ")[-1] == "'Paris'"


@pytest.fixture
def small(monkeypatch):
    """The demo's text and prompt, in tokens of :class:`Bigram`."""
    monkeypatch.setattr(run, "evaluation_tokens", lambda tokenizer, count: torch.arange(count) % 4)
    monkeypatch.setattr(run, "prompt_tokens", lambda tokenizer: torch.tensor([[0]]))


def test_each_row_is_printed_before_the_next_is_measured(small, capsys):
    printed = []

    def decode(ids):
        printed.append(capsys.readouterr().out)
        return ""

    rows = run.measure_all(Bigram().bfloat16(), SimpleNamespace(decode=decode, eos_token_id=3))
    assert [row.recipe for row in rows] == list(table.RECIPES)
    assert printed == ["", *(f"{row}\n" for row in rows[:-1])] and capsys.readouterr().out == f"{rows[-1]}\n"


def test_the_estimate_follows_the_work_and_starts_with_the_first_window(small, monkeypatch):
    """On a clock by which a window takes 4 seconds, and all other work as long as it is said to."""
    clock, shown = [1e9], []

    class Bar(tqdm):
        def update(self, work=1):
            shown.append((self.n, str(self)))
            clock[0] += 4 * work
            return super().update(work)

    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    monkeypatch.setattr(run, "tqdm", Bar)
    run.measure_all(Bigram().bfloat16(), SimpleNamespace(decode=str, eos_token_id=3))
    total = sum(sum(table.work_of(name, run.TOKENS // run.WINDOW, run.NEW_TOKENS)) for name in table.RECIPES)
    assert shown[0][0] == 0 and shown[0][1].endswith(" 00:00 elapsed, ? left")
    for done, text in shown[1:]:
        minutes, seconds = re.search(r"(\d+):(\d+) left$", text).groups()
        assert 60 * int(minutes) + int(seconds) == pytest.approx(4 * (total - done), abs=1.01)  # cut off to seconds
