"""Shares and norms of what is rounded away, against counts by hand."""

import math

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torchao.quantization import quantize_

from nvfp4_tensor import QuantizeSpec, training
from nvfp4_tensor.training import NVFP4TrainingConfig, Recipe
from nvfp4_tensor.training.reports.diagnostics import Record, Report


def model_of(recipe="nvidia"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32))
    quantize_(model, NVFP4TrainingConfig(recipe))
    return model


def diagnosed(model, x, dy):
    with training.diagnose(model) as report:
        model(x).backward(dy)
    return report


def test_planted_elements_are_counted():
    """Scales of 1 by one element of 2688 in a block of its own: what follows is known of each other block."""
    nearest = QuantizeSpec()
    linear = nn.Linear(64, 64, bias=False)
    quantize_(linear, NVFP4TrainingConfig(Recipe(x=nearest, dy=nearest, dy_t=nearest)))
    x, dy = torch.zeros(16, 64), torch.zeros(16, 64)
    for t in (x, dy):
        t[0, 0] = 2688
    x[1, :3] = torch.tensor([6.3, 6.3, 1.0])  # 6.3 / 6 rounds down to a scale of 1
    dy[1, :4] = torch.tensor([6.0, 0.2, -0.2, 1.0])  # 0.2 rounds to zero
    (record,) = diagnosed(linear, x, dy).records
    assert record.x_clipped == 2 / 1024
    assert record.dy_clipped == 0
    assert record.dy_vanished == pytest.approx(2 / 5)
    assert record.dy_error == pytest.approx(math.sqrt(2) * 0.2 / 2688, rel=1e-3)
    assert math.isnan(record.w_error)


def test_row_scaled_operands_use_the_scale_of_each_row():
    """Rows of powers of two that only differ by a factor round alike; of a square matrix a column would fit, too."""
    rows = QuantizeSpec(row_scaled=True)
    model = nn.Linear(32, 32, bias=False)
    quantize_(model, NVFP4TrainingConfig(Recipe(x=rows, dy=rows, dy_t=rows)))
    x = torch.randn(1, 32) * 2.0 ** (torch.arange(32) % 8)[:, None]
    one, all_rows = (diagnosed(model, t, t).records[0] for t in (x[:1], x))
    for fact in ("x_clipped", "x_error", "dy_clipped", "dy_vanished", "dy_error"):
        assert getattr(all_rows, fact) == pytest.approx(getattr(one, fact), rel=1e-5)
    assert 0.01 < one.x_error < 0.2 and math.isfinite(all_rows.signal)


def test_signal_matches_the_gradient_of_training():
    model = model_of()
    x, dy = torch.randn(256, 64), torch.randn(256, 32)
    report = diagnosed(model, x, dy)
    hidden = model[:2](x).detach()
    dense = dy.t() @ hidden
    facts = report.means()["2"]
    assert facts["signal"] == pytest.approx(float(dense.norm() / (model[2].weight.grad - dense).norm()), rel=0.1)
    assert 0.05 < facts["x_error"] < 0.15 and 0.05 < facts["w_error"] < 0.15 and 0 < facts["dy_clipped"] < 1 / 16


def test_weak_gradients_are_named():
    """Rows that cancel: a sum of products near zero beneath noise that does not cancel."""
    model = model_of()
    x, dy = torch.randn(128, 64), torch.randn(128, 32)
    x, dy = torch.cat([x, x * 1.01]), torch.cat([dy, -dy])
    report = diagnosed(model, x, dy)
    assert report.weak() and all(report.means()[name]["signal"] < 3**0.5 for name in report.weak())
    assert diagnosed(model_of(), x, dy.abs()).weak() == []


def test_training_gives_the_same_bits():
    model, x, dy = model_of(), torch.randn(32, 64), torch.randn(32, 32)
    torch.manual_seed(3)
    model(x).backward(dy)
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.manual_seed(3)
    diagnosed(model, x, dy)
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
    assert not model[0]._forward_hooks


@pytest.mark.parametrize("recipe", ["nvidia", "accurate_eden", "forward_only", "weight_only"])
def test_every_kind_of_recipe(recipe):
    model = model_of(recipe)
    with training.diagnose(model) as report:
        for _ in range(2):
            model(torch.randn(3, 40, 64)).sum().backward()
    assert [(r.name, r.step) for r in report.records] == [("2", 0), ("0", 0), ("2", 1), ("0", 1)]
    signal = report.records[0].signal
    assert (signal == math.inf) == (recipe in ("forward_only", "weight_only"))


def test_table_and_scalars(tmp_path):
    report = Report()
    report.records += [
        Record("layers.0.up", 0, 0.03125, 0.1, 0.1, 0.02, 0.2, 0.15, 5.0),
        Record("layers.0.up", 1, 0.03125, 0.1, 0.1, 0.04, 0.4, 0.15, 7.0),
        Record("head", 0, w_error=0.1, signal=1.5),
    ]
    assert report.weak() == ["head"]
    assert_expected_inline(
        str(report),
        """\
linear       x clipped  x error  w error  dy clipped  dy vanished  dy error  |dw|/noise
layers.0.up      3.12%   10.00%   10.00%       3.00%       30.00%    15.00%         6.0
head                 -        -   10.00%           -            -         -       1.5 !""",
    )
    scalars = {}

    class Writer:
        def add_scalar(self, tag, value, step):
            scalars[tag] = value, step

    report.log(Writer(), 7)
    assert scalars["nvfp4/dy_vanished/layers.0.up"] == (pytest.approx(0.3), 7)
    assert len(scalars) == 9
    pytest.importorskip("matplotlib")
    report.picture(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 5000
