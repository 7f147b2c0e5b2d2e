"""The race of decoding on a CPU, on a tiny model: what is compared is the same weights, and all of it is reported."""

import json

import pytest
import torch
from torchao.quantization import quantize_

from benchmarks.speed import decode_cpu
from nvfp4_tensor import NVFP4Tensor

pytest.importorskip("transformers")
from helpers.texts import own_logits

pytestmark = pytest.mark.slow


def test_an_output_layer_of_its_own():
    model, _ = decode_cpu.dense_model("tiny")
    dense = model.lm_head.weight.detach().clone()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    own = decode_cpu.with_own_head(model)
    assert isinstance(own.lm_head.weight, NVFP4Tensor) and not own.config.tie_word_embeddings
    assert torch.equal(own.model.embed_tokens.weight, dense) and torch.equal(model.lm_head.weight, dense)
    linears = sum(p.numel() for name, p in model.named_parameters() if "_proj" in name)
    embedding, norms = 2048 * 512, 3 * 512
    assert decode_cpu.bytes_read(model) == 2 * (linears + embedding + norms)
    assert decode_cpu.bytes_read(own) == 2 * (linears + norms) + own.lm_head.weight.stored_bytes


@pytest.mark.parametrize("way", ["eager", "native"])
def test_generate_is_greedy_and_timed(way):
    model, _ = decode_cpu.dense_model("tiny")
    model.generation_config.eos_token_id = None
    prompt = torch.arange(100, 108)
    if way == "native":
        quantize_(model.model, decode_cpu.CONFIG)
    run = decode_cpu.generate_with(model, way)(prompt, 5)
    assert len(run.tokens) == 5 and run.seconds > 0 and run.cpu > 0
    tokens = torch.tensor(run.tokens)
    logits = own_logits(model, torch.cat([prompt, tokens])[None, :-1])[0, 7:]
    chosen = logits.gather(1, tokens[:, None])[:, 0]
    assert ((logits.amax(1) - chosen) < 0.2 * logits.std(1)).all()  # the largest, or nearly: sums are rounded otherwise


def test_the_report(monkeypatch, tmp_path, capsys):
    pytest.importorskip("llama_cpp")
    threads = torch.get_num_threads()
    arguments = ["--models", "tiny", "--threads", "1", "--tokens", "4", "--rounds", "2", "--out"]
    monkeypatch.setattr("sys.argv", ["decode_cpu", *arguments, str(tmp_path)])
    decode_cpu.main()
    torch.set_num_threads(threads)
    (run,) = json.loads((tmp_path / "cpu/decode_cpu_tiny.json").read_text())["runs"]
    rows = {row["name"]: row for row in run["rows"]}
    assert list(rows) == [
        "ours, NVFP4", "ours, NVFP4, head", "llama.cpp, NVFP4", "llama.cpp, NVFP4, head", "llama.cpp, Q4_0",
    ]  # fmt: skip
    assert rows["llama.cpp, NVFP4"]["of_llama"] == 1 and all(len(row["rates"]) == 2 for row in rows.values())
    for head in ("", ", head"):  # but for the padding of our scales and llama.cpp's float32 norms
        ours, theirs = (rows[f"{who}, NVFP4{head}"]["bytes"] for who in ("ours", "llama.cpp"))
        assert ours == pytest.approx(theirs, rel=0.02)
    assert "llama.cpp, Q4_0" in capsys.readouterr().out
