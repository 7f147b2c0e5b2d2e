"""The benchmark of generation: stock models, their bytes, greedy text by every way, and the report."""

import dataclasses
import json
import sys

import pytest
import torch
from torch import nn

from benchmarks import peers
from benchmarks.llama import random_model
from benchmarks.speed import generation, stock_llama
from nvfp4_tensor import NVFP4Tensor, NVFP4WeightOnlyConfig
from nvfp4_tensor.sizes import stored_bytes

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

TINY = stock_llama.SHAPES["tiny"]
LINEARS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
CPU = torch.device("cpu")


@pytest.mark.parametrize("weights", stock_llama.WEIGHTS)
def test_weights_are_what_the_row_says(weights):
    model = stock_llama.stock_llama(TINY, weights, CPU)
    kinds = {
        name.rpartition(".")[2]: module.weight for name, module in model.named_modules() if hasattr(module, "weight")
    }
    assert all(isinstance(kinds[name], NVFP4Tensor) == (weights != "bf16") for name in LINEARS)
    assert isinstance(kinds["lm_head"], NVFP4Tensor) == (weights == "NVFP4, head")
    assert not any(p.is_meta for p in [*model.parameters(), *model.buffers()])
    linears = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    assert len(linears) == 7 * TINY.layers + 1
    cache = 2 * 2 * TINY.layers * TINY.kv_heads * TINY.head_dim * 100 * 3
    assert stock_llama.bytes_of_a_token(model, 100, 3) == sum(map(stored_bytes, linears)) + cache


def test_a_twin_shares_weights_and_gives_the_same_logits():
    model = stock_llama.stock_llama(TINY, "NVFP4", CPU)
    other = stock_llama.twin(model)
    ids = stock_llama.random_prompt(TINY, 2, 6, CPU)
    assert torch.equal(other(ids).logits, model(ids).logits)
    assert other.lm_head.weight.data_ptr() == model.lm_head.weight.data_ptr()
    q, again = (each.model.layers[0].self_attn.q_proj.weight for each in (model, other))
    assert again.qdata.data_ptr() == q.qdata.data_ptr()


@pytest.mark.parametrize("way", ["eager", "static", "native", "stream"])
@pytest.mark.parametrize("batch", [1, 2])
def test_every_way_writes_greedy_text(device, way, batch):
    if device == "cuda" and way == "static":
        pytest.skip("compiles")
    models = generation.Models(TINY, torch.device(device), eager=True)
    taken = models.ready(generation.Contender("NVFP4", way, batch), prompt_length=6, count=5).run(5)
    model, ids = models.stock("NVFP4"), stock_llama.random_prompt(TINY, batch, 6, torch.device(device))
    assert 0 < taken.decode < taken.call and taken.text.shape == (batch, 5)
    for token in taken.text.to(device).unbind(1):
        logits = model(ids).logits[:, -1].float()
        chosen = logits.gather(1, token[:, None]).squeeze(1)
        assert (chosen >= logits.amax(1) - 0.05 * logits.std()).all()
        ids = torch.cat([ids, token[:, None]], dim=1)


def test_int4_is_a_peer_by_its_bytes():
    model = random_model(TINY, None, CPU)
    dense = peers.linear_bytes(model)
    assert dense == 2 * sum(linear.weight.numel() for linear in model.linears())
    nvfp4 = random_model(TINY, NVFP4WeightOnlyConfig(), CPU)
    assert peers.linear_bytes(nvfp4) == sum(stored_bytes(linear.weight) for linear in nvfp4.linears()) < 0.3 * dense


@pytest.mark.parametrize(("factor", "wrong"), [(1.05, False), (1.5, True)])
def test_a_peer_with_wrong_products_is_an_error(monkeypatch, factor, wrong):
    def scaled(model):
        model.layers[0].qkv.weight.mul_(factor)

    monkeypatch.setitem(peers.MODELS, "scaled", scaled)
    if not wrong:
        peers.convert(random_model(TINY, None, CPU), "scaled")
        return
    with pytest.raises(ValueError, match=r"its product is off by 0\.5"):
        peers.convert(random_model(TINY, None, CPU), "scaled")


@pytest.mark.gpu
@pytest.mark.parametrize("peer", ["torchao int4", "torchao int4, head"])
def test_int4_multiplies_by_rounded_weights(peer):
    torch.manual_seed(0)
    device = torch.device("cuda")
    shape = dataclasses.replace(TINY, hidden=1024, ffn=1024, vocab=4096)  # int4's tiles have 1,024 columns
    model, dense = (random_model(shape, None, device) for _ in range(2))
    dense.load_state_dict(model.state_dict())
    peers.MODELS[peer](model)
    x = torch.randn(1, 1, shape.hidden, device=device, dtype=torch.bfloat16)
    y, expected = model.layers[0].qkv(x), dense.layers[0].qkv(x)
    assert 0.03 < peers.relative_error(y, expected.float()) < 0.2
    assert (peers.linear_bytes(model) < 0.35 * peers.linear_bytes(dense)) == peer.endswith("head")


def test_the_report(monkeypatch, tmp_path, capsys):
    arguments = ["--device", "cpu", "--model", "tiny", "--prompt", "4", "--tokens", "4", "--rounds", "2", "--eager"]
    arguments += ["--batch", "1", "2", "--out", str(tmp_path), "--ways"]

    def rows(*more: str) -> dict[str, dict]:
        monkeypatch.setattr(sys, "argv", ["generation", *arguments, *more])
        generation.main()
        content = json.loads((tmp_path / "cpu/generation_tiny.json").read_text())
        assert content["versions"]["transformers"] and content["tokens"] == 4
        return {row["name"]: row for row in content["rows"]}

    found = rows("graph", "native", "--weights", "bf16", "NVFP4")
    names = ["NVFP4; native", "bf16; graph", "NVFP4; graph"]
    assert list(found) == [f"{name}; batch {batch}" for batch in (1, 2) for name in names]
    printed = capsys.readouterr().out
    assert "absent: bf16; native; batch 1: ValueError: model.layers.0.self_attn.q_proj is dense" in printed
    for row in found.values():
        assert len(row["rates"]) == 2 and row["tokens_per_second"] == sum(row["rates"]) / 2
        assert row["share"] == pytest.approx(row["tokens_per_second"] / row["batch"] * row["bytes"] / row["copy"])
        assert row["same_text"] == (4 if row["way"] == "native" else None)
    more = rows("eager", "--weights", "NVFP4", "--batch", "1")
    assert next(iter(more)) == "NVFP4; eager; batch 1" and found.items() <= more.items()
    assert 1 <= more["NVFP4; eager; batch 1"]["same_text"] <= 4
    text = (tmp_path / "cpu/generation_tiny.txt").read_text()
    assert "NVFP4; eager" in text and "NVFP4; graph" in text and "absent: bf16; native" in text


def test_a_run_that_was_cut_short_goes_on(monkeypatch, tmp_path, capsys):
    def rows(*more: str) -> tuple[dict[str, dict], str]:
        command = "generation --device cpu --model tiny --prompt 4 --tokens 4 --rounds 1 --eager --weights NVFP4"
        arguments = [*command.split(), "--out", str(tmp_path), "--ways", "graph", "native", "eager", *more]
        monkeypatch.setattr(sys, "argv", arguments)
        generation.main()
        content = json.loads((tmp_path / "cpu/generation_tiny.json").read_text())
        return {row["way"]: row for row in content["rows"]}, capsys.readouterr().out

    measure, calls = generation.measure, []

    def killed_at_the_second(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(generation, "measure", killed_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        rows()
    some, printed = rows("--budget", "1e-9")
    assert list(some) == ["native"]  # the first that was measured: eager is as quick, graph compiles
    assert "not run: NVFP4; eager; batch 1" in printed and "not run: NVFP4; graph; batch 1" in printed
    found, printed = rows()
    assert list(found) == ["eager", "native", "graph"] and found["native"] == some["native"]
    assert "NVFP4; native; batch 1:" not in printed and "NVFP4; eager; batch 1:" in printed
    again, _ = rows("--again")
    assert all(again[way]["rates"] != found[way]["rates"] for way in found)


def test_slow_contenders_sit_out():
    def ready(seconds: float) -> generation.Ready:
        return generation.Ready(lambda count: generation.Taken(seconds, seconds, torch.zeros(1, 4)), 4, 0)

    assert [len(generation.measure(ready(each), rounds=5, limit=4.0)) for each in (3.0, 0.1)] == [2, 5]
