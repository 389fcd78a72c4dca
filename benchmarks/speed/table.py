"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.speed.figures import Spread


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; the first column is text, the others are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def number(value: float | None) -> str:
    """Return a number with three significant digits; a dash for None."""
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def spread(value: Spread) -> str:
    """Return a median with the range over the rounds."""
    if value.low == value.high:
        return number(value.median)
    return f"{number(value.median)} ({number(value.low)} to {number(value.high)})"
