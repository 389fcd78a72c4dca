"""The pass that answers predictions: with constants for the weights once they are made, else with variables."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from understudy.evaluator.evaluator_errors import FreezingCancelledError, NoFasterError, NotFrozenError, first_line
from understudy.evaluator.model.forward import ForwardPass
from understudy.evaluator.model.frozen import freeze, memory_bytes
from understudy.evaluator.model.replica_forward import ReplicaForward
from understudy.evaluator.model.traced_call import Tensors
from understudy.evaluator.types import Arrays

_log = logging.getLogger(__name__)

_NOT_FROZEN_YET = "it is frozen once it has served for a moment"


class PredictPass:
    """Runs predictions, with constants from `freeze` until `thaw`. Thread-safe: the constants are one reference."""

    def __init__(self) -> None:
        self.constants: ForwardPass | None = None
        self._why_not = _NOT_FROZEN_YET
        self._timed: tuple[ForwardPass, str] | None = None

    @property
    def note(self) -> str:
        """Whether constants are used for the weights, and why not."""
        if self.constants is not None:
            return "Predict uses constants for the weights"
        return f"Predict uses variables for the weights: {self._why_not}"

    def run(self, inputs: Arrays, variables: ForwardPass | ReplicaForward) -> Tensors:
        """Run the model; if constants fail where ``variables``, the same pass with variables, do not, drop them."""
        constants, failure = self.constants, None
        if constants is not None:
            try:
                return constants(inputs)[0]
            except Exception as error:  # noqa: BLE001 - the variables show whether constants are the cause
                failure = error
        outputs = variables(inputs)[0]
        if failure is not None:
            self.thaw()
            self._why_not = first_line(failure)
            _log.warning("constants for the weights are dropped", extra={"reason": self._why_not})
        return outputs

    def freeze(
        self,
        variables: ForwardPass | ReplicaForward,
        *,
        samples: Callable[[], Iterable[Arrays]],
        limit_mib: int,
        check_wanted: Callable[[], None],
    ) -> int:
        """Make constants of the weights, and use them; return the memory that they take, in bytes, about.

        Args:
            variables: The pass with variables.
            samples: Returns batches on which to compare and time both.
            limit_mib: The memory that the constants may take.
            check_wanted: Called between the parts of the work; raises FreezingCancelledError.

        Raises:
            NotFrozenError: The variables stay in use, for this reason.
        """
        try:
            self.constants = constants = self._freeze(variables, samples, limit_mib, check_wanted)
        except FreezingCancelledError:
            raise
        except Exception as error:
            self._why_not = first_line(error)
            raise
        return memory_bytes(constants)

    def thaw(self) -> None:
        """Use the variables again. A batch that runs with constants finishes with them."""
        self.constants = None
        self._why_not = _NOT_FROZEN_YET

    def forget(self) -> None:
        """Free the memory of the pass that was timed, because another model is built."""
        self._timed = None

    def _freeze(
        self,
        variables: ForwardPass | ReplicaForward,
        samples: Callable[[], Iterable[Arrays]],
        limit_mib: int,
        check_wanted: Callable[[], None],
    ) -> ForwardPass:
        """Freeze a pass; both are timed only for the first weights that are loaded into it."""
        if isinstance(variables, ReplicaForward):
            raise NotFrozenError("on GPUs, each replica has a function of its own")
        timed, no_faster = self._timed or (None, "")
        if timed is variables and no_faster:
            raise NoFasterError(no_faster)
        try:
            constants = freeze(
                variables,
                samples=samples,
                limit_mib=limit_mib,
                is_faster=timed is variables,
                check_wanted=check_wanted,
            )
        except NoFasterError as error:
            self._timed = variables, str(error)
            raise
        self._timed = variables, ""
        return constants
