"""A problem of least squares, and steps toward its solution."""

import torch
from torch import nn


def backward(net):
    """Return the loss of ``net`` for x (128, 48) and y = x @ w (128, 40), after its backward."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(128, 48, generator=generator), torch.randn(48, 40, generator=generator) / 7
    loss = nn.functional.mse_loss(net(x.to(next(net.parameters()).dtype)).float(), x @ w)
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
