"""Line charts as SVG, written directly, so that a test can compare the bytes and browsers render the text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

PANEL_WIDTH, PANEL_HEIGHT = 480, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 24, 58, 48  # margins of a panel
COLOURS = ("#00796b", "#b26a00", "#5c6bc0")
INK, FAINT = "#37474f", "#cfd8dc"
STYLE = "font-family:system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif"


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of values over rows of x."""

    name: str
    x: Sequence[int]
    y: Sequence[float]


@dataclasses.dataclass(frozen=True)
class Panel:
    """One chart: a logarithmic x axis, and a y axis from zero."""

    title: str
    subtitle: str
    lines: Sequence[Line]


def _text(
    x: float, y: float, what: str, *, size: int = 12, anchor: str = "start", colour: str = INK, more: str = ""
) -> str:
    how = f'font-size="{size}" text-anchor="{anchor}" fill="{colour}" {more}'.rstrip()
    return f'<text x="{x:.1f}" y="{y:.1f}" {how}>{what}</text>\n'


class _Axes:
    """Maps a panel's values to coordinates."""

    def __init__(self, panel: Panel, left: float) -> None:
        xs = [x for line in panel.lines for x in line.x]
        top = max(y for line in panel.lines for y in line.y)
        self.step = 0.5 if top <= 4 else 1.0
        self.top = math.ceil(top / self.step) * self.step
        self.left, self.first, self.last = left + LEFT, math.log2(min(xs)), math.log2(max(xs))
        self.right, self.bottom = left + PANEL_WIDTH - RIGHT, PANEL_HEIGHT - BOTTOM

    def x(self, rows: float) -> float:
        return self.left + (math.log2(rows) - self.first) / (self.last - self.first) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - value / self.top * (self.bottom - TOP)

    def draw(self, x_title: str, y_title: str) -> str:
        svg = ""
        for i in range(round(self.top / self.step) + 1):
            value = i * self.step
            y = self.y(value)
            svg += f'<path d="M{self.left:.1f} {y:.1f}H{self.right:.1f}" stroke="{FAINT}" stroke-width="1"/>\n'
            svg += _text(self.left - 8, y + 4, f"{value:g}", anchor="end")
        one = self.y(1.0)
        dashes = f'stroke="{INK}" stroke-width="1.5" stroke-dasharray="5 4"'
        svg += f'<path d="M{self.left:.1f} {one:.1f}H{self.right:.1f}" {dashes}/>\n'
        svg += _text(self.left + 4, one + 15, "bfloat16", size=11)
        for power in range(math.ceil(self.first), math.floor(self.last) + 1, 2):
            svg += _text(self.x(2**power), self.bottom + 18, f"{2**power:,}", anchor="middle")
        middle, centre = (self.left + self.right) / 2, (TOP + self.bottom) / 2
        svg += _text(middle, self.bottom + 38, x_title, anchor="middle")
        turned = f'transform="rotate(-90 {self.left - 40:.1f} {centre:.1f})"'
        return svg + _text(self.left - 40, centre, y_title, anchor="middle", more=turned)


def _curve(axes: _Axes, line: Line, colour: str) -> str:
    points = [(axes.x(x), axes.y(y)) for x, y in zip(line.x, line.y, strict=True)]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points)
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2.2"/>\n{dots}\n'


def _panel(panel: Panel, left: float, x_title: str, y_title: str) -> str:
    axes = _Axes(panel, left)
    svg = _text(axes.left, 24, panel.title, size=15, more='font-weight="600"') + _text(axes.left, 42, panel.subtitle)
    svg += axes.draw(x_title, y_title)
    for i, line in reversed(list(enumerate(panel.lines))):  # the first one on top
        svg += _curve(axes, line, COLOURS[i])
        y = TOP + 14 + 18 * i
        svg += f'<path d="M{axes.right - 118:.1f} {y - 4}h22" stroke="{COLOURS[i]}" stroke-width="2.6"/>\n'
        svg += _text(axes.right - 90, y, line.name)
    return svg


def draw(panels: Sequence[Panel], *, x_title: str, y_title: str) -> str:
    """Draw the panels in a row, with a white background for dark pages."""
    width = PANEL_WIDTH * len(panels)
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {PANEL_HEIGHT}" style="{STYLE}">\n'
    svg += f'<rect width="{width}" height="{PANEL_HEIGHT}" rx="8" fill="#ffffff"/>\n'
    for i, panel in enumerate(panels):
        svg += _panel(panel, i * PANEL_WIDTH, x_title, y_title)
    return svg + "</svg>\n"
