"""The study of recipes, whose trainer takes the tutorial's steps; and the training step."""

import dataclasses
import json
import sys

import pytest
import torch

from benchmarks.accuracy import training_quality
from benchmarks.accuracy.graph_trainer import GraphTrainer
from benchmarks.speed import training_step
from tutorials.train_llama import Settings, Trainer

SETTINGS = Settings(size="tiny", steps=6, batch=2, length=64)


@pytest.fixture(scope="module")
def texts():
    return tuple((97 + torch.arange(size) % 26).to(torch.uint8) for size in (4000, 2000))


def losses_of(trainer: Trainer) -> list[float]:
    """Losses of the tutorial's own steps."""
    return [trainer.train_step().item() for _ in range(trainer.settings.steps)]


@pytest.mark.slow
def test_steps_are_those_of_the_tutorial(texts):
    """Up to learning rates in float32, which a step of this training amplifies."""
    settings = dataclasses.replace(SETTINGS, recipe="accurate_eden", late_bf16=0.5)
    expected, trainer = Trainer(settings, *texts), GraphTrainer(settings, *texts)
    torch.manual_seed(1)
    losses = losses_of(expected)
    torch.manual_seed(1)
    trainer.train()
    assert trainer.losses.tolist() == pytest.approx(losses, rel=2e-3) and trainer.step == SETTINGS.steps
    assert trainer.validate(4) == pytest.approx(expected.validate(4), rel=2e-3)
    assert losses[-1] < 0.98 * losses[0]


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, {"recipe": "accurate", "late_bf16": 0.5}])
def test_replayed_steps_are_those_of_the_tutorial(texts, changes):
    """Not bit for bit: the gradient of the embedding is summed in any order."""
    settings = dataclasses.replace(SETTINGS, steps=10, device="cuda", **changes)
    expected, trainer = Trainer(settings, *texts), GraphTrainer(settings, *texts)
    torch.manual_seed(1)
    losses = losses_of(expected)
    torch.manual_seed(1)
    trainer.train()
    assert trainer.losses.tolist() == pytest.approx(losses, rel=2e-2)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.slow
def test_a_study_goes_on_where_it_stopped(monkeypatch, tmp_path, capsys):
    for i in range(120):
        for suffix, text in ((".py", f"def f{i}(x):\n    return {i}\n"), (".h", f"int f{i}(int x);\n")):
            (tmp_path / f"file_{i}{suffix}").write_text(text * 20)
    monkeypatch.setattr(training_quality, "VALIDATION_WINDOWS", 4)
    arguments = ["training_quality", "--device", "cpu", "--size", "tiny", "--steps", "2", "--batch", "2"]
    arguments += ["--branch", "0.5", "--length", "32", "--folder", str(tmp_path), "--out", str(tmp_path)]
    arguments += ["--seeds", "1", "--variants"]

    def study(*more: str) -> list[dict]:
        monkeypatch.setattr(sys, "argv", [*arguments, *more])
        training_quality.main()
        return json.loads((tmp_path / "cpu/training_quality_tiny_last_0.5.json").read_text())["runs"]

    first = study("bf16")
    assert [(each["variant"], each["text"]) for each in first] == [("bf16", "Python"), ("bf16", "C++")]
    assert study("bf16", "nvidia", "--budget", "0") == first
    assert "2 of 2 runs are left" in capsys.readouterr().out
    runs = study("bf16", "nvidia")
    assert runs[:2] == first and len(runs) == 4 and all(3 < each["validation"] < 6 for each in runs)
    losses = {each["variant"]: each["validation"] for each in runs if each["text"] == "Python"}
    increase = f"{100 * (losses['nvidia'] / losses['bf16'] - 1):.2f}"
    assert (
        f"| `nvidia` | {increase} ({increase}) |" in (tmp_path / "cpu/training_quality_tiny_last_0.5.txt").read_text()
    )
    with pytest.raises(ValueError, match="other settings \\(steps\\)"):
        study("bf16", "--steps", "3")


# --- the training step -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_training_step(monkeypatch, tmp_path):
    """But for compiling."""
    monkeypatch.setattr(training_step, "SMALL", {"square": (64, 64)})
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    command = "training_step --device cpu --tokens 64 --repeats 1 --recipes nvidia --out"
    monkeypatch.setattr(sys, "argv", [*command.split(), str(tmp_path)])
    training_step.main()
    (path,) = tmp_path.rglob("training_step.json")
    result = json.loads(path.read_text())
    host = result["host"]
    assert set(host) == set(result["blocks"]) == {"bf16", "nvidia"}
    assert f"({host['nvidia'] / host['bf16']:.2f} of bf16)" in path.with_suffix(".txt").read_text()
    assert 0.3 < result["linears"]["square"]["saved"]["nvidia"] / result["linears"]["square"]["saved"]["bf16"] < 2
