"""The trainer of the tutorial: its text, its baseline, its bits after an interruption."""

import dataclasses
import json
import math

import pytest
import torch

from nvfp4_tensor import training
from tutorials import train_llama
from tutorials.train_llama import Settings, Trainer, corpus, ngram_loss

pytestmark = pytest.mark.slow

SETTINGS = Settings(size="tiny", steps=6, batch=2, length=48)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for i in range(60):
        (folder / f"module_{i}.py").write_text(f"def function_{i}(x):\n    return x * {i} + {i * i}\n" * 8)
    return corpus(folder, 1_000_000)


def trainer(texts, **changes):
    return Trainer(dataclasses.replace(SETTINGS, **changes), *texts)


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_the_text_is_divided_by_file(texts):
    train, validation = (bytes(text.numpy()) for text in texts)
    names = [{line for line in text.split(b"\n") if line.startswith(b"def")} for text in (train, validation)]
    assert names[0] and names[1] and not names[0] & names[1] and len(names[0] | names[1]) == 60


def test_the_baseline_knows_what_repeats():
    """Text that a byte before last determines costs next to nothing; random bytes cost log 256."""
    pattern = torch.arange(26).repeat(400).to(torch.uint8)
    assert ngram_loss(pattern, pattern[:2000]) < 0.1
    noise = torch.randint(0, 256, (200_000,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    assert math.log(256) * 0.98 < ngram_loss(noise[:100_000], noise[100_000:]) < math.log(256) * 1.15


@pytest.mark.parametrize("recipe", ["bf16", "accurate_eden"])
def test_resumed_is_uninterrupted_bit_for_bit(texts, recipe, tmp_path):
    whole = trainer(texts, recipe=recipe)
    losses = [whole.train_step() for _ in range(SETTINGS.steps)]
    first = trainer(texts, recipe=recipe)
    for _ in range(3):
        first.train_step()
    train_llama.save(first.state_dict(), tmp_path / "checkpoint.pt")
    torch.manual_seed(12345)
    second = trainer(texts, recipe=recipe)
    second.load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=True))
    again = [second.train_step() for _ in range(3)]
    assert [loss.item() for loss in again] == [loss.item() for loss in losses[3:]]
    assert torch.equal(weights(second.model), weights(whole.model))


def test_what_is_quantized(texts):
    model = trainer(texts, keep_last_blocks_dense=0.5).model
    trained = {name for name, module in model.named_modules() if isinstance(module, training.NVFP4TrainingLinear)}
    assert trained == {f"layers.0.{name}" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    late = trainer(texts, late_bf16=0.5)
    for _ in range(4):
        late.train_step()
    assert all(m.bf16_forward for m in late.model.modules() if isinstance(m, training.NVFP4TrainingLinear))


def test_from_the_command_line(texts, tmp_path, monkeypatch):
    """Curves, a checkpoint and a picture; a second call goes on and keeps what was logged."""
    monkeypatch.setattr(train_llama, "corpus", lambda folder, limit: texts)
    arguments = ["--size", "tiny", "--steps", "4", "--batch", "2", "--length", "48", "--output", str(tmp_path)]
    points = train_llama.main([*arguments, "--checkpoint-every", "2"])
    assert [point["step"] for point in points] == [1, 2, 3, 4] and points[-1]["training"] < points[0]["training"]
    assert json.loads((tmp_path / "losses.json").read_text()) == points
    assert (tmp_path / "losses.png").stat().st_size > 1000 and not list(tmp_path.glob("*.partial"))
    assert train_llama.main([*arguments, "--resume"]) == points
