"""Instructions of small training steps, by valgrind: a measure of host time that a busy machine does not change.

    python -m benchmarks.speed.host_instructions                    # needs valgrind; two minutes
    python -m benchmarks.speed.host_instructions --recipes nvidia --size 64

A step is forward and backward of one linear of SIZE x SIZE with SIZE tokens on a CPU; "computed" has an input that
autograd computed, which linears share. The counts include the kernels' own instructions, nearly half of those of a
recipe at size 16, and repeat within 2 %. On one core of an AMD EPYC (Zen 3), a step of size 16 takes about a
microsecond per 3,500 of them.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.harness import table
from benchmarks.speed.training_step import RECIPES, linear_by, step_of

CALLS = 50
COLUMNS = ["step", "forward", "step, computed"]


def variants(recipe: str, size: int) -> dict[str, Callable[[], object]]:
    """What is counted of a recipe, by the names of COLUMNS."""
    x = torch.randn(size, size, dtype=torch.bfloat16, requires_grad=True)
    dy, linear = torch.randn_like(x), linear_by(recipe, size, size, torch.device("cpu"))
    runs = step_of(linear, x, dy), lambda: linear(x), lambda: step_of(linear, x.view_as(x), dy)()
    return dict(zip(COLUMNS, runs, strict=True))


class Counter:
    """Counts instructions of this process, which runs under callgrind with ``--instr-atstart=no``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._control("--instr=on")
        self.empty = 0
        self.empty = self.count(lambda: None)

    def count(self, run: Callable[[], object]) -> int:
        """Return the instructions of CALLS calls, without the loop around them."""
        self._control("--zero")
        for _ in range(CALLS):
            run()
        self._control("--dump")
        newest = max(self.folder.glob("out.*"), key=lambda path: int(path.suffix[1:]))
        found = re.search(r"^totals: (\d+)", newest.read_text(), re.MULTILINE)
        assert found is not None
        return int(found[1]) - self.empty

    def _control(self, what: str) -> None:
        subprocess.run(["callgrind_control", what, str(os.getpid())], check=True, stdout=subprocess.DEVNULL)


def count_all(recipes: list[str], size: int, folder: Path) -> str:
    """Return the table of all recipes: thousands of instructions per call."""
    torch.set_num_threads(1)
    runs = {recipe: variants(recipe, size) for recipe in ("bf16", *recipes)}
    for by_name in runs.values():
        for run in by_name.values():
            for _ in range(10):
                run()
    gc.collect()
    gc.disable()
    counter, rows, dense = Counter(folder), [], {}
    for recipe, by_name in runs.items():
        counts = {name: counter.count(run) / CALLS / 1e3 for name, run in by_name.items()}
        dense = dense or counts
        rows.append([recipe, *(f"{counts[name]:.0f} ({counts[name] / dense[name]:.2f})" for name in COLUMNS)])
    return table(["thousands of instructions", *COLUMNS], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=["nvidia", "unbiased", "accurate"])
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        print(count_all(options.recipes, options.size, options.folder))
    elif shutil.which("valgrind") is None:
        parser.error("valgrind is not installed")
    else:
        with tempfile.TemporaryDirectory() as folder:
            tool = ["valgrind", "-q", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/out"]
            again = [sys.executable, "-m", "benchmarks.speed.host_instructions", *sys.argv[1:], "--folder", folder]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run([*tool, *again], check=True, env=environment, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
