"""The demo's picture of stochastic rounding."""

import pytest
import torch

from nvfp4_cli.demo import picture
from nvfp4_tensor import NVFP4Tensor, RoundingMode


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
