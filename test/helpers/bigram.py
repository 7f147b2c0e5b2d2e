"""A model small enough to check by hand."""

import math

import torch
from torch import nn


class Bigram(nn.Module):
    """A language model with four tokens, which predicts the last token plus one with known odds."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 16)
        self.up = nn.Linear(16, 32, bias=False)
        self.lm_head = nn.Linear(32, 4, bias=False)

    def forward(self, ids, past_key_values=None, use_cache=False):
        logits = torch.full((*ids.shape, 4), 0.0).scatter(-1, ((ids + 1) % 4).unsqueeze(-1), math.log(5.0))
        logits = logits + 0 * self.lm_head(self.up(self.embed(ids)))
        return type("Output", (), {"logits": logits, "past_key_values": past_key_values})()
