"""What benchmarks.accuracy.training_quality trains, and its table. Needs no torch.

Increases of the validation loss are relative to bfloat16 with the same seed and text.
"""

from __future__ import annotations

import statistics
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

BASE, TEXTS = "bf16", ("Python", "C++")


def table(runs: list[dict]) -> str:
    """Return a Markdown table of the increase of the loss over bfloat16: per text, the mean and that of each seed."""
    losses = {(run["text"], run["variant"], run["seed"]): run["validation"] for run in runs}
    texts = sorted({text for text, *_ in losses}, key=lambda text: TEXTS.index(text) if text in TEXTS else len(TEXTS))
    lines = [["", *(f"{text}, % (by seed)" for text in texts)], ["---", *["---:"] * len(texts)]]
    for variant in VARIANTS:
        cells = [_increases(losses, text, variant) for text in texts]
        if variant != BASE and any(cells):
            lines.append([_quoted(variant), *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _increases(losses: dict[tuple[str, str, int], float], text: str, variant: str) -> str:
    """Return the mean and each seed's increase in percent, of seeds that have a bfloat16 run."""
    seeds = sorted(seed for t, v, seed in losses if (t, v) == (text, variant) and (text, BASE, seed) in losses)
    found = [100 * (losses[text, variant, seed] / losses[text, BASE, seed] - 1) for seed in seeds]
    return f"{statistics.mean(found):.2f} ({', '.join(f'{each:.2f}' for each in found)})" if found else ""


def _quoted(variant: str) -> str:
    name, comma, rest = variant.partition(",") if "," in variant else variant.partition(" ")
    return f"`{name}`{comma}{rest}".replace("bf16", "bfloat16")
