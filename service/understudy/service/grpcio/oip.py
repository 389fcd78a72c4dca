"""GRPCInferenceService of the Open Inference Protocol: each method hands over to the data plane."""

# ruff: noqa: N802 - the proto names the methods

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

from understudy.oip import inference_pb2, inference_pb2_grpc
from understudy.service.dataplane.oip.plane import UNSUPPORTED, InferencePlane
from understudy.service.grpcio.interceptors.base import Context
from understudy.service.grpcio.servicers import call_context, refusal


class InferenceServicer(inference_pb2_grpc.GRPCInferenceServiceServicer):
    """See proto/understudy/oip/inference.proto."""

    RepositoryModelLoad = refusal(UNSUPPORTED["RepositoryModelLoad"])
    RepositoryModelUnload = refusal(UNSUPPORTED["RepositoryModelUnload"])
    SystemSharedMemoryStatus = refusal(UNSUPPORTED["SystemSharedMemoryStatus"])
    SystemSharedMemoryRegister = refusal(UNSUPPORTED["SystemSharedMemoryRegister"])
    SystemSharedMemoryUnregister = refusal(UNSUPPORTED["SystemSharedMemoryUnregister"])
    CudaSharedMemoryStatus = refusal(UNSUPPORTED["CudaSharedMemoryStatus"])
    CudaSharedMemoryRegister = refusal(UNSUPPORTED["CudaSharedMemoryRegister"])
    CudaSharedMemoryUnregister = refusal(UNSUPPORTED["CudaSharedMemoryUnregister"])
    TraceSetting = refusal(UNSUPPORTED["TraceSetting"])
    LogSettings = refusal(UNSUPPORTED["LogSettings"])

    def __init__(self, plane: InferencePlane) -> None:
        self._plane = plane

    async def ServerLive(
        self, request: inference_pb2.ServerLiveRequest, context: Context
    ) -> inference_pb2.ServerLiveResponse:
        """See the proto."""
        return await self._plane.server_live(request, call_context(context))

    async def ServerReady(
        self, request: inference_pb2.ServerReadyRequest, context: Context
    ) -> inference_pb2.ServerReadyResponse:
        """See the proto."""
        return await self._plane.server_ready(request, call_context(context))

    async def ModelReady(
        self, request: inference_pb2.ModelReadyRequest, context: Context
    ) -> inference_pb2.ModelReadyResponse:
        """See the proto."""
        return await self._plane.model_ready(request, call_context(context))

    async def ServerMetadata(
        self, request: inference_pb2.ServerMetadataRequest, context: Context
    ) -> inference_pb2.ServerMetadataResponse:
        """See the proto."""
        return await self._plane.server_metadata(request, call_context(context))

    async def ModelMetadata(
        self, request: inference_pb2.ModelMetadataRequest, context: Context
    ) -> inference_pb2.ModelMetadataResponse:
        """See the proto."""
        return await self._plane.model_metadata(request, call_context(context))

    async def ModelInfer(
        self, request: inference_pb2.ModelInferRequest, context: Context
    ) -> inference_pb2.ModelInferResponse:
        """See the proto."""
        return await self._plane.model_infer(request, call_context(context))

    def ModelStreamInfer(
        self, request_iterator: AsyncIterator[inference_pb2.ModelInferRequest], context: Context
    ) -> AsyncGenerator[inference_pb2.ModelStreamInferResponse, None]:
        """See the proto."""
        return self._plane.model_stream_infer(request_iterator, call_context(context))

    async def ModelConfig(
        self, request: inference_pb2.ModelConfigRequest, context: Context
    ) -> inference_pb2.ModelConfigResponse:
        """See the proto."""
        return await self._plane.model_config(request, call_context(context))

    async def ModelStatistics(
        self, request: inference_pb2.ModelStatisticsRequest, context: Context
    ) -> inference_pb2.ModelStatisticsResponse:
        """See the proto."""
        return await self._plane.model_statistics(request, call_context(context))

    async def RepositoryIndex(
        self, request: inference_pb2.RepositoryIndexRequest, context: Context
    ) -> inference_pb2.RepositoryIndexResponse:
        """See the proto."""
        return await self._plane.repository_index(request, call_context(context))
