"""The fine-tuning of all weights: its loss, its bits after an interruption, its plan, what it saves."""

import re

import pytest
import torch
import torch.nn.functional as F
from helpers.bits import stored_bits
from transformers import LlamaConfig, LlamaForCausalLM

from nvfp4_tensor import NVFP4Tensor, model_size
from tutorials.finetune_8b_24gb import (
    ChunkedCrossEntropy,
    Finetuner,
    Settings,
    main,
    plan_memory,
    quantize_layers,
    save_for_transformers,
    train,
)

pytestmark = pytest.mark.slow

SETTINGS = Settings(steps=6, batch=2, length=24, learning_rate=3e-3, warmup=2, loss_chunk=20)


def llama(**changes):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**{**sizes, "num_key_value_heads": 2, "vocab_size": 96, **changes})
    return LlamaForCausalLM(config).bfloat16()


def text():
    return torch.arange(4000) % 50


@pytest.mark.parametrize("chunk", [7, 100])
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
def test_it_learns_and_saves_what_it_learned(tied, tmp_path):
    finetuner = Finetuner(llama(tie_word_embeddings=tied), text(), SETTINGS, "cpu")
    assert isinstance(finetuner.model.model.layers[0].mlp.up_proj.weight, NVFP4Tensor)
    losses = [finetuner.train_step() for _ in range(30)]
    assert losses[-1] < losses[0] - 1.5
    assert all(p.grad is None for p in finetuner.model.parameters())
    save_for_transformers(finetuner.model, tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, p in finetuner.model.named_parameters():
        assert torch.equal(again.get_parameter(name), p.dequantize() if isinstance(p, NVFP4Tensor) else p)


def test_a_run_that_is_killed_ends_with_the_bits_of_one_that_is_not(tmp_path, monkeypatch):
    """In its third step, half-way through the checkpoint: it goes on from the one before."""
    whole, first, second = (Finetuner(llama(), text(), SETTINGS, "cpu") for _ in range(3))
    losses = [whole.train_step() for _ in range(SETTINGS.steps)]
    running = train(first, tmp_path, 1)
    assert [next(running) for _ in range(3)] == losses[:3]

    def killed(state, path):
        path.write_bytes(b"PK")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch, "save", killed)
        next(running)
    second.load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=True))
    assert second.step == 2 and list(train(second, tmp_path, 0)) == losses[2:]
    assert torch.equal(stored_bits(*second.model.parameters()), stored_bits(*whole.model.parameters()))


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (b"\x7fELF\x02\xf3", [], "cannot be read as UTF-8 text: .*position 5"),
        (b"text", ["--length", "0"], "--length must be at least 1, not 0"),
        (b"text", ["--memory", "0.1"], "that exceeds 0.1 GiB: shorten sequences or the batch"),
    ],
)
def test_bad_input_ends_before_a_model_is_opened(content, arguments, message, tmp_path, capsys):
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    with pytest.raises(SystemExit) as caught:
        main(["--text", str(file), "--output", str(tmp_path / "out"), *arguments])
    assert re.search(message, f"{caught.value} {capsys.readouterr().err}")
    assert not (tmp_path / "out").exists()


def test_the_plan_counts_what_there_is():
    """Weights and moments of the plan are those of the run; the rest is an estimate."""
    finetuner = Finetuner(llama(hidden_size=256, intermediate_size=512), text(), SETTINGS, "cpu")
    plan = plan_memory(finetuner.model, tokens=48, loss_chunk=20, device="cpu")
    finetuner.train_step()
    states = [t for state in finetuner.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    assert plan["weights"] == model_size(finetuner.model).total
    assert plan["moments"] == sum(t.nbytes for t in states if t.dim())  # scalars are on the CPU
    assert plan["CUDA"] == 0 and plan.pop("total") == sum(plan.values())


def test_llama_3_8b_fits_into_24_gib():
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = quantize_layers(LlamaForCausalLM(config).bfloat16(), "meta")
    plan = plan_memory(model, tokens=4 * 2048, loss_chunk=512, device="cuda")
    linears = 6_979_321_856
    dense = sum(p.numel() for p in model.parameters()) - linears
    assert plan["weights"] + plan["moments"] == pytest.approx(1.6875 * linears + 3.125 * dense, rel=1e-3)
    assert plan["total"] < 22 << 30
    reserved = plan["total"] - plan["CUDA"]
    assert reserved == pytest.approx(19.11 * (1 << 30), rel=0.05)  # measured on an H200, limited to 24 GiB
