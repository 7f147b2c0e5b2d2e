"""Time of ``adamw_step`` and ``adamw_step_codes`` for a matrix of 4096 x 4096, bfloat16 gradients: medians in us.

    python -m benchmarks.speed.adamw_step [--device cuda] [--rows 4096] [--repeats 200]
    python -m benchmarks.speed.adamw_step --against OTHER_CHECKOUT   # which has a built library; runs alternate

On a GPU, launches are timed by events, each after a write of 256 MB that clears the L2 cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

KINDS = ("bfloat16", "float32", "codes")


def measure(device: str, rows: int, repeats: int) -> dict[str, float]:
    """Return the median time of a step in us by kind of weight."""
    import torch

    from nvfp4_tensor import quantize

    torch.manual_seed(0)
    grad = torch.randn(rows, rows, device=device).bfloat16()
    numbers = torch.tensor([1.0, 0.9, 0.1, 0.999, 0.001, 1e-3, 1.0, 74.0], device=device)
    rng_state = torch.tensor([1, 1], device=device)
    scratch = torch.empty(1 << 26, device=device) if device == "cuda" else None
    medians = {}
    for kind in KINDS:
        widths = (rows // 2, rows // 16, rows // 2, rows // 16)
        state = [torch.zeros(rows, width, dtype=torch.uint8, device=device) for width in widths]
        dense = torch.randn(rows, rows, device=device) * 0.05
        if kind == "codes":
            w = quantize(dense, amax=8.0)
            arguments, op = (w.qdata, w.scale, w.per_tensor_scale), torch.ops.nvfp4.adamw_step_codes
        else:
            arguments, op = (dense.to(getattr(torch, kind)),), torch.ops.nvfp4.adamw_step
        times = []
        for _ in range(repeats + 5):
            if scratch is None:
                begin = time.perf_counter()
                op(*arguments, grad, *state, numbers, rng_state, 0)
                times.append((time.perf_counter() - begin) * 1e6)
                continue
            scratch.zero_()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            op(*arguments, grad, *state, numbers, rng_state, 0)
            events[1].record()
            events[1].synchronize()
            times.append(events[0].elapsed_time(events[1]) * 1e3)
        medians[kind] = statistics.median(times[5:])
    return medians


def run(checkout: Path, options: list[str]) -> dict[str, float]:
    """Measure the package of a checkout in a process of its own."""
    remove = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'Scikit' not in type(f).__name__]; "
    call = f"from runpy import run_path; run_path({str(Path(__file__).resolve())!r}, run_name='__main__')"
    command = [sys.executable, "-c", f"{remove}sys.argv[1:] = {[*options, '--json']!r}; {call}"]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    return json.loads(subprocess.run(command, env=environment, cwd=checkout, check=True, capture_output=True).stdout)


def main() -> None:
    """Print the medians, or those of two checkouts and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--against", type=Path, help="another checkout, to compare with")
    parser.add_argument("--rounds", type=int, default=5, help="processes for each checkout")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.against is None:
        medians = measure(given.device, given.rows, given.repeats)
        print(json.dumps(medians) if given.json else "\n".join(f"{k:>8} {v:9.1f} us" for k, v in medians.items()))
        return
    options = ["--device", given.device, "--rows", str(given.rows), "--repeats", str(given.repeats)]
    here = Path(__file__).resolve().parents[2]
    rounds = [(run(given.against.resolve(), options), run(here, options)) for _ in range(given.rounds)]
    for kind in KINDS:
        other, mine = (statistics.median(each[i][kind] for each in rounds) for i in (0, 1))
        print(f"{kind:>8} {other:9.1f} us there {mine:9.1f} us here {mine / other:7.3f}")


if __name__ == "__main__":
    main()
