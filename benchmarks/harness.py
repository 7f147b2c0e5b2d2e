"""The harness of all benchmarks: how times are measured, compared and saved.

On CUDA each variant is captured in a graph and timed by events around one replay, after a flush of the L2 cache; on a
CPU by perf_counter around as many calls as take a millisecond. Variants are interleaved, one run of each at a time, so
that drift of the machine affects all of them; the figure is the median. A copy of a large tensor is measured in the
same way, and shares are relative to its bandwidth.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"
COPY = "copy"
_FLUSH_BYTES = 512 << 20  # H200: 60 MB of L2; read before each timed run
# Uncounted rounds on CUDA, until the clock is what these variants make it: on an H200 one row of 14336 x 8192, timed
# right after 8192 rows of another weight, took 27.9 us, two rows after it 24.4.
_SETTLE_SECONDS = 0.06
_COPY_BYTES = {"cuda": 512 << 20, "cpu": 32 << 20}  # what 16384^2 and 4096^2 bf16 take


def at_least(least: int) -> Callable[[str], int]:
    """Return an argparse type for integers of at least ``least``."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"a whole number from {least} on is needed, not {text!r}")
        return int(text)

    return number


def shape(text: str) -> tuple[int, int]:
    """An argparse type: 4096x8192."""
    rows, columns = map(int, text.split("x"))
    return rows, columns


def parser(doc: str | None, *, device: bool = True) -> argparse.ArgumentParser:
    """Return a parser with what all benchmarks take: --out, and --device unless they are of a CPU."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if device:
        made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--out", type=Path, help="folder of the results (default: benchmarks/results)")
    return made


@dataclasses.dataclass(frozen=True)
class Variant:
    """Something to time: run() does the work once; moved is the minimal number of bytes read and written."""

    name: str
    run: Callable[[], object]
    moved: int = 0
    in_graph: bool = True


@dataclasses.dataclass
class Timing:
    """A result: median and quartiles in seconds, and the method ("graph", "events" without a graph, "clock")."""

    name: str
    moved: int
    median: float
    low: float
    high: float
    method: str

    @property
    def bandwidth(self) -> float:
        return self.moved / self.median


def copy_variants(device: torch.device) -> list[Variant]:
    """Return variants that copy a large bf16 tensor; the bandwidth of the faster one is the limit of the machine.

    On CUDA the driver's copy is not captured: as a graph node it took 392 us for 512 MiB on an H200, 2.7 TB/s, where
    other kernels of the run reached 3.9. A simple copy kernel is measured too; the faster of the two took 254 us.
    """
    n = _COPY_BYTES[device.type]
    source = torch.randn(n // 2, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy = Variant(COPY, lambda: target.copy_(source), 2 * n, in_graph=False)
    kernel = Variant("negate", lambda: torch.neg(source, out=target), 2 * n)
    return [copy, kernel] if device.type == "cuda" else [copy]


def measure(variants: Sequence[Variant], device: torch.device, *, repeats: int) -> dict[str, Timing]:
    """Time all variants and a copy ``repeats`` times each, interleaved."""
    variants = [*(limits := copy_variants(device)), *variants]
    if device.type == "cuda":
        runs, methods = zip(*(_captured(variant.run, variant.in_graph) for variant in variants), strict=True)
        take, batches = _event_timer(device), [1] * len(variants)
        start = time.perf_counter()
        while time.perf_counter() - start < _SETTLE_SECONDS:
            for run in runs:
                take(run)
    else:
        runs, methods, take = [variant.run for variant in variants], ["clock"] * len(variants), _clock
        batches = [_calls_a_millisecond(run) for run in runs]
        runs = [functools.partial(_repeat, run, calls) for run, calls in zip(runs, batches, strict=True)]
    times: list[list[float]] = [[] for _ in variants]
    for _ in range(repeats):
        for run, calls, taken in zip(runs, batches, times, strict=True):
            taken.append(take(run) / calls)
    timings = {
        variant.name: Timing(variant.name, variant.moved, *_quartiles(taken), method)
        for variant, taken, method in zip(variants, times, methods, strict=True)
    }
    timings[COPY] = min((timings[limit.name] for limit in limits), key=lambda timing: timing.median)
    return timings


def _quartiles(times: list[float]) -> tuple[float, float, float]:
    if len(times) < 2:
        return times[0], times[0], times[0]
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return middle, low, high


def _clock(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _repeat(run: Callable[[], object], calls: int) -> None:
    for _ in range(calls):
        run()


def _calls_a_millisecond(run: Callable[[], object]) -> int:
    """Return how many calls take a millisecond, at least one. The first call, which compiles, is not counted."""
    run()
    return min(max(int(1e-3 / max(_clock(run), 1e-7)), 1), 1000)


def _event_timer(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """Time with a cold L2 cache, flushed by reading: after a flush by writing, the run would write back dirty lines."""
    flush = torch.ones(_FLUSH_BYTES // 4, device=device)

    def take(run: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.sum()  # also keeps the device busy while the host enqueues what follows
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return take


def _captured(run: Callable[[], object], in_graph: bool) -> tuple[Callable[[], object], str]:
    """Return the replay of a captured graph, or ``run`` if that is not requested or not possible (it synchronizes)."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    if not in_graph:
        return run, "events"
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):  # the failed one leaves torch's generator as if still captured
            torch.empty(1, device="cuda").zero_()
        return run, "events"
    return graph.replay, "graph"


def on_end(
    variants: Sequence[Variant], device: torch.device, *, turn: float = 0.4, rounds: int = 3
) -> dict[str, float]:
    """Measure seconds per run in sustained load on CUDA: turns of ``turn`` seconds, of which the second half counts.

    As in training, the clock then depends on the power of this variant alone. Interleaved runs (:func:`measure`) all
    have the clock of the mix, which hides the advantage of a variant that uses less power. Returns the median turn.
    """
    assert device.type == "cuda"
    runs = [_captured(variant.run, variant.in_graph)[0] for variant in variants]
    taken: list[list[float]] = [[] for _ in variants]
    for _ in range(rounds):
        for run, times in zip(runs, taken, strict=True):
            once = _turn(run, 3)
            calls = max(int(turn / 2 / once), 1)
            _turn(run, calls)
            times.append(_turn(run, calls))
    return {variant.name: statistics.median(times) for variant, times in zip(variants, taken, strict=True)}


def _turn(run: Callable[[], object], calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def host_time(run: Callable[[], object], device: torch.device, *, budget: float = 0.3, rounds: int = 15) -> float:
    """Return seconds of host time per eager call: the median of rounds of calls without synchronizing.

    This takes ``budget`` seconds. A round has at most 500 calls, fewer than a stream can queue.
    """

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    run()
    calls = min(max(int(budget / rounds / _clock(run)), 1), 500)
    taken = []
    for _ in range(rounds):
        synchronize()
        taken.append(_clock(functools.partial(_repeat, run, calls)) / calls)
    synchronize()
    return statistics.median(taken)


# --- where it ran, and what is kept ----------------------------------------------------------------------------------


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def machine(device: torch.device) -> dict[str, str | int]:
    """Return the hardware and software that figures depend on, without the host's name."""
    facts: dict[str, str | int] = {
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30),
            "capability": f"sm_{properties.major}{properties.minor}",
        }
    return facts


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version(), "torch": torch.__version__}
    peers = "humming-kernels", "quack-kernels"
    for package in ("nvfp4-tensor", "torchao", "transformers", "triton", *peers):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def native() -> dict[str, str]:
    """Return which library each device uses, native or plain torch, and why."""
    from nvfp4_tensor import info

    facts = info()
    return {"cpu": f"{facts.cpu} ({facts.cpu_instruction_set})", "cuda": facts.cuda}


def commit() -> str:
    """Return the commit, with a + if files differ from it; without a repository, the environment variable COMMIT."""
    root = Path(__file__).parent.parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ("git", "-C", str(root), *arguments), capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":!benchmarks/results")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("COMMIT", "unknown")


def command() -> str:
    """Return the command line, as ``python -m`` and the arguments, without --out."""
    spec, arguments = sys.modules["__main__"].__spec__, sys.argv[1:]
    if "--out" in arguments:
        index = arguments.index("--out")
        del arguments[index : index + 2]
    return " ".join(["python", "-m", spec.name if spec else Path(sys.argv[0]).stem, *arguments])


def record(device: torch.device, **content) -> dict:
    """Return a result with all information needed to repeat it."""
    return {
        "command": command(),
        "commit": commit(),
        "device": device.type,
        "machine": machine(device),
        "versions": versions(),
        "native": native(),
        **content,
    }


def short_name(gpu: str) -> str:
    """Return the folder of a GPU's results: h100 of "NVIDIA H100 80GB HBM3", otherwise the last word."""
    words = gpu.lower().split()
    return next((word for word in words if re.match(r"[a-z]{1,2}\d{2,}", word)), words[-1])


def result_path(device: torch.device, subject: str, folder: Path | str | None = None) -> Path:
    """Return results/<gpu or cpu>/<subject>.json and create its folder, in which pictures and tables are saved too."""
    name = short_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else "cpu"
    path = Path(folder or RESULTS) / name / f"{subject}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def save(path: Path, content: dict, text: str) -> None:
    """Save the record as JSON, and the printed tables as .txt in the same folder."""
    path.write_text(json.dumps(content, indent=1) + "\n")
    path.with_suffix(".txt").write_text(text.rstrip() + "\n")


def with_earlier(path: Path, rows: Sequence[dict], key: str, **settings) -> list[dict]:
    """Return the rows of a result file of the same settings, and these, which replace those of the same ``key``."""
    earlier = json.loads(path.read_text()) if path.exists() else {"rows": []}
    same = all(earlier.get(name) == value for name, value in settings.items())
    found = {row[key]: row for row in earlier["rows"] if same}
    return list((found | {row[key]: {**row, "commit": commit(), "command": command()} for row in rows}).values())


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table with the first column aligned left and the others right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])


class Report:
    """Prints lines immediately, and keeps the text for :func:`save`."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, text: str = "") -> None:
        print(text, flush=True)
        self.lines.append(text)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def seconds(value: float) -> str:
    """Format seconds: 1.23 ms, 45.6 us."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.3g} us"
