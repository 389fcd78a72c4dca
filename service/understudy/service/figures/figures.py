"""Figures as inline SVG, each with the table of its data. They are styled by classes alone.

The style sheet has the classes ``.c0`` to ``.c7`` for colours and ``.shade0`` to ``.shade10`` for shades.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

_WIDTH, _HEIGHT = 360, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 12, 12, 44
_COLOURS = 8
SHADES = 10


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A curve of a chart: its name, and its points with both coordinates from 0 to 1."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Bars:
    """A series of a histogram: its name and its counts."""

    name: str
    counts: Sequence[int]


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]], *, caption: str) -> str:
    """Return a table; the first cell of a row is its heading."""
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    body = "".join(map(_row, rows))
    return (
        f'<div class="scroll" role="region" aria-label="{escape(caption)}" tabindex="0"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _row(cells: Sequence[Any]) -> str:
    first, *rest = (escape(shown(cell)) for cell in cells)
    return f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>'


def matrix(names: Sequence[str], counts: Sequence[Sequence[int]], *, caption: str) -> str:
    """Return a confusion matrix as a table whose cells are shaded by their share of the row."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(_shaded(row, count) for count in row)}</tr>'
        for name, row in zip(names, counts, strict=True)
    )
    corner = '<th scope="col">actual, across: predicted</th>'
    return (
        f'<div class="scroll" role="region" aria-label="{escape(caption)}" tabindex="0"><table class="matrix">'
        f"<caption>{escape(caption)}</caption><thead><tr>{corner}{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _shaded(row: Sequence[int], count: int) -> str:
    return f'<td class="shade{round(SHADES * count / max(sum(row), 1))}">{count}</td>'


def line_figure(
    title: str, lines: Sequence[Curve], *, across: str, up: str, diagonal: bool, data: tuple[Sequence[str], Any]
) -> str:
    """Return a chart of lines on axes from 0 to 1.

    Args:
        title: Its caption.
        lines: The lines.
        across: What the horizontal axis shows.
        up: What the vertical axis shows.
        diagonal: Whether to draw the diagonal, for comparison.
        data: The headings and the rows of the table behind it.
    """
    marks = [_axes(across, up, ("0", "0.5", "1"), ("0", "0.5", "1"))]
    if diagonal:
        marks.append(f'<polyline class="guide" points="{_points([(0, 0), (1, 1)])}"/>')
    marks += [
        f'<polyline class="line c{place % _COLOURS}" points="{_points(line.points)}"/>'
        for place, line in enumerate(lines)
    ]
    return _figure(title, marks, [line.name for line in lines], data)


def bar_figure(
    title: str,
    series: Sequence[Bars],
    *,
    ends: tuple[float, float],
    across: str,
    data: tuple[Sequence[str], Any],
) -> str:
    """Return a histogram with bars of equal width, the series above each other.

    Args:
        title: Its caption.
        series: The counts of each series, all with the same bars.
        ends: Where the first bar begins and the last one ends.
        across: What the horizontal axis shows.
        data: The headings and the rows of the table behind it.
    """
    totals = [sum(counts) for counts in zip(*(one.counts for one in series), strict=True)]
    highest = max([*totals, 1])
    low, high = ends
    marks = [_axes(across, "count", (shown(low), "", shown(high)), ("0", "", str(highest)))]
    width = 1 / max(len(totals), 1)
    below = [0] * len(totals)
    for place, one in enumerate(series):
        for index, count in enumerate(one.counts):
            if count:
                x, y = _place(index * width, (below[index] + count) / highest)
                right, bottom = _place((index + 1) * width, below[index] / highest)
                marks.append(
                    f'<rect class="bar c{place % _COLOURS}" x="{x:.1f}" y="{y:.1f}" '
                    f'width="{max(right - x - 0.5, 0.5):.1f}" height="{bottom - y:.1f}"/>'
                )
            below[index] += count
    return _figure(title, marks, [one.name for one in series], data)


def shown(value: Any) -> str:
    """Return a value as text: numbers with six digits, nothing as a dash."""
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _figure(title: str, marks: Sequence[str], names: Sequence[str], data: tuple[Sequence[str], Any]) -> str:
    headings, rows = data
    legend = "".join(
        f'<li><span class="key c{place % _COLOURS}"></span>{escape(name)}</li>' for place, name in enumerate(names)
    )
    listed = f"<ul class='legend'>{legend}</ul>" if len(names) > 1 else ""
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}; data below">'
        f"{''.join(marks)}</svg>{listed}"
        f"<details><summary>Data: {escape(title)}</summary>{table(headings, rows, caption=title)}</details></figure>"
    )


def _axes(across: str, up: str, x_ticks: Sequence[str], y_ticks: Sequence[str]) -> str:
    (left, bottom), (right, top) = _place(0, 0), _place(1, 1)
    ticks = "".join(
        f'<text class="tick" x="{_place(place / 2, 0)[0]:.1f}" y="{bottom + 16:.1f}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
        for place, (text, anchor) in enumerate(zip(x_ticks, ("start", "middle", "end"), strict=True))
    ) + "".join(
        f'<text class="tick" x="{left - 6:.1f}" y="{_place(0, place / 2)[1] + 4:.1f}" text-anchor="end">'
        f"{escape(text)}</text>"
        for place, text in enumerate(y_ticks)
    )
    middle = (top + bottom) / 2
    return (
        f'<rect class="frame" x="{left}" y="{top}" width="{right - left}" height="{bottom - top}"/>{ticks}'
        f'<text class="label" x="{(left + right) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(across)}</text>'
        f'<text class="label" x="12" y="{middle}" text-anchor="middle" transform="rotate(-90 12 {middle})">'
        f"{escape(up)}</text>"
    )


def _points(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in (_place(*point) for point in points))


def _place(x: float, y: float) -> tuple[float, float]:
    """Return the place in the picture of a point with coordinates from 0 to 1."""
    return _LEFT + x * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - y * (_HEIGHT - _TOP - _BOTTOM)
