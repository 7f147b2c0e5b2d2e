"""What benchmarks.accuracy.training_quality trains, its tables and its picture. Needs no torch.

Increases of the validation loss are relative to bfloat16 with the same seed and text, and ratios to the increase of
``nvidia`` with the same seed and text.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {"recipe": "bf16"},
    "nvidia": {"recipe": "nvidia"},
    "accurate": {"recipe": "accurate"},
    "accurate_eden": {"recipe": "accurate_eden"},
    "nvidia_4over6": {"recipe": "nvidia_4over6"},
    "unbiased": {"recipe": "unbiased"},
    "nvidia, gradients to nearest": {"recipe": "nvidia", "without": "stochastic"},
    "nvidia without Hadamard": {"recipe": "nvidia", "without": "hadamard"},
    "nvidia, weights in 1x16 blocks": {"recipe": "nvidia", "without": "tiles"},
    "nvidia, the last block dense": {"recipe": "nvidia", "keep_last_blocks_dense": 0.15},
    "nvidia, forward in bf16 for the last 10 %": {"recipe": "nvidia", "late_bf16": 0.1},
}
"""Settings of tutorials/train_llama.py that a variant changes, in the order of the table."""

BASE, REFERENCE = "bf16", "nvidia"
COLORS = {"Python": "#1f4e79", "C++": "#c55a11"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One variant on one text: by seed, the validation loss and its increase over bfloat16 in percent.

    ratios: by seed, the increase relative to that of ``nvidia`` with the same seed.
    """

    losses: dict[int, float]
    increases: dict[int, float]
    ratios: dict[int, float]

    @property
    def increase(self) -> float:
        return statistics.mean(self.increases.values())

    @property
    def ratio(self) -> float:
        """The mean of the ratios."""
        return statistics.mean(self.ratios.values())


def rows_of(runs: list[dict], variants: Iterable[str] = VARIANTS) -> dict[str, dict[str, Row]]:
    """Return {text: {variant: row}} of all seeds that have a bfloat16 run; variants without one are left out."""
    losses: dict[str, dict[str, dict[int, float]]] = {}
    for run in runs:
        of_text = losses.setdefault(run["text"], {})
        of_text.setdefault(run["variant"], {})[run["seed"]] = run["validation"]
    order = [*(text for text in COLORS if text in losses), *(text for text in losses if text not in COLORS)]
    return {text: _rows(losses[text], variants) for text in order}


def _rows(losses: dict[str, dict[int, float]], variants: Iterable[str]) -> dict[str, Row]:
    dense = losses.get(BASE, {})
    increases = {
        variant: {seed: 100 * (by_seed[seed] / dense[seed] - 1) for seed in sorted(by_seed.keys() & dense.keys())}
        for variant, by_seed in losses.items()
    }
    reference = increases.get(REFERENCE, {})
    rows = {}
    for variant in variants:
        if found := increases.get(variant):
            ratios = {seed: value / reference[seed] for seed, value in found.items() if seed in reference}
            rows[variant] = Row({seed: losses[variant][seed] for seed in found}, found, ratios)
    return rows


def table(runs: list[dict], variants: Iterable[str] = VARIANTS) -> str:
    """Return a Markdown table: per text, the increase and the ratio to ``nvidia``, means of the seeds and each seed."""
    by_text = rows_of(runs, variants)
    head, rule = ["variant"], ["---"]
    for text in by_text:
        head += [f"{text}: loss", "increase, %", "by seed", "of nvidia's", "by seed"]
        rule += ["---:"] * 5
    lines = [head, rule]
    for variant in variants:
        if all(variant not in rows for rows in by_text.values()):
            continue
        line = [variant]
        for rows in by_text.values():
            line += _cells(rows[variant], variant == BASE) if variant in rows else [""] * 5
        lines.append(line)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cells(row: Row, is_base: bool) -> list[str]:
    loss = f"{statistics.mean(row.losses.values()):.4f}"
    if is_base:
        return [loss, "", "", "", ""]
    increases, ratios = ([f"{each:.2f}" for each in by_seed.values()] for by_seed in (row.increases, row.ratios))
    return [loss, f"{row.increase:.2f}", ", ".join(increases), f"{row.ratio:.2f}" if ratios else "", ", ".join(ratios)]


def summary(runs: list[dict], variants: Iterable[str] = VARIANTS) -> str:
    """Return a Markdown table for the documentation: per text, the mean increase and that of each seed."""
    by_text = rows_of(runs, variants)
    lines = [["", *(f"{text}, % (by seed)" for text in by_text)], ["---", *["---:"] * len(by_text)]]
    for variant in variants:
        found = [rows.get(variant) for rows in by_text.values()]
        if variant != BASE and any(found):
            lines.append([_quoted(variant), *("" if row is None else _short_cell(row) for row in found)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _quoted(variant: str) -> str:
    name, comma, rest = variant.partition(",") if "," in variant else variant.partition(" ")
    return f"`{name}`{comma}{rest}".replace("bf16", "bfloat16")


def _short_cell(row: Row) -> str:
    return f"{row.increase:.2f} ({', '.join(f'{each:.2f}' for each in row.increases.values())})"


def draw(runs: list[dict], path: Path, variants: Iterable[str] = VARIANTS) -> bool:
    """Plot increases relative to ``nvidia``'s: a bar per text, a point per seed. Return False without data."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    by_text = {
        text: {name: row for name, row in rows.items() if row.ratios and name != BASE}
        for text, rows in rows_of(runs, variants).items()
    }
    names = [name for name in variants if any(name in rows for rows in by_text.values())]
    if not names:
        return False
    height = 0.8 / len(by_text)
    figure, axes = plt.subplots(figsize=(8, 0.55 * len(names) + 1.2), layout="constrained")
    for i, (text, rows) in enumerate(by_text.items()):
        color = COLORS.get(text, "gray")
        places = [names.index(name) - 0.4 + height * (i + 0.5) for name in rows]
        axes.barh(places, [row.ratio for row in rows.values()], height, color=color, alpha=0.45, label=text)
        for place, row in zip(places, rows.values(), strict=True):
            axes.plot(list(row.ratios.values()), [place] * len(row.ratios), "o", color=color, markersize=4)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("increase of the validation loss over bfloat16,\nrelative to nvidia's with the same seed and text")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True
