"""The synchronous client against a peer that behaves as told."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest

from testkit.peer_server import PATIENCE_SECONDS, PREVIOUS_STEP, STEP, Failure, Peer, Script
from understudy import clients
from understudy.clients import (
    Client,
    Evaluation,
    InvalidArgumentError,
    Metric,
    PredictResult,
    Progress,
    UnderstudyError,
    requests,
)
from understudy.clients.channel import service_config
from understudy.v1 import evaluation_pb2, fleet_pb2, metrics_pb2, model_pb2, prediction_pb2
from understudy.v1.evaluation_pb2 import EvaluateRequest
from understudy.wire import decode

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)
ATTEMPTS = 5
"""How often the clients try a call that is safe to repeat."""


def unavailable() -> Failure:
    return Failure(code=grpc.StatusCode.UNAVAILABLE)


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


def test_an_overloaded_server_says_when_to_try_again(client: Client, script: Script) -> None:
    script.failures.append(Failure(code=grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after_seconds=0.25))

    with pytest.raises(clients.OverloadedError) as failure:
        client.predict({"image": ROWS})

    assert failure.value.retry_after_seconds == 0.25


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


def test_a_call_ends_at_its_deadline(client: Client, script: Script) -> None:
    script.gate.clear()

    with pytest.raises(clients.DeadlineExceededError):
        client.predict({"image": ROWS}, timeout_seconds=0.1)


def test_what_may_be_repeated_is_tried_again_while_the_server_is_unavailable(client: Client, script: Script) -> None:
    cancelled = Failure(code=grpc.StatusCode.CANCELLED)  # by a server that shuts down
    script.failures.extend([unavailable(), cancelled])

    assert client.predict({"image": ROWS}).step == STEP
    assert script.calls["Predict"] == 3


def test_every_method_is_tried_again_but_those_that_must_not() -> None:
    """Promote might roll back twice, and the clients resume watches and downloads themselves."""
    services = (prediction_pb2, evaluation_pb2, model_pb2, fleet_pb2, metrics_pb2)
    methods = {
        (service.full_name, method.name)
        for module in services
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    (retried,) = json.loads(service_config())["methodConfig"]
    repeated = {(each["service"], each["method"]) for each in retried["name"]}
    assert {name for _, name in methods - repeated} == {"Promote", "WatchEvaluations", "Follow", "ReadCheckpoint"}
    assert repeated <= methods


def test_trying_again_ends_after_five_attempts(client: Client, script: Script) -> None:
    script.failures.extend(unavailable() for _ in range(10))

    with pytest.raises(clients.UnavailableError, match="told to fail"):
        client.status()

    assert script.calls["GetModelStatus"] == ATTEMPTS


def test_a_promotion_is_never_repeated(client: Client, script: Script) -> None:
    script.failures.append(unavailable())

    with pytest.raises(clients.UnavailableError):
        client.roll_back()

    assert script.calls["Promote"] == 1


def test_several_servers_take_turns_and_stand_in_for_each_other() -> None:
    with Peer() as one, Peer() as other, Client([one.target, f"localhost:{other.port}"], timeout_seconds=20) as client:
        while not (one.script.calls["Predict"] and other.script.calls["Predict"]):  # until both are connected
            client.predict({"image": ROWS})
        before = one.script.calls["Predict"], other.script.calls["Predict"]
        for _ in range(10):
            client.predict({"image": ROWS})
        gained = one.script.calls["Predict"] - before[0], other.script.calls["Predict"] - before[1]
        assert min(gained) >= 4

        other.__exit__(None, None, None)

        for _ in range(10):
            assert client.predict({"image": ROWS}).step == STEP


@pytest.mark.parametrize(
    ("targets", "complaint"),
    [
        ("", "expected at least one target"),
        ([], "expected at least one target"),
        (["127.0.0.1:1", "127.0.0.1"], "expected HOST:PORT, got '127.0.0.1'"),
    ],
)
def test_bad_targets_are_refused(targets: str | list[str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Client(targets)


def test_many_predictions_keep_their_order(client: Client) -> None:
    batches = [np.full((2, 4), value, np.float32) for value in range(200)]

    results = list(client.predict_many(batches))

    assert [prediction(result).output[0, 0] for result in results] == [2 * value for value in range(200)]


def test_one_bad_item_fails_alone(client: Client) -> None:
    items: list[Any] = [{"image": ROWS}, {"picture": ROWS}, {"image": ROWS.astype(complex)}, {"image": ROWS}]

    first, refused, unsent, last = client.predict_many(items)

    assert prediction(first).step == prediction(last).step == STEP
    assert isinstance(refused, InvalidArgumentError)
    assert str(refused) == "got picture; expected image"
    assert isinstance(unsent, InvalidArgumentError)
    assert "complex128 cannot be sent" in str(unsent)


def test_an_item_that_is_refused_for_now_says_when_to_send_it_again(client: Client) -> None:
    (refused,) = client.predict_many([ROWS], version=429)

    assert isinstance(refused, clients.OverloadedError)
    assert (str(refused), refused.retry_after_seconds) == ("the queue is full", 0.25)


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


def test_items_are_drawn_no_further_ahead_than_allowed(client: Client, script: Script) -> None:
    drawn: list[int] = []

    def items() -> Iterator[dict[str, npt.NDArray[np.float32]]]:
        for index in range(50):
            drawn.append(index)
            yield {"image": ROWS}

    for taken, _ in enumerate(client.predict_many(items(), in_flight=4), start=1):
        assert len(drawn) <= taken + 4 + 1  # those unanswered, and one ready to go

    assert len(drawn) == script.calls["PredictStream"] * 50


def test_a_stream_left_early_ends_the_call(client: Client) -> None:
    results = client.predict_many(({"image": ROWS} for _ in iter(int, 1)), in_flight=2)
    next(results)

    results.close()

    assert client.predict({"image": ROWS}).step == STEP


def test_what_the_items_raise_is_raised_after_the_results_before_it(client: Client) -> None:
    def items() -> Iterator[dict[str, npt.NDArray[np.float32]]]:
        yield {"image": ROWS}
        raise LookupError("no more examples")

    results = client.predict_many(items())

    assert prediction(next(results)).step == STEP
    with pytest.raises(LookupError, match="no more examples"):
        next(results)


def test_a_stream_whose_call_fails_does_not_wait_for_its_items(client: Client, script: Script) -> None:
    script.failures.append(Failure(code=grpc.StatusCode.FAILED_PRECONDITION, message="not now"))
    released = threading.Event()

    def items() -> Iterator[dict[str, npt.NDArray[np.float32]]]:
        released.wait(20)
        yield {"image": ROWS}

    with pytest.raises(clients.FailedPreconditionError, match="not now"):
        list(client.predict_many(items()))
    released.set()


def batches(count: int) -> Iterator[tuple[Any, ...]]:
    for index in range(count):
        x = np.full((2, 4), index, np.float32)
        yield (x, 2 * x + 1) if index % 2 else (x, 2 * x + 1, np.ones(2, np.float32))


def test_batches_are_scored_whatever_form_they_have(client: Client, script: Script) -> None:
    by_name = ({"image": ROWS}, {"targets": 2 * ROWS}, None)

    result = client.evaluate([*batches(3), by_name], version=STEP, metrics=["accuracy", Metric(name="AUC")])

    assert (result.examples, result.batches, result.step) == (9, 4, STEP)
    assert result.metrics == {"loss": pytest.approx(6 / 9)}
    assert result.notes == ("by NumPy",)
    options = next(request.options for request in script.requests if isinstance(request, EvaluateRequest))
    assert [metric.name for metric in options.metrics] == ["accuracy", "AUC"]
    assert options.version.step == STEP


def test_the_configuration_of_a_metric_travels_as_json(client: Client, script: Script) -> None:
    client.evaluate([({"image": ROWS}, ROWS)], metrics=[Metric(name="AUC", config={"curve": "PR"})])

    assert script.requests[0].options.metrics[0].config_json == '{"curve": "PR"}'


def test_what_the_batches_raise_reaches_the_caller(client: Client) -> None:
    def damaged() -> Iterator[tuple[Any, ...]]:
        yield from batches(2)
        raise LookupError("the file ends here")

    with pytest.raises(LookupError, match="the file ends here"):
        client.evaluate(damaged())


@pytest.mark.parametrize(
    ("batch", "complaint"),
    [
        (ROWS, "a batch is (x, y) or (x, y, sample_weight), but got a ndarray"),
        ((ROWS,), "a batch is (x, y) or (x, y, sample_weight), but got a tuple of 1"),
        ((ROWS, ROWS.astype(complex)), "targets: dtype complex128 cannot be sent"),
    ],
)
def test_what_is_no_batch_is_refused(client: Client, batch: Any, complaint: str) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        client.evaluate([batch])

    assert str(refusal.value).startswith(complaint)


def test_a_refused_stream_says_why(client: Client, script: Script) -> None:
    script.failures.append(Failure(code=grpc.StatusCode.NOT_FOUND, message="no such step"))
    with pytest.raises(clients.NotFoundError, match="no such step"):
        client.evaluate(({"image": ROWS}, ROWS) for _ in iter(int, 1))
    with pytest.raises(InvalidArgumentError, match="a stream without a batch"):
        client.evaluate([])


def test_a_slow_server_slows_the_drawing_of_batches(client: Client, script: Script) -> None:
    script.gate.clear()
    drawn = 0
    moved = threading.Event()

    def large() -> Iterator[tuple[Any, ...]]:
        nonlocal drawn
        for _ in range(200):
            drawn += 1
            moved.set()
            yield {"image": np.ones((64, 1024), np.float32)}, np.full((64, 1024), 2, np.float32)

    def open_when_nothing_moves() -> None:
        while moved.wait(0.5):
            moved.clear()
        before_opening.append(drawn)
        script.gate.set()

    before_opening: list[int] = []
    opener = threading.Thread(target=open_when_nothing_moves)
    opener.start()
    result = client.evaluate(large())
    opener.join(20)

    assert result.metrics == {"loss": 0.0}
    assert result.batches == 200
    assert before_opening[0] < 100  # of half a mebibyte each


def test_a_dataset_of_the_server_is_scored_with_progress(client: Client) -> None:
    seen: list[Progress] = []

    evaluation = client.evaluate_dataset("test", version=40, on_progress=seen.append)

    assert [progress.examples for progress in seen] == [10, 20]
    assert (evaluation.step, evaluation.dataset, evaluation.outcome) == (40, "test", "scored")


def test_the_ledger_is_listed_page_by_page(client: Client, script: Script) -> None:
    for step in range(1, 6):
        script.record(step)

    listed = list(client.list_evaluations(dataset="test", min_step=1, outcome="scored"))

    assert [evaluation.step for evaluation in listed] == [1, 2, 3, 4, 5]
    assert script.calls["ListEvaluations"] == 3
    assert script.requests[0].min_step == 1
    assert not script.requests[0].HasField("max_step")


def test_the_hardest_examples_of_a_step_are_read(client: Client, script: Script) -> None:
    found = client.examples("hardest", "test", version=STEP, max_examples=5)

    assert (found.evaluation.step, found.indices, found.described) == (STEP, (7,), ({"loss": 0.5},))
    assert (found.baseline, found.flips, found.inputs) == (None, None, {})
    assert (script.requests[0].dataset, script.requests[0].max_examples) == ("test", 5)
    assert client.evaluation_tables("test", version=STEP).content == {"examples": 20}


def test_an_unknown_kind_of_examples_is_refused(client: Client) -> None:
    with pytest.raises(InvalidArgumentError, match="kind is 'easy'; expected one of hardest, newly_wrong, newly_right"):
        client.examples("easy")  # type: ignore[arg-type]


def test_an_unknown_outcome_is_refused(client: Client) -> None:
    with pytest.raises(InvalidArgumentError, match="outcome is 'lost'; expected one of scored, skipped, failed"):
        list(client.list_evaluations(outcome="lost"))  # type: ignore[arg-type]


def test_watching_misses_and_repeats_nothing_over_breaks(client: Client, script: Script) -> None:
    script.watch_breaks_after.extend([2, 0, 1])
    for step in range(1, 5):
        script.record(step)
    watch = client.watch_evaluations(after=1)

    seen = [next(watch) for _ in range(3)]
    script.record(5)
    seen.append(next(watch))

    assert [evaluation.sequence for evaluation in seen] == [2, 3, 4, 5]
    assert script.calls["WatchEvaluations"] == 4


def test_watching_survives_a_restart_of_the_server() -> None:
    script = Script()
    script.record(1)
    with Peer(script) as first:
        client = Client(first.target)
        watch = client.watch_evaluations()
        seen: list[Evaluation] = [next(watch)]
    script.record(2)
    with Peer(script, port=first.port), client:
        seen.append(next(watch))

    assert [evaluation.step for evaluation in seen] == [1, 2]


def test_watching_resumes_after_a_server_cancelled_it(client: Client, script: Script) -> None:
    script.failures.append(Failure(code=grpc.StatusCode.CANCELLED))
    script.record(1)

    assert next(client.watch_evaluations()).step == 1


def test_watching_ends_when_the_client_is_closed(client: Client, script: Script) -> None:
    script.record(1)
    watch = client.watch_evaluations()
    next(watch)
    client.close()

    with pytest.raises(clients.CancelledError):
        next(watch)


def test_watching_ends_when_the_client_is_closed_before_it_resumes(peer: Peer, script: Script) -> None:
    script.failures.append(unavailable())
    client = Client(peer.target)
    watch = client.watch_evaluations()

    def close() -> None:
        script.entered.wait(PATIENCE_SECONDS)
        client.close()

    closing = threading.Thread(target=close)
    closing.start()

    with pytest.raises(clients.CancelledError):
        next(watch)
    closing.join()


def test_watching_ends_on_an_error_that_time_does_not_mend(client: Client, script: Script) -> None:
    script.failures.append(Failure(code=grpc.StatusCode.UNIMPLEMENTED))

    with pytest.raises(clients.UnimplementedError):
        next(client.watch_evaluations())


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


def prediction(outcome: PredictResult | UnderstudyError) -> PredictResult:
    assert isinstance(outcome, PredictResult)
    return outcome
