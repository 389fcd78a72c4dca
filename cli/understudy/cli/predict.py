"""``understudy predict``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from understudy.cli.command_errors import reported
from understudy.cli.connection import ConnectionSettings, connected, json_option, version_option
from understudy.cli.options import settings_options
from understudy.cli.output import print_json, print_table, say
from understudy.cli.run_checkpoint import (
    RunCheckpoints,
    checkpoint_options,
    files_for_server,
    pool_maker,
    workers_options,
)
from understudy.cli.scoring_options import progress_bar
from understudy.cli.values import LocalPath, LocalPathOrUrl

if TYPE_CHECKING:
    import numpy.typing as npt

    from understudy.clients import Client, PredictResult, Version
    from understudy.evaluator.sharding.evaluate import MakePool

_SHOWN_ROWS: Final = 20


@click.command("predict")
@click.argument("files", type=LocalPathOrUrl(exists=True, path_type=Path), nargs=-1, required=True)
@version_option("A version that is loaded, by default the serving one; with --run-dir any, by default the best.")
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    metavar="N",
    help="Examples per request or batch; to a server fewer, if they or their outputs have more than 8 MiB.",
)
@click.option(
    "--output",
    type=LocalPath(path_type=Path),
    metavar="FILE.npz|DIR",
    help="Write every output under its name, and the step that computed each example under 'step'. With --run-dir, a "
    "folder with a file for each part of the data.",
)
@json_option("Print one JSON object per batch: step, first_example, and outputs as nested lists by name.")
@workers_options
@checkpoint_options
@settings_options(settings=ConnectionSettings)
def command(
    *,
    files: tuple[Path | str, ...],
    version: Version | None,
    batch_size: int,
    output: Path | None,
    as_json: bool,
    workers: int | None,
    cluster: str | None,
    run: RunCheckpoints,
    settings: ConnectionSettings,
) -> None:
    """Send the examples of a file to a server and show the model's outputs, or write those of many FILES.

    For a server, there is one file: a .npy file with the model's only input, or an .npz file with every input under its
    name (a single input may also be called x, and arrays without names go by their order). Other arrays in it are
    ignored.

    With --run-dir, no server is needed: --workers processes compute the outputs of a checkpoint of the run and write
    them to the folder --output, one file for each part of the data and in the end manifest.json. A command that was
    interrupted goes on where it ended. FILES are then such files, TFRecord files or folders of them, or their URLs
    (s3://..., gs://...), or one saved tf.data folder.
    """
    if run.is_given:
        if output is None:
            raise click.UsageError("--run-dir and --checkpoints go with --output DIR.")
        _write_folder(run, files, output, pool_maker(workers, cluster), version=version, batch_size=batch_size)
        return
    (file,) = files_for_server(files, workers, cluster)
    if output is not None and output.is_dir():
        raise click.UsageError(f"--output {output} is a folder, which goes with --run-dir; give FILE.npz.")
    with connected(settings) as client:
        results = _predictions(client, file, version, batch_size)
        if output is not None:
            _write(output, list(results))
        elif as_json:
            _print_as_json(results)
        else:
            _print_as_table(list(results))


def _write_folder(
    run: RunCheckpoints,
    files: tuple[Path | str, ...],
    output: Path,
    make_pool: MakePool,
    *,
    version: Version | None,
    batch_size: int,
) -> None:
    from understudy.checkpoints.checkpoint_errors import CheckpointError
    from understudy.evaluator.evaluator_errors import EvaluatorError
    from understudy.evaluator.sharding.predict import predict_files
    from understudy.evaluator.sharding.work import DataSource, Work
    from understudy.experiments import ExperimentError

    with ExitStack() as stack:
        stack.enter_context(reported(EvaluatorError, ExperimentError, CheckpointError))
        step, model = stack.enter_context(run.opened(version))
        advance = stack.enter_context(progress_bar(f"predicting with step {step}"))
        data = DataSource(name="files", paths=files, inputs_only=True)
        written = predict_files(
            Work(model=model, data=data, batch_size=batch_size),
            output,
            step=step,
            make_pool=make_pool,
            progress=advance,
        )
    say(f"wrote {written.examples} examples of step {step} to {written.files} files in {written.folder}")
    for note in written.notes:
        say(f"note: {note}")


def _predictions(client: Client, file: Path, version: Version | None, batch_size: int) -> Iterator[PredictResult]:
    from understudy.cli.arrays import examples_to_predict
    from understudy.clients import UnderstudyError

    rows = examples_to_predict(file, client.metadata(version=version))
    for outcome in client.predict_many(rows.inputs_by(batch_size), version=version):
        if isinstance(outcome, UnderstudyError):
            raise outcome
        yield outcome


def _write(file: Path, results: list[PredictResult]) -> None:
    import numpy as np

    from understudy.cli.arrays import write_npz

    arrays = _joined(results)
    arrays["step"] = np.concatenate([np.full(_rows(result), result.step) for result in results])
    write_npz(file, arrays)
    say(f"wrote {len(arrays['step'])} examples of {', '.join(sorted(arrays))} to {file}")


def _print_as_json(results: Iterator[PredictResult]) -> None:
    first_example = 0
    for result in results:
        outputs = {name: array.tolist() for name, array in result.outputs.items()}
        print_json({"step": result.step, "first_example": first_example, "outputs": outputs})
        first_example += _rows(result)


def _print_as_table(results: list[PredictResult]) -> None:
    arrays = _joined(results)
    steps = [result.step for result in results for _ in range(_rows(result))]
    rows = [
        (str(row), str(steps[row]), *(_cell(array[row]) for array in arrays.values()))
        for row in range(min(len(steps), _SHOWN_ROWS))
    ]
    print_table(("row", "step", *arrays), rows)
    if len(steps) > _SHOWN_ROWS:
        say(f"and {len(steps) - _SHOWN_ROWS} more examples; --output and --json give all of them")


def _joined(results: list[PredictResult]) -> dict[str, npt.NDArray[Any]]:
    import numpy as np

    return {name: np.concatenate([result.outputs[name] for result in results]) for name in results[0].outputs}


def _rows(result: PredictResult) -> int:
    return len(next(iter(result.outputs.values())))


def _cell(value: Any) -> str:
    """Return one example of one output as text, with the largest element of a vector of scores."""
    import numpy as np

    array = np.asarray(value)
    if array.dtype.kind in "OS":
        return " ".join(item.decode(errors="backslashreplace") for item in array.ravel().tolist())
    text = np.array2string(array, precision=4, suppress_small=True, threshold=6, edgeitems=2, separator=" ")
    if array.ndim == 1 and array.size > 1 and array.dtype.kind == "f":
        best = int(array.argmax())
        return f"largest [{best}] = {array[best]:.4f} of {text}"
    return " ".join(text.split())
