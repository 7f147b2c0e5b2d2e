"""Runs of torchtitan compared by what it printed: time of a step, memory and loss. Needs no torchtitan.

    python -m benchmarks.speed.titan_runs bf16.log nvidia.log

The runs are made by titan_llama.py.
"""

from __future__ import annotations

import argparse
import re
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Report, record, result_path, save, seconds, table

STEP = re.compile(
    r"step:\s+(\d+)\s+loss:\s+([0-9.]+)\s+grad_norm:\s+([0-9.]+)\s+memory:\s+(-?[0-9.]+)GiB.*?tps: ([0-9,]+)"
)
"""What torchtitan prints of a step."""


def steps_of(log: str) -> list[dict[str, float]]:
    """Of the first rank that printed them: step, loss, gradient norm, memory in GiB, tokens a second and rank.

    Raises:
        ValueError: no step is there.
    """
    found: dict[int, dict[str, float]] = {}
    for step, loss, norm, memory, rate in STEP.findall(re.sub(r"\x1b\[[0-9;]*m", "", log)):
        row = {"step": int(step), "loss": float(loss), "grad_norm": float(norm)}
        found.setdefault(
            int(step), row | {"memory_gib": float(memory), "tokens_a_second": float(rate.replace(",", ""))}
        )
    if not found:
        raise ValueError("no line of the log is torchtitan's of a step")
    return [found[step] for step in sorted(found)]


def summary(steps: list[dict[str, float]], tokens: int, first: int, last: int) -> dict[str, float]:
    """Medians over steps ``first`` to ``last``, the loss a mean over the last five of them.

    Raises:
        ValueError: none of them was run.
    """
    part = [row for row in steps if first <= row["step"] <= last]
    if not part:
        raise ValueError(f"no step from {first} to {last} is among the {len(steps)} of the log: see --parts")
    rate = statistics.median(row["tokens_a_second"] for row in part)
    return {
        "first": first,
        "last": last,
        "seconds": tokens / rate,
        "tokens_a_second": rate,
        "memory_gib": max(row["memory_gib"] for row in part),
        "loss": statistics.mean(row["loss"] for row in part[-5:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path, nargs="+", help="what torchtitan printed, a run a file")
    parser.add_argument("--tokens", type=int, default=16384, help="of a rank and step (%(default)s)")
    parser.add_argument("--parts", default="11-28,33-40", help="steps whose medians are shown (%(default)s)")
    parser.add_argument("--output", help="folder of results, benchmarks/results by default")
    args = parser.parse_args()
    runs = {log.stem: steps_of(log.read_text()) for log in args.logs}
    parts = [tuple(int(end) for end in part.split("-")) for part in args.parts.split(",")]
    summaries = {name: [summary(steps, args.tokens, *part) for part in parts] for name, steps in runs.items()}
    report = Report()
    rows = [_row(name, part) for name, found in summaries.items() for part in found]
    report(table(["run", "steps", "step", "tokens/s a rank", "memory GiB", "loss"], rows))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    content = record(device, arguments={"tokens": args.tokens, "parts": args.parts}, summaries=summaries, runs=runs)
    save(result_path(device, "torchtitan", args.output), content, report.text)


def _row(name: str, part: dict[str, Any]) -> list[str]:
    return [
        name,
        f"{part['first']} to {part['last']}",
        seconds(part["seconds"]),
        f"{part['tokens_a_second']:,.0f}",
        f"{part['memory_gib']:.2f}",
        f"{part['loss']:.4f}",
    ]


if __name__ == "__main__":
    main()
