"""Evaluate the cost model of products on Hopper, and fit its constants to measurements.

    python -m benchmarks.fit_costs                              benchmarks/results/h200/matmul_published.json
    python -m benchmarks.fit_costs forced.json another.json     several files together
    python -m benchmarks.fit_costs --measure forced.json        every kernel for every product: needs a Hopper

The model (nvfp4_tensor/csrc/cuda/matmul: costs.h, many_rows_sm90/costs.h, few_rows_sm90/costs.h) chooses a kernel by
predicting the cycles of a product in a chain of products. This script compiles it for the host and evaluates it on the
products of a results file, for chains with 9 to 1024 rows of x, for which the model was made.

It prints three tables. First, the errors of the model: measured over predicted time, the median and the worst. Only
differences between plans of one product matter for the choice, so two parameters are fitted to the file before: the
clock, and the constant overhead of a product, such as its launch.

Second, the cost of the choice, if a file has several kernels of a product: the time of the kernel that the model
chooses, over that of the fastest.

Third, each constant of the header, its fitted value, and how well it is determined, by least squares of the logarithms
(Gauss-Newton) with a prior of a factor of e around the header's value. A constant is "not determined" if its standard
deviation is more than 15 %. A results file of benchmarks.matmul has only the chosen kernel of each product, so many
constants are undetermined, and the others absorb errors of the model. --measure runs every kernel that supports a
product, each in its own process with the environment variable NVFP4_TENSOR_FORCE_KERNEL.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import harness

HERE = Path(__file__).parent
PUBLISHED = HERE / "results" / "h200" / "matmul_published.json"
FEWEST_ROWS, MOST_ROWS = 9, 1024
ROWS = [9, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]  # for --measure
FREEDOM = 0.15  # a constant known less well is "not determined"
STEP = 0.02  # relative step of a constant for differences


@dataclasses.dataclass(frozen=True)
class Run:
    """One measured product in a chain: x (m, k) @ w (n, k)^T, the kernel, and its time in seconds."""

    m: int
    n: int
    k: int
    blocks: int
    kernel: str
    seconds: float

    @property
    def product(self) -> tuple[int, int, int]:
        return self.m, self.n, self.k


class Model:
    """A process with the compiled headers, which returns costs for given constants."""

    def __init__(self, folder: Path) -> None:
        compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            raise SystemExit("fit_costs needs a C++ compiler: set CXX")
        sources = HERE.parent / "nvfp4_tensor" / "csrc"
        program = folder / "fit_costs"
        command = [compiler, "-std=c++20", "-O1", "-w", f"-I{sources}", str(HERE / "fit_costs.cpp"), "-o", str(program)]
        subprocess.run(command, check=True)
        self._process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.header = {name: float(value) for name, value in map(str.split, self._lines("constants"))}
        self.kernels = self._lines("kernels")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def _lines(self, command: str) -> list[str]:
        self._tell(command)
        return list(iter(self._line, ""))

    def set(self, constants: dict[str, float]) -> None:
        for name, value in constants.items():
            self._tell(f"set {name} {value}")

    def cost(self, kernel: str, m: int, n: int, k: int, blocks: int) -> int | None:
        """Return cycles, or None if the kernel does not support the product or the model does not cover it."""
        self._tell(f"cost {kernel} {m} {n} {k} {blocks}")
        answer = self._line()
        return None if answer == "none" else int(answer)

    def choice(self, m: int, n: int, k: int, blocks: int) -> str:
        self._tell(f"choice {m} {n} {k} {blocks}")
        return self._line().split()[0]

    def costs(self, runs: list[Run]) -> Tensor:
        costs = [self.cost(run.kernel, *run.product, run.blocks) for run in runs]
        return torch.tensor([float(cost or 1) for cost in costs], dtype=torch.float64)


def read(path: Path, model: Model) -> list[Run]:
    """Return the chains of a results file that the model covers; a missing kernel name means the chosen one."""
    content = json.loads(path.read_text())
    blocks, runs = content["machine"]["multiprocessors"], []
    for run in content["runs"]:
        n, k = run["shape"]
        for entry in run.get("chain", []):
            m = entry["m"]
            if not FEWEST_ROWS <= m <= MOST_ROWS:
                continue
            kernel = entry.get("kernel") or model.choice(m, n, k, blocks)
            if model.cost(kernel, m, n, k, blocks) is not None:
                runs.append(Run(m, n, k, blocks, kernel, entry["nvfp4"]["median"] / run["chain_length"]))
    return runs


# --- what the model is worth ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Machine:
    """Parameters that convert cycles to seconds: predicted = beside + cycles / clock."""

    clock: float  # Hz
    beside: float  # overhead of every product in seconds

    def logs(self, cycles: Tensor) -> Tensor:
        return (self.beside + cycles / self.clock).log()

    @classmethod
    def fitted(cls, model: Model, runs: list[Run]) -> Machine:
        """Fit by least squares of predicted over measured."""
        seconds = measured(runs)
        rows = torch.stack([1 / seconds, model.costs(runs) / seconds], 1)
        beside, period = torch.linalg.lstsq(rows, torch.ones_like(seconds)[:, None]).solution.flatten().tolist()
        return cls(1 / period, beside)


def measured(runs: list[Run]) -> Tensor:
    return torch.tensor([run.seconds for run in runs], dtype=torch.float64)


def ratios(model: Model, runs: list[Run], machine: Machine) -> list[float]:
    """Return measured over predicted times."""
    return (measured(runs).log() - machine.logs(model.costs(runs))).exp().tolist()


def off(ratios: list[float]) -> float:
    """The median's distance from 1."""
    return math.expm1(statistics.median(abs(math.log(ratio)) for ratio in ratios))


def show_deviations(model: Model, runs: list[Run]) -> str:
    machine = Machine.fitted(model, runs)
    groups: dict[str, list[tuple[float, Run]]] = collections.defaultdict(list)
    for ratio, run in zip(ratios(model, runs, machine), runs, strict=True):
        groups["all"].append((ratio, run))
        groups[f"{run.m} rows"].append((ratio, run))
        groups[run.kernel].append((ratio, run))
    lines = []
    for name in sorted(groups, key=lambda name: (name != "all", not name.endswith("rows"), len(name), name)):
        found = groups[name]
        worst, run = max(found, key=lambda one: abs(math.log(one[0])))
        middle = statistics.median(ratio for ratio, _ in found)
        where = f"{run.m} rows of {run.n}x{run.k}"
        lines.append(
            [name, str(len(found)), f"{middle:.2f}", f"{off([ratio for ratio, _ in found]):.1%}", f"{worst:.2f}", where]
        )
    header = ["measured over predicted", "products", "middle", "off by", "worst", "where"]
    scale = f"{machine.clock / 1e9:.2f} GHz, and {machine.beside * 1e6:.2f} us beside each plan"
    return scale + "\n" + harness.table(header, lines)


def show_choices(model: Model, runs: list[Run]) -> str:
    """Print the loss from the model's choices, for products with several measured kernels."""
    products: dict[tuple[int, int, int], dict[str, Run]] = collections.defaultdict(dict)
    for run in runs:
        products[run.product][run.kernel] = run
    losses = []
    for product, by in products.items():
        chosen = model.choice(*product, next(iter(by.values())).blocks)
        if len(by) > 1 and chosen in by:
            losses.append((by[chosen].seconds / min(run.seconds for run in by.values()), product, chosen))
    if not losses:
        return "what the choice costs: no product here was measured by more than one kernel (--measure does that)"
    loss, (m, n, k), kernel = max(losses)
    mean = statistics.geometric_mean(loss for loss, *_ in losses)
    return (
        f"what the choice costs, of {len(losses)} products: {mean - 1:.1%} in the mean, "
        f"{loss - 1:.1%} at most ({m} rows of {n}x{k}, {kernel})"
    )


# --- fitting ----------------------------------------------------------------------------------------------------------


def slopes(model: Model, runs: list[Run], machine: Machine, at: dict[str, float]) -> Tensor:
    """Return the derivatives of log predictions by log constants: (runs, constants)."""
    columns = []
    for name, value in at.items():
        model.set({name: value * (1 + STEP)})
        above = machine.logs(model.costs(runs))
        model.set({name: value * (1 - STEP)})
        columns.append((above - machine.logs(model.costs(runs))) / (math.log1p(STEP) - math.log1p(-STEP)))
        model.set({name: value})
    return torch.stack(columns, 1)


def fit(model: Model, runs: list[Run], machine: Machine, steps: int = 8) -> tuple[dict[str, float], dict[str, float]]:
    """Return the fitted constants and the standard deviations of their logarithms; restores the header's constants.

    The machine parameters stay fixed, because otherwise a common factor of all constants would be undetermined.
    """
    names = list(model.header)
    moved = torch.zeros(len(names), dtype=torch.float64)  # from the header's, in logarithms
    for _ in range(steps):
        at = {
            name: value * math.exp(by) for (name, value), by in zip(model.header.items(), moved.tolist(), strict=True)
        }
        model.set(at)
        residual = measured(runs).log() - machine.logs(model.costs(runs))
        slope, variance = slopes(model, runs, machine, at), residual.square().mean().clamp(min=1e-6)
        precision = slope.T @ slope / variance + torch.eye(len(names), dtype=torch.float64)
        moved += torch.linalg.solve(precision, slope.T @ residual / variance - moved).clamp(-0.3, 0.3)
    freedom = torch.linalg.inv(precision).diagonal().sqrt()
    model.set(model.header)
    return at, dict(zip(names, freedom.tolist(), strict=True))


def show_fit(model: Model, runs: list[Run]) -> str:
    machine = Machine.fitted(model, runs)
    fitted, freedom = fit(model, runs, machine)
    lines = []
    for name, header in model.header.items():
        known = freedom[name] <= FREEDOM
        values = [f"{fitted[name]:.4g}", f"{fitted[name] / header - 1:+.1%}"] if known else ["not determined", ""]
        lines.append([name, f"{header:.10g}", *values, f"{freedom[name]:.0%}"])
    text = harness.table(["constant", "header", "fitted", "", "freedom"], lines)
    free = sum(value > FREEDOM for value in freedom.values())
    if free:
        text += f"\n{free} of {len(freedom)} are not determined: python -m benchmarks.fit_costs --measure FILE runs all"
    before = off(ratios(model, runs, machine))
    model.set({name: value for name, value in fitted.items() if freedom[name] <= FREEDOM})
    after = off(ratios(model, runs, machine))
    model.set(model.header)
    return text + f"\noff by {before:.1%} in the middle with the header's constants, {after:.1%} with the fitted ones"


# --- measuring --------------------------------------------------------------------------------------------------------


def measure_forced(kernel: str, model: Model, repeats: int) -> list[dict]:
    """Measure chains of all published weights with the kernel NVFP4_TENSOR_FORCE_KERNEL, if it supports them."""
    from benchmarks import matmul

    device = torch.device("cuda")
    blocks = torch.cuda.get_device_properties(device).multi_processor_count
    measured = []
    for n, k in matmul.PUBLISHED:
        rows = [m for m in ROWS if model.cost(kernel, m, n, k, blocks) is not None]
        if not rows:
            continue
        length = matmul.chain_length(n, k)
        layers = [matmul.Layer.random(n, k, device, seed) for seed in range(length)]
        entries = []
        for m in rows:
            x = torch.randn(m, k, device=device).bfloat16()
            chain = functools.partial(matmul.chain, [layer.product for layer in layers], x)
            timing = harness.measure([harness.Variant("nvfp4", chain)], device, repeats=repeats)["nvfp4"]
            entries.append({"m": m, "kernel": kernel, "nvfp4": dataclasses.asdict(timing)})
        measured.append({"shape": [n, k], "chain_length": length, "chain": entries})
    return measured


def measure(path: Path, model: Model, repeats: int) -> None:
    """Measure all kernels, each in its own process, because a process reads the variable only once."""
    content = harness.record(torch.device("cuda"), repeats=repeats, runs=[])
    for kernel in model.kernels:
        command = [sys.executable, "-m", "benchmarks.fit_costs", "--measure-forced", "--repeats", str(repeats)]
        environment = os.environ | {"NVFP4_TENSOR_FORCE_KERNEL": kernel}
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        content["runs"] += json.loads(done.stdout.splitlines()[-1])
        print(kernel, flush=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", default=[PUBLISHED], help="of benchmarks.matmul or --measure")
    parser.add_argument("--measure", type=Path, metavar="FILE", help="measure every kernel by every product first")
    parser.add_argument("--repeats", type=harness.at_least(1), default=9, help="timed runs of each chain")
    parser.add_argument("--measure-forced", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Model(Path(folder))
        if arguments.measure_forced:
            print(json.dumps(measure_forced(os.environ["NVFP4_TENSOR_FORCE_KERNEL"], model, arguments.repeats)))
            return
        if arguments.measure:
            measure(arguments.measure, model, arguments.repeats)
            arguments.files = [arguments.measure]
        runs = [run for path in arguments.files for run in read(path, model)]
        for text in (show_deviations(model, runs), show_choices(model, runs), show_fit(model, runs)):
            print(text, end="\n\n")


if __name__ == "__main__":
    main()
