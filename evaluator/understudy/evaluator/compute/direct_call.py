"""Calls of traced functions at the price of one operation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


class DirectCall:
    """A concrete function of flat tensors, called as the one operation that runs functions inside of graphs.

    `ConcreteFunction.__call__` binds and checks its arguments in Python, which takes longer than a small model computes
    (docs/performance.md). What is called so must have been checked before. Thread-safe.

    That holds for functions that stay on the first CPU device. Where they span devices, tensors pass between these
    through a rendezvous that overlapping calls of the operation would share. There the function is called by its name,
    which gives each call a rendezvous of its own, and costs less than the concrete function's checks as well.

    Args:
        function: A concrete function whose every argument is one tensor and which returns a list of tensors.
        devices: Where its variables are.
    """

    def __init__(self, function: Any, devices: Sequence[str]) -> None:
        self.function = function
        self._dtypes = [tensor.dtype for tensor in function.outputs]
        self._has_gpu = any("GPU" in device.upper() for device in devices)
        self._is_direct = [device.upper().rpartition("DEVICE:")[2] for device in devices] == ["CPU:0"]

    def __call__(self, *arguments: Any) -> list[Any]:
        """Return the tensors that the function returns.

        Args:
            arguments: An array or a tensor for each argument, of its dtype, and of a shape that it takes.
        """
        captured = self.function.captured_inputs
        if not self._is_direct:
            with tf.device("CPU:0") if self._has_gpu else contextlib.nullcontext():  # not all to the first GPU
                tensors = [tf.convert_to_tensor(argument) for argument in arguments]
            return list(self.function.inference_fn.call_flat(*tensors, *captured))
        return tf.raw_ops.StatefulPartitionedCall(  # type: ignore[no-any-return]
            args=[*arguments, *captured], Tout=self._dtypes, f=self.function
        )


class StructuredCall:
    """A Python function, traced once for arguments of any structure, and called as `DirectCall` does. Thread-safe.

    Args:
        python_function: What to trace; takes and returns structures of tensors.
        specs: The specification of each argument: structures of `tf.TensorSpec`s, and None where None will come.
        devices: Where its variables are.
    """

    def __init__(self, python_function: Callable[..., Any], specs: Sequence[Any], devices: Sequence[str]) -> None:
        leaves = tf.nest.flatten(specs)
        self._places = [place for place, leaf in enumerate(leaves) if leaf is not None]
        self._result: Any = None

        def of_leaves(*given: Any) -> list[Any]:
            filled = list(leaves)
            for place, leaf in zip(self._places, given, strict=True):
                filled[place] = leaf
            result = python_function(*tf.nest.pack_sequence_as(specs, filled))
            self._result = tf.nest.map_structure(lambda _: None, result)
            return tf.nest.flatten(result)  # type: ignore[no-any-return]

        traced = tf.function(of_leaves, autograph=False)
        self._call = DirectCall(traced.get_concrete_function(*(leaves[place] for place in self._places)), devices)

    @property
    def function(self) -> Any:
        """The concrete function."""
        return self._call.function

    def __call__(self, *arguments: Any) -> Any:
        """Return what the function returns for arguments like their specifications."""
        leaves = tf.nest.flatten(arguments)
        return tf.nest.pack_sequence_as(self._result, self._call(*(leaves[place] for place in self._places)))
