"""The names, types and shapes of a model's inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor: its flattened name, NumPy's name of its dtype (``string`` for bytes), and its shape.

    ``None`` in the shape stands for any length; axis 0 is the batch and always ``None``. ``positional`` means that the
    name was derived from the tensor's position, because the user gave none; it is ignored in comparisons.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    positional: bool = field(default=False, compare=False)

    def as_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        value = {"name": self.name, "dtype": self.dtype, "shape": list(self.shape)}
        return {**value, "positional": True} if self.positional else value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TensorSpec:
        """Read what `as_json` returned; raise KeyError or TypeError if it is something else."""
        return cls(
            name=str(value["name"]),
            dtype=str(value["dtype"]),
            shape=tuple(value["shape"]),
            positional=bool(value.get("positional", False)),
        )


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Every input and output of a model, in the model's own order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def as_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return {
            "inputs": [spec.as_json() for spec in self.inputs],
            "outputs": [spec.as_json() for spec in self.outputs],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Signature:
        """Read what `as_json` returned; raise KeyError or TypeError if it is something else."""
        return cls(
            inputs=tuple(TensorSpec.from_json(spec) for spec in value["inputs"]),
            outputs=tuple(TensorSpec.from_json(spec) for spec in value["outputs"]),
        )
