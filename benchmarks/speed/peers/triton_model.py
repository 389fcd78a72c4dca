"""The model in Triton's Python backend: one call for all requests that Triton's dynamic batching merges."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as triton
from forward import Forward


class TritonPythonModel:
    """The backend's model interface."""

    def initialize(self, arguments: dict[str, str]) -> None:
        """Load the model that the configuration names."""
        parameters = json.loads(arguments["model_config"])["parameters"]
        self._forward = Forward(parameters["model_file"]["string_value"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer the requests of one batch."""
        rows = [triton.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        outputs = self._forward(rows[0] if len(rows) == 1 else np.concatenate(rows))
        ends = np.cumsum([len(array) for array in rows])[:-1]
        return [triton.InferenceResponse([triton.Tensor("y", part)]) for part in np.split(outputs, ends)]
