"""The benchmark of distillation: its training text shares nothing with the evaluation, and a row from end to end."""

import argparse

import pytest
import torch
from helpers.distillation import batches, dense_model

from benchmarks.accuracy import distillation as benchmark

pytestmark = pytest.mark.slow


def test_windows_that_share_13_tokens_are_left_out(capsys):
    """Also where the 13 begin in one window and end in the next; 12 are no reason."""
    evaluation = torch.arange(1000, 1200)
    windows = torch.randint(1000, (40, 32), generator=torch.Generator().manual_seed(0))
    windows[3, 5:18] = evaluation[7:20]
    windows[8, 5:17] = evaluation[7:19]
    windows[20, 27:], windows[21, :8] = evaluation[50:55], evaluation[55:63]
    kept = benchmark.without_shared(windows, [evaluation])
    assert torch.equal(kept, windows[[i for i in range(40) if i not in (3, 20, 21)]])
    assert "3 of 40 windows left out" in capsys.readouterr().out


@pytest.mark.parametrize("row", ["w4a4", "w4a16:start=gptq,learning_rate=1e-3", "w4a4:rounding=0.5,optimizer=sign"])
def test_a_row(row, monkeypatch, tmp_path):
    monkeypatch.setattr(benchmark, "WINDOW", 24)
    dense, texts = dense_model(), {name: batches(1)[0].flatten() for name in ("help", "chat")}
    given = {"minutes": None, "steps": 12, "every": 1.0, "curve_windows": 2, "folder": None, "budget": None}
    evaluation = benchmark.Evaluation(dense, texts)
    assert evaluation.of(dense)["help"].items() >= {"increase": 0.0, "agreement": 1.0}.items()
    found = benchmark.run_row(row, dense, batches(), evaluation, argparse.Namespace(**given))
    assert (found["steps"], found["tokens"]) == (12, 12 * 96)
    assert 0 < found["texts"]["help"]["kl"] < 0.1 and found["texts"]["help"]["agreement"] > 0.4
    assert row in benchmark.report([found])
    benchmark.draw([found], tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 10_000
