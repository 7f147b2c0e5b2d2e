"""The fine-tuning of all weights: its loss, its bits after an interruption, its plan, what it saves."""

import copy
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from nvfp4_tensor import NVFP4Tensor, training
from tutorials.finetune_8b_24gb import ChunkedCrossEntropy, Finetuner, Settings, main, save_for_transformers

pytestmark = pytest.mark.slow

SETTINGS = Settings(steps=6, batch=2, length=24, learning_rate=3e-3, warmup=2, loss_chunk=20)


def llama(**changes):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**{**sizes, "num_key_value_heads": 2, "vocab_size": 96, **changes})
    return LlamaForCausalLM(config).bfloat16()


def text():
    return torch.arange(4000) % 50


def bits(model):
    tensors = []
    for p in model.parameters():
        parts = (p.qdata, p.scale, p.per_tensor_scale) if isinstance(p, NVFP4Tensor) else (p.detach(),)
        tensors += [part.reshape(-1).view(torch.uint8) for part in parts]
    return torch.cat(tensors)


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_the_chunked_loss_is_cross_entropy(chunk):
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(30, 16), torch.randn(50, 16), torch.randint(50, (30,))
    leaves = [(hidden.clone().requires_grad_(), weight.clone().requires_grad_()) for _ in range(2)]
    losses = (
        ChunkedCrossEntropy.apply(*leaves[0], targets, chunk),
        F.cross_entropy(leaves[1][0] @ leaves[1][1].t(), targets),
    )
    assert torch.allclose(*losses, atol=1e-6)
    for loss in losses:
        (3 * loss).backward()
    for mine, right in zip(*leaves, strict=True):
        assert torch.allclose(mine.grad, right.grad, atol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_it_learns(tied):
    finetuner = Finetuner(llama(tie_word_embeddings=tied), text(), SETTINGS, "cpu")
    assert isinstance(finetuner.model.model.layers[0].mlp.up_proj.weight, NVFP4Tensor)
    losses = [finetuner.train_step() for _ in range(30)]
    assert losses[-1] < losses[0] - 1.5
    assert all(p.grad is None for p in finetuner.model.parameters())


@pytest.mark.parametrize("steps", [1, 4])
def test_resumed_is_uninterrupted_bit_for_bit(steps, tmp_path):
    whole, first, second = (Finetuner(llama(), text(), SETTINGS, "cpu") for _ in range(3))
    losses = [whole.train_step() for _ in range(6)]
    for _ in range(steps):
        first.train_step()
    torch.save(first.state_dict(), tmp_path / "checkpoint.pt")
    second.load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=True))
    assert [second.train_step() for _ in range(6 - steps)] == losses[steps:]
    assert torch.equal(bits(second.model), bits(whole.model))


CHILD = """
import sys
from pathlib import Path
import torch
sys.path[:0] = sys.argv[2:]
from test_finetune_8b_24gb import SETTINGS, llama, text
from tutorials.finetune_8b_24gb import Finetuner, train
folder = Path(sys.argv[1])
finetuner = Finetuner(llama(), text(), SETTINGS, "cpu")
if (folder / "checkpoint.pt").exists():
    finetuner.load_state_dict(torch.load(folder / "checkpoint.pt", weights_only=True))
for loss in train(finetuner, folder, 1):
    print("step", finetuner.step, loss, flush=True)
"""


def test_a_run_that_is_killed_at_random_steps_ends_with_the_bits_of_one_that_is_not(tmp_path):
    whole = Finetuner(llama(), text(), SETTINGS, "cpu")
    losses = [whole.train_step() for _ in range(SETTINGS.steps)]
    random_steps, kills, seen = random.Random(0), 0, {}
    here = Path(__file__).parent
    while True:
        command = [sys.executable, "-c", CHILD, str(tmp_path), str(here), str(here.parents[1])]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=here.parents[1])
        stop = random_steps.randint(1, 2) if kills < 3 else SETTINGS.steps + 1
        for count, line in enumerate(child.stdout, 1):
            _, step, loss = line.split()
            seen[int(step)] = float(loss)
            if count == stop:
                child.kill()  # SIGKILL, somewhere in the next step or its checkpoint
                break
        if child.wait() == 0:
            break
        kills += 1
        assert kills <= 3
    assert kills == 3 and [seen[step + 1] for step in range(SETTINGS.steps)] == losses
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    again = Finetuner(llama(), text(), SETTINGS, "cpu")
    again.load_state_dict(saved)
    assert torch.equal(bits(again.model), bits(whole.model))


def test_other_settings_do_not_resume():
    finetuner = Finetuner(llama(), text(), SETTINGS, "cpu")
    state = finetuner.state_dict()
    state["settings"]["batch"] = 3
    with pytest.raises(ValueError, match="other settings: batch"):
        finetuner.load_state_dict(state)


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (b"\x7fELF\x02\xf3", [], "is not UTF-8 text .byte 5."),
        (None, [], "cannot be read: No such file"),
        (b"text", ["--length", "0"], "--length must be at least 1, not 0"),
        (b"text", ["--learning-rate", "nan"], "--learning-rate must not be negative, not nan"),
        (b"text", ["--resume"], "checkpoint.pt does not exist"),
    ],
)
def test_bad_input_ends_before_a_model_is_opened(content, arguments, message, tmp_path, capsys):
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SystemExit) as caught:
        main(["--text", str(file), "--output", str(tmp_path / "out"), *arguments])
    assert re.search(message, f"{caught.value} {capsys.readouterr().err}")
    assert not (tmp_path / "out").exists()


def test_the_saved_model_is_the_trained_one(tmp_path):
    finetuner = Finetuner(llama(), text(), SETTINGS, "cpu")
    finetuner.train_step()
    save_for_transformers(finetuner.model, tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, p in finetuner.model.named_parameters():
        value = p.dequantize() if isinstance(p, NVFP4Tensor) else p
        assert torch.equal(again.get_parameter(name), value)


def test_the_plan_counts_what_there_is():
    """Weights and moments of the plan are those of the run, within the padding of scales; the rest is an estimate."""
    model = llama(hidden_size=256, intermediate_size=512)
    plan = training.plan_finetuning(model, tokens=48, loss_chunk=20, on_cuda=False)
    finetuner = Finetuner(copy.deepcopy(model), text(), SETTINGS, "cpu")
    finetuner.train_step()
    weights = sum(
        p.qdata.nbytes + p.scale.nbytes if isinstance(p, NVFP4Tensor) else p.nbytes
        for p in finetuner.model.parameters()
    )
    states = finetuner.optimizer.state.values()
    moments = sum(t.nbytes for state in states for t in state.values() if t.dim())  # scalars are on the CPU
    assert plan.weights == pytest.approx(weights, rel=0.01)
    assert plan.moments == moments
    parts = (plan.weights, plan.moments, plan.layer_inputs, plan.work, plan.reserve, plan.context)
    assert plan.total == sum(parts) and "layer inputs" in str(plan) and plan.context == 0


def test_llama_3_8b_fits_into_24_gib():
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    plan = training.plan_finetuning(model, tokens=4 * 2048)
    linears = 6_979_321_856
    dense = sum(p.numel() for p in model.parameters()) - linears
    assert plan.weights + plan.moments == pytest.approx(1.6875 * linears + 3.125 * dense, rel=1e-3)
    plan.check(22 << 30)
    reserved = plan.total - plan.context
    assert reserved == pytest.approx(19.11 * (1 << 30), rel=0.05)  # measured on an H200, limited to 24 GiB
    with pytest.raises(MemoryError, match=r"the limit is 12.00 GiB: weights and moments alone"):
        plan.check(12 << 30)
    with pytest.raises(MemoryError, match="shorten the sequences or the batch"):
        training.plan_finetuning(model, tokens=64 * 2048).check(24 << 30)


def test_models_without_sizes_are_refused():
    with pytest.raises(ValueError, match="has no hidden_size"):
        training.plan_finetuning(torch.nn.Linear(4, 4), tokens=8)
    with pytest.raises(ValueError, match="give more text"):
        Finetuner(llama(), text()[:10], SETTINGS, "cpu")
