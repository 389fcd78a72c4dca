"""The RPCs of ModelService."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor, Future

from understudy.evaluator.evaluator import Evaluator
from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.types import ServingChange
from understudy.service.calls.call import CallContext
from understudy.service.handlers import messages
from understudy.v1 import model_pb2


class ModelHandler:
    """Describes versions and changes which one is served. Belongs to the event loop's thread.

    Args:
        evaluator: Manages the versions.
        model_name: The name the model is served under.
        executor: Runs blocking calls.
    """

    def __init__(self, evaluator: Evaluator, *, model_name: str, executor: Executor) -> None:
        self._evaluator = evaluator
        self._model_name = model_name
        self._executor = executor

    async def get_model_metadata(
        self, request: model_pb2.GetModelMetadataRequest, call: CallContext
    ) -> model_pb2.GetModelMetadataResponse:
        """Describe one version."""
        del call
        described = self._evaluator.metadata(messages.version(request.version))
        return model_pb2.GetModelMetadataResponse(
            model_name=self._model_name,
            step=described.step,
            inputs=[messages.tensor_spec(spec) for spec in described.signature.inputs],
            outputs=[messages.tensor_spec(spec) for spec in described.signature.outputs],
            replicas=described.replicas,
            devices=described.devices,
            datasets=described.datasets,
            notes=described.notes,
        )

    async def get_model_status(
        self, request: model_pb2.GetModelStatusRequest, call: CallContext
    ) -> model_pb2.GetModelStatusResponse:
        """Return the state of every version."""
        del request, call
        evaluator = self._evaluator
        return model_pb2.GetModelStatusResponse(
            model_name=self._model_name,
            versions=[messages.version_status(status) for status in evaluator.status()],
            serving_step=evaluator.serving_step,
            latest_step=evaluator.latest_step,
            best_step=evaluator.best_step,
            pinned_step=evaluator.pinned_step,
        )

    async def list_checkpoints(
        self, request: model_pb2.ListCheckpointsRequest, call: CallContext
    ) -> model_pb2.ListCheckpointsResponse:
        """Return all checkpoints."""
        del request, call
        found = await asyncio.get_running_loop().run_in_executor(self._executor, self._evaluator.checkpoints)
        return model_pb2.ListCheckpointsResponse(checkpoints=[messages.checkpoint(info) for info in found])

    async def promote(self, request: model_pb2.PromoteRequest, call: CallContext) -> model_pb2.PromoteResponse:
        """Pin, remove the pin, or roll back."""
        change = await asyncio.wrap_future(self._decide(request, call))
        return model_pb2.PromoteResponse(
            serving_step=change.serving_step, previous_step=change.previous_step, pinned_step=change.pinned_step
        )

    def _decide(self, request: model_pb2.PromoteRequest, call: CallContext) -> Future[ServingChange]:
        action = request.WhichOneof("action")
        if action == "pin":
            return self._evaluator.pin(messages.version(request.pin), deadline=call.deadline)
        if action == "unpin" and request.unpin:
            return self._evaluator.unpin(deadline=call.deadline)
        if action == "roll_back" and request.roll_back:
            return self._evaluator.roll_back(deadline=call.deadline)
        raise InvalidInputError("the request has no action; set pin to a version, or unpin or roll_back to true")
