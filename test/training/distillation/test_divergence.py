"""The divergence of logits and its gradient, against autograd in float64."""

import pytest
import torch
from torch.nn.functional import kl_div

from nvfp4_tensor.training.distillation import divergence as module
from nvfp4_tensor.training.distillation.divergence import divergence


@pytest.mark.parametrize("reverse", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("masked", "compiled"), [(False, False), (True, False), (True, True)])
def test_divergence_and_gradient(reverse, masked, compiled, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 3 * 50)  # three rows at a time, and a rest
    monkeypatch.setattr(module, "_compiled_rows", torch.compile(module._of_rows, backend="aot_eager"))
    torch.manual_seed(0)
    student, teacher = (torch.randn(2, 7, 50) * 3 for _ in range(2))
    mask = torch.rand(2, 7) < 0.6 if masked else torch.ones(2, 7, dtype=torch.bool)
    own = student.clone().requires_grad_()
    found = divergence(own, teacher, mask if masked else None, reverse=reverse, compiled=compiled)
    (3 * found).backward()
    x = student.double().requires_grad_()
    log_q, log_p = x.log_softmax(-1)[mask], teacher.double().log_softmax(-1)[mask]
    both = [kl_div(a, b, reduction="sum", log_target=True) for a, b in ((log_q, log_p), (log_p, log_q))]
    wanted = ((1 - reverse) * both[0] + reverse * both[1]) / mask.sum()
    (3 * wanted).backward()
    torch.testing.assert_close(found.double(), wanted.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(own.grad.double(), x.grad, rtol=1e-4, atol=1e-7)
