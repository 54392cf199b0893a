"""Line charts as SVG text: panels below each other, one line per series, ticks at round numbers.

Everything in the repository is drawn with this: acceptance by position, a training run's curves, a server's speed over
concurrent streams. It needs no plotting library. Points that are not finite numbers are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f3c8d")
WIDTH, HEIGHT = 760, 340  # of a panel
LEFT, RIGHT, TOP, FLOOR = 60, 610, 50, 290  # the lines' part of it; the legend is to its right
LETTER = 7  # pixels, about


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    points: list[tuple[float, float]]
    thick: bool = False  # thick and black: the line that matters
    # in the colour of the line before it, without a name: the same quantity measured in another way
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    lines: list[Line]
    x_label: str = ""
    y_label: str = ""
    y_percent: bool = False  # shares, always drawn from 0 to 100 %
    y_from_zero: bool = False
    # each doubling has the same width, with ticks at the values that occur; all values are above 0
    x_doubling: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values low..high to pixels first..last, in proportion to the value or to its logarithm."""

    low: float
    high: float
    first: float
    last: float
    ticks: list[float]
    scale: Callable[[float], float] = float

    def at(self, value: float) -> float:
        low, high = self.scale(self.low), self.scale(self.high)
        return self.first + (self.last - self.first) * (self.scale(value) - low) / (high - low)


def svg(panels: Sequence[Panel]) -> str:
    body = "".join(f'<g transform="translate(0 {i * HEIGHT})">{_panel(p)}</g>' for i, p in enumerate(panels))
    size = f'viewBox="0 0 {WIDTH} {HEIGHT * len(panels)}" width="{WIDTH}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12" fill="#222">'
    return f'{opening}<rect width="100%" height="100%" fill="#fff"/>{body}</svg>\n'


def round_step(span: float, most: int) -> float:
    """The smallest of 1, 2 or 5 times a power of ten that divides 'span' into at most 'most' parts."""
    power = 10.0 ** math.floor(math.log10(span / most))
    return next(power * factor for factor in (1, 2, 5, 10, 20) if span / (power * factor) <= most + 1e-9)


# ---- the parts


def _panel(panel: Panel) -> str:
    lines = [replace(line, points=[p for p in line.points if all(map(math.isfinite, p))]) for line in panel.lines]
    points = [p for line in lines for p in line.points] or [(1.0, 0.0)]
    xs, ys = [p[0] for p in points], [p[1] for p in points] + [0.0] * panel.y_from_zero
    x = _doubling_axis(xs) if panel.x_doubling else _x_axis(xs)
    y = Axis(0, 1, FLOOR, TOP, [t / 5 for t in range(6)]) if panel.y_percent else _y_axis(ys)
    parts = [_text(LEFT, 28, panel.title, 'font-size="14" font-weight="bold"'), _grid(x, y, panel.y_percent)]
    parts.append(_text((LEFT + RIGHT) / 2, FLOOR + 38, panel.x_label, 'text-anchor="middle"'))
    parts.append(_text(LEFT, TOP - 6, panel.y_label))
    named = 0
    for line in lines:
        named += not line.dashed
        colour, width = ("#000", 3) if line.thick else (COLOURS[(named - 1) % len(COLOURS)], 1.5)
        look = f'stroke="{colour}" stroke-width="{width}" stroke-linecap="round"'
        dashes = ' stroke-dasharray="4 5"' if line.dashed else ""
        places = [f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in line.points]
        places = places[:1] + places  # the first point twice, so that a line of a single point is drawn as a dot
        parts.append(f'<polyline points="{" ".join(places)}" fill="none" {look}{dashes}/>')
        if not line.dashed:
            high = TOP - 8 + 20 * named
            parts.append(f'<path d="M{RIGHT + 20} {high}h24" {look}/>{_text(RIGHT + 52, high + 4, line.name)}')
    return "".join(parts)


def _grid(x: Axis, y: Axis, percent: bool) -> str:
    parts = []
    for tick in y.ticks:
        label = f"{tick:.0%}".replace("%", " %") if percent else _number(tick, y.ticks)
        parts.append(f'<path d="M{LEFT} {y.at(tick):.1f}H{RIGHT}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 8, y.at(tick) + 4, label, 'text-anchor="end"'))
    parts.append(f'<path d="M{LEFT} {TOP}V{FLOOR}H{RIGHT}" fill="none" stroke="#222"/>')
    parts += [_text(x.at(tick), FLOOR + 18, _number(tick, x.ticks), 'text-anchor="middle"') for tick in x.ticks]
    return "".join(parts)


def _x_axis(values: list[float]) -> Axis:
    """Span the first value to the last, with as many ticks as fit; whole values get whole ticks."""
    low, high = _apart(min(values), max(values), 1.0)
    room = int((RIGHT - LEFT) / (LETTER * (len(_number(high, [low, high])) + 2)))
    step = max(round_step(high - low, min(room, 15)), float(all(value == int(value) for value in values)))
    return Axis(low, high, LEFT, RIGHT, _ticks(low, high, step))


def _doubling_axis(values: list[float]) -> Axis:
    low, high = _apart(min(values), max(values), min(values))
    return Axis(low, high, LEFT, RIGHT, sorted(set(values)), math.log2)


def _y_axis(values: list[float]) -> Axis:
    """Span the round number below all values to the one above."""
    low, high = _apart(min(values), max(values), abs(max(values)) / 10 or 1.0)
    step = round_step(high - low, 5)
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    return Axis(low, high, FLOOR, TOP, _ticks(low, high, step))


def _apart(low: float, high: float, least: float) -> tuple[float, float]:
    return (low, high) if high > low else (low, low + least)


def _ticks(low: float, high: float, step: float) -> list[float]:
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def _number(value: float, ticks: Sequence[float]) -> str:
    """Format with as many decimals as tell neighbouring ticks apart."""
    gap = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
    return f"{value:.{max(0, -math.floor(math.log10(gap) + 1e-9))}f}"


def _text(x: float, y: float, text: str, look: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(text)}</text>'
