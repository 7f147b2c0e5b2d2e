"""Charts as SVG in the page itself; a pointer at a mark shows its number."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from markupsafe import Markup, escape

WIDTH, HEIGHT = 720, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 40
_LABELS = 16
"""The most labels that fit below an axis."""


@dataclasses.dataclass(frozen=True)
class Mark:
    """A bar: the label below it, its height, the text that a pointer shows, and its CSS class."""

    label: str
    value: float
    title: str
    kind: str = ""


def bars(marks: Sequence[Mark], *, unit: str, log: bool = False) -> Markup:
    """Draw a bar for each mark; marks that are not finite have none.

    log: a logarithmic axis that starts below the smallest mark; marks of zero have no bar.
    """
    heights = [mark.value for mark in marks if math.isfinite(mark.value) and (mark.value > 0 or not log)]
    if not heights:
        return Markup('<p class="none">nothing to draw</p>')
    low = float(math.floor(math.log10(min(heights)))) if log else min(0.0, *heights)
    high = math.log10(max(heights)) if log else max(heights)
    high = high if high > low else low + 1
    step = (WIDTH - _LEFT - _RIGHT) / len(marks)
    drawn = [_axis(low, high, log), *_labels(marks, step)]
    for i, mark in enumerate(marks):
        if not math.isfinite(mark.value) or (log and mark.value <= 0):
            continue
        y = _y(math.log10(mark.value) if log else mark.value, low, high)
        size = f'width="{max(step * 0.86, 0.6):.2f}" height="{max(HEIGHT - _BOTTOM - y, 0.5):.2f}"'
        drawn.append(
            f'<rect class="bar {escape(mark.kind)}" x="{_LEFT + i * step + step * 0.07:.2f}" y="{y:.2f}" {size}>'
            f"<title>{escape(mark.title)}</title></rect>"
        )
    return _svg(drawn, unit)


def line(points: Sequence[tuple[float, float, str]], *, unit: str, below: str) -> Markup:
    """Draw points (x, y, the text that a pointer shows), joined in their order; they need two different x at least."""
    xs, ys = [x for x, _, _ in points], [y for _, y, _ in points]
    if len(set(xs)) < 2 or not all(map(math.isfinite, ys)):
        return Markup('<p class="none">nothing to draw</p>')
    margin = 0.08 * (max(ys) - min(ys)) or 1.0
    low, high = min(ys) - margin, max(ys) + margin
    left, span = min(xs), max(xs) - min(xs)
    dots = [
        (_LEFT + 8 + (x - left) / span * (WIDTH - _LEFT - _RIGHT - 16), _y(y, low, high), title)
        for x, y, title in points
    ]
    path = " ".join(f"{x:.2f},{y:.2f}" for x, y, _ in dots)
    drawn = [_axis(low, high, False), f'<polyline class="line" points="{path}"/>']
    for (x, y, title), value in zip(dots, xs, strict=True):
        drawn.append(f'<circle class="dot" cx="{x:.2f}" cy="{y:.2f}" r="5"><title>{escape(title)}</title></circle>')
        drawn.append(f'<text class="tick middle" x="{x:.2f}" y="{HEIGHT - _BOTTOM + 16}">{value:.3g}</text>')
    drawn.append(f'<text class="tick middle" x="{WIDTH / 2}" y="{HEIGHT - 4}">{escape(below)}</text>')
    return _svg(drawn, unit)


def _svg(drawn: Sequence[str], unit: str) -> Markup:
    name = f'<text class="tick" transform="translate(12,{HEIGHT / 2}) rotate(-90)" text-anchor="middle">{escape(unit)}'
    inside = "".join((*drawn, name, "</text>"))
    return Markup(f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(unit)}">{inside}</svg>')


def _y(value: float, low: float, high: float) -> float:
    return _TOP + (high - value) / (high - low) * (HEIGHT - _TOP - _BOTTOM)


def _axis(low: float, high: float, log: bool) -> str:
    """Some lines across, with their numbers."""
    if log:
        power = max(math.ceil((high - low) / 5), 1)
        ticks = [low + i * power for i in range(int((high - low) / power) + 1)]
    else:
        step = _round_step((high - low) / 6)
        first = math.ceil(low / step)
        ticks = [i * step for i in range(first, math.floor(high / step) + 1)]
    lines = []
    for tick in ticks:
        y, value = _y(tick, low, high), 10**tick if log else tick
        text = f"{value:.3g}" if abs(value) < 1e5 else f"{value:.0e}".replace("e+0", "e")
        lines.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.2f}" y2="{y:.2f}"/>')
        lines.append(f'<text class="tick end" x="{_LEFT - 6}" y="{y + 4:.2f}">{text}</text>')
    return "".join(lines)


def _round_step(step: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * 0.999)


def _labels(marks: Sequence[Mark], step: float) -> list[str]:
    every = -(-len(marks) // _LABELS)
    return [
        f'<text class="tick middle" x="{_LEFT + (i + 0.5) * step:.2f}" y="{HEIGHT - _BOTTOM + 16}">'
        f"{escape(mark.label)}</text>"
        for i, mark in enumerate(marks)
        if i % every == 0
    ]
