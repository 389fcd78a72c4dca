"""TensorFlow Serving's services: each method hands over to the data plane. Imports TensorFlow."""

# ruff: noqa: N802 - the protos name the methods

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from tensorflow_serving.apis import (
    model_service_pb2,
    model_service_pb2_grpc,
    prediction_service_pb2,
    prediction_service_pb2_grpc,
)

from understudy.service.dataplane.tfserving.plane import UNSUPPORTED, TfServingPlane
from understudy.service.grpcio.interceptors.base import Context
from understudy.service.grpcio.servicers import call_context, refusal

SERVICES: tuple[ServiceDescriptor, ...] = (
    prediction_service_pb2.DESCRIPTOR.services_by_name["PredictionService"],
    model_service_pb2.DESCRIPTOR.services_by_name["ModelService"],
)


def add_to_server(plane: TfServingPlane, server: grpc.aio.Server) -> None:
    """Register both services."""
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(TfPredictionServicer(plane), server)
    model_service_pb2_grpc.add_ModelServiceServicer_to_server(TfModelServicer(plane), server)


class TfPredictionServicer(prediction_service_pb2_grpc.PredictionServiceServicer):  # type: ignore[misc]  # it has no types
    """See tensorflow_serving/apis/prediction_service.proto."""

    Classify = refusal(UNSUPPORTED["Classify"])
    Regress = refusal(UNSUPPORTED["Regress"])
    MultiInference = refusal(UNSUPPORTED["MultiInference"])

    def __init__(self, plane: TfServingPlane) -> None:
        self._plane = plane

    async def Predict(self, request: Any, context: Context) -> Any:
        """See the proto."""
        return await self._plane.predict(request, call_context(context))

    async def GetModelMetadata(self, request: Any, context: Context) -> Any:
        """See the proto."""
        return await self._plane.get_model_metadata(request, call_context(context))


class TfModelServicer(model_service_pb2_grpc.ModelServiceServicer):  # type: ignore[misc]  # it has no types
    """See tensorflow_serving/apis/model_service.proto."""

    HandleReloadConfigRequest = refusal(UNSUPPORTED["HandleReloadConfigRequest"])

    def __init__(self, plane: TfServingPlane) -> None:
        self._plane = plane

    async def GetModelStatus(self, request: Any, context: Context) -> Any:
        """See the proto."""
        return await self._plane.get_model_status(request, call_context(context))
