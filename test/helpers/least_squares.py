"""A problem of least squares, and steps toward its solution."""

import torch
from torch import nn


def problem(seed=0):
    """Return x (128, 48), y (128, 40) and the weight (40, 48) that gives y."""
    generator = torch.Generator().manual_seed(seed)
    x, w = torch.randn(128, 48, generator=generator), torch.randn(48, 40, generator=generator) / 7
    return x, x @ w, w.t().contiguous()


def backward(net):
    x, y, _ = problem()
    loss = nn.functional.mse_loss(net(x.to(next(net.parameters()).dtype)).float(), y)
    loss.backward()
    return loss.item()


def train(net, optimizer, steps):
    """Return the loss before each step."""
    losses = []
    for _ in range(steps):
        losses.append(backward(net))
        optimizer.step()
        optimizer.zero_grad()
    return losses
