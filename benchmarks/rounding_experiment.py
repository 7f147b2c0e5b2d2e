"""The standard experiment: the mean of 50 stochastic quantizations compared with one quantization to nearest.

    python -m benchmarks.rounding_experiment [--device cuda] [--draws 50] [--small]

It uses Gaussian tensors of 8192x8192 and 8192x8256, float32 and bfloat16; 1x16 blocks and 16x16 tiles; with and without
the Hadamard transform; row-wise and column-wise (the transpose, quantized in the same pass and decoded with its own
amax). Each row has the RMSE of nearest, the RMSE of the mean, their ratio, and the theoretical ratio: for a value that
is a fraction f of a step h above its lower neighbour, stochastic rounding has variance f (1 - f) h^2 and nearest has an
error of min(f, 1 - f) h, both computed from the actual scales of each element, including clipping. With NEAREST scales
an element beyond 6 is clipped, a bias that averaging does not remove; with UP scales nothing clips, and for uniformly
distributed fractions the ratio is sqrt(1/6 / 50) / sqrt(1/12) = 0.2.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks import harness
from nvfp4_tensor import QuantizeSpec, RoundingMode, ScaleRounding
from nvfp4_tensor.numerics.layout import DEFAULT_HADAMARD_SIGN
from nvfp4_tensor.testing.statistics import Neighbours, rng_state

SHAPES = ((8192, 8192), (8192, 8256))
SMALL_SHAPES = ((128, 128), (128, 144))
DTYPES = (torch.float32, torch.bfloat16)
_CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 25}  # float64 intermediates of the theory: 10 x 8 bytes an element


@dataclasses.dataclass(frozen=True)
class Case:
    """One tensor quantized row-wise or column-wise: half of a row of the table."""

    shape: tuple[int, int]
    dtype: str
    block_rows: int
    hadamard: bool
    columnwise: bool
    scale_rounding: str


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Measured and expected RMSE, and z of the measured mean square error of the mean."""

    nearest: float
    mean: float
    nearest_theory: float
    mean_theory: float
    z: float

    @property
    def ratio(self) -> float:
        return self.mean / self.nearest

    @property
    def theory(self) -> float:
        return self.mean_theory / self.nearest_theory


class Quantizer:
    """Quantizes x (M, K) row-wise or column-wise and decodes: ``decoded(mode, state)`` approximates ``target``.

    Row-wise is ``quantize`` on x, column-wise the second half of ``quantize_pair``.
    """

    def __init__(self, x: Tensor, case: Case) -> None:
        sign = DEFAULT_HADAMARD_SIGN if case.hadamard else None
        self.x, self.columnwise = x, case.columnwise
        self.spec = QuantizeSpec(
            round_mode="stochastic",
            block_rows=case.block_rows,
            scale_rounding=case.scale_rounding,
            hadamard_sign=sign,
        )
        along = x.t().contiguous() if case.columnwise else x
        self.amax = torch.ops.nvfp4.amax(along, -1 if sign is None else sign)
        self.amax_x = torch.ops.nvfp4.amax(x, -1)
        self.target = along if sign is None else torch.ops.nvfp4.hadamard(along, sign)

    def decoded(self, mode: RoundingMode, state: Tensor) -> Tensor:
        spec = self.spec.replace(round_mode=mode)
        if self.columnwise:
            plain = spec.replace(hadamard_sign=None)
            packed = torch.ops.nvfp4.quantize_pair(self.x, self.amax_x, self.amax, state, plain.pack(), spec.pack())[3:]
        else:
            packed = torch.ops.nvfp4.quantize(self.x, self.amax, state, spec.pack())
        return torch.ops.nvfp4.dequantize(*packed, self.target.shape[1], torch.float32)


def judge(quantizer: Quantizer, draws: int, seed: int) -> Outcome:
    """Judge a case. Only the sum of decoded tensors is kept, and the theory is computed in chunks of complete tiles."""
    device = quantizer.x.device
    nearest = quantizer.decoded(RoundingMode.RNE, rng_state(seed, 0, device))
    mean = torch.zeros_like(nearest)
    for draw in range(draws):
        mean += quantizer.decoded(RoundingMode.STOCHASTIC, rng_state(seed, draw, device))
    mean /= draws
    target, columns = quantizer.target, quantizer.target.shape[1]
    step = max(_CHUNK_ELEMENTS[device.type] // columns // 16, 1) * 16
    sums = torch.zeros(5, dtype=torch.float64, device=device)
    for start in range(0, len(target), step):
        piece = slice(start, start + step)
        neighbours = Neighbours.of(target[piece], quantizer.amax, quantizer.spec)
        expected, variance = neighbours.mean_square_error(draws)
        sums += torch.stack(
            [
                (nearest[piece].double() - neighbours.x).square().sum(),
                (mean[piece].double() - neighbours.x).square().sum(),
                neighbours.nearest_square_error.sum(),
                expected.sum(),
                variance.sum(),
            ]
        )
    *squares, variance_sum = sums.tolist()
    z = (squares[1] - squares[3]) / math.sqrt(variance_sum)
    return Outcome(*(math.sqrt(square / target.numel()) for square in squares), z)


def cases(shapes, scale_rounding: str) -> Iterator[Case]:
    names = (str(dtype).removeprefix("torch.") for dtype in DTYPES)
    for shape, dtype, block_rows, hadamard, columnwise in itertools.product(
        shapes, names, (1, 16), (False, True), (False, True)
    ):
        yield Case(shape, dtype, block_rows, hadamard, columnwise, scale_rounding)


def experiment(
    shapes, draws: int, device: torch.device, progress: Callable[[Case, Outcome, Case, Outcome], None] | None = None
) -> list[tuple[Case, Outcome]]:
    """Run all configurations, with NEAREST and UP scales."""
    results = []
    pairs = zip(*(cases(shapes, rounding.name) for rounding in (ScaleRounding.NEAREST, ScaleRounding.UP)), strict=True)
    for number, pair in enumerate(pairs):
        x = torch.randn(pair[0].shape, generator=torch.Generator(device).manual_seed(number), device=device)
        x = x.to(getattr(torch, pair[0].dtype))
        outcomes = [judge(Quantizer(x, case), draws, seed=2 * number + i) for i, case in enumerate(pair)]
        results += zip(pair, outcomes, strict=True)
        if progress:
            progress(pair[0], outcomes[0], pair[1], outcomes[1])
    return results


HEADER = (
    "shape", "dtype", "block", "transform", "direction",
    "nearest", "mean", "ratio", "theory", "off", "UP: nearest", "mean", "ratio", "theory", "off",
)  # fmt: skip
WIDTHS = (9, 8, 5, 9, 9, 9, 9, 7, 7, 7, 11, 9, 7, 7, 7)


def line(cells) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, WIDTHS, strict=True))


def row(case: Case, near: Outcome, up: Outcome) -> str:
    def figures(outcome: Outcome) -> tuple[str, ...]:
        off = outcome.ratio / outcome.theory - 1
        return (
            f"{outcome.nearest:.6f}",
            f"{outcome.mean:.6f}",
            f"{outcome.ratio:.5f}",
            f"{outcome.theory:.5f}",
            f"{off:+.2%}",
        )

    cells = (
        f"{case.shape[0]}x{case.shape[1]}",
        case.dtype,
        f"{case.block_rows}x16",
        "Hadamard" if case.hadamard else "none",
        "columns" if case.columnwise else "rows",
    )
    return line((*cells, *figures(near), *figures(up)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--draws", type=int, default=50)
    parser.add_argument("--small", action="store_true", help="a small shape of each configuration")
    parser.add_argument("--out", help="folder of the results (default: benchmarks/results; with --small: none kept)")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    content = harness.record(device, draws=arguments.draws)
    report, start = harness.Report(), time.perf_counter()
    report(f"RMSE of nearest and of the mean of {arguments.draws} stochastic quantizations, {device.type}")
    report(line(HEADER))
    results = experiment(
        SMALL_SHAPES if arguments.small else SHAPES,
        arguments.draws,
        device,
        lambda case, near, _, up: report(row(case, near, up)),
    )
    largest = max(abs(outcome.z) for _, outcome in results)
    off = max(abs(outcome.ratio / outcome.theory - 1) for _, outcome in results)
    report(
        f"{len(results)} configurations in {time.perf_counter() - start:.0f} s: "
        f"at most {off:.2%} off theory, largest |z| {largest:.2f}"
    )
    if not arguments.small or arguments.out:
        content["results"] = [
            {
                **dataclasses.asdict(case),
                **dataclasses.asdict(outcome),
                "ratio": outcome.ratio,
                "theory": outcome.theory,
            }
            for case, outcome in results
        ]
        harness.save(harness.result_path(device, "rounding_experiment", arguments.out), content, report.text)


if __name__ == "__main__":
    main()
