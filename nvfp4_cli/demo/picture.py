"""The demo's picture: rounding to nearest gives a staircase, the mean of stochastic rounding the identity."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nvfp4_tensor.numerics.choices import RoundingMode
from nvfp4_tensor.numerics.layout import BLOCK, E2M1_MAX, E4M3_MAX
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = (1, 16, 256)
"""The numbers of draws whose means are plotted."""
_COLORS = ("#c6dbef", "#6baed6", "#08519c")
_NEAREST_COLOR = "#d95f0e"


def sweep(blocks: int) -> Tensor:
    """Values from -6 to 6, float32 (blocks, 16), whose scales under :func:`rounded` are all 1.

    The last element of each block is 6, the largest value of the format, which sets the block's scale.
    """
    values = torch.linspace(-E2M1_MAX, E2M1_MAX, blocks * (BLOCK - 1), dtype=torch.float32).view(blocks, BLOCK - 1)
    return torch.cat((values, torch.full((blocks, 1), E2M1_MAX, dtype=torch.float32)), dim=1)


def swept(x: Tensor) -> Tensor:
    """The values without the last element of each block, (blocks * 15,)."""
    return x[:, :-1].flatten()


def rounded(x: Tensor, mode: RoundingMode) -> Tensor:
    """x through NVFP4 and back, with a per-tensor scale of 1."""
    return NVFP4Tensor.to_nvfp4(x, round_mode=mode, amax=E2M1_MAX * E4M3_MAX).dequantize()


def means(x: Tensor, draws: int, tick: Callable[[], object] = lambda: None) -> dict[int, Tensor]:
    """The mean of the first N stochastic roundings of x, for N = 1, 2, 4, ... up to draws."""
    total, result = torch.zeros_like(x, dtype=torch.float64), {}
    for n in range(1, draws + 1):
        total += rounded(x, RoundingMode.STOCHASTIC)
        if n & (n - 1) == 0:
            result[n] = total / n
        tick()
    return result


def rmse(x: Tensor, y: Tensor) -> float:
    """Root of the mean squared difference of the :func:`swept` values."""
    return (swept(x).double() - swept(y).double()).square().mean().sqrt().item()


def draw_picture(path: Path, x: Tensor, mean_of: dict[int, Tensor]) -> None:
    """Three panels: nearest, the means of N stochastic roundings, and their error against N."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    nearest = rounded(x, RoundingMode.RNE)
    with plt.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 11}):
        figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 5), layout="constrained")
        _draw_against_identity(left, x, {"nearest, any number of times": (nearest, _NEAREST_COLOR)})
        left.set_title("Rounded to nearest")
        shown = {_name(n): (mean_of[n], color) for n, color in zip(SHOWN, _COLORS, strict=True) if n in mean_of}
        _draw_against_identity(middle, x, shown)
        middle.set_title("Rounded stochastically: the mean of N draws")
        _draw_error(right, x, nearest, mean_of)
        figure.savefig(path, dpi=120)
        plt.close(figure)


def _name(draws: int) -> str:
    return "1 draw" if draws == 1 else f"mean of {draws} draws"


def _draw_against_identity(axes: Axes, x: Tensor, curves: dict[str, tuple[Tensor, str]]) -> None:
    for label, (y, color) in curves.items():
        axes.plot(swept(x), swept(y), ".", markersize=3, color=color, label=label)
    axes.plot([-E2M1_MAX, E2M1_MAX], [-E2M1_MAX, E2M1_MAX], color="black", linewidth=1, label="identity")
    axes.set(xlabel="value", ylabel="NVFP4, decoded", xlim=(-6.3, 6.3), ylim=(-6.3, 6.3), aspect="equal")
    axes.set_xticks(range(-6, 7, 2), map(str, range(-6, 7, 2)))
    axes.grid(alpha=0.25)
    axes.legend(loc="upper left", markerscale=4, frameon=False)


def _draw_error(axes: Axes, x: Tensor, nearest: Tensor, mean_of: dict[int, Tensor]) -> None:
    draws = list(mean_of)
    errors = [rmse(x, mean_of[n]) for n in draws]
    floor = rmse(x, nearest)
    axes.loglog(draws, [errors[0] / n**0.5 for n in draws], "--", color="gray", label=r"$1/\sqrt{N}$")
    axes.loglog(draws, errors, "o", color=_COLORS[-1], label="stochastic")
    axes.axhline(floor, color=_NEAREST_COLOR, label="nearest")
    axes.set(title="Error of the mean of N draws", xlabel="N", ylabel="RMSE")
    axes.set_xticks([4**k for k in range(20) if 4**k <= draws[-1]], [4**k for k in range(20) if 4**k <= draws[-1]])
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.legend(loc="lower left", frameon=False)
