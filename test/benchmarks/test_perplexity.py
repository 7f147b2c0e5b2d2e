"""The accuracy table: what a row says, and that nothing is judged on what it learned from."""

import json
import math
import pydoc_data.topics

import pytest
import torch

from benchmarks.accuracy import perplexity
from benchmarks.accuracy.perplexity import ROWS, calibration_batches, docstrings, losses, report, summary

pytestmark = pytest.mark.slow


def row(values, **more):
    return {"losses": torch.tensor(values), "bits": 4.5, "seconds": 3.0, "tokens": 4, **more}


def test_a_summary():
    base, peer = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.5, 2.5, 3.5])
    found = summary("gptq", row([1.1, 2.3, 3.2]), base, peer)
    assert found["perplexity"] == pytest.approx(math.exp(2.2))
    assert found["increase"] == pytest.approx(0.2)
    assert found["standard_error"] == pytest.approx(0.1 / 3**0.5)
    assert found["gap_closed"] == pytest.approx((math.exp(2.5) - math.exp(2.2)) / (math.exp(2.5) - math.exp(2)))
    assert summary("torchao", row([1.5, 2.5, 3.5]), base, peer)["gap_closed"] == pytest.approx(0)
    assert summary("bf16", row([1.0, 2.0, 3.0]), base, peer)["gap_closed"] == pytest.approx(1)


def test_a_report_of_what_is_finished(tmp_path, capsys):
    arguments = tmp_path, torch.device("cpu"), 4, tmp_path / "out"
    torch.save(row([1.0, 2.0]), tmp_path / "bf16.pt")
    report(*arguments)
    assert "torchao" in capsys.readouterr().out and not (tmp_path / "out").exists()
    torch.save(row([2.0, 3.0]), tmp_path / "torchao.pt")
    torch.save(row([1.5, 2.5]), tmp_path / "gptq.pt")
    torch.save(row([1.5, 2.5], tokens=5), tmp_path / "search.pt")  # of another run
    report(*arguments)
    assert "0.5000 +- 0.0000" in capsys.readouterr().out
    result = json.loads((tmp_path / "out/cpu/perplexity.json").read_text())
    assert [each["name"] for each in result["rows"]] == ["bf16", "torchao", "gptq"]
    assert (tmp_path / "out/cpu/perplexity.txt").read_text().count("\n") > 5


def test_losses_are_of_windows_that_do_not_see_each_other(monkeypatch):
    monkeypatch.setattr(perplexity, "WINDOW", 4)

    class Successor(torch.nn.Module):
        """Sure that the next token is one more."""

        def forward(self, ids):
            return type("Output", (), {"logits": 3 * torch.nn.functional.one_hot(ids + 1, 12).float()})

    found = losses(Successor(), torch.tensor([1, 2, 3, 4, 9, 5, 6, 8]), "x")
    right, wrong = math.log(math.exp(3) + 11) - 3, math.log(math.exp(3) + 11)
    assert found.tolist() == pytest.approx([right, right, right, wrong, right, wrong])


def test_calibration_and_evaluation_are_disjoint():
    text, topics = docstrings(), "\n".join(pydoc_data.topics.topics.values())
    assert len(text) > 500_000
    lines = {line.strip() for line in topics.splitlines() if len(line.strip()) > 60}
    shared = [line for line in text.splitlines() if line.strip() in lines]
    assert len(shared) < 0.002 * len(text.splitlines())


def test_calibration_batches_are_spread_over_the_text(monkeypatch):
    monkeypatch.setattr(perplexity, "docstrings", lambda: "")
    tokenizer = lambda text, return_tensors: type("Ids", (), {"input_ids": torch.arange(512 * 21 + 7)[None]})  # noqa: E731
    batches = calibration_batches(tokenizer, 512 * 4)
    assert [batch.shape for batch in batches] == [(1, 512)] * 4
    assert [int(batch[0, 0]) // 512 for batch in batches] == [0, 5, 10, 15]


def test_every_row_has_a_name_of_its_own():
    labels = [label for label, _ in ROWS.values()]
    assert len(set(labels)) == len(labels)
