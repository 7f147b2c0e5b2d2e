"""Recipes beside those with a name: they draw random bits, or leave operands dense, where those do not."""

from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.training import RECIPES, Recipe, WeightForDx

DRAWN, EDEN = QuantizeSpec(round_mode="stochastic"), QuantizeSpec(round_mode="eden")
ROWS = QuantizeSpec(row_scaled=True)
_NVIDIA = RECIPES["nvidia"]
_DRAWN_W = _NVIDIA.w.replace(round_mode="stochastic")

MORE = {
    "dense forward": _NVIDIA.dense_forward(),
    "dense backward": _NVIDIA.dense_backward(),
    "w again": _NVIDIA.replace(keep_w=False),
    "stochastic w again": _NVIDIA.replace(keep_w=False, w=_DRAWN_W),
    "stochastic forward": _NVIDIA.replace(x=DRAWN, w=_DRAWN_W, x_t=_NVIDIA.dy_t),
    "dense forward of accurate_eden": RECIPES["accurate_eden"].dense_forward(),
    "all stochastic": Recipe(
        x=DRAWN, w=DRAWN, dy=DRAWN, w_for_dx=DRAWN, dy_t=DRAWN, x_t=DRAWN.replace(scale_rounding="up")
    ),
    "all EDEN": Recipe(dy=EDEN, w_for_dx=EDEN, dy_t=EDEN, x_t=EDEN),
    "EDEN in fprop": _NVIDIA.replace(x=EDEN, w=EDEN, w_for_dx=WeightForDx.DENSE),
    "EDEN with a dense weight": Recipe(dy=EDEN),
    "dy alone": Recipe(dy=DRAWN),
    "dy^T alone": Recipe(x=QuantizeSpec(), dy_t=DRAWN),
    "x^T alone": Recipe(x_t=QuantizeSpec()),
    "row scales": _NVIDIA.replace(x=ROWS, dy=ROWS, dy_t=QuantizeSpec(), x_t=ROWS),
}
