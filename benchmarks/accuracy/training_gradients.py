"""Bias, variance and cosine of gradients for each rounding of dy, with dense weight and input.

    python -m benchmarks.accuracy.training_gradients [--draws 1024] [--device cuda]

dx and dw are means over many roundings of one dy.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.harness import at_least, record, result_path, save
from nvfp4_tensor import QuantizeSpec, fake_quantize

ROUNDINGS = {
    "nearest": QuantizeSpec(),
    "stochastic, 8 bits": QuantizeSpec(round_mode="stochastic", random_bits=8),
    "stochastic": QuantizeSpec(round_mode="stochastic"),
    "stochastic, scales up": QuantizeSpec(round_mode="stochastic", scale_rounding="up"),
    "EDEN": QuantizeSpec(round_mode="eden"),
}


def gradients(device: str, draws: int, tokens: int = 256, width: int = 256) -> list[dict]:
    """Return bias, variance and cosine of dx and dw over ``draws`` roundings of dy, relative to the unrounded dy.

    ``bias`` is the root mean square of (mean - exact) relative to that of the exact gradient; ``floor`` is what an
    unbiased rounding would show for that many draws.
    """
    generator = torch.Generator().manual_seed(0)
    dy = torch.randn(tokens, width, generator=generator) * torch.rand(tokens, 1, generator=generator)
    x, w = (torch.randn(size, width, generator=generator).to(device) for size in (tokens, width))
    dy = dy.to(device)
    exact = {"dx": dy @ w, "dw": dy.t() @ x}
    rows = []
    for name, spec in ROUNDINGS.items():
        sums = {key: torch.zeros_like(value, dtype=torch.float64) for key, value in exact.items()}
        squares = {key: torch.zeros_like(value, dtype=torch.float64) for key, value in exact.items()}
        for draw in range(draws):
            states = (torch.tensor([stream, draw], device=device) for stream in (1, 2))
            rounded, rounded_t = (
                fake_quantize(each, spec, rng_state=state, dtype=torch.float32)
                for each, state in zip((dy, dy.t()), states, strict=True)
            )
            for key, value in (("dx", rounded @ w), ("dw", rounded_t @ x)):
                sums[key] += value
                squares[key] += (value - exact[key]).double() ** 2
        rows += [
            {"rounding": name, "gradient": key, **errors(true.double(), sums[key], squares[key], draws)}
            for key, true in exact.items()
        ]
    return rows


def errors(true: torch.Tensor, total: torch.Tensor, squares: torch.Tensor, draws: int) -> dict[str, float]:
    """Return the errors of one gradient from the sum of its draws and the sum of their squared errors."""
    size, mean = true.pow(2).mean().sqrt(), total / draws
    error = (squares / draws).mean().sqrt() / size
    cosine = torch.nn.functional.cosine_similarity(mean.flatten(), true.flatten(), dim=0)
    return {
        "relative error of a draw": error.item(),
        "bias": ((mean - true).pow(2).mean().sqrt() / size).item(),
        "floor": (error / draws**0.5).item(),
        "1 - cosine of the mean": 1 - cosine.item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--draws", type=at_least(1), default=1024)
    parser.add_argument("--out", help="folder of the results (default: benchmarks/results)")
    options = parser.parse_args()
    device = torch.device(options.device)
    rows = gradients(options.device, options.draws)
    text = "\n".join(
        ", ".join(f"{key} {value:.6f}" if isinstance(value, float) else str(value) for key, value in row.items())
        for row in rows
    )
    print(text)
    save(result_path(device, "training_gradients", options.out), record(device, draws=options.draws, rows=rows), text)


if __name__ == "__main__":
    main()
