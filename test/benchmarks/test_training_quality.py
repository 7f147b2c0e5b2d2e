"""The study of recipes: its trainer takes the tutorial's steps, its ratios pair seeds, an interrupted study goes on."""

import dataclasses
import json
import sys

import pytest
import torch

from benchmarks.accuracy import training_quality
from benchmarks.accuracy.graph_trainer import GraphTrainer
from benchmarks.accuracy.recipe_table import draw, rows_of, summary, table
from nvfp4_tensor.training import RECIPES
from tutorials.train_llama import Settings, Trainer

SETTINGS = Settings(size="tiny", steps=6, batch=2, length=64)


@pytest.fixture(scope="module")
def texts():
    return tuple((97 + torch.arange(size) % 26).to(torch.uint8) for size in (4000, 2000))


def losses_of(trainer: Trainer) -> list[float]:
    """Losses of the tutorial's own steps."""
    return [trainer.train_step().item() for _ in range(trainer.settings.steps)]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"recipe": "bf16"}, {}, {"recipe": "accurate_eden"}, {"late_bf16": 0.5}])
def test_steps_are_those_of_the_tutorial(texts, changes):
    """Up to learning rates in float32, which a step of this training amplifies."""
    settings = dataclasses.replace(SETTINGS, **changes)
    expected, trainer = Trainer(settings, *texts), GraphTrainer(settings, *texts)
    torch.manual_seed(1)
    losses = losses_of(expected)
    torch.manual_seed(1)
    trainer.train()
    assert trainer.losses.tolist() == pytest.approx(losses, rel=2e-3) and trainer.step == SETTINGS.steps
    assert trainer.validate(4) == pytest.approx(expected.validate(4), rel=2e-3)
    assert losses[-1] < 0.98 * losses[0]


@pytest.mark.slow
def test_a_branch_goes_on_where_its_trunk_ended(texts):
    """In bfloat16 it takes the steps of one run; by a recipe, other ones from the same point on."""
    dense = dataclasses.replace(SETTINGS, recipe="bf16")
    whole, trunk = GraphTrainer(dense, *texts), GraphTrainer(dense, *texts)
    whole.train()
    trunk.train(until=4)
    assert trunk.step == 4 and torch.equal(trunk.losses[:4], whole.losses[:4]) and not trunk.losses[4:].any()
    for recipe in ("bf16", "nvidia"):
        branch = GraphTrainer(dataclasses.replace(SETTINGS, recipe=recipe), *texts)
        branch.start_from(trunk)
        branch.train()
        assert not branch.losses[:4].any() and branch.losses[4:].all()
        assert torch.equal(branch.losses[4:], whole.losses[4:]) == (recipe == "bf16")
        assert branch.losses[4:].tolist() == pytest.approx(whole.losses[4:].tolist(), rel=0.1)
    assert trunk.step == 4


def test_jobs_of_one_trunk_are_one_list():
    jobs = [training_quality.Job(v, text, 0) for text in ("Python", "C++") for v in ("bf16", "nvidia")]
    assert training_quality.groups_of(jobs, 0.25) == [jobs[:2], jobs[2:]]
    assert training_quality.groups_of(jobs, 0.0) == [[job] for job in jobs]
    assert training_quality.subject_of("20m", 0.25) == "training_quality_20m_last_0.25"
    assert training_quality.subject_of("20m", 0.0) == "training_quality_20m"


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{"recipe": "bf16"}, {}, {"recipe": "accurate"}, {"late_bf16": 0.5}])
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


def run(variant, seed, validation, text="Python"):
    return {"variant": variant, "text": text, "seed": seed, "validation": validation}


RUNS = [
    *(run("bf16", seed, 1.0 + seed) for seed in (0, 1)),
    run("nvidia", 0, 1.04),
    run("nvidia", 1, 2.02),
    run("accurate", 0, 1.02),
    run("accurate", 1, 2.02),
    run("unbiased", 1, 2.01),
    run("unbiased", 2, 9.0),
    run("bf16", 0, 2.0, "C++"),
    run("nvidia", 0, 2.1, "C++"),
]
VARIANTS = ["bf16", "nvidia", "accurate", "unbiased"]


def test_ratios_are_of_the_same_seed_and_text():
    rows = rows_of(RUNS, VARIANTS)
    python = rows["Python"]
    assert python["nvidia"].increases == pytest.approx({0: 4, 1: 1}) and python["nvidia"].ratios == {0: 1, 1: 1}
    assert python["accurate"].increase == pytest.approx(1.5) and python["accurate"].ratio == pytest.approx(0.75)
    assert python["accurate"].ratios == pytest.approx({0: 0.5, 1: 1})
    assert python["unbiased"].ratios == pytest.approx({1: 0.5}), "no run in bfloat16 has seed 2"
    assert rows["C++"]["nvidia"].increase == pytest.approx(5)


def test_the_table_has_every_variant_and_seed(tmp_path):
    lines = table(RUNS, VARIANTS).split("\n")
    assert lines[2] == "| bf16 | 1.5000 |  |  |  |  | 2.0000 |  |  |  |  |"
    assert lines[4] == "| accurate | 1.5200 | 1.50 | 2.00, 1.00 | 0.75 | 0.50, 1.00 |  |  |  |  |  |"
    assert draw(RUNS, tmp_path / "ratios.png", VARIANTS) and (tmp_path / "ratios.png").stat().st_size > 1000
    assert not draw(RUNS[:2], tmp_path / "none.png", VARIANTS)


def test_the_summary_is_of_means():
    lines = summary(RUNS, VARIANTS).split("\n")
    assert lines[0] == "|  | Python, % (by seed) | C++, % (by seed) |"
    assert lines[2:] == [
        "| `nvidia` | 2.50 (4.00, 1.00) | 5.00 (5.00) |",
        "| `accurate` | 1.50 (2.00, 1.00) |  |",
        "| `unbiased` | 0.50 (0.50) |  |",
    ]
    late = [
        {**run, "variant": "nvidia, forward in bf16 for the last 10 %"} for run in RUNS if run["variant"] == "nvidia"
    ]
    assert "| `nvidia`, forward in bfloat16 for the last 10 % | 2.50 (" in summary([*RUNS, *late])


@pytest.mark.parametrize("part", ["stochastic", "hadamard", "tiles"])
def test_one_part_is_left_out(part):
    recipe, nvidia = training_quality.recipe_without(part), RECIPES["nvidia"]
    changed = {name for name in ("x", "w", "dy", "dy_t", "x_t") if getattr(recipe, name) != getattr(nvidia, name)}
    assert changed == {"stochastic": {"dy", "dy_t"}, "hadamard": {"dy_t", "x_t"}, "tiles": {"w"}}[part]


@pytest.mark.slow
def test_a_study_goes_on_where_it_stopped(monkeypatch, tmp_path, capsys):
    for i in range(120):
        for suffix, text in ((".py", f"def f{i}(x):\n    return {i}\n"), (".h", f"int f{i}(int x);\n")):
            (tmp_path / f"file_{i}{suffix}").write_text(text * 20)
    monkeypatch.setattr(training_quality, "VALIDATION_WINDOWS", 4)
    arguments = ["training_quality", "--device", "cpu", "--size", "tiny", "--steps", "2", "--batch", "2"]
    arguments += ["--length", "32", "--folder", str(tmp_path), "--out", str(tmp_path), "--seeds", "1", "--variants"]

    def study(*more: str) -> list[dict]:
        monkeypatch.setattr(sys, "argv", [*arguments, *more])
        training_quality.main()
        return json.loads((tmp_path / "cpu/training_quality_tiny.json").read_text())["runs"]

    first = study("bf16")
    assert [(each["variant"], each["text"]) for each in first] == [("bf16", "Python"), ("bf16", "C++")]
    assert study("bf16", "nvidia", "--budget", "0") == first
    assert "2 of 2 runs are left" in capsys.readouterr().out
    runs = study("bf16", "nvidia")
    assert runs[:2] == first and len(runs) == 4 and all(3 < each["validation"] < 6 for each in runs)
    assert "| nvidia |" in (tmp_path / "cpu/training_quality_tiny.txt").read_text()
    assert (tmp_path / "cpu/training_quality_tiny.png").exists()
    with pytest.raises(ValueError, match="other settings \\(steps\\)"):
        study("bf16", "--steps", "3")
