"""The geometry of a chart of values over steps, which a template draws as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from understudy.service.page.history import Mark, MarkKind, Point, Series

WIDTH: Final = 560
HEIGHT: Final = 240
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 40

_TICKS: Final = 5
_MARGIN: Final = 0.05
_NICE: Final = (1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A label of an axis, and its place in the picture."""

    place: float
    text: str


@dataclass(frozen=True, kw_only=True)
class DrawnMark:
    """A mark at the top of the chart if the step served, else at its foot.

    Attributes:
        path: Its outline, as SVG has it.
        step: The step.
        kind: What became of the step.
    """

    path: str
    step: int
    kind: MarkKind


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart.

    Attributes:
        series: What it shows.
        line: The points of its line, as SVG has them.
        dots: The places of the points if they are few enough to be told apart, else none.
        bands: The polygons of the intervals, one for each run of points that have some.
        marks: The marks at its top and foot.
        first_step: The step at its left edge.
        last_step: The step at its right edge.
        serving_x: The place of the serving step; None if it is not within the chart.
        x_ticks: The labels of the steps.
        y_ticks: The labels of the values.
    """

    series: Series
    line: str
    dots: Sequence[tuple[float, float]]
    bands: Sequence[str]
    marks: Sequence[DrawnMark]
    first_step: float
    last_step: float
    serving_x: float | None
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]

    @property
    def has_intervals(self) -> bool:
        """Whether any value has an interval."""
        return bool(self.bands)

    @property
    def kinds(self) -> list[MarkKind]:
        """The kinds of its marks."""
        present = {mark.kind for mark in self.marks}
        return [kind for kind in MarkKind if kind in present]


_TOLD_APART: Final = 60
AT_TOP: Final = frozenset({MarkKind.SERVED, MarkKind.ROLLED_BACK})
"""The kinds of marks at the top of a chart."""
OUTLINES: Final[Mapping[MarkKind, str]] = {
    MarkKind.SERVED: "v8",
    MarkKind.ROLLED_BACK: "m-5 0h10l-5 9z",
    MarkKind.REFUSED: "l-4 -8h8z",
    MarkKind.UNDECIDED: "l-4 -4l4 -4l4 4z",
    MarkKind.FAILED: "m-4 -8l8 8m0 -8l-8 8",
}
"""The outline of each kind of mark, so that colours are not all that tells them apart."""


def draw(series: Series, marks: Iterable[Mark], serving_step: int | None) -> Chart:
    """Return the chart of a series, which has a point at least."""
    points = series.points
    own = [mark for mark in marks if mark.dataset in ("", series.dataset)]
    steps = [points[0].step, points[-1].step, *(mark.step for mark in own if mark.kind not in AT_TOP)]
    own = [mark for mark in own if min(steps) <= mark.step <= max(steps)]
    across = _Axis(min(steps), max(steps), LEFT, WIDTH - RIGHT)
    low, high = _range_of(points)
    up = _Axis(low, high, HEIGHT - BOTTOM, TOP)
    places = [(across.place(point.step), up.place(point.value)) for point in points]
    within = serving_step is not None and across.low <= serving_step <= across.high
    return Chart(
        series=series,
        line=_joined(places),
        dots=places if len(places) <= _TOLD_APART else [],
        bands=_bands(points, across, up),
        marks=[DrawnMark(path=_outline(mark, across), step=mark.step, kind=mark.kind) for mark in own],
        first_step=across.low,
        last_step=across.high,
        serving_x=across.place(serving_step) if within and serving_step is not None else None,
        x_ticks=[Tick(place=across.place(tick), text=f"{tick:.0f}") for tick in across.ticks(whole=True)],
        y_ticks=[Tick(place=up.place(tick), text=f"{tick:.6g}") for tick in up.ticks()],
    )


class _Axis:
    """Maps the values of a range to places in the picture."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        self.low, self.high = low, high
        self._begin, self._end = begin, end

    def place(self, value: float) -> float:
        """Return the place of a value, to a tenth of a unit; the middle if the range is a single value."""
        share = 0.5 if self.high == self.low else (value - self.low) / (self.high - self.low)
        return round(self._begin + share * (self._end - self._begin), 1)

    def ticks(self, *, whole: bool = False) -> list[float]:
        """Return about five round values within the range."""
        span = self.high - self.low
        if span <= 0 or not math.isfinite(span):
            return [self.low]
        rough = span / _TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        width = next(nice * power for nice in _NICE if nice * power >= rough * (1 - 1e-9))
        width = max(1.0, width) if whole else width
        first = math.ceil(self.low / width)
        count = math.floor(self.high / width) - first + 1
        return [(first + index) * width for index in range(max(count, 0))]


def _outline(mark: Mark, across: _Axis) -> str:
    return f"M{across.place(mark.step)} {TOP if mark.kind in AT_TOP else HEIGHT - BOTTOM}{OUTLINES[mark.kind]}"


def _range_of(points: Sequence[Point]) -> tuple[float, float]:
    values = [point.value for point in points]
    values += [
        end
        for point in points
        if point.interval is not None
        for end in (point.interval.low, point.interval.high)
        if math.isfinite(end)
    ]
    low, high = min(values), max(values)
    margin = (high - low) * _MARGIN
    return low - margin, high + margin


def _bands(points: Sequence[Point], across: _Axis, up: _Axis) -> list[str]:
    """Return a polygon around the intervals of each run of points that have one."""
    runs: list[list[tuple[float, float, float]]] = [[]]
    for point in points:
        interval = point.interval
        if interval is None or not (math.isfinite(interval.low) and math.isfinite(interval.high)):
            runs.append([])
        else:
            runs[-1].append((across.place(point.step), up.place(interval.low), up.place(interval.high)))
    return [
        _joined([(x, high) for x, _, high in run] + [(x, low) for x, low, _ in reversed(run)]) for run in runs if run
    ]


def _joined(places: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x},{y}" for x, y in places)
