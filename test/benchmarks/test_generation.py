"""The benchmarks of generation: what each row multiplies and reads, greedy text by every way, and the reports."""

import json
import sys

import pytest
import torch
from torch import nn

from benchmarks import llama
from benchmarks.llama import Generator, Shape, random_model
from benchmarks.speed import decode_cpu, generation, stock_llama
from nvfp4_tensor import NVFP4Config, NVFP4Tensor
from nvfp4_tensor.sizes import stored_bytes

pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

TINY = stock_llama.SHAPES["tiny"]
LINEARS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
CPU = torch.device("cpu")


def test_the_shape_of_llama_8b():
    with torch.device("meta"):
        block, large = llama.Block(llama.LLAMA_8B), llama.LLAMA_8B
    parameters = large.layers * sum(p.numel() for p in block.parameters())
    assert parameters + 2 * large.vocab * large.hidden + large.hidden == 8_030_261_248


def test_compiled_equals_eager(device):
    """And on CUDA the graph of a step gives what the step itself gives."""
    shape = Shape(2, 64, 4, 2, 16, 96, 96, 10_000.0)
    torch.manual_seed(0)
    model = random_model(shape, NVFP4Config(), torch.device(device), torch.float32)
    assert all(isinstance(linear.weight, NVFP4Tensor) for linear in model.linears())
    tokens = torch.randint(96, (2, 8), device=device)
    eager = Generator(model, tokens, 4)
    eager.advance = eager.step
    expected = eager.generate().clone()
    model.compile_parts()
    counter = torch._dynamo.utils.counters["stats"]
    before = counter["unique_graphs"]
    generator = Generator(model, tokens, 4)
    for _ in range(2):
        assert torch.equal(generator.generate(), expected)
    assert counter["unique_graphs"] - before == 7, "blocks, before and behind them: two graphs each; the choice"


# --- stock models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", stock_llama.WEIGHTS)
def test_weights_are_what_the_row_says(weights):
    model = stock_llama.stock_llama(TINY, weights, CPU)
    kinds = {name.rpartition(".")[2]: m.weight for name, m in model.named_modules() if hasattr(m, "weight")}
    assert all(isinstance(kinds[name], NVFP4Tensor) == (weights != "bf16") for name in LINEARS)
    assert isinstance(kinds["lm_head"], NVFP4Tensor) == (weights == "NVFP4, head")
    linears = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    cache = 2 * 2 * TINY.layers * TINY.kv_heads * TINY.head_dim * 100 * 3
    assert stock_llama.bytes_of_a_token(model, 100, 3) == sum(map(stored_bytes, linears)) + cache
    other, ids = stock_llama.twin(model), stock_llama.random_prompt(TINY, 2, 6, CPU)
    assert torch.equal(other(ids).logits, model(ids).logits)
    assert other.lm_head.weight.data_ptr() == model.lm_head.weight.data_ptr()


@pytest.mark.parametrize(("way", "batch"), [("eager", 2), ("static", 1), ("native", 2), ("stream", 1)])
def test_every_way_writes_greedy_text(device, way, batch):
    if device == "cuda" and way == "static":
        pytest.skip("compiles")
    models = generation.Models(TINY, torch.device(device))
    taken = models.ready(generation.Contender("NVFP4", way, batch), prompt_length=6, count=5).run(5)
    model, ids = models.stock("NVFP4"), stock_llama.random_prompt(TINY, batch, 6, torch.device(device))
    assert 0 < taken.decode < taken.call and taken.text.shape == (batch, 5)
    for token in taken.text.to(device).unbind(1):
        logits = model(ids).logits[:, -1].float()
        chosen = logits.gather(1, token[:, None]).squeeze(1)
        assert (chosen >= logits.amax(1) - 0.05 * logits.std()).all()
        ids = torch.cat([ids, token[:, None]], dim=1)


# --- reports ---------------------------------------------------------------------------------------------------------


def test_a_run_that_was_cut_short_goes_on(monkeypatch, tmp_path, capsys):
    def rows(*more: str) -> tuple[dict[str, dict], str]:
        command = "generation --device cpu --model tiny --prompt 4 --tokens 4 --rounds 1 --batch 1 --weights"
        monkeypatch.setattr(sys, "argv", [*command.split(), "bf16", "NVFP4", "--out", str(tmp_path), "--ways", *more])
        generation.main()
        content = json.loads((tmp_path / "cpu/generation_tiny_4.json").read_text())
        assert content["versions"]["transformers"] and content["tokens"] == 4
        return {row["name"]: row for row in content["rows"]}, capsys.readouterr().out

    some, printed = rows("native")
    assert list(some) == ["NVFP4; native; batch 1"]
    assert "absent: bf16; native; batch 1: ValueError: model.layers.0.self_attn.q_proj is dense" in printed
    again, printed = rows("native", "eager", "--budget", "1e-9")
    assert again == some and "not run: NVFP4; eager; batch 1" in printed
    found, printed = rows("native", "eager")
    assert list(found) == ["bf16; eager; batch 1", "NVFP4; eager; batch 1", "NVFP4; native; batch 1"]
    assert found.items() >= some.items() and "NVFP4; native; batch 1:" not in printed
    for row in found.values():
        assert row["tokens_per_second"] == row["rates"][0]
        assert row["first_token"] == pytest.approx(4 / row["whole_call"] - 3 / row["rates"][0])
        assert row["share"] == pytest.approx(row["tokens_per_second"] * row["bytes"] / row["copy"])
    assert "NVFP4; eager" in (tmp_path / "cpu/generation_tiny_4.txt").read_text()


def test_the_race_with_llama_cpp(monkeypatch, tmp_path):
    pytest.importorskip("llama_cpp")
    arguments = ["--models", "tiny", "--threads", "1", "--tokens", "4", "--rounds", "2", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["decode_cpu", *arguments])
    decode_cpu.main()
    (run,) = json.loads((tmp_path / "cpu/decode_cpu_tiny.json").read_text())["runs"]
    rows = {row["name"]: row for row in run["rows"]}
    assert rows["llama.cpp, NVFP4"]["of_llama"] == 1 and all(len(row["rates"]) == 2 for row in rows.values())
