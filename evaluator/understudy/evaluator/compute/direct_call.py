"""Calls of traced functions at the price of one operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class DirectCall:
    """A concrete function of flat tensors, called as the one operation that runs functions inside of graphs.

    `ConcreteFunction.__call__` binds and checks its arguments in Python, which takes longer than a small model computes
    (docs/performance.md). What is called so must have been checked before. Thread-safe.

    That holds for functions that stay on the first CPU device. Where they span devices, tensors pass between these
    through a rendezvous that overlapping calls of the operation would share, so the concrete function is called.

    Args:
        function: A concrete function whose every argument is one tensor and which returns a list of tensors.
        devices: Where its variables are.
    """

    def __init__(self, function: Any, devices: Sequence[str]) -> None:
        self.function = function
        self._dtypes = [tensor.dtype for tensor in function.outputs]
        self._is_direct = [device.upper().rpartition("DEVICE:")[2] for device in devices] == ["CPU:0"]

    def __call__(self, *arguments: Any) -> list[Any]:
        """Return the tensors that the function returns.

        Args:
            arguments: An array or a tensor for each argument, of its dtype, and of a shape that it takes.
        """
        if not self._is_direct:
            return list(self.function(*arguments))
        captured = self.function.captured_inputs
        return tf.raw_ops.StatefulPartitionedCall(  # type: ignore[no-any-return]
            args=[*arguments, *captured], Tout=self._dtypes, f=self.function
        )
