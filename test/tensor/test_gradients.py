"""The gradient of decoded values reaches an NVFP4 parameter as it reaches a dense one."""

import pytest
import torch
from torch import nn

from nvfp4_tensor import QuantizeSpec, quantize, quantize_experts

VIEWS = {
    "whole": lambda w: w, "t": lambda w: w.t(), "rows that share": lambda w: w[128:], "clone": lambda w: w.clone(),
    "rows that do not": lambda w: w[5:], "every second row": lambda w: w[::2], "columns": lambda w: w[:, :32],
    "row": lambda w: w[3], "flat": lambda w: w.view(-1), "other rows": lambda w: w.reshape(320, 32),
    "gathered rows": lambda w: w[torch.tensor([1, 5, 7, 7])], "chunk": lambda w: w.split(50)[1],
    "cast": lambda w: w.to(torch.float16), "expanded": lambda w: w.expand(2, 160, 64),
}  # fmt: skip


@pytest.mark.parametrize(("view", "dtype"), [(view, torch.float32) for view in VIEWS] + [("columns", torch.bfloat16)])
def test_gradient_of_dequantize_is_that_of_a_dense_parameter(view, dtype):
    w = nn.Parameter(quantize(torch.randn(160, 64, dtype=dtype)))
    dense = nn.Parameter(w.detach().dequantize())
    for out in (None, torch.float32, torch.bfloat16):
        y = VIEWS[view](w).dequantize(out)
        mirror = VIEWS[view](dense).to(y.dtype)
        gradient = torch.randn(y.shape).to(y.dtype)
        y.backward(gradient)
        mirror.backward(gradient)
    assert type(w.grad) is torch.Tensor and w.grad.dtype == dtype
    torch.testing.assert_close(w.grad, dense.grad)


def test_decoding_functions_and_modes():
    w = nn.Parameter(quantize_experts(torch.randn(3, 20, 64), QuantizeSpec(block_rows=16)))
    (first,) = torch.autograd.grad(torch.dequantize(w).pow(3).sum(), w, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), w)
    torch.testing.assert_close(second, 6 * w.detach().dequantize())
    with torch.no_grad():
        assert not w.dequantize().requires_grad
    assert not w.detach().dequantize().requires_grad
    assert w.tolist() == w.detach().dequantize().tolist()
    compiled = torch.compile(lambda w: (w.dequantize() ** 2).sum(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(w), w)[0], 2 * w.detach().dequantize())
