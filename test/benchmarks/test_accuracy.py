"""The benchmarks of accuracy: their texts share nothing with the evaluation, and rows from end to end."""

import copy
import json
import pydoc_data.topics
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torchao.quantization import quantize_

from benchmarks.accuracy import distillation as benchmark
from benchmarks.accuracy import own_model, own_model_branches, perplexity, texts
from nvfp4_tensor.training import to_dense

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def test_windows_that_share_13_tokens_are_left_out(capsys):
    """Also where the 13 begin in one window and end in the next; 12 are no reason."""
    evaluation = torch.arange(1000, 1200)
    windows = torch.randint(1000, (40, 32), generator=torch.Generator().manual_seed(0))
    windows[3, 5:18] = evaluation[7:20]
    windows[8, 5:17] = evaluation[7:19]
    windows[20, 27:], windows[21, :8] = evaluation[50:55], evaluation[55:63]
    kept = texts.without_shared(windows, [evaluation])
    assert torch.equal(kept, windows[[i for i in range(40) if i not in (3, 20, 21)]])
    assert "3 of 40 windows left out" in capsys.readouterr().out


def test_candidates_that_share_least():
    """Of five windows, one shares nothing, one 13 tokens that training has twice, one 14 that it has once."""
    generator = torch.Generator().manual_seed(0)
    training, candidates = torch.randint(1000, (900,), generator=generator), torch.arange(1000, 1320).view(5, 64)
    training[20:33] = training[80:93] = training[140:153] = candidates[0, :13]
    training[200:213] = training[260:273] = candidates[1, 7:20]
    training[320:334] = candidates[2, 8:22]
    training[400:413] = candidates[4, 51:]
    assert texts.least_shared(candidates, training, 2).tolist() == candidates[[3, 4]].tolist()
    assert texts.least_shared(candidates, training, 4).tolist() == candidates[1:].tolist()


def test_calibration_and_evaluation_are_disjoint():
    text, topics = texts.library_docstrings(), "\n".join(pydoc_data.topics.topics.values())
    lines = {line.strip() for line in topics.splitlines() if len(line.strip()) > 60}
    shared = [line for line in text.splitlines() if line.strip() in lines]
    assert len(text) > 500_000 and len(shared) < 0.002 * len(text.splitlines())


# --- a model of one's own --------------------------------------------------------------------------------------------


def run(monkeypatch, module, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["x", *map(str, arguments), "--device", "cpu"])
    module.main()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model, trained by two calls, of which the first only collects texts."""
    folder = tmp_path_factory.mktemp("own")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_model, "EVALUATION_WINDOWS", 2)
        common = ["--size", "tiny", "--steps", 4, "--batch", 1, "--roots", ROOT / "nvfp4_tensor", ROOT / "docs"]
        common += ["--folder", folder, "--out", folder]
        run(patch, own_model, "--minutes", 0, *common)
        assert torch.load(folder / "checkpoint.pt")["step"] == 0
        run(patch, own_model, *common)
    return folder


def test_the_saved_model_is_the_trained_one(folder):
    """The losses of the result are those of the trainer's model, up to the arithmetic of bfloat16."""
    found, state = torch.load(folder / "texts.pt"), torch.load(folder / "checkpoint.pt")
    python = found["evaluation"]["python"]
    settings = own_model.Settings(**{**state["settings"], "batch": 2, "length": 1023})
    trainer = own_model.Trainer(settings, found["training"], python)
    trainer.model.load_state_dict(state["model"])
    row = json.loads((folder / "training.json").read_text())["rows"][0]
    with torch.no_grad():
        loss = trainer._loss_of(python.view(2, 1024).long())
    assert row["loss"] == pytest.approx(loss.item(), abs=2e-3) and row["loss"] < 9.7
    assert (row["text"], row["tokens"]) == ("python", 2048)
    seen = texts.ngrams(torch.cat(list(found["evaluation"].values())).view(-1, 1024)).flatten()
    assert not torch.isin(texts.ngrams(found["training"]), seen).any()


def test_branches_of_the_model(folder, monkeypatch, tmp_path):
    """The branch in bfloat16 ends as the model did, and each is near its end."""
    run(monkeypatch, own_model_branches, "--folder", folder, "--out", tmp_path)
    rows = json.loads((tmp_path / f"cpu/{folder.name}_branches.json").read_text())["rows"]
    nats = {row["name"]: {how: texts["python"]["increase"] for how, texts in row["judged"].items()} for row in rows}
    assert list(nats) == [*own_model_branches.RECIPES, *own_model_branches.MEANS]
    assert abs(nats["bf16"]["bfloat16"]) < 1e-3 and {row["steps"] for row in rows} == {1}
    assert all(abs(each) < 0.1 for judged in nats.values() for each in judged.values())


@pytest.mark.parametrize("recipe", own_model_branches.RECIPES[1:])
def test_a_forward_that_trained_is_that_which_is_deployed(recipe):
    """Logits to the bit, each linear with its own scale; scales that servers share round otherwise."""
    text = torch.randint(256, (4096,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    trainer = own_model.Trainer(own_model.Settings(recipe=recipe, size="tiny", batch=2, length=64, steps=4), text, text)
    for _ in range(3):
        trainer.train_step()
    own = to_dense(copy.deepcopy(trainer.model)).eval()
    for name, module in own.layers.named_modules():
        if isinstance(module, nn.Linear):
            config = own_model_branches.forward_of(recipe)
            quantize_(own.layers, config, filter_fn=lambda _, each, name=name: each == name)
    models = trainer.model, own, own_model_branches.deployed(trainer.model, recipe)
    with torch.no_grad():
        trained, alone, shared = (
            own_model_branches.Logits(each)(text[None, :64].long(), use_cache=False).logits for each in models
        )
    assert torch.equal(alone, trained) and not torch.equal(shared, trained)


def test_rows_of_the_model(folder, monkeypatch, tmp_path):
    """A result file keeps its other rows; the calibrated row returns a model, the cache's what judges it."""
    common = ("--model", folder, "--out", tmp_path, "--tokens", 1024, "--texts", "python")
    path = tmp_path / f"cpu/perplexity_{folder.name}.json"
    run(monkeypatch, perplexity, "--rows", "bf16", "nearest", *common)
    first = json.loads(path.read_text())["rows"]
    run(monkeypatch, perplexity, "--rows", "w4a4_static", "cache_no_dense", *common)
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == ["bf16", "nearest", "w4a4_static", "cache_no_dense"] and list(rows.values())[:2] == first
    assert rows["bf16"]["texts"]["python"].items() >= {"increase": 0.0, "kl": 0.0, "agreement": 1.0}.items()
    kl = {name: row["texts"]["python"]["kl"] for name, row in rows.items()}
    assert 0 < kl["nearest"] < kl["w4a4_static"] < 0.05 and 0 < kl["cache_no_dense"] < 0.05
    assert rows["nearest"]["bits"] == pytest.approx(4.5, abs=0.05)
    assert rows["cache_no_dense"]["bits"] == pytest.approx(4.625, abs=0.05)
    small = ["--rows", "w4a4:start=gptq,seed=1", "--steps", "2", "--batch", "2", "--window", "128", "--limit", "9000"]
    run(monkeypatch, benchmark, *small, *common)
    (row,) = json.loads((tmp_path / f"cpu/distillation_{folder.name}.json").read_text())["rows"]
    assert (row["steps"], row["seed"], list(row["texts"])) == (2, 1, ["python"])
