"""Compare x @ w^T on a CPU with w in NVFP4 against torch's linear in bfloat16.

    python -m benchmarks.matmul_cpu [--shapes 4096x4096] [--rows 1 4 16 512] [--threads 1 2] [--sets avx512 avx2]

Rows: shapes of the weight (N x K) and rows of x. Columns: median time of the product; minimal bytes per second and
their share of the copy bandwidth measured in the same run; multiplications and additions per second; torch's median
time and the speedup over it; and the same for other requested instruction sets. Variants are interleaved, and the copy
among them removes weights from the caches.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

import torch
from torch.nn.functional import linear

from benchmarks import harness
from benchmarks.harness import Timing, Variant, seconds
from nvfp4_tensor import quantize
from nvfp4_tensor.ops import native

LARGE, LARGE_ROWS = (4096, 4096), (1, 2, 4, 8, 16, 32, 64, 128, 512, 1024)
SMALL, SMALL_ROWS = ((576, 576), (192, 576), (1536, 576), (576, 1536)), (1,)
"""SmolLM2-135M's layers; a token at a time."""
TORCH = "torch"


class Case(NamedTuple):
    shape: tuple[int, int]
    rows: int


def variants(case: Case, sets: list[str]) -> list[Variant]:
    """Return variants of torch's linear and of the product with each instruction set, by its name."""
    n, k = case.shape
    generator = torch.Generator().manual_seed(0)
    w, x = (torch.randn(rows, k, generator=generator).bfloat16() for rows in (n, case.rows))
    q = quantize(w)
    own = (case.rows * (n + k)) * x.element_size()
    in_use = native.instruction_set()

    def multiply(isa: str) -> None:
        nonlocal in_use
        if in_use != isa:  # asking the library would add 9 us to each product
            native.set_instruction_set(isa)
            in_use = isa
        torch.ops.nvfp4.matmul(x, None, q.qdata, q.scale, q.per_tensor_scale, None, k, False, x.dtype)

    return [
        Variant(TORCH, lambda: linear(x, w), own + w.numel() * w.element_size()),
        *(Variant(isa, lambda isa=isa: multiply(isa), own + w.numel() * 9 // 16) for isa in sets),
    ]


def row(case: Case, isa: str, timings: dict[str, Timing]) -> tuple[dict, list[str]]:
    """Return the record of a case with one instruction set, and its line in the table."""
    timing, peer, limit = timings[isa], timings[TORCH], timings[harness.COPY]
    n, k = case.shape
    flops = 2 * case.rows * n * k / timing.median
    share, speedup = timing.bandwidth / limit.bandwidth, peer.median / timing.median
    kept = {key: value for key, value in dataclasses.asdict(timing).items() if key != "name"}
    kept |= {"shape": [n, k], "rows": case.rows, "instruction_set": isa, "share": share, "flops": flops}
    kept |= {"torch": peer.median, "speedup": speedup}
    speeds = [f"{timing.bandwidth / 1e9:.3g} GB/s", f"{share:.0%}", f"{flops / 1e9:.3g} GFLOP/s"]
    line = [f"{n}x{k}, M={case.rows}, {isa}", seconds(timing.median), *speeds, seconds(peer.median), f"{speedup:.2f}x"]
    return kept, line


def time_all(report: harness.Report, cases: list[Case], sets: list[str], repeats: int) -> list[dict]:
    kept, lines = [], []
    for case in cases:
        timings = harness.measure(variants(case, sets), torch.device("cpu"), repeats=repeats)
        for isa in sets:
            facts, line = row(case, isa, timings)
            kept.append(facts)
            lines.append(line)
    report(harness.table(["", "time", "moved", "of copy", "speed", "torch", "faster"], lines))
    return kept


def cases_of(shapes: list[tuple[int, int]] | None, rows: list[int] | None) -> list[Case]:
    if shapes is None:
        large = [Case(LARGE, m) for m in rows or LARGE_ROWS]
        return large + [Case(shape, m) for shape, m in itertools.product(SMALL, rows or SMALL_ROWS)]
    return [Case(shape, m) for shape, m in itertools.product(shapes, rows or LARGE_ROWS)]


def main() -> None:
    parser = harness.parser(__doc__, device=False)
    parser.add_argument(
        "--shapes", type=harness.shape, nargs="+", help="N x K (default: 4096x4096 and SmolLM2-135M's layers)"
    )
    parser.add_argument("--rows", type=int, nargs="+", help="rows of x (default: 1 to 1024)")
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--sets", nargs="+", default=[], help="instruction sets (default: the best of this machine)")
    parser.add_argument("--repeats", type=int, default=25, help="timed runs of each variant")
    arguments = parser.parse_args()
    native.set_instruction_set("")
    sets = arguments.sets or [native.instruction_set()]
    device = torch.device("cpu")
    content = harness.record(device, repeats=arguments.repeats, runs=[])
    report = harness.Report()
    report(f"{content['machine']['processor']}, native: {content['native']['cpu']}")
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        report(f"\n{threads} threads, median of {arguments.repeats}")
        cases = cases_of(arguments.shapes, arguments.rows)
        results = time_all(report, cases, sets, arguments.repeats)
        content["runs"].append({"threads": threads, "cases": results})
    native.set_instruction_set("")
    harness.save(harness.result_path(device, "matmul", arguments.out), content, report.text)


if __name__ == "__main__":
    main()
