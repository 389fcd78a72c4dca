"""Draws the closed loop: requests per second over connections, a panel for each model and batch size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.speed.figures import Spread

_MARKERS = "osD^vP*X<>h"


def closed_loop(result: dict[str, Any], file: Path) -> None:
    """Write a plot of one closed loop's result, as SVG, with bars from the minimum to the maximum of the rounds."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    models = list(result["models"])
    batches = sorted({row["rows"] for row in result["rows"]})
    figure = Figure(figsize=(4.2 * len(batches), 3.6 * len(models)), layout="constrained")
    panels = figure.subplots(len(models), len(batches), squeeze=False)
    names = sorted({row["entrant"] for row in result["rows"]})
    styles = {name: (f"C{place % 10}", _MARKERS[place % len(_MARKERS)]) for place, name in enumerate(names)}
    for model, line in zip(models, panels, strict=True):
        for batch, panel in zip(batches, line, strict=True):
            _draw(panel, result, model, batch, styles)
    handles = [Line2D([], [], color=color, marker=marker, label=name) for name, (color, marker) in styles.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize="small")
    # Reproducible output for the same figures, with text as text.
    with mpl.rc_context({"svg.hashsalt": "understudy", "svg.fonttype": "none"}):
        figure.savefig(file, metadata={"Date": None})


def _draw(panel: Any, result: dict[str, Any], model: str, batch: int, styles: dict[str, tuple[str, str]]) -> None:
    for name, (color, marker) in styles.items():
        points = sorted(
            (row["connections"], Spread.of(row["requests_per_second"]))
            for row in result["rows"]
            if (row["model"], row["rows"], row["entrant"]) == (model, batch, name)
        )
        if points:
            rates = [spread.median for _, spread in points]
            bars = [
                [spread.median - spread.low for _, spread in points],
                [spread.high - spread.median for _, spread in points],
            ]
            width = 2.4 if name.startswith("understudy") else 1.0
            style = {"color": color, "marker": marker, "markersize": 4, "capsize": 2, "linewidth": width}
            panel.errorbar([count for count, _ in points], rates, bars, **style)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks([1, 8, 32, 64], ["1", "8", "32", "64"])
    panel.set_title(f"{model}, batch {batch}", fontsize="medium")
    panel.set_xlabel("connections")
    panel.set_ylabel("requests/s")
    panel.grid(visible=True, which="both", alpha=0.2)
