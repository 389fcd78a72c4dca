"""Figures as inline SVG, each with the table of its data, and what was recorded about an output, drawn with them.

Figures are styled by classes alone. The style sheet has the classes ``.c0`` to ``.c7`` for colours and ``.shade0`` to
``.shade10`` for shades.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


Content = Mapping[str, Any]

_DRAWN_LABELS = 8
"""Curves of so many labels are drawn: those with the least average precision."""

_LISTED = 100
"""So many pairs of classes are listed at most."""

_TASKS = {
    "binary": "two classes",
    "multilabel": "several labels at once",
    "categorical": "one of several classes",
    "sparse": "one of several classes",
    "regression": "numbers",
}


def output_sections(name: str, versions: Sequence[tuple[str, Content]]) -> Iterator[str]:
    """Yield what was recorded about one output of a model, of each version that has it beside each other.

    Args:
        name: The name of the output.
        versions: The name of each version, and the tables that were recorded with its evaluation.
    """
    having = [(version, content["outputs"][name]) for version, content in versions if name in content["outputs"]]
    task = having[0][1]["task"]
    yield f"<h2>{escape(f'Output {name}: {_TASKS.get(task, task)}')}</h2>"

    def section(title: str, draw: Callable[[str, Content], str]) -> str:
        drawn = "".join(f"<div>{draw(version, tables)}</div>" for version, tables in having)
        return f'<h3>{title}</h3><div class="beside">{drawn}</div>'

    if task == "regression":
        yield section("Residuals", _residuals)
        return
    yield section("Decisions", _decisions)
    if any(tables["labels"] for _, tables in having):
        yield section("ROC curve", _roc)
        yield section("Precision and recall", _precision_recall)
        yield section("Thresholds", _thresholds)
        yield section("Reliability", _reliability)
        yield section("Scores", _scores)
    notes = dict.fromkeys(note for _, tables in having for note in tables["notes"])
    yield "".join(f"<p>{escape(note)}.</p>" for note in notes)


def _decisions(version: str, tables: Content) -> str:
    right, items, left_out = tables["right"], tables["items"], tables["left_out"]
    summary = f"{version}: {right} of {items} decided rightly{f', {left_out} left out' if left_out else ''}."
    parts = [f"<p>{escape(summary)}</p>"]
    if tables.get("confusion"):
        names = [one["label"] for one in tables["per_class"]]
        parts.append(matrix(names, tables["confusion"], caption=f"Confusion matrix of {version}"))
    if tables.get("per_class"):
        rows = [(one["label"], one["actual"], one["predicted"], one["right"]) for one in tables["per_class"]]
        headings = ("class", "actual", "predicted", "right")
        parts.append(table(headings, rows, caption=f"Classes of {version}"))
    if tables.get("most_confused"):
        pairs = [(one["actual"], one["predicted"], one["count"]) for one in tables["most_confused"][:_LISTED]]
        parts.append(table(("actual", "predicted", "count"), pairs, caption=f"Most frequent confusions of {version}"))
    if "per_label" in tables:
        kinds = ("true_positives", "false_positives", "false_negatives", "true_negatives")
        counts = [(one["label"], *(one[kind] for kind in kinds)) for one in tables["per_label"]]
        kind_names = [kind.replace("_", " ") for kind in kinds]
        parts.append(table(("label", *kind_names), counts, caption=f"Labels of {version}"))
    return "".join(parts)


def _roc(version: str, tables: Content) -> str:
    drawn, title = _drawn(tables), f"ROC curve of {version}{_which(tables)}"
    lines, rows = [], []
    for one in drawn:
        points = [(0.0, 0.0), *((fpr, tpr) for _, tpr, fpr, _ in _rates(one))]
        lines.append(Curve(name=f"label {one['label']}, area {shown(one['auc'])}", points=points))
        rows += [(one["label"], threshold, fpr, tpr) for threshold, tpr, fpr, _ in _rates(one)]
    data = (("label", "threshold", "false positive rate", "true positive rate"), rows)
    areas = [(one["label"], one["positives"], one["negatives"], one["auc"]) for one in tables["labels"]]
    figure = line_figure(title, lines, across="false positive rate", up="true positive rate", diagonal=True, data=data)
    return figure + table(("label", "positives", "negatives", "area"), areas, caption=f"Areas under the ROC, {version}")


def _precision_recall(version: str, tables: Content) -> str:
    lines, rows = [], []
    for one in _drawn(tables):
        points = [(recall, precision) for _, recall, _, precision in _rates(one)]
        lines.append(Curve(name=f"label {one['label']}, {shown(one['average_precision'])}", points=points))
        rows += [(one["label"], threshold, recall, precision) for threshold, recall, _, precision in _rates(one)]
    data = (("label", "threshold", "recall", "precision"), rows)
    average = [(one["label"], one["average_precision"]) for one in tables["labels"]]
    title = f"Precision and recall of {version}{_which(tables)}"
    figure = line_figure(title, lines, across="recall", up="precision", diagonal=False, data=data)
    return figure + table(("label", "average precision"), average, caption=f"Average precision of {version}")


def _drawn(tables: Content) -> list[Content]:
    labels = sorted(tables["labels"], key=lambda one: one["average_precision"] or 0.0)
    chosen = {one["label"] for one in labels[:_DRAWN_LABELS]}
    return [one for one in tables["labels"] if one["label"] in chosen]


def _which(tables: Content) -> str:
    count = len(tables["labels"])
    return f", the {_DRAWN_LABELS} of {count} labels with the least precision" if count > _DRAWN_LABELS else ""


def _rates(label: Content) -> list[tuple[float, float, float, float]]:
    """Return the threshold, the recall, the false positive rate and the precision at each point of a curve."""
    curve, positives, negatives = label["curve"], label["positives"], label["negatives"]
    return [
        (threshold, tp / max(positives, 1), fp / max(negatives, 1), tp / max(tp + fp, 1))
        for threshold, tp, fp in zip(curve["threshold"], curve["true_positives"], curve["false_positives"], strict=True)
    ]


def _thresholds(version: str, tables: Content) -> str:
    rows = [
        (label["label"], f"{one['at']} {one['level']:g}", one["threshold"], one.get("precision"), one.get("recall"))
        for label in tables["labels"]
        for one in label["thresholds"]
    ]
    headings = ("label", "at least", "threshold", "precision", "recall")
    return table(headings, rows, caption=f"Thresholds of {version}; a dash where none reaches it")


def _reliability(version: str, tables: Content) -> str:
    labels: list[Content] = tables["labels"]
    confidence = tables.get("confidence")
    of = confidence or labels[0]
    what = "the predicted class" if confidence else f"label {of['label']}"
    reliability = of["reliability"]
    bins = zip(reliability["mean_probability"], reliability["negatives"], reliability["positives"], strict=True)
    rows = [(mean, pos / (neg + pos), neg + pos) for mean, neg, pos in bins if mean is not None]
    figure = line_figure(
        f"Reliability of {what}, {version}",
        [Curve(name=version, points=[(mean, share) for mean, share, _ in rows])],
        across="mean probability",
        up="share that came true",
        diagonal=True,
        data=(("mean probability", "share that came true", "items"), rows),
    )
    overall = [("predicted class", confidence["ece"], confidence["brier"])] if confidence else []
    errors = [*overall, *((f"label {one['label']}", one["ece"], one["brier"]) for one in labels)]
    headings = ("of", "expected calibration error", "Brier score")
    return figure + table(headings, errors, caption=f"Calibration of {version}")


def _scores(version: str, tables: Content) -> str:
    parts = []
    for one in _drawn(tables):
        negatives, positives = one["reliability"]["negatives"], one["reliability"]["positives"]
        width = 1 / len(negatives)
        rows = [
            (f"{index * width:.2f} to {(index + 1) * width:.2f}", neg, pos)
            for index, (neg, pos) in enumerate(zip(negatives, positives, strict=True))
        ]
        parts.append(
            bar_figure(
                f"Scores of label {one['label']}, {version}",
                [Bars(name="negatives", counts=negatives), Bars(name="positives", counts=positives)],
                ends=(0.0, 1.0),
                across="probability",
                data=(("probability", "negatives", "positives"), rows),
            )
        )
    return "".join(parts)


def _residuals(version: str, tables: Content) -> str:
    measures = ("items", "mean", "mean_absolute", "root_mean_square")
    headings = tuple(measure.replace("_", " ") for measure in measures)
    parts = [
        table(("of", *headings), [("all", *(tables[one] for one in measures))], caption=f"Errors of {version}"),
        table(("quantile", "residual"), tables["quantiles"].items(), caption=f"Quantiles of the residuals, {version}"),
    ]
    histogram = tables["histogram"]
    if histogram is not None:
        edges, counts = histogram["edges"], histogram["counts"]
        rows = [
            (f"below {edges[0]:.4g}", histogram["below"]),
            *(
                (f"{low:.4g} to {high:.4g}", count)
                for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True)
            ),
            (f"from {edges[-1]:.4g}", histogram["above"]),
        ]
        parts.insert(
            0,
            bar_figure(
                f"Residuals of {version}: prediction minus target",
                [Bars(name=version, counts=counts)],
                ends=(edges[0], edges[-1]),
                across="residual",
                data=(("residual", "count"), rows),
            ),
        )
    if tables["components"]:
        rows = [(index, *(one[measure] for measure in measures)) for index, one in enumerate(tables["components"])]
        parts.append(table(("component", *headings), rows, caption=f"Errors of the components, {version}"))
    return "".join(parts)
