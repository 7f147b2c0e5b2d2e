"""Matrices, and operators that write into one, as functions of it and another operand, and return it."""

import operator

import torch

from nvfp4_tensor import NVFP4Tensor, quantize


def matrix(rows=256, columns=128, factor=1.0, **arguments) -> NVFP4Tensor:
    return quantize(torch.randn(rows, columns) * factor, **arguments)


def linear_of(t):
    linear = torch.nn.Linear(t.shape[1], t.shape[0], bias=False)
    linear.weight = torch.nn.Parameter(t, requires_grad=False)
    return linear


BINARY = {
    "+=": operator.iadd, "-=": operator.isub, "*=": operator.imul, "/=": operator.itruediv, "%=": operator.imod,
    "//=": operator.ifloordiv, "**=": operator.ipow, "add_": lambda a, b: a.add_(b, alpha=0.5),
    "copy_": lambda a, b: a.copy_(b), "lerp_": lambda a, b: a.lerp_(b, 0.25), "addcmul_": lambda a, b: a.addcmul_(b, b),
    "index_add_": lambda a, b: a.index_add_(0, torch.arange(len(a)), b),
    "index_copy_": lambda a, b: a.index_copy_(0, torch.tensor([0]), b[:1]),
    "index_put_": lambda a, b: a.index_put_((torch.tensor([0, len(a) - 1]),), b[[0, -1]]),
    "masked_scatter_": lambda a, b: a.masked_scatter_(b > 0, b), "add out": lambda a, b: torch.add(a, b, out=a),
    "_foreach_add_": lambda a, b: torch._foreach_add_([a], [b])[0],
    "_foreach_mul_": lambda a, b: torch._foreach_mul_([a], [b])[0],
    "_foreach_copy_": lambda a, b: torch._foreach_copy_([a], [b])[0],
    "_foreach_lerp_": lambda a, b: torch._foreach_lerp_([a], [b], 0.25)[0],
}  # fmt: skip
UNARY = {
    "*= 2": lambda a, b: operator.imul(a, 2), "mul_": lambda a, b: a.mul_(-0.5), "relu_": lambda a, b: torch.relu_(a),
    "clamp_": lambda a, b: a.clamp_(-0.5, 0.25), "neg_": lambda a, b: a.neg_(), "fill_": lambda a, b: a.fill_(-3.0),
    "masked_fill_": lambda a, b: a.masked_fill_(torch.ones(a.shape[-1]) > 0, 2.0), "zero_": lambda a, b: a.zero_(),
    "index_fill_": lambda a, b: a.index_fill_(0, torch.tensor([0]), 0.0), "exp out": lambda a, b: torch.exp(a, out=a),
    "fill_ tensor": lambda a, b: a.fill_(torch.tensor(0.1)),
    "_foreach_mul_ scalar": lambda a, b: torch._foreach_mul_([a], 3.0)[0],
}  # fmt: skip
WRITES = BINARY | UNARY
