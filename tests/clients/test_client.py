"""The synchronous client against a peer that behaves as told."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from testkit.peer_server import PREVIOUS_STEP, STEP, Failure, Peer, Script, scored_inputs
from understudy import clients
from understudy.clients import (
    Client,
    InvalidArgumentError,
    UnderstudyError,
    requests,
)
from understudy.wire import decode

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)

ATTEMPTS = 5
"""How often the clients try a call that is safe to repeat."""


def test_arrays_by_name_come_back_by_name(client: Client) -> None:
    result = client.predict({"image": ROWS})

    np.testing.assert_array_equal(result.outputs["doubled"], 2 * ROWS)
    np.testing.assert_array_equal(result.output, 2 * ROWS)
    assert result.step == STEP


def test_the_name_of_a_lone_array_is_asked_for_once(client: Client, script: Script) -> None:
    for _ in range(3):
        client.predict(ROWS)

    assert script.calls == {"GetModelMetadata": 1, "Predict": 3}


def test_the_name_of_a_lone_array_is_asked_for_again_after_a_refusal(client: Client, script: Script) -> None:
    client.predict(ROWS)
    script.input_names = ("picture",)
    with pytest.raises(InvalidArgumentError, match="got image; expected picture"):
        client.predict(ROWS)

    assert set(client.predict(ROWS).outputs) == {"doubled_picture"}


def test_a_lone_array_for_a_model_with_two_inputs_is_refused_with_their_names(client: Client, script: Script) -> None:
    script.input_names = ("left", "right")

    with pytest.raises(InvalidArgumentError, match="this model takes left, right: give arrays by name, or a list of 2"):
        client.predict(ROWS)
    with pytest.raises(InvalidArgumentError, match="got a list of 3; this model takes left, right"):
        client.predict([ROWS, ROWS, ROWS])


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_goes_to_several_inputs_in_the_models_order(client: Client, script: Script, kind: Any) -> None:
    script.input_names = ("left", "right")

    result = client.predict(kind([ROWS, ROWS + 1]))
    (streamed,) = client.predict_many([kind([ROWS, ROWS + 1])])

    assert not isinstance(streamed, Exception)
    for outputs in (result.outputs, streamed.outputs):
        np.testing.assert_array_equal(outputs["doubled_left"], 2 * ROWS)
        np.testing.assert_array_equal(outputs["doubled_right"], 2 * ROWS + 2)
    assert script.calls["GetModelMetadata"] == 1


def test_a_list_is_one_array_where_the_model_has_one_input(client: Client) -> None:
    np.testing.assert_array_equal(client.predict(list(ROWS)).output, 2 * ROWS)


def test_metadata_says_which_names_stand_for_places(client: Client, script: Script) -> None:
    script.positional = True

    metadata = client.metadata()

    assert [spec.positional for spec in metadata.inputs] == [True]
    assert [spec.positional for spec in metadata.outputs] == [False]


def test_batches_to_score_go_by_order_too() -> None:
    names = requests.Names(inputs=("left", "right"), outputs=("a", "b"))

    message = requests.evaluate_batch(((ROWS, ROWS + 1), [ROWS + 2, ROWS + 3]), names).batch

    assert {name: decode(tensor)[0, 0] for name, tensor in message.inputs.items()} == {"left": 0, "right": 1}
    assert {name: decode(tensor)[0, 0] for name, tensor in message.targets.items()} == {"a": 2, "b": 3}
    lone = requests.Names(inputs=("image",), outputs=("doubled",))
    assert list(requests.evaluate_batch((ROWS, list(ROWS)), lone).batch.targets) == ["targets"]


def test_nested_mappings_are_flattened_and_several_outputs_have_names(client: Client, script: Script) -> None:
    script.input_names = ("pair/a", "pair/b")

    result = client.predict({"pair": {"a": ROWS, "b": ROWS}})

    assert set(result.outputs) == {"doubled_pair/a", "doubled_pair/b"}
    with pytest.raises(ValueError, match="the model has 2 outputs; take one of doubled_pair/a"):
        _ = result.output


def test_lists_of_text_travel_as_string_tensors(client: Client) -> None:
    assert client.predict(["äh", "b"]).output.tolist() == ["ähäh".encode(), b"bb"]


@pytest.mark.parametrize(("version", "step"), [(PREVIOUS_STEP, PREVIOUS_STEP), ("latest", STEP), (None, STEP)])
def test_a_version_is_a_step_or_a_label(client: Client, version: clients.Version | None, step: int) -> None:
    assert client.predict({"image": ROWS}, version=version).step == step


def test_an_unknown_label_is_refused_before_it_is_sent(client: Client, script: Script) -> None:
    with pytest.raises(InvalidArgumentError, match="version is 'newest'; expected a step or one of serving, latest"):
        client.predict({"image": ROWS}, version="newest")  # type: ignore[arg-type]

    assert not script.calls


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda client: client.predict(ROWS, version=1.5), "version is 1.5; expected a step or one of serving, latest"),
        (lambda client: client.predict(ROWS, version=2**64), "version is 18446744073709551616; expected a step"),
        (
            lambda client: client.evaluate([], metrics="mae"),
            "metrics is the text 'mae'; expected a list, such as ['mae",
        ),
        (
            lambda client: client.evaluate([], slices="age"),
            "slices is the text 'age'; expected a list, such as ['age']",
        ),
        (
            lambda client: client.evaluate([], metrics=[len]),
            "metrics holds a builtin_function_or_method; expected names",
        ),
        (
            lambda client: client.evaluate([], metrics=[clients.Metric(name="TopK", config={"k": np.int64(2)})]),
            "the config of metric 'TopK' must be JSON: Object of type int64 is not JSON serializable",
        ),
        (
            lambda client: client.evaluate((ROWS, ROWS)),
            "a batch is (x, y) or (x, y, sample_weight), or (x,) without targets, but got an ndarray; give an iterable",
        ),
        (lambda client: client.compare([], versions=[]), "versions is empty; 2 to 16 can be compared with one another"),
        (lambda client: client.compare([], versions="best"), "versions is the text 'best'; expected a list"),
        (
            lambda client: next(client.predict_many({"image": ROWS})),
            "items is one mapping, of image; expected an itera",
        ),
        (lambda client: next(client.predict_many([ROWS], in_flight=0)), "in_flight is 0; at least 1 was expected"),
    ],
)
def test_arguments_that_no_server_could_take_are_refused_with_what_to_give(
    client: Client, call: Callable[[Client], object], complaint: str
) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        call(client)

    assert str(refusal.value).startswith(complaint)


def test_an_array_that_cannot_travel_is_refused_before_it_is_sent(client: Client, script: Script) -> None:
    with pytest.raises(InvalidArgumentError, match="image: dtype complex64 cannot be sent"):
        client.predict({"image": ROWS.astype(np.complex64)})

    assert not script.calls


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, clients.InvalidArgumentError),
        (grpc.StatusCode.NOT_FOUND, clients.NotFoundError),
        (grpc.StatusCode.FAILED_PRECONDITION, clients.FailedPreconditionError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, clients.OverloadedError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, clients.DeadlineExceededError),
        (grpc.StatusCode.CANCELLED, clients.CancelledError),
        (grpc.StatusCode.ABORTED, clients.AbortedError),
        (grpc.StatusCode.UNIMPLEMENTED, clients.UnimplementedError),
        (grpc.StatusCode.INTERNAL, clients.InternalError),
        (grpc.StatusCode.DATA_LOSS, UnderstudyError),
    ],
)
def test_every_status_has_its_type(
    client: Client, script: Script, code: grpc.StatusCode, kind: type[UnderstudyError]
) -> None:
    script.failures.extend([Failure(code=code, message="because")] * ATTEMPTS)

    with pytest.raises(UnderstudyError, match="because") as failure:
        client.status()

    assert type(failure.value) is kind
    assert failure.value.code is code


@pytest.mark.parametrize(
    ("code", "said", "told"),
    [
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", "the server has no such call: .* different versions, or"),
        (grpc.StatusCode.INTERNAL, "Exception deserializing response!", "cannot be read: .*; upgrade the older one"),
    ],
)
def test_a_server_of_another_version_is_told_from_one_that_fails(
    client: Client, script: Script, code: grpc.StatusCode, said: str, told: str
) -> None:
    script.failures.append(Failure(code=code, message=said))

    with pytest.raises(UnderstudyError, match=told):
        client.examples("hardest")


def test_an_overloaded_server_says_when_to_try_again(client: Client, script: Script) -> None:
    script.failures.append(Failure(code=grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after_seconds=0.25))

    with pytest.raises(clients.OverloadedError) as failure:
        client.predict({"image": ROWS})

    assert failure.value.retry_after_seconds == 0.25


def test_results_and_errors_survive_pickling(client: Client, script: Script) -> None:
    result = client.predict({"image": ROWS})
    script.failures.append(Failure(code=grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after_seconds=0.25))
    with pytest.raises(clients.OverloadedError) as failure:
        client.predict({"image": ROWS})

    again, error = pickle.loads(pickle.dumps((result, failure.value)))  # noqa: S301 - the bytes are its own

    np.testing.assert_array_equal(again.output, result.output)
    assert (type(error), str(error), error.code) == (clients.OverloadedError, "told to fail", failure.value.code)
    assert error.retry_after_seconds == 0.25


def test_an_internal_error_carries_the_id_for_the_server_s_log(client: Client, script: Script) -> None:
    incident = "0123456789abcdef" * 2
    script.failures.append(Failure(code=grpc.StatusCode.INTERNAL, message=f"internal error {incident}; see the log"))

    with pytest.raises(clients.InternalError) as failure:
        client.status()

    assert failure.value.incident == incident


def test_a_message_that_is_too_large_says_what_to_do(peer: Peer, client: Client) -> None:
    large = np.zeros((1, 3 * 1024 * 1024), np.float32)

    with pytest.raises(clients.MessageTooLargeError, match="send fewer examples at once"):
        client.predict({"image": large})
    with (
        Client(peer.target, max_message_bytes=1000) as small,
        pytest.raises(clients.MessageTooLargeError, match="send fewer examples at once"),
    ):
        small.predict({"image": large[:, :1000]})


def test_step_0_is_asked_for_and_told(client: Client) -> None:
    assert client.predict(ROWS, version=0).step == 0
    assert client.promote(0).pinned_step == 0


def test_every_request_names_the_model(peer: Peer, script: Script) -> None:
    script.record(STEP)
    with Client(peer.target, model_name="doubler") as client:
        client.predict(ROWS)
        list(client.predict_many([ROWS]))
        client.evaluate([(ROWS, ROWS)])
        with pytest.raises(clients.UnimplementedError):
            client.compare(dataset="test", versions=[1, 2])
        client.evaluate_dataset("test")
        list(client.list_evaluations())
        next(client.watch_evaluations())
        client.status()
        client.checkpoints()
        client.evaluation_tables()
        client.examples("hardest")
        client.promote(STEP)
        client.unpin()
        client.roll_back()

    named = [model_names(request) for request in script.requests]
    assert len(named) == 16
    assert set().union(*named) == {"doubler"}


def model_names(request: Any) -> set[str]:
    """Return the model that a message names, empty for a batch of a stream that has named it."""
    if "request" in request.DESCRIPTOR.fields_by_name:
        return {request.request.model_name}
    if "options" in request.DESCRIPTOR.fields_by_name:
        return {request.options.model_name} if request.HasField("options") else set()
    return {request.model_name}


def test_everything_else_is_told_in_plain_objects(peer: Peer, client: Client) -> None:
    assert client.metadata().inputs == (clients.TensorSpec(name="image", dtype="float32", shape=(None, 4)),)
    assert client.metadata().devices == ("CPU:0", "CPU:1")
    status = client.status()
    assert (status.serving_step, status.latest_step, status.best_step, status.pinned_step) == (STEP, STEP, None, None)
    assert [version.state for version in status.versions] == ["AVAILABLE", "END"]
    (checkpoint,) = client.checkpoints()
    assert (checkpoint.step, checkpoint.final, checkpoint.created_at.timestamp()) == (STEP, True, 1_000_000)
    assert client.metrics() == "understudy_replicas 2\n"
    assert client.is_serving()
    peer.stop_serving()
    assert not client.is_serving()


def test_promotions_tell_what_is_serving(client: Client) -> None:
    assert client.promote(40) == clients.Promotion(serving_step=40, previous_step=STEP, pinned_step=40)
    assert client.unpin() == clients.Promotion(serving_step=STEP, previous_step=None, pinned_step=None)
    assert client.roll_back().serving_step == PREVIOUS_STEP


def test_calls_of_a_closed_client_say_so(peer: Peer) -> None:
    client = Client(peer.target)
    client.close()
    calls: list[Callable[[], object]] = [
        lambda: client.predict({"image": ROWS}),
        lambda: next(client.predict_many([{"image": ROWS}])),
        lambda: client.evaluate([(ROWS, ROWS)]),
        lambda: client.evaluate_dataset("test"),
        lambda: next(client.list_evaluations()),
        lambda: next(client.watch_evaluations()),
    ]

    for call in calls:
        with pytest.raises(clients.CancelledError, match="the client was closed; create another one"):
            call()


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_client_is_not_copied(client: Client, duplicate: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match=r"Client holds connections.*; create one in each process"):
        duplicate(client)


@pytest.mark.parametrize("rows", [ROWS.tolist(), ROWS.astype(int).tolist(), tuple(map(tuple, ROWS.tolist()))])
def test_lists_of_numbers_get_the_models_dtype(client: Client, script: Script, rows: Any) -> None:
    (streamed,) = client.predict_many([{"image": rows}])
    client.evaluate([(rows, 2 * ROWS), ({"image": rows}, 2 * ROWS)])

    assert client.predict(rows) == client.predict({"image": rows}) == streamed == client.predict(ROWS)
    assert script.calls["GetModelMetadata"] == 1
    assert [decode(tensor).dtype for tensor in scored_inputs(script)] == [np.float32, np.float32]


def test_arrays_keep_their_dtypes_and_so_do_numbers_that_do_not_fit(client: Client, script: Script) -> None:
    script.input_dtype = "uint8"

    assert client.predict(ROWS.astype(np.float64)).output.dtype == np.float64
    assert client.predict([[255, 1, 2, 3]]).output.dtype == np.uint8
    assert client.predict([[256, 1, 2, 3]]).output.dtype == np.int64
    assert client.predict([[0.5, 1, 2, 3]]).output.dtype == np.float64


def test_numbers_that_are_too_large_for_the_model_do_not_become_infinite(client: Client, script: Script) -> None:
    script.input_dtype = "float16"

    assert client.predict([[70_000.0, 1, 2, 3]]).output.dtype == np.float64
    assert client.predict([[70_000, 1, 2, 3]]).output.dtype == np.int64
    assert client.predict([[math.inf, math.nan, 2, 3]]).output.dtype == np.float16


def test_results_are_equal_where_step_and_outputs_are(client: Client) -> None:
    rows = np.where(ROWS == 1, np.float32(np.nan), ROWS)

    result = client.predict(rows)

    assert result == client.predict(rows)
    assert result in [client.predict(ROWS), client.predict(rows)]
    assert result != client.predict(ROWS)
    assert result != client.predict(rows[:1])
    assert result != replace(result, step=STEP + 1)
    assert result != replace(result, outputs={"tripled": result.output})
    assert result != replace(result, outputs={"doubled": result.output.astype(np.float64)})
    assert result != rows.tolist()
