"""The end-to-end benchmark multiplies what it says: its model against transformers', its cache, graphs and figures."""

import dataclasses
import json
import sys

import pytest
import torch
from torch import nn

from benchmarks import generate
from benchmarks.generate import Generator
from benchmarks.llama import Block, Llama, Shape, from_transformers, random_model
from nvfp4_tensor import NVFP4Config, NVFP4Tensor, NVFP4WeightOnlyConfig, fake_quantize
from nvfp4_tensor.sizes import stored_bytes

pytestmark = pytest.mark.slow

TINY = Shape(layers=3, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=80, vocab=96, rope_theta=10_000.0)
CONFIGS = {"weight only": NVFP4WeightOnlyConfig(), "w4a4": NVFP4Config()}
LENGTH = 12


def model(config=None, device="cpu", dtype=torch.float32) -> Llama:
    torch.manual_seed(0)
    return random_model(TINY, config, torch.device(device), dtype)


def prompt(device="cpu", batch=2) -> torch.Tensor:
    return torch.randint(TINY.vocab, (batch, LENGTH), device=device, generator=torch.Generator(device).manual_seed(1))


def decoded(m: Llama) -> Llama:
    """m with dense linears of what its weights decode to; one that quantizes activations does so in a hook."""
    dense = model(None, m.embedding.weight.device, m.embedding.weight.dtype)
    dense.embedding.load_state_dict(m.embedding.state_dict())
    for linear, quantized in zip(dense.linears(), m.linears(), strict=True):
        assert isinstance(quantized.weight, NVFP4Tensor)
        linear.weight = nn.Parameter(quantized.weight.dequantize(), requires_grad=False)
        spec = quantized.weight.activation_spec
        if spec is not None:
            linear.register_forward_pre_hook(lambda _, inputs, spec=spec: fake_quantize(inputs[0], spec))
    return dense


def all_logits(m: Llama, tokens: torch.Tensor, start: int) -> torch.Tensor:
    """Logits behind each token from ``start`` - 1 on, (B, T - start + 1, vocab): one prefill, then token by token."""
    positions, caches = torch.arange(tokens.shape[1], device=tokens.device), m.new_caches(*tokens.shape)
    with torch.no_grad():
        steps = [m(tokens[:, :start], positions[:start], caches)]
        steps += [m(tokens[:, i : i + 1], positions[i : i + 1], caches) for i in range(start, tokens.shape[1])]
    return torch.stack(steps, dim=1)


def test_quantized_logits_are_those_of_decoded_weights(device):
    m = model(CONFIGS["weight only"], device)
    logits, expected = (all_logits(each, prompt(device), LENGTH // 2) for each in (m, decoded(m)))
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", CONFIGS)
def test_each_linear_multiplies_by_decoded_weights(device, config):
    """Compared linear by linear: in W4A4 one activation on the edge between two codes changes all that follows."""
    m = model(CONFIGS[config], device)
    seen = []
    for linear, dense in zip(m.linears(), decoded(m).linears(), strict=True):
        linear.register_forward_hook(lambda _, inputs, y, dense=dense: seen.append((y, dense(inputs[0]))))
    all_logits(m, prompt(device), LENGTH // 2)
    assert len(seen) == (4 * TINY.layers + 1) * (1 + LENGTH // 2)
    for y, expected in seen:
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [None, CONFIGS["weight only"]])
def test_decode_with_the_cache_equals_prefill(device, config):
    """A prefill of any length, and then one token at a time, give the logits that longer prefills give.

    Not in W4A4: the amax of a whole prompt is not that of one token.
    """
    m, tokens = model(config, device), prompt(device)
    whole = all_logits(m, tokens, LENGTH)[:, -1]
    for start in (1, 2, LENGTH - 1):
        torch.testing.assert_close(all_logits(m, tokens, start)[:, -1], whole, rtol=1e-4, atol=1e-4)


def test_the_choice_is_the_most_likely_token(device):
    m, logits = model(device=device), torch.randn(50, TINY.vocab, device=device)
    assert torch.equal(m.choose(logits), logits.argmax(-1, keepdim=True))


def test_the_model_is_transformers_llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=TINY.hidden,
        intermediate_size=TINY.ffn,
        num_hidden_layers=TINY.layers,
        num_attention_heads=TINY.heads,
        num_key_value_heads=TINY.kv_heads,
        vocab_size=TINY.vocab,
        rms_norm_eps=TINY.eps,
        initializer_range=0.2,
    )
    source = transformers.LlamaForCausalLM(config).eval()
    tokens = prompt()
    with torch.no_grad():
        expected = source(tokens).logits
    got = all_logits(from_transformers(source, TINY).eval(), tokens, 1)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_greedy_tokens_of_decoded_weights_agree(device):
    """In bf16 each chosen token is the decoded model's choice too, or within two roundings of it."""
    m = model(NVFP4WeightOnlyConfig(), device, torch.bfloat16)
    tokens = Generator(m, prompt(device), 16).generate()
    logits = all_logits(decoded(m), tokens, LENGTH)[:, :-1].float()
    chosen = logits.gather(2, tokens[:, LENGTH:, None]).squeeze(2)
    best = logits.amax(2)
    assert (chosen >= best - 2 * best.abs() * torch.finfo(torch.bfloat16).eps).all()
    assert (chosen == best).float().mean() > 0.8
    assert len(tokens[:, LENGTH:].unique()) > 4


@pytest.mark.parametrize("config", [None, *CONFIGS.values()])
def test_compiled_equals_eager(device, config):
    """And on CUDA the graph of a step gives what the step itself gives."""
    m, tokens = model(config, device), prompt(device)
    torch.manual_seed(3)
    eager = Generator(m, tokens, 6)
    eager.advance = eager.step
    expected = eager.generate().clone()
    m.compile_parts()
    counter = torch._dynamo.utils.counters["stats"]
    before = counter["unique_graphs"]
    generator = Generator(m, tokens, 6)
    for _ in range(2):
        assert torch.equal(generator.generate(), expected)
    assert counter["unique_graphs"] - before == 7, "blocks, before and behind them: two graphs each; the choice"


def test_random_models_are_quantized_as_they_grow():
    dense, quantized = model(dtype=torch.bfloat16), model(NVFP4WeightOnlyConfig(), dtype=torch.bfloat16)
    assert type(quantized.embedding.weight.data) is torch.Tensor
    assert all(isinstance(linear.weight, NVFP4Tensor) for linear in quantized.linears())
    assert len(list(quantized.linears())) == 4 * TINY.layers + 1
    error = (quantized.head.weight.dequantize() - dense.head.weight).norm() / dense.head.weight.norm()
    assert error < 0.12
    assert not any(parameter.is_meta for parameter in [*quantized.parameters(), *quantized.buffers()])


def test_llama_8b_has_the_weights_of_llama_8b():
    with torch.device("meta"):
        block, shape = Block(generate.LLAMA_8B), generate.LLAMA_8B
    parameters = shape.layers * sum(p.numel() for p in block.parameters())
    assert parameters + 2 * shape.vocab * shape.hidden + shape.hidden == 8_030_261_248


def test_the_report(monkeypatch, tmp_path, capsys, device):
    monkeypatch.setattr(generate, "LLAMA_8B", TINY)
    arguments = ["--device", device, "--models", "llama-8b", "--batch", "1", "2", "--prompt", "8", "--tokens", "4"]
    arguments += ["--layers", "2", "--repeats", "2", "--eager", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["generate", *arguments])
    generate.main()
    (path,) = tmp_path.glob("*/generate.json")
    content = json.loads(path.read_text())
    assert [run["batch"] for run in content["runs"]] == [1, 2]
    weights = [linear.weight for linear in model(NVFP4WeightOnlyConfig(), dtype=torch.bfloat16).linears()]
    head, *per_layer = weights[-1], *weights[:4]
    for run in content["runs"]:
        rows = {row["recipe"]: row for row in run["rows"]}
        assert list(rows) == list(generate.RECIPES)
        assert rows["W4A4"]["linear_bytes"] == stored_bytes(head) + 2 * sum(map(stored_bytes, per_layer))
        assert rows["bf16"]["linear_bytes"] == 2 * (head.numel() + 2 * sum(weight.numel() for weight in per_layer))
        assert {row["embedding_bytes"] for row in run["rows"]} == {2 * TINY.vocab * TINY.hidden}
        for row in run["rows"]:
            assert row["tokens_per_second"] == pytest.approx(run["batch"] * 3 / row["decode"]["median"])
            assert row["share"] == pytest.approx(row["decode"]["moved"] / row["decode"]["median"] / run["copy"])
            assert (row["peak_bytes"] is None) == (row["prefill_graph"] is None) == (device == "cpu")
            assert row["prefill_graph"] is None or row["prefill_graph"]["method"] == "graph"
            assert row["peak_bytes"] is None or row["peak_bytes"] > row["linear_bytes"] + row["embedding_bytes"]
        assert rows["bf16"]["times"] == rows["bf16"]["first_token_times"] == rows["bf16"]["linear_ratio"] == 1
    printed = capsys.readouterr().out
    assert path.with_suffix(".txt").read_text().strip() in printed


def test_a_missing_model_is_left_out(monkeypatch, tmp_path, capsys):
    def missing(*arguments):
        raise FileNotFoundError("the demo's model is not installed")

    monkeypatch.setattr(generate, "smollm2", missing)
    monkeypatch.setattr(sys, "argv", ["generate", "--device", "cpu", "--models", "smollm2", "--out", str(tmp_path)])
    generate.main()
    assert "smollm2 is left out: the demo's model is not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "value", "least"),
    [
        *((option, "0", 1) for option in ("--layers", "--batch", "--prompt", "--repeats")),
        *(("--tokens", "1", 2), ("--batch", "-1", 1), ("--prompt", "many", 1)),
    ],
)
def test_counts_that_make_no_sense_are_refused(monkeypatch, tmp_path, capsys, option, value, least):
    monkeypatch.setattr(generate, "run_model", lambda *arguments: [])
    monkeypatch.setattr(sys, "argv", ["generate", "--device", "cpu", f"{option}={value}", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        generate.main()
    assert f"argument {option}: a whole number from {least} on is needed, not '{value}'" in capsys.readouterr().err


def test_quick_shrinks_the_model(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(generate, "run_model", lambda report, name, arguments, device: seen.append(arguments) or [])
    monkeypatch.setattr(sys, "argv", ["generate", "--device", "cpu", "--quick", "--out", str(tmp_path)])
    generate.main()
    assert (seen[0].layers, seen[0].prompt, seen[0].repeats) == (2, [64], 1)
    assert dataclasses.replace(generate.LLAMA_8B, layers=2).hidden == 4096
