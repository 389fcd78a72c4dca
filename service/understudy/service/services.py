"""Every service on the gRPC port, and the handler and codec of each method."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from google.protobuf import descriptor_pool, text_format
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from understudy.evaluator.evaluator_errors import NotReadyError
from understudy.evaluator.types import Prediction
from understudy.oip import inference_pb2
from understudy.service.calls.caller import ANY_GROUP, OPEN_TO_ALL, Group, only
from understudy.service.calls.methods import (
    CallContext,
    Codec,
    Handler,
    Requests,
    Service,
    ZeroCopyCodec,
    foreign_service,
    refusals,
    service,
)
from understudy.service.calls.status import Failure
from understudy.service.fleet.fleet_handler import PATIENCE_SECONDS, FleetHandler
from understudy.service.handlers.evaluation_handler import EvaluationHandler
from understudy.service.handlers.infer_codec import (
    InferCodec,
    InferFailure,
    InferRequest,
    InferResponse,
    InferStreamCodec,
)
from understudy.service.handlers.inference_handler import UNSUPPORTED, InferenceHandler
from understudy.service.handlers.predict_codec import PredictCodec, PredictRequest, PredictStreamCodec
from understudy.service.handlers.prediction_handler import PredictionHandler
from understudy.service.handlers.replay_stream import PATIENCE_SECONDS as REPLAY_PATIENCE_SECONDS
from understudy.service.handlers.replay_stream import ReplayCodec
from understudy.service.handlers.status_handlers import HealthHandler, MetricsHandler, ModelHandler
from understudy.service.readiness import Readiness
from understudy.v1 import evaluation_pb2, fleet_pb2, metrics_pb2, model_pb2, prediction_pb2

if TYPE_CHECKING:
    from understudy.service.handlers.tfserving_handler import TfServingHandler


PREDICTION: ServiceDescriptor = prediction_pb2.DESCRIPTOR.services_by_name["PredictionService"]
EVALUATION: ServiceDescriptor = evaluation_pb2.DESCRIPTOR.services_by_name["EvaluationService"]
MODEL: ServiceDescriptor = model_pb2.DESCRIPTOR.services_by_name["ModelService"]
FLEET: ServiceDescriptor = fleet_pb2.DESCRIPTOR.services_by_name["FleetService"]
METRICS: ServiceDescriptor = metrics_pb2.DESCRIPTOR.services_by_name["MetricsService"]
INFERENCE: ServiceDescriptor = inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
HEALTH: ServiceDescriptor = health_pb2.DESCRIPTOR.services_by_name["Health"]

ALPHA: ServiceDescriptor = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
"""The service of version 1alpha."""

LIGHT_SERVICES = (PREDICTION, EVALUATION, MODEL, FLEET, METRICS, INFERENCE, HEALTH, ALPHA)
"""Every service but TensorFlow Serving's, whose messages import TensorFlow."""

PREDICTS, EVALUATES = only(Group.PREDICT), only(Group.EVALUATE)
PROMOTES, OBSERVES, FOLLOWS = only(Group.PROMOTE), only(Group.OBSERVE), only(Group.FOLLOW)

_ALPHA_VERSION = "v1alpha"
_VERSION = "v1"


@dataclass(frozen=True, kw_only=True)
class RequestHandlers:
    """The handlers that every front end serves."""

    prediction: PredictionHandler
    evaluation: EvaluationHandler
    model: ModelHandler
    fleet: FleetHandler
    metrics: MetricsHandler
    inference: InferenceHandler
    tf_serving: TfServingHandler


@dataclass(frozen=True, kw_only=True)
class Codecs:
    """The codecs of the methods that predict."""

    predict: Codec[PredictRequest, Prediction]
    predict_stream: Codec[PredictRequest, Prediction | Failure]
    infer: Codec[InferRequest, InferResponse]
    infer_stream: Codec[InferRequest, InferResponse | InferFailure]


def plain_codecs() -> Codecs:
    """Return codecs that parse and build every message."""
    return Codecs(
        predict=PredictCodec(),
        predict_stream=PredictStreamCodec(),
        infer=InferCodec(),
        infer_stream=InferStreamCodec(),
    )


def all_services(handlers: RequestHandlers, readiness: Readiness, codecs: Codecs) -> tuple[Service, ...]:
    """Return every service.

    Args:
        handlers: The handlers of the methods.
        codecs: The codecs of the methods that predict.
        readiness: The state that health reports.
    """
    working = (*_own(handlers, codecs), inference_service(handlers.inference, codecs), *_tf_serving(handlers))
    names = [each.name for each in working]
    health = HealthHandler(readiness, names)
    return (*working, health_service(health), *reflection_services([*names, HEALTH.full_name]))


def _own(handlers: RequestHandlers, codecs: Codecs) -> tuple[Service, ...]:
    prediction, evaluation, model, fleet = handlers.prediction, handlers.evaluation, handlers.model, handlers.fleet
    batches = ZeroCopyCodec(evaluation_pb2.EvaluateRequest)
    return (
        service(
            PREDICTION,
            {
                "Predict": Handler(
                    PREDICTS, prediction.predict, admit=prediction.check_admission, codec=codecs.predict
                ),
                "PredictStream": Handler(PREDICTS, prediction.predict_stream, codec=codecs.predict_stream),
            },
        ),
        service(
            EVALUATION,
            {
                "Evaluate": Handler(EVALUATES, evaluation.evaluate, codec=batches),
                "Compare": Handler(EVALUATES, evaluation.compare),
                "Replay": Handler(
                    EVALUATES, evaluation.replay, codec=ReplayCodec(), patience_seconds=REPLAY_PATIENCE_SECONDS
                ),
                "EvaluateDataset": Handler(EVALUATES, evaluation.evaluate_dataset),
                "ListEvaluations": Handler(OBSERVES, evaluation.list_evaluations),
                "WatchEvaluations": Handler(OBSERVES, evaluation.watch_evaluations),
                "GetEvaluationTables": Handler(OBSERVES, evaluation.get_evaluation_tables),
                "GetExamples": Handler(OBSERVES, evaluation.get_examples),
            },
        ),
        service(
            MODEL,
            {
                "GetModelMetadata": Handler(ANY_GROUP, model.get_model_metadata),
                "GetModelStatus": Handler(ANY_GROUP, model.get_model_status),
                "ListCheckpoints": Handler(OBSERVES, model.list_checkpoints),
                "Promote": Handler(PROMOTES, model.promote, admit=model.check_promotion),
            },
        ),
        service(
            FLEET,
            {
                "Follow": Handler(FOLLOWS, fleet.follow),
                "ReadCheckpoint": Handler(FOLLOWS, fleet.read_checkpoint, patience_seconds=PATIENCE_SECONDS),
                "GetFleet": Handler(OBSERVES, fleet.get_fleet),
            },
        ),
        metrics_service(handlers.metrics),
    )


def standby_services(readiness: Readiness) -> tuple[Service, ...]:
    """Return what a server answers that waits to take over: health. All other calls are refused as unavailable."""

    def refuse(_call: CallContext) -> None:
        raise NotReadyError(readiness.reason)

    refusal = Handler(OPEN_TO_ALL, _not_reached, admit=refuse)
    working = [each for each in (*LIGHT_SERVICES, *tf_serving_services()) if each not in (HEALTH, ALPHA)]
    return (
        health_service(HealthHandler(readiness, [each.full_name for each in LIGHT_SERVICES])),
        *(foreign_service(each, dict.fromkeys(each.methods_by_name, refusal)) for each in working),
    )


async def _not_reached(_request: Any, _call: CallContext) -> None:
    """Stand for the answer of a method whose admission check refuses every call."""
    raise NotImplementedError


def health_service(health: HealthHandler) -> Service:
    """Return gRPC's service of health."""
    return foreign_service(
        HEALTH,
        {
            "Check": Handler(OPEN_TO_ALL, health.check),
            "List": Handler(OPEN_TO_ALL, health.list),
            "Watch": Handler(OPEN_TO_ALL, health.watch),
        },
    )


def metrics_service(metrics: MetricsHandler) -> Service:
    """Return the service of the metrics, whose method ``/metrics`` calls as well."""
    return service(METRICS, {"GetMetrics": Handler(OBSERVES, metrics.get_metrics)})


def inference_service(inference: InferenceHandler, codecs: Codecs) -> Service:
    """Return the Open Inference Protocol's service, whose methods the REST form calls as well."""
    return service(
        INFERENCE,
        {
            "ServerLive": Handler(OPEN_TO_ALL, inference.server_live),
            "ServerReady": Handler(OPEN_TO_ALL, inference.server_ready),
            "ModelReady": Handler(ANY_GROUP, inference.model_ready),
            "ServerMetadata": Handler(ANY_GROUP, inference.server_metadata),
            "ModelMetadata": Handler(ANY_GROUP, inference.model_metadata),
            "ModelInfer": Handler(PREDICTS, inference.model_infer, admit=inference.check_admission, codec=codecs.infer),
            "ModelStreamInfer": Handler(PREDICTS, inference.model_stream_infer, codec=codecs.infer_stream),
            "ModelConfig": Handler(ANY_GROUP, inference.model_config),
            "ModelStatistics": Handler(OBSERVES, inference.model_statistics),
            "RepositoryIndex": Handler(OBSERVES, inference.repository_index),
            **refusals(UNSUPPORTED, ANY_GROUP),
        },
    )


def tf_serving_services() -> tuple[ServiceDescriptor, ServiceDescriptor]:
    """Return TensorFlow Serving's PredictionService and ModelService. Imports TensorFlow."""
    from tensorflow_serving.apis import model_service_pb2, prediction_service_pb2

    return (
        prediction_service_pb2.DESCRIPTOR.services_by_name["PredictionService"],
        model_service_pb2.DESCRIPTOR.services_by_name["ModelService"],
    )


def _tf_serving(handlers: RequestHandlers) -> tuple[Service, ...]:
    from understudy.service.handlers.tfserving_handler import UNSUPPORTED as UNSUPPORTED_BY_TF_SERVING
    from understudy.service.handlers.tfserving_handler import TfPredictCodec

    tf_serving = handlers.tf_serving
    answered = {
        "Predict": Handler(PREDICTS, tf_serving.predict, admit=tf_serving.check_admission, codec=TfPredictCodec()),
        "GetModelMetadata": Handler(ANY_GROUP, tf_serving.get_model_metadata),
        "GetModelStatus": Handler(ANY_GROUP, tf_serving.get_model_status),
    }
    table = answered | refusals(UNSUPPORTED_BY_TF_SERVING, ANY_GROUP)
    return tuple(foreign_service(descriptor, table) for descriptor in tf_serving_services())


def reflection_services(names: Iterable[str]) -> tuple[Service, ...]:
    """Return server reflection in its two versions, whose messages differ in their package only.

    Args:
        names: Full names of the services to describe, without those of reflection itself.
    """
    servicer = reflection.aio.ReflectionServicer([*names, ALPHA.full_name, _declared_version_1()])  # type: ignore[attr-defined]

    def info(requests: Requests, call: CallContext) -> AsyncGenerator[Any, None]:
        del call
        answers: AsyncGenerator[Any, None] = servicer.ServerReflectionInfo(requests, None)
        return answers

    alpha = foreign_service(ALPHA, {"ServerReflectionInfo": Handler(ANY_GROUP, info)})
    return alpha, _as_version_1(alpha)


def _declared_version_1() -> str:
    """Register the descriptor of version 1, which grpcio-reflection lacks; return its full name."""
    alpha = FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(alpha)
    text = text_format.MessageToString(alpha).replace(_ALPHA_VERSION, _VERSION)
    declared = text_format.Parse(text, FileDescriptorProto())
    descriptor_pool.Default().AddSerializedFile(declared.SerializeToString())
    return ALPHA.full_name.replace(_ALPHA_VERSION, _VERSION)


def _as_version_1(alpha: Service) -> Service:
    """Return the service under its version 1 name, with the messages of version 1alpha, which encode the same."""
    name = alpha.name.replace(_ALPHA_VERSION, _VERSION)
    methods = [replace(method, rpc=replace(method.rpc, service=name)) for method in alpha.methods]
    return Service(name=name, methods=tuple(methods))
