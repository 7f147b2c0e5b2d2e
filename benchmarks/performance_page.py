"""Generate docs/performance.md and its figure from benchmarks/results: python -m benchmarks.performance_page [--check]

All numbers in the page's tables come from the benchmarks' JSON files; performance_page.template.md has the text. This
module does not need torch, so that the page can be generated with the documentation. A test checks that the committed
page is up to date.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import string
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.accuracy import recipe_table
from benchmarks.performance_figure import Line, Panel, draw

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TEMPLATE = Path(__file__).with_suffix(".template.md")
PAGE, FIGURE = ROOT / "docs" / "performance.md", ROOT / "docs" / "images" / "speed.svg"
"""A picture of the results, and where the page shows it."""
PEERS = ("humming", "quack")
KINDS = {"single": "single", "chain": "in a chain"}
MODELS = {"mixtral": "Mixtral-8x7B", "deepseek": "DeepSeek-like", "llama-8b": "Llama-8B", "smollm2": "SmolLM2-135M"}


def load(machine: str, subject: str) -> dict:
    """Load a result file."""
    return json.loads((RESULTS / machine / f"{subject}.json").read_text())


def measured(machine: str, subject: str) -> bool:
    """Return whether there is a result; the template's sections "if machine/subject" need one."""
    return (RESULTS / machine / f"{subject}.json").exists()


def measured_sections(text: str) -> str:
    """Return the template without the sections whose results do not exist."""

    def section(found: re.Match[str]) -> str:
        return found[2] if measured(*found[1].split("/")) else ""

    return re.sub(r"<!-- if (\S+) -->\n(.*?)<!-- end -->\n", section, text, flags=re.DOTALL)


# --- Markdown --------------------------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table whose first column is text and whose other columns are numbers."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def source(*results: dict) -> str:
    """Return the command, machine and commit of a result."""
    result = results[0]
    machine = result["machine"]
    where = machine.get("gpu") or f"{machine['cores']} cores of an {machine['processor']} ({machine['cpu_capability']})"
    packages = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if name != "nvfp4-tensor")
    commands = "  \n".join(f"`{result['command']}`" for result in results)
    rows = [row for row in result.get("rows", []) if isinstance(row, dict)]
    of_rows = [row["commit"][:7] for row in rows if "commit" in row] or [result["commit"][:7]]
    commits = " and ".join(dict.fromkeys(of_rows))
    return f"{commands}  \n{where}; {packages}; commit {commits}."


def source_if_measured(machine: str, subject: str) -> str:
    return source(load(machine, subject)) if measured(machine, subject) else ""


def name_of(shape: Sequence[int]) -> str:
    return f"{shape[0]} x {shape[1]}"


def times(value: float) -> str:
    return f"{value:.2f}"


def digits(value: float) -> str:
    """Format three digits."""
    return f"{value:#.3g}".rstrip(".")


def whole(value: float) -> str:
    """Format three digits, or from 1,000 on a whole number."""
    return digits(value) if value < 1000 else f"{value:,.0f}"


def seconds(value: float) -> str:
    return f"{digits(value * 1e6)} us" if value < 1e-3 else f"{digits(value * 1e3)} ms"


# --- products --------------------------------------------------------------------------------------------------------


def ratios(run: dict, kind: str, way: str) -> list[float]:
    """Return speedups over bfloat16 by rows of x; kind: single or chain; way: nvfp4, w4a4 or a peer."""
    return [case["ratio"][way] for case in run[kind]]


def geometric_mean(values: Iterable[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def rows_of_x(result: dict, title: str = "times as fast; rows of x") -> list[str]:
    return [title, *(f"{case['m']:,}" for case in result["runs"][0]["single"])]


def products(kind: str) -> str:
    result = load("h200", "matmul")
    rows = [
        [name_of(run["shape"]) + ("" if way == "nvfp4" else f", {way}"), *map(times, ratios(run, kind, way))]
        for run in result["runs"]
        for way in ("nvfp4", *PEERS)
    ]
    return table(rows_of_x(result), rows)


def published() -> str:
    result = load("h200", "matmul_published")
    lines = []
    for kind, title in KINDS.items():
        by_rows = list(zip(*(ratios(run, kind, "nvfp4") for run in result["runs"]), strict=True))
        lines.append([f"{title}, geometric mean", *(times(geometric_mean(values)) for values in by_rows)])
        lines.append([f"{title}, slowest", *(times(min(values)) for values in by_rows)])
        faster = [str(sum(value > 1 for value in values)) for values in by_rows]
        lines.append([f"{title}, faster than bf16", *faster])
    return table(rows_of_x(result), lines)


def gradients() -> str:
    result = load("h200", "matmul_gradients")
    rows = [
        [f"{name_of(run['shape'])}, {title}", *map(times, ratios(run, kind, "nvfp4"))]
        for run in result["runs"]
        for kind, title in KINDS.items()
    ]
    return table(rows_of_x(result, "times as fast; rows of dy"), rows)


def products_cpu() -> str:
    tables = []
    for run in load("cpu", "matmul")["runs"]:
        large = [case for case in run["cases"] if case["shape"] == [4096, 4096]]
        layers = [case for case in run["cases"] if case["shape"] != [4096, 4096]]
        threads = f"{run['threads']} thread{'s' if run['threads'] > 1 else ''}"
        header = [f"4096 x 4096, {threads}; rows of x", *(f"{case['rows']:,}" for case in large)]
        time, speed = [seconds(case["median"]) for case in large], [times(case["speedup"]) for case in large]
        small = ", ".join(f"{name_of(case['shape'])} {times(case['speedup'])}" for case in layers)
        tables.append(table(header, [["time", *time], ["times as fast", *speed]]))
        tables.append(f"One row of x and SmolLM2-135M's layers: {small}.")
    return "\n\n".join(tables)


def products_amx() -> str:
    """Return a table of torch's time over ours by rows of x, for each number of threads and shape of an Intel CPU."""
    if not measured("cpu", "matmul_intel"):
        return ""
    runs = load("cpu", "matmul_intel")["runs"]
    lines: dict[str, dict[int, str]] = {}
    for run in runs:
        for case in run["cases"]:
            line = f"{run['threads']} threads, {name_of(case['shape'])}, {case['instruction_set']}"
            lines.setdefault(line, {})[case["rows"]] = times(case["speedup"])
    rows = sorted({m for line in lines.values() for m in line})
    header = ["times as fast; rows of x", *(f"{m:,}" for m in rows)]
    return table(header, [[name, *(line.get(m, "") for m in rows)] for name, line in lines.items()])


# --- models ----------------------------------------------------------------------------------------------------------


def experts() -> str:
    rows = []
    results = {"at random": load("h200", "experts"), "all to the same": load("h200", "experts_skewed")}
    for tokens_are, result in results.items():
        for run in result["runs"]:
            shape = f"{run['top']} of {run['experts']} experts, {run['rows']} x {run['columns']}"
            speeds = [times(case["ratio"]) for case in run["tokens"]]
            rows.append([f"{MODELS[run['model']]}: {shape}, {tokens_are}", *speeds])
    tokens = [f"{case['tokens']:,}" for case in results["at random"]["runs"][0]["tokens"]]
    return table(["times as fast; tokens", *tokens], rows)


WAYS = {
    "eager": "`model.generate`",
    "static": "`model.generate`, static cache (transformers compiles)",
    "native": "`decode_natively(model)`, `model.generate`",
    "stream": "`generation.generate(model, ids)`",
    "codes": "the same, `nvfp4_cache`",
    "graph": "benchmarks/llama.py compiled, one CUDA graph",
}


def generation(machine: str, model: str) -> str:
    """Return a table for each batch of how a stock model of transformers generates."""
    if not measured(machine, f"generation_{model}"):
        return ""
    result = load(machine, f"generation_{model}")
    tables = []
    for batch in sorted({row["batch"] for row in result["rows"]}):
        rows = [row for row in result["rows"] if row["batch"] == batch]
        base = {row["way"]: row["tokens_per_second"] for row in rows if row["weights"] == "bf16"}
        cells = []
        for row in rows:
            speed = row["tokens_per_second"]
            ratios = [times(speed / base[way]) if way in base else "" for way in (row["way"], "graph")]
            name = f"{row['weights']}: {WAYS[row['way']]}"
            cells.append([name, whole(speed), whole(row["whole_call"]), *ratios, f"{100 * row['share']:.0f} %"])
        head = [f"batch {batch}", "tokens/s", "whole call", "x bf16, same way", "x bf16, graph", "of copy"]
        tables.append(table(head, cells))
    if "note" in result:
        tables.append(f"These rows were {result['note']}.")
    return "\n\n".join(tables)


# --- quantize ----------------------------------------------------------------------------------------------


def quantize(machine: str, subject: str = "quantize") -> str:
    result = load(machine, subject)
    tables = []
    for run in result["runs"]:
        threads = f", threads: {run['threads']}" if machine == "cpu" else ""
        title = f"{name_of(run['shape'])}{threads}; copy {run['copy'] / 1e9:,.0f} GB/s"
        rows = [
            [case["name"], seconds(case["median"]), f"{100 * case['share']:.0f} %",
             *(digits(case["times"][peer]) if peer in case["times"] else "" for peer in ("torchao", "compiled"))]
            for case in run["subjects"]
        ]  # fmt: skip
        tables.append(table([title, "time", "of copy", "x torchao", "x compiled"], rows))
    return "\n\n".join(tables)


# --- training --------------------------------------------------------------------------------------------------------


def branched_recipes() -> str:
    """Return what recipes cost in the last quarter of a run."""
    if not measured("h200", "training_quality_25m_last_0.25"):
        return ""
    return recipe_table.summary(load("h200", "training_quality_25m_last_0.25")["runs"])


# --- the page --------------------------------------------------------------------------------------------------------


def figure() -> str:
    """Return the figure of README and of the page as SVG."""
    result = load("h200", "matmul")
    runs, rows = result["runs"], [case["m"] for case in result["runs"][0]["chain"]]

    def mean_of(way: str) -> list[float]:
        return [geometric_mean(ratios(run, "chain", way)[i] for run in runs) for i in range(len(rows))]

    lines = [Line("nvfp4_tensor", rows, mean_of("nvfp4")), *(Line(peer, rows, mean_of(peer)) for peer in PEERS)]
    shapes = ", ".join(name_of(run["shape"]) for run in runs)
    gpu = Panel("One NVIDIA H200", f"products in a chain, mean of {shapes}", lines)
    result = load("cpu", "matmul")
    run, processor = result["runs"][0], result["machine"]["processor"]
    cases = [case for case in run["cases"] if case["shape"] == [4096, 4096]]
    line = Line("nvfp4_tensor", [case["rows"] for case in cases], [case["speedup"] for case in cases])
    cpu = Panel(f"{run['threads']} cores of an {processor}", "4096 x 4096", [line])
    return draw([gpu, cpu], x_title="rows of x (tokens)", y_title="times as fast as torch's bfloat16")


def page() -> str:
    """Return the text of docs/performance.md."""
    return string.Template(measured_sections(TEMPLATE.read_text()).rstrip() + "\n").substitute(
        source_products=source(load("h200", "matmul")),
        products_chain=products("chain"),
        source_published=source(load("h200", "matmul_published")),
        published=published(),
        source_gradients=source(load("h200", "matmul_gradients")),
        gradients=gradients(),
        source_experts=source(load("h200", "experts"), load("h200", "experts_skewed")),
        experts=experts(),
        source_generation=source_if_measured("h200", "generation_llama-8b"),
        generation=generation("h200", "llama-8b"),
        source_quantize=source(load("h200", "quantize")),
        quantize=quantize("h200"),
        source_quantize_cpu=source(load("cpu", "quantize")),
        quantize_cpu=quantize("cpu"),
        source_products_cpu=source(load("cpu", "matmul")),
        products_cpu=products_cpu(),
        source_products_amx=source_if_measured("cpu", "matmul_intel"),
        products_amx=products_amx(),
        source_branched=source_if_measured("h200", "training_quality_25m_last_0.25"),
        branched_recipes=branched_recipes(),
    )


def main() -> None:
    """Write or check the page and its pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if what is committed is not this")
    arguments = parser.parse_args()
    for path, text in ((PAGE, page()), (FIGURE, figure())):
        if not arguments.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            sys.exit(f"{path.relative_to(ROOT)} is not what benchmarks/results give: run make docs")


if __name__ == "__main__":
    main()
