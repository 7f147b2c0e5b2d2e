"""Report statistics of stochastic rounding: n, measured, expected and z of each check.

    python -m benchmarks.stochastic_rounding [--device cuda] [--size 4096] [--draws 4096] [--all]

The checks are those of test/testing/test_statistics.py, at the given sizes (--size is the side of square tensors);
``nvfp4_tensor.testing.statistics`` documents them and the certainty of z. The worst line of each check is printed, or
with --all every line. The same checks are then applied to the planted faults, all of which must be detected.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable

import torch

from benchmarks import harness, planted_faults
from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.testing import statistics
from nvfp4_tensor.testing.statistics import Finding, PairRounder, Rounder, worst

HEADER = ("check", "n", "measured", "expected", "z")


def checks(rounder: Rounder, pair: PairRounder, random_bits: int, size: int, device: torch.device):
    """Return a function for each section, which returns its findings; ``size`` is the side of square tensors."""
    generator = torch.Generator(device).manual_seed(2026)
    sections: dict[str, Callable[[], statistics.Findings]] = {
        "cells of the grid": lambda: statistics.cells(
            rounder, random_bits, max(size * size // (112 * 4096), 1), device
        ),
        "bias in steps": lambda: statistics.bias(rounder, random_bits, size, size, generator),
        "errors of one draw": lambda: statistics.correlations(rounder, random_bits, size, size, generator),
        "errors of two draws": lambda: statistics.draws(rounder, random_bits, size, size, generator),
        "row and transpose": lambda: statistics.transposed(pair, random_bits, size, generator),
        "shards": lambda: statistics.shards(rounder, size, size, generator),
    }
    if random_bits == 16:
        sections["random bits"] = lambda: statistics.bits(rounder, size // 2, size, device)
    return sections


def row(finding: Finding) -> tuple[str, ...]:
    return (
        finding.check,
        f"{finding.n:,}",
        f"{finding.measured:.7f}",
        f"{finding.expected:.7f}",
        f"{finding.z:+.2f}" + ("" if finding.ok else "  FAILED"),
    )


def show(report: harness.Report, title: str, findings: list[Finding], everything: bool) -> None:
    report(f"\n{title}: {len(findings)} checks")
    lines = findings if everything else sorted(findings, key=lambda finding: -abs(finding.z))[:3]
    report(harness.table(HEADER, [row(finding) for finding in lines]))


def judge_op(report: harness.Report, spec: QuantizeSpec, size: int, draws: int, device, everything: bool) -> list[dict]:
    """Run all checks of one spec on the op of one device."""
    report(f"\n=== {spec} on {device.type}")
    sections = checks(statistics.op_rounder(spec), statistics.op_pair(spec), spec.random_bits, size, device)
    if spec.block_rows == 1:
        x = torch.randn(1, 65536, generator=torch.Generator().manual_seed(7)).to(device)
        sections["convergence"] = lambda: statistics.convergence(x, spec.replace(scale_rounding="up"), draws)
    kept = []
    for title, run in sections.items():
        findings = list(run())
        show(report, title, findings, everything or title in ("bias in steps", "convergence", "random bits"))
        kept += [{"spec": str(spec), "section": title, **dataclasses.asdict(finding)} for finding in findings]
    return kept


def judge_faults(report: harness.Report, size: int, device: torch.device) -> list[dict]:
    """Print the line that detects each planted fault best; the control shows that there are no false alarms."""
    kept = []
    for fault, rounder in {"none (the control)": planted_faults.sound, **planted_faults.FAULTS}.items():
        findings = []
        for title, run in checks(rounder, statistics.pair_of(rounder), 16, size, device).items():
            findings += [dataclasses.replace(finding, check=f"{title}: {finding.check}") for finding in run()]
        failed = [finding for finding in findings if not finding.ok]
        kept.append(
            {"fault": fault, "checks": len(findings), "failed": len(failed), **dataclasses.asdict(worst(findings))}
        )
    report("\n=== planted faults, in plain torch: how many lines see each, and the line that sees it best")
    header = ("fault", "lines that fail", *HEADER[:1], *HEADER[2:])
    report(
        harness.table(
            header,
            [
                (
                    k["fault"],
                    f"{k['failed']} of {k['checks']}",
                    k["check"],
                    f"{k['measured']:.5f}",
                    f"{k['expected']:.5f}",
                    f"{k['z']:+.1f}",
                )
                for k in kept
            ],
        )
    )
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", type=int, help="side of the square tensors (default: 8192 on CUDA, 2048 on CPU)")
    parser.add_argument("--draws", type=int, default=4096, help="quantizations whose mean must keep converging")
    parser.add_argument("--all", action="store_true", help="print every line, not the worst three of each section")
    parser.add_argument("--out", help="folder of the results (default: benchmarks/results)")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    size = arguments.size or (8192 if device.type == "cuda" else 2048)
    content = harness.record(device, size=size, draws=arguments.draws)
    report, start = harness.Report(), time.perf_counter()
    plain = QuantizeSpec(round_mode="stochastic")
    findings = []
    for spec in (plain, plain.replace(random_bits=8), plain.replace(block_rows=16), plain.replace(scale_rounding="up")):
        findings += judge_op(report, spec, size, arguments.draws, device, arguments.all)
    faults = judge_faults(report, min(size, 1024), device)
    largest = max(abs(finding["z"]) for finding in findings)
    failed = sum(abs(finding["z"]) > statistics.Z_BOUND for finding in findings)
    missed = [fault["fault"] for fault in faults[1:] if not fault["failed"]] + faults[:1] * bool(faults[0]["failed"])
    report(
        f"\n{len(findings)} checks of the ops in {time.perf_counter() - start:.0f} s: {failed} failed, "
        f"largest |z| {largest:.2f} (bound {statistics.Z_BOUND:g}); planted faults missed: {missed or 'none'}"
    )
    content |= {"findings": findings, "faults": faults}
    harness.save(harness.result_path(device, "stochastic_rounding", arguments.out), content, report.text)
    if failed or missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
