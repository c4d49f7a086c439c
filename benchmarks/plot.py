"""Line plots as SVG text: axes from zero, round ticks, a legend. Written by hand, so that no library is needed."""

from __future__ import annotations

import math
from html import escape

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 40, 52
COLOURS = ("#1b6ca8", "#c8553d", "#e0a458", "#6a4c93", "#3d8361", "#888888")

Series = dict[str, list[tuple[float, float]]]


def step(largest: float, about: int = 5) -> float:
    """A round distance between ticks: 1, 2 or 5 times a power of ten."""
    if largest <= 0:
        return 1.0
    raw = largest / about
    power = 10.0 ** math.floor(math.log10(raw))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)


def lines(title: str, x_label: str, y_label: str, series: Series) -> str:
    """One line with points for every series."""
    x_step, y_step = (step(max(p[i] for points in series.values() for p in points)) for i in (0, 1))
    x_end, y_end = (
        s * math.ceil(max(p[i] for points in series.values() for p in points) / s - 1e-9)
        for i, s in ((0, x_step), (1, y_step))
    )
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return round(LEFT + wide * x / x_end, 1), round(TOP + high * (1 - y / y_end), 1)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{escape(title)}</text>',
    ]
    for i in range(round(x_end / x_step) + 1):
        x, y = at(i * x_step, 0)
        out.append(f'<line x1="{x}" y1="{TOP}" x2="{x}" y2="{y}" stroke="#eeeeee"/>')
        out.append(f'<text x="{x}" y="{y + 18}" text-anchor="middle">{i * x_step:g}</text>')
    for i in range(round(y_end / y_step) + 1):
        x, y = at(0, i * y_step)
        out.append(f'<line x1="{x}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}" stroke="#dddddd"/>')
        out.append(f'<text x="{x - 8}" y="{y + 4}" text-anchor="end">{i * y_step:g}</text>')
    out.append(f'<text x="{LEFT + wide / 2}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x_label)}</text>')
    out.append(f'<text x="12" y="{TOP - 6}">{escape(y_label)}</text>')
    for n, (name, points) in enumerate(series.items()):
        colour = COLOURS[n % len(COLOURS)]
        placed = [at(x, y) for x, y in sorted(points)]
        path = " ".join(f"{x},{y}" for x, y in placed)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in placed]
        y = TOP + 14 + 18 * n
        out.append(f'<rect x="{LEFT + 12}" y="{y - 9}" width="14" height="4" fill="{colour}"/>')
        out.append(f'<text x="{LEFT + 32}" y="{y - 3}">{escape(name)}</text>')
    return "\n".join([*out, "</svg>", ""])
