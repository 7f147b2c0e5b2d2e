"""Perplexity, greedy generation and bytes, of a model whose odds are known."""

import pytest
import torch
from helpers.bigram import Bigram
from torch import nn

from nvfp4_tensor import NVFP4Tensor
from nvfp4_tensor.cli.demo import measure


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


def test_bits_of_a_weight_count_its_scales_and_their_padding():
    net = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(64, 8, bias=False))
    assert measure.bits_per_weight(net, lambda module, name: name == "0") == 32
    t = NVFP4Tensor.to_nvfp4(torch.ones(128, 64))
    net[0].weight = nn.Parameter(t, requires_grad=False)
    assert measure.bits_per_weight(net, lambda module, name: name == "0") == t.bits_per_element
