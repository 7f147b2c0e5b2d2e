"""How much faster a linear layer of NVFP4 weights is than torch's bf16 one, from decode to prefill.

    python -m benchmarks.matmul [--device cuda] [--shapes 14336x8192 28672x8192 4096x4096] [--rows 1 16 64 1024]

Columns for each number M of rows of x: the time of torch's bfloat16 linear and of ``torch.ops.nvfp4.matmul`` in one
run, their ratio, the bytes that have to be read and written (codes, scales, x, y) a second as a share of the copy
bandwidth, and TFLOP/s. W4A4 is the same product with the activation quantized and decoded before it. The last table
gives the host's time for one eager call.
"""

from __future__ import annotations

import argparse
import dataclasses

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.harness import Timing, Variant, seconds
from nvfp4_tensor.spec import QuantizeSpec

SHAPES = {"cuda": [(14336, 8192), (28672, 8192), (4096, 4096)], "cpu": [(4096, 4096)]}
ROWS = {"cuda": [1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096], "cpu": [1, 4, 16, 512]}
NEAREST = QuantizeSpec().pack()


@dataclasses.dataclass(frozen=True)
class Layer:
    """One weight both ways: bf16 (N, K), and NVFP4 of the same values."""

    dense: Tensor
    codes: Tensor
    scale: Tensor
    factor: Tensor

    @classmethod
    def random(cls, rows: int, columns: int, device: torch.device) -> Layer:
        generator = torch.Generator(device).manual_seed(0)
        dense = torch.randn(rows, columns, device=device, generator=generator).bfloat16()
        return cls(dense, *torch.ops.nvfp4.quantize(dense, torch.ops.nvfp4.amax(dense, -1), None, NEAREST))

    def product(self, x: Tensor, x_scale: Tensor | None = None) -> Tensor:
        return torch.ops.nvfp4.matmul(
            x, x_scale, self.codes, self.scale, self.factor, None, self.dense.shape[1], False, x.dtype
        )

    def product_of_quantized(self, x: Tensor) -> Tensor:
        """W4A4 without FP4 tensor cores: x is quantized and decoded, its per-tensor scale left for the epilogue."""
        values, x_scale = torch.ops.nvfp4.fake_quantize(x, torch.ops.nvfp4.amax(x, -1), None, NEAREST, x.dtype, False)
        return self.product(values, x_scale)

    def moved(self, m: int) -> int:
        """The fewest bytes that a product of m rows reads and writes."""
        rows, columns = self.dense.shape
        return self.codes.numel() + self.scale.numel() + 2 * m * (rows + columns)


def variants(layer: Layer, m: int) -> list[Variant]:
    x = torch.randn(m, layer.dense.shape[1], device=layer.dense.device).bfloat16()
    dense_moved = layer.dense.numel() * 2 + 2 * m * sum(layer.dense.shape)
    return [
        Variant(f"bf16 {m}", lambda: torch.nn.functional.linear(x, layer.dense), dense_moved),
        Variant(f"nvfp4 {m}", lambda: layer.product(x), layer.moved(m)),
        Variant(f"w4a4 {m}", lambda: layer.product_of_quantized(x), layer.moved(m)),
    ]


def show(report: harness.Report, layer: Layer, rows: list[int], timings: dict[str, Timing]) -> list[dict]:
    limit = timings[harness.COPY]
    flops = 2.0 * layer.dense.numel()
    kept, lines = [], []
    for m in rows:
        bf16, nvfp4, w4a4 = (timings[f"{name} {m}"] for name in ("bf16", "nvfp4", "w4a4"))
        ratio, share = bf16.median / nvfp4.median, nvfp4.bandwidth / limit.bandwidth
        times = {"bf16": dataclasses.asdict(bf16), "nvfp4": dataclasses.asdict(nvfp4), "w4a4": dataclasses.asdict(w4a4)}
        kept.append({"m": m, "ratio": ratio, "share": share, **times})
        lines.append(
            [
                str(m),
                seconds(bf16.median),
                seconds(nvfp4.median),
                f"{ratio:.2f}x",
                f"{share:.0%}",
                f"{flops * m / nvfp4.median / 1e12:.3g}",
                f"{bf16.median / w4a4.median:.2f}x",
            ]
        )
    report(harness.table(["M", "bf16", "nvfp4", "times bf16", "of copy", "TFLOP/s", "W4A4 times bf16"], lines))
    return kept


def shape(text: str) -> tuple[int, int]:
    rows, columns = map(int, text.split("x"))
    return rows, columns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", type=shape, nargs="+", help="N x K of the weights")
    parser.add_argument("--rows", type=int, nargs="+", help="rows of x")
    parser.add_argument("--repeats", type=int, help="timed runs of each variant (default: 25 on CUDA, 5 on CPU)")
    parser.add_argument("--out", help="folder of the results (default: benchmarks/results)")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    repeats = arguments.repeats or (25 if device.type == "cuda" else 5)
    content, report = harness.record(device, repeats=repeats, runs=[]), harness.Report()
    where = content["machine"].get("gpu", content["machine"]["processor"])
    report(f"{where}, native: {content['native'][device.type]}, median of {repeats}")
    content["host"] = {}
    for rows, columns in arguments.shapes or SHAPES[device.type]:
        layer, ms = Layer.random(rows, columns, device), arguments.rows or ROWS[device.type]
        timings = harness.measure([v for m in ms for v in variants(layer, m)], device, repeats=repeats)
        report(f"\n{rows}x{columns}, copy {timings[harness.COPY].bandwidth / 1e9:.0f} GB/s")
        content["runs"].append({"shape": [rows, columns], "rows": show(report, layer, ms, timings)})
    if device.type == "cuda":
        layer = Layer.random(256, 256, device)
        for m in (1, 64):
            x = torch.randn(m, 256, device=device).bfloat16()
            content["host"][f"M = {m}"] = harness.host_time(lambda x=x, layer=layer: layer.product(x), device)
        report("\nhost time of one eager call, 256x256")
        report(harness.table(["", "time"], [[name, seconds(taken)] for name, taken in content["host"].items()]))
    harness.save(harness.result_path(device, "matmul", arguments.out), content, report.text)


if __name__ == "__main__":
    main()
