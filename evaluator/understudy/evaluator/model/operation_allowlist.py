"""The operations that a SavedModel may execute.

Accepted are the operations that compute: those without state, apart from the ones below, and those whose state is
variables, tables in memory, random numbers or control flow. What reads or writes files, opens connections or calls
Python is excluded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from understudy.compat import is_stateful
from understudy.evaluator.evaluator_errors import LoadError

_WITH_STATE: Final = re.compile(
    r"VarHandleOp|VariableV2|Variable|TemporaryVariable|VarIsInitializedOp|VariableShape"
    r"|DestroyResourceOp|DisableCopyOnRead|ReadVariableOp"
    r"|Assign\w*|Resource(Apply|SparseApply|Gather|Scatter|StridedSlice)\w*|ResourceCountUpTo"
    r"|(Anonymous)?(Mutable(Dense)?)?HashTable(OfTensors)?(V2)?|InitializeTableV2|LookupTable\w+V2"
    r"|StatefulPartitionedCall|If|While|Case|Assert|CheckNumerics(V2)?|Print(V2)?|GuaranteeConst|Empty|DeviceIndex"
    r"|TensorArray\w*|Stack\w*|Random(Crop|Gamma|Poisson|PoissonV2|Shuffle|StandardNormal|Uniform|UniformInt)"
    r"|Stateful(RandomBinomial|StandardNormal|StandardNormalV2|TruncatedNormal|Uniform|UniformFullInt|UniformInt)"
    r"|TruncatedNormal|ParameterizedTruncatedNormal|Multinomial|NonDeterministicInts|Rng(ReadAndSkip|Skip)"
    r"|StatelessRandomGetAlg|SampleDistortedBoundingBox(V2)?|\w*CandidateSampler"
    r"|CudnnRNN\w*|\w*SparseFromTensorsMap|\w*SparseToTensorsMap|Timestamp"
)
"""The accepted operations with state."""

_EXCLUDED: Final = re.compile(
    r"ReadFile|MatchingFiles|PyFuncStateless|Reader\w+|\w*Dataset\w*|\w*Iterator\w*|Debug\w*|Copy|CopyHost"
    r"|(Decode|Encode)Proto\w*|GenerateVocabRemapping|\w*Summary(V2)?|InitializeTableFromTextFile"
)
"""The excluded operations without state."""

_REMEDY: Final = "if you trust who wrote it, start the service with --allow-unsafe-models"
_RESTORING: Final = frozenset({"RestoreV2", "Restore", "RestoreSlice", "MergeV2Checkpoints", "ShardedFilename"})


def check_operations(found: Mapping[str, Any], folder_name: str) -> None:
    """Check what `understudy.checkpoints.inspection.graph.inspect_saved_model` found.

    Raises:
        LoadError: The model executes an operation that is not accepted. The text names it and where it is.
    """
    for problem in found["problems"]:
        raise LoadError(f"{folder_name}: {problem}; {_REMEDY}")
    for part, extra in (("operations", frozenset[str]()), ("restoring", _RESTORING)):
        for operation, place in found[part].items():
            if operation not in extra and not _is_accepted(operation):
                raise LoadError(
                    f"{folder_name} executes {operation!r} ({place}), which is not one of the accepted operations: "
                    f"it may read or write files; {_REMEDY}"
                )


def _is_accepted(operation: str) -> bool:
    if _WITH_STATE.fullmatch(operation):
        return True
    # An operation that TensorFlow does not know is a function of the model, or TensorFlow refuses it.
    return not is_stateful(operation) and not _EXCLUDED.fullmatch(operation)
