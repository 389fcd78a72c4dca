"""Attacks on what is served: versions that are held, model files that are overwritten, and imitated requests.

All but the last publish checkpoints into the run folder of the server, delete them again and leave nothing pinned; what
is serving then may be another step than before.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import grpc
import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from testkit.served import Served
    from understudy.clients import Client

_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.02
_ROW_SECONDS: Final = 0.5
_STREAMS: Final = 2
_OVERLAPPING: Final = 3
_VARIANTS: Final = 300
_TOLERANCE: Final = 1e-5
_LEAST: Final = 1e-30
"""TensorFlow takes numbers that are not normal, such as 1e-40, for 0."""
_PREDICT: Final = "/understudy.v1.PredictionService/Predict"


def streams_beside_new_versions(served: Served) -> Iterator[str]:
    """Hold every version with quiet evaluations; checkpoints that are published meanwhile are served and scored."""
    from testkit.values import PLAIN_STEPS

    over = threading.Event()

    def quiet() -> Iterator[tuple[Any, Any]]:
        while not over.is_set():
            yield _examples()
            over.wait(_ROW_SECONDS)

    with _client(served) as client, ExitStack() as stack:
        stack.callback(over.set)
        for step in PLAIN_STEPS:
            for _ in range(_STREAMS):
                stream = threading.Thread(target=_ignoring_errors, args=(client.evaluate, quiet(), step))
                stream.start()
                stack.callback(stream.join)
                stack.callback(over.set)
        with _published(served, client) as (step, _):
            if not _within(lambda: client.status().serving_step == step):
                yield f"beside quiet streams, step {step} was not served within {_SECONDS} s"
            yield from _wrong_scores(client, step)


def overlapping_evaluations(served: Served) -> Iterator[str]:
    """Evaluate older versions so that each is always in use; a checkpoint that is published meanwhile is served."""
    from testkit.values import PLAIN_STEPS

    over = threading.Event()

    def brief() -> Iterator[tuple[Any, Any]]:
        for _ in range(4):
            yield _examples()
            over.wait(_ROW_SECONDS)

    def again_and_again(step: int) -> None:
        with _client(served) as client:
            while not over.wait(_POLL_SECONDS):
                _ignoring_errors(client.evaluate, brief(), step)

    with _client(served) as client, ExitStack() as stack:
        stack.callback(over.set)
        for step in PLAIN_STEPS:  # each has served, so one is the version before, and another is loaded beside it
            client.promote(step)
        for step in PLAIN_STEPS:
            for _ in range(_OVERLAPPING):
                thread = threading.Thread(target=again_and_again, args=(step,))
                thread.start()
                stack.callback(thread.join)
                stack.callback(over.set)
                over.wait(_ROW_SECONDS)
        with _published(served, client) as (step, _):
            if not _within(lambda: client.status().serving_step == step):
                yield f"beside overlapping evaluations, step {step} was not served within {_SECONDS} s"


def overwritten_model_files(served: Served) -> Iterator[str]:
    """Overwrite the model file of a served checkpoint in place: its step never stands for other weights."""
    from testkit.served import plain_model
    from testkit.values import PLAIN_STEPS
    from understudy.clients import FailedPreconditionError, NotFoundError

    with _client(served) as client, _published(served, client) as (step, file):
        if not _within(lambda: client.status().serving_step == step):
            yield f"step {step} was not served within {_SECONDS} s"
        other = file.with_suffix(".other.keras")
        plain_model(step + 1).save(other)
        with file.open("r+b") as place:
            place.write(other.read_bytes())
            place.truncate()
        other.unlink()
        yield from _wrong_scores(client, step)
        for loaded in PLAIN_STEPS:
            client.promote(loaded)
        try:
            yield from _wrong_scores(client, step)
            client.promote(step)
            yield from _wrong_scores(client, step)
        except (FailedPreconditionError, NotFoundError):
            pass  # the checkpoint is gone, and nothing else was taken for it
        finally:
            client.unpin()


def imitated_requests(served: Served) -> Iterator[str]:
    """Send requests that resemble others in most of their bytes: each is read as protobuf reads it, or refused."""
    from google.protobuf.message import DecodeError

    from testkit.values import WIDTH
    from understudy.v1 import prediction_pb2
    from understudy.wire import WireError, decode, encode_all

    x = _examples()[0]
    honest = prediction_pb2.PredictRequest(inputs=encode_all({"x": x})).SerializeToString()
    chance = random.Random(0)  # noqa: S311 - no secrets here
    with served.channel() as channel:
        predict = channel.unary_unary(_PREDICT)
        for number in range(_VARIANTS):
            if number % 5 == 0:
                for _ in range(3):
                    predict(honest, timeout=_SECONDS)
            variant = _imitation(honest, chance)
            try:
                answer = prediction_pb2.PredictResponse.FromString(predict(variant, timeout=_SECONDS))
            except grpc.RpcError as error:
                if error.code() in {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE}:
                    yield f"{variant.hex()}: {error.code()} {error.details()}"
                continue
            try:
                meant = decode(prediction_pb2.PredictRequest.FromString(variant).inputs["x"])
            except (DecodeError, WireError, ValueError) as error:
                yield f"{variant.hex()} was answered, and is none: {error}"
                continue
            expected = meant @ np.diag(np.full(WIDTH, answer.step, np.float32))
            if not np.allclose(decode(answer.outputs["y"]), expected, rtol=_TOLERANCE, atol=_LEAST, equal_nan=True):
                yield f"{variant.hex()} was answered as another request"


ATTACKS: Final[Mapping[str, Callable[[Served], Iterator[str]]]] = {
    attack.__name__: attack
    for attack in (streams_beside_new_versions, overlapping_evaluations, overwritten_model_files)
}
"""Each yields what the server should not have done."""


def _imitation(honest: bytes, chance: random.Random) -> bytes:
    """Return a request with one or two bytes changed, inserted, removed or repeated."""
    variant = bytearray(honest)
    for _ in range(chance.choice((1, 1, 2))):
        place, length = chance.randrange(len(variant)), chance.choice((1, 1, 2, 8))
        change = chance.choice(("set", "insert", "remove", "repeat", "end"))
        if change == "set":
            variant[place] = chance.randrange(256)
        elif change == "insert":
            variant[place:place] = chance.randbytes(length)
        elif change == "remove":
            del variant[place : place + length]
        elif change == "repeat":
            variant[place:place] = variant[place : place + length]
        else:
            variant += chance.choice((honest, honest[: place + 1], variant[place:]))
        if not variant:
            return bytes(variant)
    return bytes(variant)


@contextmanager
def _published(served: Served, client: Client) -> Iterator[tuple[int, Path]]:
    """Publish the next step; yield it and its model file; delete it."""
    from testkit.served import plain_model, publish
    from understudy.checkpoints import RunDir
    from understudy.checkpoints.layout import MODEL_FILE

    client.unpin()
    step = max(version.step for version in client.status().versions) + 1
    publish(served.run, {step: plain_model(step)})
    folder = RunDir(served.run).checkpoint(step)
    try:
        yield step, folder / MODEL_FILE
    finally:
        shutil.rmtree(folder)


def _wrong_scores(client: Client, step: int) -> Iterator[str]:
    """Yield whether a version is scored otherwise than one that multiplies by its step."""
    x, y = _examples()
    found = client.evaluate([(x, y)], version=step, metrics=["mae"]).metrics["mae"]
    expected = float(np.abs(x * np.float32(step) - y).mean())
    if abs(found - expected) > _TOLERANCE * expected:
        yield f"step {step} has the mean absolute error {found}, expected was {expected}"


def _examples() -> tuple[Any, Any]:
    from testkit.values import WIDTH

    x = np.linspace(0, 1, 4 * WIDTH, dtype=np.float32).reshape(4, WIDTH)
    return x, x * x


def _client(served: Served) -> Client:
    from understudy.clients import Client

    credentials = None if served.credentials is None else served.credentials.channel()
    return Client(served.grpc, credentials=credentials, timeout_seconds=_SECONDS)


def _ignoring_errors(evaluate: Callable[..., object], batches: Iterator[Any], step: int) -> None:
    from understudy.clients import UnderstudyError

    with suppress(UnderstudyError):  # the server may end what holds its versions
        evaluate(batches, version=step, timeout_seconds=_SECONDS)


def _within(condition: Callable[[], bool]) -> bool:
    """Return whether a condition is met in time."""
    ends = time.monotonic() + _SECONDS
    while not (met := condition()) and time.monotonic() < ends:
        time.sleep(_POLL_SECONDS)
    return met
