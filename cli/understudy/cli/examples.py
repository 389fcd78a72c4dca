"""``understudy examples``."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from understudy.cli.command_errors import CommandError, written
from understudy.cli.connection import ConnectionSettings, VersionType, connected
from understudy.cli.options import settings_options
from understudy.cli.output import csv_cell, plain, print_table, say
from understudy.cli.values import LocalPath

if TYPE_CHECKING:
    from understudy.clients import ExampleList, Version
    from understudy.clients.evaluation_types import ExampleKind

_KINDS = ("hardest", "newly-wrong", "newly-right")
_SUFFIXES = (".json", ".csv", ".npz")


def _output_file(_: click.Context, __: click.Parameter, value: Path | None) -> Path | None:
    if value is not None and value.suffix not in _SUFFIXES:
        raise click.BadParameter(f"{str(value)!r} ends in none of {', '.join(_SUFFIXES)}.")
    return value


@click.command("examples")
@click.argument("kind", type=click.Choice(_KINDS))
@click.option("--step", type=VersionType(), help="The version; the serving one by default.")
@click.option("--baseline", type=VersionType(), help="The version to compare with; the serving one by default.")
@click.option("--dataset", metavar="NAME", help="The dataset; the server's first one by default.")
@click.option(
    "--max-examples",
    type=click.IntRange(1, 1000),
    default=100,
    show_default=True,
    metavar="N",
    help="How many to list at most.",
)
@click.option(
    "--output",
    type=LocalPath(dir_okay=False, path_type=Path),
    callback=_output_file,
    metavar="FILE",
    help="Write them, with their inputs and targets, to a file that ends in .json, .csv or .npz; --eval-data takes "
    "the last.",
)
@settings_options(settings=ConnectionSettings)
def command(
    *,
    kind: str,
    step: Version | None,
    baseline: Version | None,
    dataset: str | None,
    max_examples: int,
    output: Path | None,
    settings: ConnectionSettings,
) -> None:
    """List examples of a dataset of the server: the hardest, or those newly decided wrongly or rightly.

    The server records what this needs with `understudy serve --tables`. Examples count from 0;
    an array `key` of the dataset gives each a name. Features that slices name are listed, too.

    \b
    understudy examples hardest --step latest
    understudy examples newly-wrong --step 2000 --baseline serving --output worse.npz
    """  # noqa: D301 - click needs this character, which keeps the line breaks below it
    if kind == "hardest" and baseline is not None:
        raise click.UsageError("--baseline goes with newly-wrong and newly-right; the hardest have none.")
    with connected(settings) as client:
        found = client.examples(_as_kind(kind), dataset, version=step, baseline=baseline, max_examples=max_examples)
    if output is None:
        _show(found)
        return
    with written(output):
        _write(found, output)
    say(f"wrote {output}: {len(found.indices)} of {found.total} examples")
    _show_notes(found)


def _as_kind(kind: str) -> ExampleKind:
    kinds: dict[str, ExampleKind] = {
        "hardest": "hardest",
        "newly-wrong": "newly_wrong",
        "newly-right": "newly_right",
    }
    return kinds[kind]


def _show(found: ExampleList) -> None:
    headings, rows = _listed(found)
    title = f"{len(found.indices)} of {found.total} examples, step {found.evaluation.step}, {found.evaluation.dataset}"
    print_table(headings, [[shown(cell) for cell in row] for row in rows], title=title)
    if found.flips is not None:
        from understudy.cli.report_page import summary_of

        say(summary_of(found.flips))
    _show_notes(found)


def _show_notes(found: ExampleList) -> None:
    for note in found.notes:
        say(f"note: {note}")


def _listed(found: ExampleList) -> tuple[list[str], list[list[Any]]]:
    """Return what is known about each example as a table, without inputs."""
    outputs = found.described[0].get("outputs", {}) if found.described else {}
    said = [
        (name, what) for name, kinds in outputs.items() for what in ("actual", "predicted", "baseline") if what in kinds
    ]
    losses = ["loss"] if found.described and "loss" in found.described[0] else []
    keys = ["key"] if any("key" in described for described in found.described) else []
    features = list(dict.fromkeys(name for described in found.described for name in described.get("features", {})))
    headings = [
        "example",
        *keys,
        *losses,
        *(f"{name}.{what}" for name, what in said),
        *features,
    ]
    rows = [
        [
            index,
            *(described.get(name, "") for name in keys),
            *(described[name] for name in losses),
            *(described["outputs"][name][what] for name, what in said),
            *(described.get("features", {}).get(name, "") for name in features),
        ]
        for index, described in zip(found.indices, found.described, strict=True)
    ]
    return headings, rows


def shown(cell: Any) -> str:
    """Return a cell of the table as text; a list is of classes, labels or numbers."""
    if isinstance(cell, list):
        return " ".join(map(shown, cell)) or "none"
    return f"{cell:.6g}" if isinstance(cell, float) else str(cell)


def _write(found: ExampleList, output: Path) -> None:
    if output.suffix == ".npz":
        _write_npz(found, output)
    elif output.suffix == ".csv":
        output.write_text(_as_csv(found), encoding="utf-8")
    else:
        output.write_text(json.dumps(plain(_as_json(found)), allow_nan=False) + "\n", encoding="utf-8")


def _write_npz(found: ExampleList, output: Path) -> None:
    """Write the examples as `understudy.experiments.example_arrays` reads them."""
    import numpy as np

    if not found.inputs:
        raise CommandError(f"there are no examples to write to {output}: {'; '.join(found.notes) or 'none was found'}")
    arrays = {}
    for key, part in (("x", found.inputs), ("y", found.targets)):
        arrays.update({key if len(part) == 1 else name: _storable(array) for name, array in part.items()})
    if len(found.sample_weights) > 1:
        raise CommandError(
            f"the examples have a sample weight for each of {', '.join(found.sample_weights)}, and a .npz file holds "
            "one for all outputs; write to a .json or .csv file"
        )
    for array in found.sample_weights.values():
        arrays["sample_weight"] = array
    np.savez(output, allow_pickle=False, **arrays)


def _storable(array: Any) -> Any:
    return array.astype("S") if array.dtype.kind == "O" else array


def _as_csv(found: ExampleList) -> str:
    """Return one line per example; arrays are JSON."""
    headings, rows = _listed(found)
    contents = [(f"{kind}.{name}", array) for kind, name, array in _contents(found)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(csv_cell, [*headings, *(name for name, _ in contents)]))
    for place, row in enumerate(rows):
        held = [json.dumps(plain(_plain_array(array[place]))) if place < len(array) else "" for _, array in contents]
        writer.writerow([*(json.dumps(cell) if isinstance(cell, list) else csv_cell(cell) for cell in row), *held])
    return text.getvalue()


def _as_json(found: ExampleList) -> dict[str, Any]:
    examples = []
    for place, (index, described) in enumerate(zip(found.indices, found.described, strict=True)):
        content: dict[str, dict[str, Any]] = {}
        for kind, name, array in _contents(found):
            if place < len(array):
                content.setdefault(kind, {})[name] = _plain_array(array[place])
        examples.append({"index": index, **described, **content})
    return {
        "step": found.evaluation.step,
        "dataset": found.evaluation.dataset,
        "baseline_step": None if found.baseline is None else found.baseline.step,
        "total": found.total,
        "flips": None if found.flips is None else dataclasses.asdict(found.flips),
        "examples": examples,
        "notes": list(found.notes),
    }


def _contents(found: ExampleList) -> list[tuple[str, str, Any]]:
    parts = {"inputs": found.inputs, "targets": found.targets, "sample_weights": found.sample_weights}
    return [(kind, name, array) for kind, part in parts.items() for name, array in part.items()]


def _plain_array(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value.tolist() if hasattr(value, "tolist") else value
