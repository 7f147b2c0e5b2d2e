"""Perplexity of a model whose odds are known; compare_models is tested with ``nvfp4 compare``."""

import math
from types import SimpleNamespace

import pytest
import torch

from nvfp4_tensor.testing.model_quality import perplexity


class Bigram(torch.nn.Linear):
    """A language model with four tokens, which predicts the last token plus one with known odds."""

    def __init__(self):
        super().__init__(1, 1)

    def forward(self, ids, past_key_values=None, use_cache=False):
        logits = torch.zeros(*ids.shape, 4).scatter(-1, ((ids + 1) % 4).unsqueeze(-1), math.log(5.0))
        return SimpleNamespace(logits=logits, past_key_values=past_key_values)


def test_perplexity_matches_known_odds_in_independent_windows():
    ticks = []
    right = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])  # every next token has probability 5/8
    assert perplexity(Bigram(), right, 4, lambda: ticks.append(1)) == pytest.approx(8 / 5)
    assert len(ticks) == 2
    # Between the windows the sequence breaks; a window's first token is not predicted, so nothing is lost.
    assert perplexity(Bigram(), torch.tensor([0, 1, 2, 1, 2, 3]), 3) == pytest.approx(8 / 5)
    assert perplexity(Bigram(), torch.tensor([0, 2, 0, 2]), 4) == pytest.approx(8)
