"""Compare products of e4m3 operands (activations="fp8") with torch's bf16 linear and with W4A16, on Hopper.

    python -m benchmarks.speed.matmul_fp8 [--shapes 14336x8192 28672x8192] [--rows 512 1024 4096] [--sustained]

For each number M of rows of x: the time of torch's bfloat16 linear, of the product with the NVFP4 weight as W4A16 and
as FP8, and of the parts of the latter: rounding x and the weight to e4m3, and torch's scaled_mm of the two. Each is one
product with a cold cache. The ratio is bf16's time over that of the whole FP8 product.

--sustained adds the times of each alone under load, where power sets the clock.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks import harness
from benchmarks.harness import Variant, seconds
from nvfp4_tensor import ProductBackend, quantize
from nvfp4_tensor.matmul import fp8
from nvfp4_tensor.matmul.backends import FP8_ROWS

SHAPES = [(14336, 8192), (28672, 8192), (8192, 28672), (4096, 14336), (4096, 4096)]
ROWS = [FP8_ROWS, 1024, 2048, 4096, 8192]
WHOLE = ("bf16", "w4a16", "fp8")
PARTS = ("operands", "scaled_mm")


def variants(dense: Tensor, x: Tensor) -> list[Variant]:
    """Return the whole products and the parts of the last one."""
    w = quantize(dense)
    codes = w.qdata, w.scale, w.per_tensor_scale
    operands = torch.ops.nvfp4.fp8_operands(x, *codes)
    rows, columns = dense.shape
    y_bytes, w_bytes = 2 * len(x) * rows, codes[0].numel() + codes[1].numel()
    runs = {
        "bf16": (functools.partial(linear, x, dense), 2 * (x.numel() + dense.numel()) + y_bytes),
        "w4a16": (functools.partial(linear, x, w), 2 * x.numel() + w_bytes + y_bytes),
        "fp8": (
            functools.partial(linear, x, w._replace(product_backend=ProductBackend.FP8)),
            2 * x.numel() + w_bytes + y_bytes,
        ),
        "operands": (
            functools.partial(torch.ops.nvfp4.fp8_operands, x, *codes),
            3 * x.numel() + w_bytes + rows * columns,
        ),
        "scaled_mm": (
            functools.partial(fp8.scaled_mm, *operands, None, x.dtype),
            x.numel() + rows * columns + y_bytes,
        ),
    }
    return [Variant(name, run, moved) for name, (run, moved) in runs.items()]


def measure(rows: int, columns: int, m: int, device: torch.device, repeats: int, sustained: bool) -> dict:
    """Return the record of one weight and one number of rows."""
    generator = torch.Generator(device).manual_seed(0)
    dense, x = (torch.randn(n, columns, device=device, generator=generator).bfloat16() for n in (rows, m))
    each = variants(dense, x)
    timings = harness.measure(each, device, repeats=repeats)
    record = {
        "m": m,
        "ratio": {way: timings["bf16"].median / timings[way].median for way in WHOLE[1:]},
        "copy": timings[harness.COPY].bandwidth,
        **{name: dataclasses.asdict(timings[name]) for name in (*WHOLE, *PARTS)},
    }
    if sustained:
        record["sustained"] = harness.on_end(each[: len(WHOLE)], device, turn=0.12)
    return record


def lines(shape: tuple[int, int], records: list[dict]) -> str:
    flops = [2.0 * shape[0] * shape[1] * record["m"] for record in records]
    rows = [
        [str(record["m"])]
        + [seconds(record[name]["median"]) for name in WHOLE]
        + [f"{record['ratio'][way]:.2f}" for way in WHOLE[1:]]
        + [f"{flop / record['fp8']['median'] / 1e12:.0f}"]
        + [seconds(record[name]["median"]) for name in PARTS]
        + [f"{record['operands']['moved'] / record['operands']['median'] / record['copy']:.2f}"]
        + ([f"{record['sustained']['bf16'] / record['sustained']['fp8']:.2f}"] if "sustained" in record else [])
        for record, flop in zip(records, flops, strict=True)
    ]
    header = ["M", *WHOLE, "bf16/w4a16", "bf16/fp8", "TFLOP/s", *PARTS, "of copy"]
    header += ["sustained bf16/fp8"] if "sustained" in records[0] else []
    return harness.table(header, rows)


def shape_of(text: str) -> tuple[int, int]:
    rows, columns = text.split("x")
    return int(rows), int(columns)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=SHAPES, metavar="NxK")
    parser.add_argument("--rows", nargs="+", type=harness.at_least(1), default=ROWS, metavar="M")
    parser.add_argument("--repeats", type=harness.at_least(1), default=15)
    parser.add_argument("--sustained", action="store_true")
    parser.add_argument("--out", help="of results, instead of benchmarks/results")
    options = parser.parse_args()
    device, report, runs = torch.device(options.device), harness.Report(), []
    for rows, columns in options.shapes:
        records = [
            measure(rows, columns, m, device, options.repeats, options.sustained and device.type == "cuda")
            for m in options.rows
        ]
        report(f"\n{rows}x{columns}, copy {records[0]['copy'] / 1e9:.0f} GB/s")
        report(lines((rows, columns), records))
        runs.append({"shape": [rows, columns], "rows": records})
    harness.save(harness.result_path(device, "matmul_fp8", options.out), harness.record(device, runs=runs), report.text)


if __name__ == "__main__":
    main()
