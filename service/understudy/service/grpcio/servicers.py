"""The services of understudy.v1: each method hands over to the data plane."""

# ruff: noqa: N802 - the protos name the methods

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from understudy.service.dataplane.call import CallContext
from understudy.service.dataplane.errors import UnsupportedError
from understudy.service.dataplane.evaluation import EvaluationPlane
from understudy.service.dataplane.metrics import MetricsPlane
from understudy.service.dataplane.model import ModelPlane
from understudy.service.dataplane.prediction import PredictionPlane
from understudy.service.grpcio.interceptors.base import Context
from understudy.v1 import (
    evaluation_pb2,
    evaluation_pb2_grpc,
    metrics_pb2,
    metrics_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    prediction_pb2,
    prediction_pb2_grpc,
)


class PredictionServicer(prediction_pb2_grpc.PredictionServiceServicer):
    """See proto/understudy/v1/prediction.proto."""

    def __init__(self, plane: PredictionPlane) -> None:
        self._plane = plane

    async def Predict(self, request: prediction_pb2.PredictRequest, context: Context) -> prediction_pb2.PredictResponse:
        """See the proto."""
        return await self._plane.predict(request, call_context(context))

    def PredictStream(
        self, request_iterator: AsyncIterator[prediction_pb2.PredictStreamRequest], context: Context
    ) -> AsyncGenerator[prediction_pb2.PredictStreamResponse, None]:
        """See the proto."""
        return self._plane.predict_stream(request_iterator, call_context(context))


class EvaluationServicer(evaluation_pb2_grpc.EvaluationServiceServicer):
    """See proto/understudy/v1/evaluation.proto."""

    def __init__(self, plane: EvaluationPlane) -> None:
        self._plane = plane

    async def Evaluate(
        self, request_iterator: AsyncIterator[evaluation_pb2.EvaluateRequest], context: Context
    ) -> evaluation_pb2.EvaluateResponse:
        """See the proto."""
        return await self._plane.evaluate(request_iterator, call_context(context))

    async def Compare(
        self, request_iterator: AsyncIterator[evaluation_pb2.CompareRequest], context: Context
    ) -> evaluation_pb2.CompareResponse:
        """See the proto."""
        return await self._plane.compare(request_iterator, call_context(context))

    def EvaluateDataset(
        self, request: evaluation_pb2.EvaluateDatasetRequest, context: Context
    ) -> AsyncGenerator[evaluation_pb2.EvaluateDatasetResponse, None]:
        """See the proto."""
        return self._plane.evaluate_dataset(request, call_context(context))

    async def ListEvaluations(
        self, request: evaluation_pb2.ListEvaluationsRequest, context: Context
    ) -> evaluation_pb2.ListEvaluationsResponse:
        """See the proto."""
        return await self._plane.list_evaluations(request, call_context(context))

    def WatchEvaluations(
        self, request: evaluation_pb2.WatchEvaluationsRequest, context: Context
    ) -> AsyncGenerator[evaluation_pb2.WatchEvaluationsResponse, None]:
        """See the proto."""
        return self._plane.watch_evaluations(request, call_context(context))


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """See proto/understudy/v1/model.proto."""

    def __init__(self, plane: ModelPlane) -> None:
        self._plane = plane

    async def GetModelMetadata(
        self, request: model_pb2.GetModelMetadataRequest, context: Context
    ) -> model_pb2.GetModelMetadataResponse:
        """See the proto."""
        return await self._plane.get_model_metadata(request, call_context(context))

    async def GetModelStatus(
        self, request: model_pb2.GetModelStatusRequest, context: Context
    ) -> model_pb2.GetModelStatusResponse:
        """See the proto."""
        return await self._plane.get_model_status(request, call_context(context))

    async def ListCheckpoints(
        self, request: model_pb2.ListCheckpointsRequest, context: Context
    ) -> model_pb2.ListCheckpointsResponse:
        """See the proto."""
        return await self._plane.list_checkpoints(request, call_context(context))

    async def Promote(self, request: model_pb2.PromoteRequest, context: Context) -> model_pb2.PromoteResponse:
        """See the proto."""
        return await self._plane.promote(request, call_context(context))


class MetricsServicer(metrics_pb2_grpc.MetricsServiceServicer):
    """See proto/understudy/v1/metrics.proto."""

    def __init__(self, plane: MetricsPlane) -> None:
        self._plane = plane

    async def GetMetrics(
        self, request: metrics_pb2.GetMetricsRequest, context: Context
    ) -> metrics_pb2.GetMetricsResponse:
        """See the proto."""
        return await self._plane.get_metrics(request, call_context(context))


def refusal(sentence: str) -> Any:
    """Return a method that answers UNIMPLEMENTED with a sentence."""

    async def refuse(_self: Any, _request: Any, _context: Context) -> Any:
        raise UnsupportedError(sentence)

    return refuse


def call_context(context: Context) -> CallContext:
    """Return what the data plane knows about a call."""
    remaining: Any = context.time_remaining()
    return CallContext.with_time_remaining(remaining)
