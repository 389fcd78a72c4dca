"""The RPCs of ModelService."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor, Future

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.types import ServingChange
from understudy.service.calls.call import CallContext
from understudy.service.handlers import messages
from understudy.service.handlers.served_model import ServedModel
from understudy.v1 import model_pb2


class ModelHandler:
    """Describes versions and changes which one is served. Belongs to the event loop's thread.

    Args:
        model: The served model, whose evaluator manages the versions.
        executor: Runs blocking calls.
    """

    def __init__(self, model: ServedModel, *, executor: Executor) -> None:
        self._model = model
        self._evaluator = model.evaluator
        self._executor = executor

    async def get_model_metadata(
        self, request: model_pb2.GetModelMetadataRequest, call: CallContext
    ) -> model_pb2.GetModelMetadataResponse:
        """Describe one version."""
        del call
        self._model.check_optional_name(request.model_name)
        described = self._evaluator.metadata(messages.version(request.version))
        return model_pb2.GetModelMetadataResponse(
            model_name=self._model.name,
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
        del call
        self._model.check_optional_name(request.model_name)
        evaluator = self._evaluator
        return model_pb2.GetModelStatusResponse(
            model_name=self._model.name,
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
        del call
        self._model.check_optional_name(request.model_name)
        found = await asyncio.get_running_loop().run_in_executor(self._executor, self._evaluator.checkpoints)
        return model_pb2.ListCheckpointsResponse(checkpoints=[messages.checkpoint(info) for info in found])

    async def promote(self, request: model_pb2.PromoteRequest, call: CallContext) -> model_pb2.PromoteResponse:
        """Pin, remove the pin, or roll back."""
        self._model.check_optional_name(request.model_name)
        change = await asyncio.wrap_future(self._decide(request, call))
        return model_pb2.PromoteResponse(
            serving_step=change.serving_step, previous_step=change.previous_step, pinned_step=change.pinned_step
        )

    def _decide(self, request: model_pb2.PromoteRequest, call: CallContext) -> Future[ServingChange]:
        action, names_version = request.action, request.HasField("version")
        if action == model_pb2.PROMOTE_ACTION_PIN:
            if not names_version:
                raise InvalidInputError("action is PIN without a version; set version to a step or a label")
            return self._evaluator.pin(messages.version(request.version), deadline=call.deadline)
        if action not in (model_pb2.PROMOTE_ACTION_UNPIN, model_pb2.PROMOTE_ACTION_ROLL_BACK):
            raise InvalidInputError(f"action is {_action_name(action)}; give PIN, UNPIN or ROLL_BACK")
        if names_version:
            raise InvalidInputError(f"action is {_action_name(action)} with a version; only PIN takes one")
        if action == model_pb2.PROMOTE_ACTION_UNPIN:
            return self._evaluator.unpin(deadline=call.deadline)
        return self._evaluator.roll_back(deadline=call.deadline)


def _action_name(action: int) -> str:
    value = model_pb2.PromoteAction.DESCRIPTOR.values_by_number.get(action)
    return f"number {action}" if value is None else value.name.removeprefix("PROMOTE_ACTION_")
