"""Plots as inline SVG that stretches with the page, with axis labels as text beside it; bars as HTML.

An SVG that keeps its proportions would shrink its letters on a phone, so there are none in it.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

_WIDTH, _HEIGHT = 1000, 200
Values = Sequence[float] | npt.NDArray[np.float64]


def nice_ceiling(value: float) -> float:
    """The least of 1, 2, 2.5, 5, 10 times a power of ten that is not below `value`; 1 for nothing."""
    if value <= 0 or not math.isfinite(value):
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * step for step in (1.0, 2.0, 2.5, 5.0, 10.0) if power * step >= value * (1 - 1e-9))


def area_chart(
    title: str,
    values: Values,
    say: Callable[[float], str],
    *,
    ends: tuple[str, str],
    summary: str,
    line: Values | None = None,
    top: float | None = None,
    marks: Sequence[float] = (),
) -> Markup:
    """A filled curve over equal steps.

    Args:
        say: how a value is written at the axis.
        ends: what stands below the left and the right end.
        summary: the chart in words, for everybody.
        line: a second curve, not filled.
        top: end of the axis; default: a round number above all values.
        marks: places of vertical lines, 0 to 1.
    """
    ceiling = top if top is not None else nice_ceiling(max(map(float, values), default=0.0))
    shapes = [f'<line class="grid" x1="0" x2="{_WIDTH}" y1="{y}" y2="{y}"/>' for y in (0, _HEIGHT // 2, _HEIGHT)]
    if len(values):
        curve = _points(values, ceiling)
        shapes.append(f'<path class="area" d="M0 {_HEIGHT}L{curve}L{_WIDTH} {_HEIGHT}Z"/>')
        shapes.append(f'<path class="curve" d="M{curve}"/>')
    if line is not None and len(line):
        shapes.append(f'<path class="second" d="M{_points(line, ceiling)}"/>')
    shapes += [
        f'<line class="mark" x1="{_WIDTH * at:.1f}" x2="{_WIDTH * at:.1f}" y1="0" y2="{_HEIGHT}"/>' for at in marks
    ]
    labels = Markup("").join(Markup("<span>{}</span>").format(say(value)) for value in (ceiling, ceiling / 2, 0.0))
    return Markup(
        '<figure class="chart"><figcaption><b>{title}</b> <span>{summary}</span></figcaption>'
        '<div class="plot"><div class="y" aria-hidden="true">{labels}</div>'
        '<svg viewBox="0 0 {width} {height}" preserveAspectRatio="none" role="img" aria-label="{title}: {summary}">'
        "{shapes}</svg>"
        '<div class="x" aria-hidden="true"><span>{first}</span><span>{last}</span></div></div></figure>'
    ).format(
        title=title,
        summary=summary,
        labels=labels,
        width=_WIDTH,
        height=_HEIGHT,
        shapes=Markup("".join(shapes)),
        first=ends[0],
        last=ends[1],
    )


def strip(places: Sequence[float], label: str) -> Markup:
    """Vertical ticks on a line, for what happened when: `places` are 0 to 1. Ticks on top of each other become one."""
    ticks = sorted({round(500 * min(1.0, max(0.0, place))) for place in places})
    path = "".join(f"M{2 * tick} 0V20" for tick in ticks)
    return Markup(
        '<svg class="strip" viewBox="-4 0 1008 20" preserveAspectRatio="none" role="img" aria-label="{}">'
        '<line class="grid" x1="0" x2="1000" y1="10" y2="10"/><path class="tick" d="{}"/></svg>'
    ).format(label, Markup(path))


def bar(fraction: float, kind: str = "") -> Markup:
    """A horizontal bar, for the cell beside one that says the number; nothing for 0."""
    if not fraction > 0:
        return Markup("")
    return Markup('<div class="bar {}" style="width:{:.2f}%" aria-hidden="true"></div>').format(
        kind, 100 * min(1.0, fraction)
    )


def _points(values: Values, ceiling: float) -> str:
    """Coordinates of a curve; steps of a bin's width, so that the last bin reaches the end."""
    count = len(values)
    points = []
    for i, value in enumerate(values):
        x = _WIDTH * i / max(1, count - 1)
        y = _HEIGHT * (1 - min(1.0, max(0.0, float(value) / ceiling)))
        points.append(f"{x:.0f} {y:.0f}")
    if count == 1:
        points.append(f"{_WIDTH} {points[0].split()[1]}")
    return "L".join(points)
