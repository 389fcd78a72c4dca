"""The asyncio calls that describe the model and change what is served."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import NoReturn, Self, TypeVar, Unpack

import grpc
from grpc import aio

from understudy.clients import requests, responses
from understudy.clients.async_connection import AsyncConnection, Stubs
from understudy.clients.call_options import CallDefaults, CallOptions, Metadata
from understudy.clients.channel import DEFAULT_MAX_MESSAGE_BYTES, Option, channel_options, channel_target
from understudy.clients.client_errors import client_closed, translated
from understudy.clients.evaluation_types import (
    Evaluation,
    EvaluationOutcome,
    EvaluationTables,
    ExampleKind,
    ExampleList,
)
from understudy.clients.model_calls import not_copied
from understudy.clients.token import BearerToken, check_plaintext
from understudy.clients.types import Checkpoint, FleetStatus, ModelMetadata, ModelStatus, Promotion, Version
from understudy.v1 import metrics_pb2, model_pb2

Request = TypeVar("Request")
Response = TypeVar("Response")


class AsyncModelCalls:
    """The connection, and every unary call about the model; see `AsyncClient`."""

    def __init__(
        self,
        targets: str | Sequence[str],
        *,
        model_name: str = "",
        credentials: grpc.ChannelCredentials | None = None,
        options: Sequence[Option] = (),
        interceptors: Sequence[aio.ClientInterceptor] = (),
        metadata: Metadata = (),
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        token_without_tls: bool = False,
        timeout_seconds: float = 30.0,
        stream_timeout_seconds: float = 3600.0,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    ) -> None:
        own_token = None if token is None and token_file is None else BearerToken(token, token_file)
        if own_token is not None and credentials is None:
            check_plaintext(targets, leaves_machine=token_without_tls)
        self._defaults = CallDefaults(
            timeout_seconds=timeout_seconds,
            stream_timeout_seconds=stream_timeout_seconds,
            metadata=metadata,
            is_secure=credentials is not None,
            token=own_token,
        )
        self._requests = requests.Requests(model_name=model_name)
        self._known_names = requests.KnownNames()
        target, all_options = channel_target(targets), channel_options(targets, max_message_bytes, options)
        self._connection = AsyncConnection(
            (lambda: aio.insecure_channel(target, all_options, interceptors=interceptors))
            if credentials is None
            else (lambda: aio.secure_channel(target, credentials, all_options, interceptors=interceptors))
        )

    async def close(self) -> None:
        """Close the channel and cancel running calls."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __reduce__(self) -> NoReturn:
        raise not_copied(self)

    async def metadata(self, *, version: Version | None = None, **call_options: Unpack[CallOptions]) -> ModelMetadata:
        """Describe the inputs, outputs and devices of a version."""
        response = await self._invoke(
            self._stubs.models.GetModelMetadata, self._requests.metadata(version), call_options
        )
        return responses.metadata(response)

    async def status(self, **call_options: Unpack[CallOptions]) -> ModelStatus:
        """Return the state of every version."""
        return responses.status(
            await self._invoke(self._stubs.models.GetModelStatus, self._requests.status(), call_options)
        )

    async def checkpoints(self, **call_options: Unpack[CallOptions]) -> tuple[Checkpoint, ...]:
        """List the checkpoints that the server sees, by ascending step."""
        return responses.checkpoints(
            await self._invoke(self._stubs.models.ListCheckpoints, self._requests.checkpoints(), call_options)
        )

    async def list_evaluations(
        self,
        *,
        dataset: str | None = None,
        min_step: int | None = None,
        max_step: int | None = None,
        outcome: EvaluationOutcome | None = None,
        **call_options: Unpack[CallOptions],
    ) -> AsyncGenerator[Evaluation]:
        """Yield the entries of the server's ledger, oldest first, and request pages as needed."""
        token, more = "", True
        while more:
            request = self._requests.list_evaluations(
                page_token=token, dataset=dataset, min_step=min_step, max_step=max_step, outcome=outcome
            )
            page = await self._invoke(self._stubs.evaluations.ListEvaluations, request, call_options)
            for record in page.evaluations:
                yield responses.evaluation(record)
            token = page.next_page_token
            more = bool(token)

    async def evaluation_tables(
        self, dataset: str | None = None, *, version: Version | None = None, **call_options: Unpack[CallOptions]
    ) -> EvaluationTables:
        """Return the tables of the last evaluation of a version on a dataset, by default the server's first one."""
        request = self._requests.tables(dataset, version)
        return responses.evaluation_tables(
            await self._invoke(self._stubs.evaluations.GetEvaluationTables, request, call_options)
        )

    async def examples(
        self,
        kind: ExampleKind,
        dataset: str | None = None,
        *,
        version: Version | None = None,
        baseline: Version | None = None,
        max_examples: int = 100,
        **call_options: Unpack[CallOptions],
    ) -> ExampleList:
        """Return the hardest examples of a dataset, or those that only a version or its baseline decided rightly."""
        request = self._requests.examples(kind, dataset, version=version, baseline=baseline, max_examples=max_examples)
        return responses.example_list(await self._invoke(self._stubs.evaluations.GetExamples, request, call_options))

    async def promote(self, version: Version, **call_options: Unpack[CallOptions]) -> Promotion:
        """Serve this version until `unpin`; load it if necessary."""
        return await self._promoted(self._requests.pin(version), call_options)

    async def unpin(self, **call_options: Unpack[CallOptions]) -> Promotion:
        """Remove the pin and follow the version policy again."""
        return await self._promoted(self._requests.unpin(), call_options)

    async def roll_back(self, **call_options: Unpack[CallOptions]) -> Promotion:
        """Serve and pin the version that served before. The next rollback goes further back."""
        return await self._promoted(self._requests.roll_back(), call_options)

    async def _promoted(self, request: model_pb2.PromoteRequest, call_options: CallOptions) -> Promotion:
        return responses.promotion(await self._invoke(self._stubs.models.Promote, request, call_options))

    async def fleet(self, **call_options: Unpack[CallOptions]) -> FleetStatus:
        """Return which servers follow this evaluator, and what each serves."""
        return responses.fleet(await self._invoke(self._stubs.fleet.GetFleet, self._requests.fleet(), call_options))

    async def metrics(self, **call_options: Unpack[CallOptions]) -> str:
        """Return the server's metrics as Prometheus text."""
        response = await self._invoke(self._stubs.metrics.GetMetrics, metrics_pb2.GetMetricsRequest(), call_options)
        return response.exposition.decode()

    async def is_serving(self, service: str = "", **call_options: Unpack[CallOptions]) -> bool:
        """Ask ``grpc.health.v1`` whether the server, or one service of it, serves."""
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        stub = health_pb2_grpc.HealthStub(self._stubs.channel)
        response = await self._invoke(stub.Check, health_pb2.HealthCheckRequest(service=service), call_options)
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    async def _invoke(
        self, method: aio.UnaryUnaryMultiCallable[Request, Response], request: Request, call_options: CallOptions
    ) -> Response:
        with self._calling():
            return await method(request, **self._defaults.unary(call_options))

    @property
    def _stubs(self) -> Stubs:
        return self._connection.stubs

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Raise the errors of `understudy.clients.client_errors`, also for calls that closing the client cancels."""
        try:
            with translated():
                yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._connection.closed or (task is not None and task.cancelling()):
                raise
            raise client_closed() from None
