"""The measured tables of the documentation and the figures, from benchmarks/results: python -m benchmarks.pages

A page has its tables between comments that name them (:data:`BLOCKS`); all numbers come from the JSON of benchmarks.
``make docs`` writes them, and a test compares. This needs no torch.
"""

from __future__ import annotations

import json
import math
import operator
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy import recipe_table
from benchmarks.performance_figure import Line, Panel, draw

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "docs" / name for name in ("performance.md", "guides/accuracy.md")]
IMAGES = ROOT / "docs" / "images"
PEERS = ("humming", "quack")
KINDS = {"single": "single", "chain": "in a chain"}
MODELS = {"mixtral": "Mixtral-8x7B", "deepseek": "DeepSeek-like"}


def load(machine: str, subject: str) -> dict:
    """Load a result file."""
    return json.loads((RESULTS / machine / f"{subject}.json").read_text())


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
    runs = load("cpu", "matmul")["runs"]
    count = max(run["threads"] for run in runs)
    large, *layers = (run for run in runs if run["threads"] == count)
    header = [f"{name_of(large['shape'])}, {count} threads; rows of x", *(f"{row['m']:,}" for row in large["single"])]
    time = [seconds(row["nvfp4"]["median"]) for row in large["single"]]
    rows = [["time", *time], ["times as fast", *map(times, ratios(large, "single", "nvfp4"))]]
    small = ", ".join(f"{name_of(run['shape'])} {times(ratios(run, 'single', 'nvfp4')[0])}" for run in layers)
    return f"{table(header, rows)}\n\nOne row of x and SmolLM2-135M's layers: {small}."


def products_amx() -> str:
    """Return a table of torch's time over ours by rows of x, for each number of threads and shape of an Intel CPU."""
    result = load("cpu", "matmul_intel")
    rows = [
        [f"{run['threads']} threads, {name_of(run['shape'])}, {isa}", *map(times, ratios(run, "single", isa))]
        for run in result["runs"]
        for isa in run["single"][0]["ratio"]
    ]
    return table(rows_of_x(result), rows)


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


PROMPTS = {128: "_128", 512: "", 1024: "_1024", 2048: "_2048", 8192: "_8192"}
"""Tokens read, and how a result file is named."""
WAYS = {
    "eager": "`model.generate`",
    "static": "`model.generate`, static cache (transformers compiles)",
    "native": "`decode_natively(model)`, `model.generate`",
    "stream": "`generation.generate(model, ids)`",
    "codes": "the same, `nvfp4_cache`",
    "graph": "benchmarks/llama.py compiled, one CUDA graph",
}


def generation() -> str:
    """Return how a stock model of transformers generates one text, by the ways that differ much."""
    shown = [row for row in load("h200", "generation_llama-8b")["rows"] if row["batch"] == 1]
    base = {row["way"]: row["tokens_per_second"] for row in shown if row["weights"] == "bf16"}
    cells = []
    for row in shown:
        if row["weights"].endswith("head") and row["way"] not in ("native", "stream"):
            continue
        speed = row["tokens_per_second"]
        ratios = [times(speed / base[way]) if way in base else "" for way in (row["way"], "graph")]
        name = f"{row['weights']}: {WAYS[row['way']]}"
        cells.append([name, whole(speed), whole(row["whole_call"]), *ratios, f"{100 * row['share']:.0f} %"])
    return table(["one text", "tokens/s", "whole call", "x bf16, same way", "x bf16, graph", "of copy"], cells)


def batches() -> str:
    """Return the speed of texts together, and the time to the first token by the length of the prompt."""
    rows = {(r["weights"], r["way"], r["batch"]): r for r in load("h200", "generation_llama-8b_128_16_layers")["rows"]}
    counts = sorted({batch for _, _, batch in rows})
    ways = {"stream": "", "padded": ", padded", "native": ", `model.generate`"}
    speeds = {
        f"{weights}{named}": [rows.get((weights, way, each), {}).get("tokens_per_second") for each in counts]
        for weights in ("bf16", "NVFP4")
        for way, named in ways.items()
    }
    cells = [[name, *(whole(each) if each else "" for each in found)] for name, found in speeds.items()]
    cells.append(["NVFP4, x bf16", *map(times, map(operator.truediv, speeds["NVFP4"], speeds["bf16"]))])
    first: dict[str, list[str]] = {}
    ours = [("stream", each) for each in ("bf16", "NVFP4", "NVFP4, fp8")]
    for name_of_length in PROMPTS.values():
        for row in load("h200", f"generation_llama-8b{name_of_length}_16_layers")["rows"]:
            if row["batch"] == 1 and (row["way"], row["weights"]) in [*ours, ("eager", "bf16"), ("eager", "NVFP4")]:
                name = f"{row['weights']}{', `model.generate`' if row['way'] == 'eager' else ''}"
                first.setdefault(name, []).append(f"{1e3 * row['first_token']:.1f}")
    lengths = [f"{each:,}" for each in PROMPTS]
    return "\n\n".join([
        table(["tokens/s; texts", *map(str, counts)], cells),
        table(["first token, ms; tokens read", *lengths], [[name, *each] for name, each in first.items()]),
    ])  # fmt: skip


# --- quantize ----------------------------------------------------------------------------------------------


def quantize(machine: str, subject: str = "quantize") -> str:
    runs, tables = load(machine, subject)["runs"], []
    for run in runs if machine != "cpu" else [max(runs, key=operator.itemgetter("threads"))]:
        threads = f", threads: {run['threads']}" if machine == "cpu" else ""
        title = f"{name_of(run['shape'])}{threads}; copy {run['copy'] / 1e9:,.0f} GB/s"
        rows = [
            [case["name"], seconds(case["median"]), f"{100 * case['share']:.0f} %",
             *(digits(case["times"][peer]) if peer in case["times"] else "" for peer in ("torchao", "compiled"))]
            for case in run["subjects"] if not case["name"].endswith(("scales up", "8 bits"))
        ]  # fmt: skip
        tables.append(table([title, "time", "of copy", "x torchao", "x compiled"], rows))
    return "\n\n".join(tables)


# --- training --------------------------------------------------------------------------------------------------------


def recipes() -> str:
    """Return what recipes cost in the last quarter of a run."""
    return recipe_table.table(load("h200", "training_quality_25m_last_0.25")["runs"])


# --- accuracy -------------------------------------------------------------------------------------------------------

MACHINE, SUBJECTS = "h200", {"smollm2": "SmolLM2", "own_model": "own"}
WEIGHTS = {
    "w4a16": "distilled", "gptq_to_dense": "GPTQ + scale search, fitted to the dense model's outputs *",
    "gptq_search": "GPTQ + scale search *", "gptq_own_text": "GPTQ + scale search, on text generated by the model",
    "weighted": "weighted scale search *", "folded": "AWQ's scales + scale search *", "four_over_six": "four-over-six",
    "search": "scale search", "nearest": "to nearest", "torchao": "torchao's NVFP4, to nearest",
}  # fmt: skip
ACTIVATIONS = {
    "w4a4": "distilled", "w4a4_activations": "distilled, scale search for activations",
    "w4a4_rows_gptq": "GPTQ + scale search, one scale per token *",
    "w4a4_gptq": "GPTQ + scale search *", "w4a4_search": "scale search", "w4a4_nearest": "to nearest",
}  # fmt: skip
CACHES = {"cache": "the latest 64 tokens dense", "cache_as_it_is": "the same, keys not rotated",
          "cache_no_dense": "every token rounded, new ones too"}  # fmt: skip


def rows_of(subject: str) -> dict[str, dict[str, Any]]:
    """A model's rows by name. Distillation's are called by their format (of seeds, the median), W4A4 w4a4_nearest."""
    rows = {row["name"]: row for row in load(MACHINE, f"perplexity_{subject}")["rows"]}
    if "w4a4" in rows:
        rows["w4a4_nearest"] = rows.pop("w4a4")
    distilled: dict[str, list[dict[str, Any]]] = {}
    for row in load(MACHINE, f"distillation_{subject}")["rows"]:
        distilled.setdefault(row["row"].partition(":")[0], []).append(row)
    for name, seeds in distilled.items():
        seeds.sort(key=lambda row: next(iter(row["texts"].values()))["increase"])
        rows[name] = seeds[len(seeds) // 2]
    return rows


def duration(row: dict[str, Any]) -> str:
    seconds = row["seconds"] if "seconds" in row else 60 * row["minutes"]
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"


def dense_perplexity(row: dict[str, Any]) -> str:
    """The dense model's on the first text: of a model trained again, it is another."""
    return f"{next(iter(row['texts'].values()))['dense_perplexity']:.3f}"


def cells(row: dict[str, Any] | None, dense: str) -> list[str]:
    """The increase, KL and agreement on the first text; a mark if the dense model's perplexity is not ``dense``."""
    if row is None:
        return [""] * 3
    found, mark = next(iter(row["texts"].values())), "" if dense_perplexity(row) == dense else " †"
    nats = f"{found['increase']:.4f} ± {found['standard_error']:.4f}{mark}"
    return [nats, f"{found['kl']:.4f}", f"{100 * found['agreement']:.1f} %"]


def accuracy(labels: dict[str, str], first: str) -> str:
    """The table of some rows: both models side by side, with the time and memory that SmolLM2's took."""
    by_model = {name: rows_of(subject) for subject, name in SUBJECTS.items()}
    dense = [dense_perplexity(found["bf16"]) for found in by_model.values()]
    heads, lines = [first], []
    for (name, found), each in zip(by_model.items(), dense, strict=True):
        heads += [f"{name}, {next(iter(found['bf16']['texts']))} ({each}): nats", "KL", "same token"]
    for key, label in labels.items():
        own = [found.get(key) for found in by_model.values()]
        if known := [row for row in own if row is not None]:
            memory = known[0]["memory_gb"]
            made = [duration(known[0]), f"{memory:.1f} GB" if memory else "CPU"]
            found = [cell for row, each in zip(own, dense, strict=True) for cell in cells(row, each)]
            lines.append([label, *found, *made])
    return table([*heads, "made in", "memory"], lines)


def distilled() -> str:
    """Distillation on all texts, a row's seeds side by side."""
    lines, cpu = [], ("cpu", "smollm2", "SmolLM2 on two CPU cores")
    for machine, subject, name in (*((MACHINE, *each) for each in SUBJECTS.items()), cpu):
        by_name: dict[str, list[dict[str, Any]]] = {}
        for row in load(machine, f"distillation_{subject}")["rows"]:
            by_name.setdefault(row["row"].partition(",seed=")[0], []).append(row)
        for row, seeds in by_name.items():
            nats = {text: [each["texts"][text]["increase"] for each in seeds] for text in seeds[0]["texts"]}
            cells = ", ".join(f"{text} {'/'.join(f'{each:.4f}' for each in found)}" for text, found in nats.items())
            lines.append([f"{name}, {row.replace(':', ', ')}", f"{seeds[0]['minutes']:.1f}", cells])
    return table(["model, format", "minutes", "nats per token over bfloat16, by seed"], lines)


def branches() -> str:
    """What training the second model's last steps by other means costs, on all texts."""
    heads, lines = ["the last steps by", "as trained", "in bfloat16", "as W4A4", "peak"], []
    for row in load(MACHINE, "own_model_branches")["rows"]:
        judged = [row["judged"].get(how, {}) for how in ("trained", "bfloat16", "W4A4")]
        nats = ["/".join(f"{each['increase']:.4f}" for each in texts.values()) for texts in judged]
        lines.append([f"`{row['name']}`", *nats, f"{row['memory_gb']:.0f} GB"])
    return table(heads, lines)


def own() -> str:
    """A sentence about the second model."""
    log = load(MACHINE, "own_model")
    losses = ", ".join(f"{row['loss']:.3f} on {row['text']}" for row in log["rows"])
    seen = log["steps"] * log["settings"]["batch"] * log["settings"]["length"]
    return (
        f"The second model has {log['parameters'] / 1e6:.0f} million parameters. It saw {seen / 1e6:.0f} million\n"
        f"tokens in {log['seconds'] / 60:.0f} minutes of one {MACHINE.upper()}. In bfloat16 it has {losses}\n"
        "nats per token."
    )


# --- the figures -----------------------------------------------------------------------------------------------------


def speed() -> str:
    """Return the figure of the products' speed as SVG."""
    result = load("h200", "matmul")
    runs, rows = result["runs"], [case["m"] for case in result["runs"][0]["chain"]]

    def mean_of(way: str) -> list[float]:
        return [geometric_mean(ratios(run, "chain", way)[i] for run in runs) for i in range(len(rows))]

    lines = [Line("nvfp4_tensor", rows, mean_of("nvfp4")), *(Line(peer, rows, mean_of(peer)) for peer in PEERS)]
    shapes = ", ".join(name_of(run["shape"]) for run in runs)
    gpu = Panel("One NVIDIA H200", f"products in a chain, mean of {shapes}", lines)
    result = load("cpu", "matmul")
    run, processor = result["runs"][0], result["machine"]["processor"]
    line = Line("nvfp4_tensor", [row["m"] for row in run["single"]], ratios(run, "single", "nvfp4"))
    cpu = Panel(f"{run['threads']} cores of an {processor}", name_of(run["shape"]), [line])
    return draw([gpu, cpu], x_title="rows of x (tokens)", y_title="times as fast as torch's bfloat16")


def distillation() -> str:
    """Return the figure of W4A4's loss by minutes of distillation as SVG."""
    panels = []
    for machine, row in (MACHINE, rows_of("smollm2")["w4a4"]), ("cpu", load("cpu", "distillation_smollm2")["rows"][0]):
        minutes = [point["minutes"] for point in row["curve"]]
        lines = [Line(text, minutes, [point["texts"][text]["increase"] for point in row["curve"]])
                 for text in row["texts"]]  # fmt: skip
        where = "Two cores of a Xeon" if machine == "cpu" else "One NVIDIA H200"
        panels.append(Panel(where, f"SmolLM2-135M, W4A4, {row['tokens'] / 1e6:.1f} million tokens", lines, 0.1, 0.0))
    return draw(panels, x_title="minutes of training", y_title="nats per token over bfloat16")


FIGURES = {"speed": speed, "distillation": distillation}
"""Name of an image -> its SVG."""

# --- the pages -------------------------------------------------------------------------------------------------------


def measured(make: Callable[[], str], machine: str, *subjects: str) -> Callable[[], str]:
    """Return a block: the source of the results, and what is made of them."""
    return lambda: f"{source(*(load(machine, subject) for subject in subjects))}\n\n{make()}"


BLOCKS: dict[str, Callable[[], str]] = {
    "products": measured(lambda: products("chain"), "h200", "matmul"),
    "published": measured(published, "h200", "matmul_published"),
    "gradients": measured(gradients, "h200", "matmul_gradients"),
    "experts": measured(experts, "h200", "experts", "experts_skewed"),
    "generation": measured(generation, "h200", "generation_llama-8b"),
    "batches": measured(batches, "h200", "generation_llama-8b_128_16_layers"),
    "quantize": measured(lambda: quantize("h200"), "h200", "quantize"),
    "quantize_cpu": measured(lambda: quantize("cpu"), "cpu", "quantize"),
    "products_cpu": measured(products_cpu, "cpu", "matmul"),
    "products_amx": measured(products_amx, "cpu", "matmul_intel"),
    "recipes": measured(recipes, "h200", "training_quality_25m_last_0.25"),
    "weights": lambda: accuracy(WEIGHTS, "weights"),
    "activations": lambda: accuracy(ACTIVATIONS, "weights and activations (W4A4)"),
    "caches": lambda: accuracy(CACHES, "key-value cache"),
    "distilled": distilled,
    "branches": branches,
    "own": own,
}
"""Name -> what a page has between its comments."""


def page(path: Path) -> str:
    """Return the text of a page with its tables from the results."""

    def block(found: re.Match[str]) -> str:
        return f"<!--{found[1]}-->\n{BLOCKS[found[1]]()}\n<!--end-->"

    return re.sub(r"<!--(\w+)-->\n(?:.*?\n)??<!--end-->", block, path.read_text(), flags=re.DOTALL)


def main() -> None:
    """Write the pages and the figures."""
    for name, make in FIGURES.items():
        (IMAGES / f"{name}.svg").write_text(make())
    for path in PAGES:
        path.write_text(page(path))


if __name__ == "__main__":
    main()
