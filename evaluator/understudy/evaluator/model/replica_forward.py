"""The forward pass on GPUs: a function for each replica, with all data exchange on the host."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from understudy.checkpoints.keras_signature import ModelInterface
from understudy.compat import call_flat
from understudy.compat.error_texts import first_line
from understudy.evaluator.evaluator_errors import InvalidInputError, Resource, exhausted_resource
from understudy.evaluator.model.forward import BatchLimits, ModelCall, Tensors, tensor_specs
from understudy.evaluator.model.graph_analysis import draws_random_numbers, find_value_ranges
from understudy.evaluator.model.reclaiming import reclaim_memory
from understudy.evaluator.types import Array

Named = tuple[dict[str, Array], dict[str, Array]]
"""The outputs and the masks by name, each ``[examples, ...]``."""

Fetch = Callable[[], Named]
_HOST = "CPU:0"


@dataclass(frozen=True, kw_only=True)
class Share:
    """The examples from ``start`` to ``stop`` of a batch, for one replica, padded to ``size`` examples."""

    replica: int
    start: int
    stop: int
    size: int


class ReplicaPlan:
    """Splits batches for the shortest expected duration. Thread-safe.

    One thread launches the work of all replicas, one after another. Each additional replica costs a launch and saves
    computing time on the others; both are measured. A batch that is faster on one replica than on several goes to one,
    in round-robin order.

    Args:
        replicas: The number of replicas.
        max_batch_size: The maximum number of examples of one call on one replica.

    Attributes:
        sizes: The numbers of examples of a call, ascending: powers of two, and ``max_batch_size``.
    """

    def __init__(self, replicas: int, max_batch_size: int) -> None:
        powers = [1 << exponent for exponent in range((max_batch_size - 1).bit_length())]
        self.sizes: tuple[int, ...] = (*powers, max_batch_size)
        self._replicas = replicas
        self._launch_seconds = 0.0
        self._seconds: dict[int, float] = {}
        self._scheduler = itertools.count()
        self._counts: dict[tuple[int, int], int] = {}

    def observe(self, size: int, *, launch_seconds: float, seconds: float) -> None:
        """Add the measured duration of a call on one replica, and of its launch alone."""
        known = self._launch_seconds
        self._launch_seconds = min(known, launch_seconds) if known else launch_seconds
        self._seconds[size] = seconds
        self._counts.clear()

    def size_for(self, examples: int) -> int:
        """Return the smallest size that holds this many examples."""
        return next(size for size in self.sizes if size >= examples)

    def most_examples(self, largest: int) -> int:
        """Return the number of examples of the largest batch whose shares have at most ``largest`` examples."""
        return self._replicas * largest

    def smaller_size(self, size: int) -> int:
        """Return the largest size that is at most half of this one; 0 if there is none."""
        return max((smaller for smaller in self.sizes if 2 * smaller <= size), default=0)

    def shares(self, examples: int, largest: int) -> list[Share]:
        """Split a batch of 1 to ``most_examples(largest)`` examples. No share is empty.

        Args:
            examples: The number of examples of the batch.
            largest: The maximum number of examples of a share; one of `sizes`.
        """
        count = self._count(examples, largest)
        first = next(self._scheduler) if count < self._replicas else 0
        bounds = itertools.pairwise(index * examples // count for index in range(count + 1))
        return [
            Share(replica=(first + index) % self._replicas, start=start, stop=stop, size=self.size_for(stop - start))
            for index, (start, stop) in enumerate(bounds)
        ]

    def largest_share(self, examples: int, largest: int) -> int:
        """Return the size of the largest share of a batch; see `shares`."""
        return self.size_for(-(-examples // self._count(examples, largest)))

    def _count(self, examples: int, largest: int) -> int:
        """Return the number of replicas for a batch."""
        count = self._counts.get((examples, largest))
        if count is None:
            count = self._counts[examples, largest] = self._best_count(examples, largest)
        return count

    def _best_count(self, examples: int, largest: int) -> int:
        """Return the number of replicas with the shortest expected duration; the maximum without measurements."""
        counts = [count for count in range(1, min(self._replicas, examples) + 1) if -(-examples // count) <= largest]
        return min(counts, key=lambda count: (self._estimate(examples, count), count)) if self._seconds else counts[-1]

    def _estimate(self, examples: int, count: int) -> float:
        size = self.size_for(-(-examples // count))
        longest = max(self._seconds.values())
        return (count - 1) * self._launch_seconds + self._seconds.get(size, longest)


class ReplicaForward:
    """A model's forward pass on replicas whose devices compute asynchronously. Thread-safe.

    Each replica has its own function, with the variables of its device. A batch is split on the host, each share is
    copied to its device and computed there, and the outputs are copied back and joined on the host; no data moves
    between devices. Shares are padded to one of a few sizes, because a GPU's libraries tune themselves for each new
    size; padding repeats the last example and is removed from the outputs.

    Args:
        model: The model, with variables mirrored by the strategy.
        interface: The structures of its inputs and outputs.
        strategy: The `tf.distribute.MirroredStrategy` whose replicas share each batch.
        max_batch_size: The maximum number of examples of one call on one replica; larger batches run in pieces.
        on_trace: Called each time a function is traced: normally once for each replica.

    Attributes:
        adds_losses: Whether the model adds losses in its call, besides the regularizers of its weights.
        draws_random_numbers: Whether the model draws random numbers at inference.
        input_ranges: The valid ids of inputs, by name, for inputs that directly index a table.
        plan: Splits batches into shares.
        limits: The maximum number of examples of a share, lowered after an out-of-memory error.
    """

    def __init__(
        self, model: Any, interface: ModelInterface, strategy: Any, *, max_batch_size: int, on_trace: Callable[[], None]
    ) -> None:
        self._names = interface.inputs.names
        self._call = ModelCall(model, interface)
        self._specs = tensor_specs(interface)
        self._on_trace = on_trace
        devices = strategy.extended.worker_devices
        with strategy.scope():
            self._replicas = [self._trace(strategy, index, device) for index, device in enumerate(devices)]
        self.plan = ReplicaPlan(len(devices), max_batch_size)
        self.limits = BatchLimits(max_batch_size)
        function = self._replicas[0].function
        self.adds_losses = self._call.adds_losses
        self.draws_random_numbers = draws_random_numbers(function)
        ranges = find_value_ranges(function)
        self.input_ranges = {name: ranges[place] for place, name in enumerate(self._names) if place in ranges}

    @property
    def functions(self) -> tuple[Any, ...]:
        """The concrete function of each replica."""
        return tuple(replica.function for replica in self._replicas)

    @property
    def output_specs(self) -> tuple[Tensors, Tensors]:
        """The `tf.TensorSpec`s of the results of a call."""
        return self._call.specs(self._replicas[0].function.structured_outputs)

    def __call__(self, inputs: Mapping[str, Any], between_pieces: Callable[[], None] = lambda: None) -> Named:
        """Run the model; see `launch`.

        Args:
            inputs: NumPy arrays, or tensors on the host, by name, each ``[examples, ...]`` with at least one example.
            between_pieces: Called between the pieces of a batch that is too large for one call of all replicas.
        """
        return self.launch(inputs, between_pieces)()

    def launch(self, inputs: Mapping[str, Any], between_pieces: Callable[[], None] = lambda: None) -> Fetch:
        """Copy a batch to the devices and launch it; return a function that waits for the outputs and the masks.

        Both raise InvalidInputError if the model refuses a value, and OutOfResourcesError if there is not enough memory
        for a single example. At most two pieces of a batch are in progress.
        """
        leaves = [np.asarray(inputs[name]) for name in self._names]
        launched = [self._begin(leaves)]

        def fetch() -> Named:
            while True:
                begun = launched.pop() if launched else self._begin(leaves)
                try:
                    return self._call.by_name(self._fetch_all(begun, between_pieces))
                except Exception as error:
                    if exhausted_resource(error) is not Resource.MEMORY:
                        raise
                    self._use_less_memory(leaves, begun.largest, error)
                del begun  # it references tensors on the devices
                reclaim_memory()

        return fetch

    def warm_up(self, inputs: Mapping[str, Any]) -> Named:
        """Run a batch of one of the plan's sizes on each replica, and add the measured times to the plan.

        A batch that does not fit in memory runs in pieces, and so will others of its shapes.
        """
        leaves = [np.asarray(inputs[name]) for name in self._names]
        size = len(leaves[0])
        if size > self.limits.limit(leaves):
            return self(inputs)
        try:
            outputs = self.run_on_each(inputs)
            self._measure(leaves)
        except Exception as error:
            if exhausted_resource(error) is not Resource.MEMORY:
                raise
            self.limits.lower(leaves, size, self.plan.smaller_size(size), error)
        else:
            return outputs
        reclaim_memory()
        return self(inputs)

    def run_on_each(self, inputs: Mapping[str, Any]) -> Named:
        """Run a batch of one of the plan's sizes on each replica; return the last one's results."""
        leaves = [np.asarray(inputs[name]) for name in self._names]
        launched = [replica(leaves) for replica in self._replicas]
        fetched = [_to_host(tensors, len(leaves[0])) for tensors in launched]
        return self._call.by_name(fetched[-1])

    def _measure(self, leaves: Sequence[Array]) -> None:
        """Time a batch of one of the plan's sizes on one replica."""
        size = len(leaves[0])
        began = time.perf_counter()
        launched = self._replicas[0](leaves)
        launch_seconds = time.perf_counter() - began
        _to_host(launched, size)
        self.plan.observe(size, launch_seconds=launch_seconds, seconds=time.perf_counter() - began)

    def _trace(self, strategy: Any, index: int, device: str) -> _Replica:
        def on_replica(*inputs: Any) -> list[Any]:
            self._on_trace()
            with tf.device(device), tf.distribute.ReplicaContext(strategy, index):
                return self._call(inputs)

        return _Replica(device, tf.function(on_replica, autograph=False).get_concrete_function(*self._specs))

    def _begin(self, leaves: Sequence[Array]) -> _Begun:
        """Cut a batch into pieces that fit the replicas, and launch the first."""
        while True:
            largest = self.limits.limit(leaves)
            most = self.plan.most_examples(largest)
            pieces = [[leaf[start : start + most] for leaf in leaves] for start in range(0, len(leaves[0]), most)]
            try:
                return _Begun(launched=self._launch(pieces[0], largest), others=pieces[1:], largest=largest)
            except Exception as error:
                if exhausted_resource(error) is not Resource.MEMORY:
                    raise
                self._use_less_memory(leaves, largest, error)
            reclaim_memory()

    def _use_less_memory(self, leaves: Sequence[Array], largest: int, error: Exception) -> None:
        """Lower the limit of shares after an out-of-memory error."""
        tried = self.plan.largest_share(min(len(leaves[0]), self.plan.most_examples(largest)), largest)
        self.limits.lower(leaves, tried, self.plan.smaller_size(tried), error)

    def _launch(self, leaves: Sequence[Array], largest: int) -> list[tuple[Share, list[Any]]]:
        """Launch one piece that fits the replicas."""
        with _refusals():
            return [
                (share, self._replicas[share.replica]([_cut(leaf, share) for leaf in leaves]))
                for share in self.plan.shares(len(leaves[0]), largest)
            ]

    def _fetch_all(self, begun: _Begun, between_pieces: Callable[[], None]) -> list[Array]:
        """Fetch all pieces; each piece is launched before the previous one is fetched."""
        done = []
        launched = begun.launched
        for piece in begun.others:
            between_pieces()
            following = self._launch(piece, begun.largest)
            done.append(_join(launched))
            launched = following
        done.append(_join(launched))
        return done[0] if len(done) == 1 else [np.concatenate(parts) for parts in zip(*done, strict=True)]


@dataclass(frozen=True, kw_only=True)
class _Begun:
    """A batch whose first piece is launched.

    Attributes:
        launched: The shares of the first piece, and the tensors on their devices.
        others: The other pieces.
        largest: The maximum number of examples of a share.
    """

    launched: list[tuple[Share, list[Any]]]
    others: Sequence[Sequence[Array]]
    largest: int


class _Replica:
    """The traced function of one replica, from arrays on the host to tensors on its device."""

    def __init__(self, device: str, function: Any) -> None:
        self.function = function
        self._call_flat = call_flat(function)
        self._device = device

    def __call__(self, leaves: Sequence[Array]) -> list[Any]:
        inputs = [self._copy(leaf) for leaf in leaves]
        return list(self._call_flat(*inputs, *self.function.captured_inputs))

    def _copy(self, leaf: Array) -> Any:
        """Return a tensor on the device; text stays on the host.

        Unlike `tf.constant`, an operation uses an aligned array without a copy on the host.
        """
        with tf.device(_HOST if leaf.dtype.kind in "SUO" else self._device):
            return tf.raw_ops.Identity(input=leaf)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Raise TensorFlow's refusal of a value as InvalidInputError."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        raise InvalidInputError(f"the model refused the values: {first_line(error)}") from error


def _cut(leaf: Array, share: Share) -> Array:
    """Return the examples of a share, padded to its size with its last example."""
    examples = leaf[share.start : share.stop]
    if len(examples) == share.size:
        return examples
    padded = np.empty((share.size, *leaf.shape[1:]), leaf.dtype)
    padded[: len(examples)] = examples
    padded[len(examples) :] = examples[-1:]
    return padded


def _to_host(tensors: Sequence[Any], examples: int) -> list[Array]:
    return [tensor.numpy()[:examples] for tensor in tensors]


def _join(launched: Sequence[tuple[Share, Sequence[Any]]]) -> list[Array]:
    """Wait for the outputs of the replicas, and join them on the host."""
    with _refusals():
        parts = [_to_host(tensors, share.stop - share.start) for share, tensors in launched]
    return parts[0] if len(parts) == 1 else [np.concatenate(leaves) for leaves in zip(*parts, strict=True)]
