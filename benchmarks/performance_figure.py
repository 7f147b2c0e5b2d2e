"""Line charts as SVG, written directly, so that a test can compare the bytes and browsers render the text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

PANEL_WIDTH, PANEL_HEIGHT = 480, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 24, 58, 48  # margins of a panel
COLOURS = ("#00796b", "#b26a00", "#5c6bc0")
INK, FAINT = "#37474f", "#cfd8dc"
STYLE = "font-family:system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif"


class Line(NamedTuple):
    """A line of values over rows of x."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


class Panel(NamedTuple):
    """One chart: a logarithmic x axis, and a y axis from zero.

    step: between the lines of the grid, by default 0.5 or 1.
    base: where bfloat16 is, dashed.
    """

    title: str
    subtitle: str
    lines: Sequence[Line]
    step: float | None = None
    base: float = 1.0


def _text(
    x: float, y: float, what: str, *, size: int = 12, anchor: str = "start", colour: str = INK, more: str = ""
) -> str:
    how = f'font-size="{size}" text-anchor="{anchor}" fill="{colour}" {more}'.rstrip()
    return f'<text x="{x:.1f}" y="{y:.1f}" {how}>{what}</text>\n'


def _panel(panel: Panel, start: float, x_title: str, y_title: str) -> str:
    xs, most = [x for line in panel.lines for x in line.x], max(y for line in panel.lines for y in line.y)
    step = panel.step or (0.5 if most <= 4 else 1.0)
    top, first, last = math.ceil(most / step) * step, math.log2(min(xs)), math.log2(max(xs))
    left, right, bottom = start + LEFT, start + PANEL_WIDTH - RIGHT, PANEL_HEIGHT - BOTTOM

    def x_of(rows: float) -> float:
        return left + (math.log2(rows) - first) / (last - first) * (right - left)

    def y_of(value: float) -> float:
        return bottom - value / top * (bottom - TOP)

    svg = _text(left, 24, panel.title, size=15, more='font-weight="600"') + _text(left, 42, panel.subtitle)
    for i in range(round(top / step) + 1):
        y = y_of(i * step)
        svg += f'<path d="M{left:.1f} {y:.1f}H{right:.1f}" stroke="{FAINT}" stroke-width="1"/>\n'
        svg += _text(left - 8, y + 4, f"{i * step:g}", anchor="end")
    dashes = f'stroke="{INK}" stroke-width="1.5" stroke-dasharray="5 4"'
    svg += f'<path d="M{left:.1f} {y_of(panel.base):.1f}H{right:.1f}" {dashes}/>\n'
    svg += _text(left + 4, y_of(panel.base) + (15 if panel.base else -5), "bfloat16", size=11)
    for power in range(math.ceil(first), math.floor(last) + 1, 2):
        svg += _text(x_of(2**power), bottom + 18, f"{2**power:,}", anchor="middle")
    centre = (TOP + bottom) / 2
    svg += _text((left + right) / 2, bottom + 38, x_title, anchor="middle")
    turned = f'transform="rotate(-90 {left - 40:.1f} {centre:.1f})"'
    svg += _text(left - 40, centre, y_title, anchor="middle", more=turned)
    for i, line in reversed(list(enumerate(panel.lines))):  # the first one on top
        points, y = [(x_of(x), y_of(y)) for x, y in zip(line.x, line.y, strict=True)], TOP + 14 + 18 * i
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        svg += f'<path d="{path}" fill="none" stroke="{COLOURS[i]}" stroke-width="2.2"/>\n'
        svg += "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{COLOURS[i]}"/>' for x, y in points) + "\n"
        svg += f'<path d="M{right - 118:.1f} {y - 4}h22" stroke="{COLOURS[i]}" stroke-width="2.6"/>\n'
        svg += _text(right - 90, y, line.name)
    return svg


def draw(panels: Sequence[Panel], *, x_title: str, y_title: str) -> str:
    """Draw the panels in a row, with a white background for dark pages."""
    width = PANEL_WIDTH * len(panels)
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {PANEL_HEIGHT}" style="{STYLE}">\n'
    svg += f'<rect width="{width}" height="{PANEL_HEIGHT}" rx="8" fill="#ffffff"/>\n'
    for i, panel in enumerate(panels):
        svg += _panel(panel, i * PANEL_WIDTH, x_title, y_title)
    return svg + "</svg>\n"
