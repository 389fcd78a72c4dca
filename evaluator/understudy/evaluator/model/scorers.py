"""The scorers of a model: for its own metrics or a caller's, from its inputs or from outputs computed elsewhere."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from understudy.checkpoints.keras_signature import ModelInterface, NamedStructure
from understudy.checkpoints.signature import TensorSpec
from understudy.evaluator.evaluator_errors import NotEvaluableError
from understudy.evaluator.model.compilation import Compilation, NoExampleLossesError, PerExampleLosses, check_metrics
from understudy.evaluator.model.forward import ForwardPass
from understudy.evaluator.model.metric_catalog import comparisons
from understudy.evaluator.model.replica_forward import ReplicaForward
from understudy.evaluator.model.scorer import Scorer
from understudy.evaluator.model.scoring_program import ScoringData, ScoringProgram
from understudy.evaluator.types import Arrays, MetricSpec

_MOST_SCORERS = 8
"""How many combinations of metrics are kept; open streams keep their own."""

_OUTPUT, _MASK = "output:", "mask:"


class Scorers:
    """Makes the scorers of one model, and keeps the latest. Thread-safe, but for `retraced`.

    Args:
        model: The model.
        interface: The structures of its inputs and outputs.
        compilation: Compiles it.
        forward: Its forward pass on all replicas.
        couples_examples: Whether the examples of a batch influence each other.
        devices: The devices of the replicas, in order.
        on_trace: Called each time a function is traced.
    """

    def __init__(
        self,
        model: Any,
        interface: ModelInterface,
        compilation: Compilation,
        forward: ForwardPass | ReplicaForward,
        *,
        couples_examples: bool,
        devices: Sequence[str],
        on_trace: Callable[[], None],
    ) -> None:
        self._model = model
        self._interface = interface
        self._compilation = compilation
        self._pass = forward
        self._couples_examples = couples_examples
        self._devices = devices
        self._on_trace = on_trace
        self._kept: OrderedDict[str, Scorer] = OrderedDict()
        self._building = threading.Lock()

    def retraced(self, forward: ForwardPass | ReplicaForward) -> None:
        """Use another forward pass of the same model for the scorers from now on."""
        self._pass = forward
        self._kept.clear()

    def scorer(
        self, metrics: Sequence[MetricSpec] = (), *, example_losses: bool = False, increments: bool = False
    ) -> Scorer:
        """Return a scorer for these metrics, or for the compiled ones if empty.

        With ``example_losses``, it also computes the loss of each example of the last batch; with ``increments``, what
        each of them adds to the state of the loss and the metrics.

        Raises:
            InvalidInputError: There is no such metric, it has no such argument, or there are too many metrics.
            NotEvaluableError: The model was not compiled, and no metric is named.
        """
        check_metrics(metrics, self._interface.outputs.names)
        key = repr((list(metrics), example_losses, increments))
        with self._building:
            if key not in self._kept:
                self._kept[key] = self._make(tuple(metrics), example_losses=example_losses, increments=increments)
            if len(self._kept) > _MOST_SCORERS:
                self._kept.popitem(last=False)
            return self._kept[key]

    def scorer_of_outputs(
        self, metrics: Sequence[MetricSpec] = (), *, example_losses: bool = False, increments: bool = False
    ) -> Scorer:
        """Return a scorer of batches whose inputs are what `Slot.compute` returned, possibly in another process.

        It scores as `scorer` does; see there for the arguments and errors.

        Raises:
            NotEvaluableError: See `scorer`; or what the model computes its score from is more than its outputs.
        """
        check_metrics(metrics, self._interface.outputs.names)
        if needed := self.needs_more_than_outputs():
            raise NotEvaluableError(f"outputs alone give no score: {'; '.join(needed)}")
        received = ReceivedOutputs(self._interface, self._pass.output_specs)
        return self._make(tuple(metrics), received=received, example_losses=example_losses, increments=increments)

    def needs_more_than_outputs(self) -> tuple[str, ...]:
        """Return why the score needs more than the outputs; empty if they are enough."""
        more = ("the model has a compute_metrics of its own",) if self._compilation.custom_metrics else ()
        return (*self.needs_whole_batches(), *more)

    def needs_whole_batches(self) -> Iterator[str]:
        """Yield the reasons why batches cannot be split over the replicas."""
        if self._compilation.custom_step:
            yield "the model has a test_step of its own"
        if self._compilation.custom_loss:
            yield "the model has a compute_loss of its own"
        if self._pass.adds_losses:
            yield "the model adds losses that depend on the data"
        if self._couples_examples:
            yield "the examples of a batch influence each other"

    def _make(
        self,
        metrics: tuple[MetricSpec, ...],
        *,
        example_losses: bool,
        increments: bool,
        received: ReceivedOutputs | None = None,
    ) -> Scorer:
        whole = any(self.needs_whole_batches())
        options = self._compilation.options(metrics, calls_model=whole, adds_losses=self._pass.adds_losses)

        def build(data: ScoringData) -> ScoringProgram:
            with self._building, self._compilation.naming_the_part(metrics):
                self._compilation.compile(metrics)
                program = ScoringProgram(
                    self._model,
                    self._interface,
                    devices=self._devices,
                    options=options,
                    data=data,
                    on_trace=self._on_trace,
                )
                if increments:
                    program.add_increments(data)
                return self._with_example_losses(program, data, calls_model=whole) if example_losses else program

        if received is not None:
            return Scorer(
                received.interface, forward=received, build=build, comparisons=comparisons(metrics), input_ranges={}
            )
        return Scorer(
            self._interface,
            forward=None if whole else self._pass,
            build=build,
            comparisons=comparisons(metrics),
            input_ranges=self._pass.input_ranges,
        )

    def _with_example_losses(self, program: ScoringProgram, data: ScoringData, *, calls_model: bool) -> ScoringProgram:
        """Add per-example losses to a program, or the reason why there are none."""
        try:
            self._compilation.compile_for_examples(adds_losses=self._pass.adds_losses)
            program.example_losses = PerExampleLosses(
                self._model, self._interface, device=self._devices[0], calls_model=calls_model, data=data
            )
        except NoExampleLossesError as error:
            program.without_example_losses = str(error)
        return program


class ReceivedOutputs:
    """The forward pass of a scorer whose batches hold outputs and masks instead of inputs.

    Args:
        interface: The structures of the model's inputs and outputs.
        specs: The `tf.TensorSpec`s of the outputs and of the masks, by the names of the outputs.

    Attributes:
        interface: The structures of a batch to score: a flat list of outputs and masks, and the model's outputs.
    """

    def __init__(self, interface: ModelInterface, specs: tuple[Mapping[str, Any], Mapping[str, Any]]) -> None:
        self.output_specs = dict(specs[0]), dict(specs[1])
        received = tuple(
            TensorSpec(
                name=prefix + name,
                dtype=spec.dtype.name,
                shape=(None, *spec.shape[1:]),
            )
            for prefix, of_kind in zip((_OUTPUT, _MASK), self.output_specs, strict=True)
            for name, spec in of_kind.items()
        )
        inputs = NamedStructure(template=[spec.name for spec in received], specs=received)
        self.interface = ModelInterface(inputs=inputs, outputs=interface.outputs)

    def __call__(
        self, inputs: Mapping[str, Any], between_pieces: Callable[[], None] = lambda: None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the outputs and the masks that a batch holds."""
        del between_pieces
        return _with_prefix(inputs, _OUTPUT), _with_prefix(inputs, _MASK)


def as_inputs(outputs: Arrays, masks: Arrays) -> dict[str, Any]:
    """Return outputs and masks as the inputs of a batch to score."""
    return {_OUTPUT + name: array for name, array in outputs.items()} | {
        _MASK + name: array for name, array in masks.items()
    }


def _with_prefix(inputs: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in inputs.items() if name.startswith(prefix)}
