"""The model under MLServer, which loads `Net`."""

from __future__ import annotations

from forward import Forward
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class Net(MLModel):
    """MLServer's model interface."""

    async def load(self) -> bool:
        """Load the model that the settings name."""
        self._forward = Forward(self.settings.parameters.uri)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Answer one request, or several that adaptive batching merged."""
        answers = self._forward(NumpyCodec.decode_input(payload.inputs[0]))
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("y", answers)])
