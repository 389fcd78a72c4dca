"""One set of mirrored variables with its traced functions."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from understudy.checkpoints.initial_values import weights_are_loaded
from understudy.checkpoints.keras_signature import interface_of
from understudy.checkpoints.signature import Signature, TensorSpec
from understudy.compat import layers_of, repair_open_axes
from understudy.compat.error_texts import first_line
from understudy.evaluator.evaluator_errors import ArchitectureMismatchError, LoadError
from understudy.evaluator.model.compilation import Compilation
from understudy.evaluator.model.devices import has_gpu, precision_note
from understudy.evaluator.model.forward import ForwardPass, Tensors
from understudy.evaluator.model.frozen import FrozenPass
from understudy.evaluator.model.graph_analysis import may_overlap, state_changes
from understudy.evaluator.model.inputs import check_forms, check_inputs, check_values
from understudy.evaluator.model.loaders import KerasLoader, ModelLoader
from understudy.evaluator.model.output_tasks import output_tasks
from understudy.evaluator.model.probe import Probe
from understudy.evaluator.model.replica_forward import ReplicaForward
from understudy.evaluator.model.scorers import Scorers
from understudy.evaluator.model.weights import FrozenState, through_first_device
from understudy.evaluator.types import Array, ArrayForm, Arrays, OutputTask

_REMEMBERED_FORMS = 1024
_UNLOCKED = contextlib.nullcontext()


class Slot:
    """A model on all replicas, without optimizer, into which the weights of one checkpoint after another are loaded.

    `forward`, `check_inputs` and scorers may be used from several threads at once. `load` and `warm_up` need exclusive
    use of the slot, because a forward pass during the assignment of weights would mix two checkpoints.

    Args:
        strategy: The `tf.distribute.MirroredStrategy` whose replicas share each batch.
        model_file: The checkpoint whose model is built and whose weights are loaded.
        max_batch_size: The maximum number of examples of one pass on one replica; larger batches run in pieces.
        loader: The loader for this kind of checkpoint; by default for ``.keras`` files.
        on_trace: Called each time one of its functions is traced.
        per_replica: Whether each replica has its own function (`ReplicaForward`) or one function splits batches
            (`ForwardPass`); None for the former on GPUs.

    Attributes:
        check_inputs: Returns the number of examples; raises InvalidInputError if the inputs do not fit the signature.
        check_forms: As ``check_inputs``, for inputs that need not be built yet.
        scorer: See `Scorers.scorer`.
        scorer_of_outputs: See `Scorers.scorer_of_outputs`.
        traces: How many times any of its functions was traced.

    Raises:
        LoadError: The model cannot be built, its inputs cannot be determined, it cannot run, or its outputs do not have
            one example for each example of input.
    """

    def __init__(
        self,
        strategy: Any,
        model_file: Path,
        *,
        max_batch_size: int,
        loader: ModelLoader | None = None,
        on_trace: Callable[[], None] = lambda: None,
        per_replica: bool | None = None,
    ) -> None:
        self._per_replica = has_gpu(strategy) if per_replica is None else per_replica
        self._loader = loader or KerasLoader()
        self.architecture = self._loader.architecture_of(model_file)
        self._strategy = strategy
        self._max_batch_size = max_batch_size
        self._on_trace = on_trace
        self.traces = 0
        self._state_lock = threading.RLock()
        self._warm: ForwardPass | ReplicaForward | None = None
        self._constants = FrozenPass()
        self._build(model_file)

    def _build(self, model_file: Path) -> None:
        """Build a model, trace it and determine its properties."""
        repair_open_axes()
        with self._assigning(), weights_are_loaded():
            built = self._loader.build(model_file)
        self._model = built.model
        self._compile_config = built.compile_config
        with _load_errors(model_file.name):
            self._interface = interface_of(self._model)
            _check_stateless(self._model)
            self._trace()
            specs = self._interface.inputs.specs
            check = _InputCheck(specs)
            self.check_inputs, self.check_forms = check.examples_of, check.examples_of_forms
            with self.keeping_variables():
                self._probe = Probe(self._outputs, specs, self._pass.input_ranges)
                coupled = self._probe.examples_depend_on_each_other(replicas=self.replicas)
        self._compilation = Compilation(self._model, self._interface, self._compile_config)
        self._scorers = Scorers(
            self._model,
            self._interface,
            self._compilation,
            self._pass,
            couples_examples=coupled and not self._pass.draws_random_numbers,
            devices=self._strategy.extended.worker_devices,
            on_trace=self._traced,
        )
        self.scorer, self.scorer_of_outputs = self._scorers.scorer, self._scorers.scorer_of_outputs
        self._frozen = FrozenState(self._model)

    @property
    def signature(self) -> Signature:
        """The names, dtypes and shapes of the inputs and outputs."""
        return self._interface.signature

    @property
    def metric_digest(self) -> str:
        """Identifies the configuration of the compiled losses and metrics."""
        return self._compilation.metric_digest

    @property
    def output_tasks(self) -> Mapping[str, OutputTask]:
        """What each output is for, by its name."""
        specs = self._interface.outputs.specs
        widths = [spec.shape[-1] if len(spec.shape) > 1 else 1 for spec in specs]
        metrics = [self._compile_config.get(name) for name in ("metrics", "weighted_metrics")]
        return output_tasks(self._compile_config.get("loss"), self._interface.outputs.names, widths, metrics)

    @property
    def nested_outputs(self) -> tuple[str, ...]:
        """The names of the outputs that are nested deeper than in a list or a dict."""
        return self._interface.outputs.nested_names

    @property
    def replicas(self) -> int:
        """The number of replicas a batch is split over."""
        return int(self._strategy.num_replicas_in_sync)

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of the replicas, in order."""
        return tuple(name.rpartition("device:")[2] for name in self._strategy.extended.worker_devices)

    @functools.cached_property
    def may_overlap(self) -> bool:
        """Whether `forward` changes nothing and runs no Python, so that several threads gain by calling it at once."""
        return not self._pass.draws_random_numbers and all(map(may_overlap, self._pass.functions))

    @contextlib.contextmanager
    def keeping_variables(self) -> Iterator[None]:
        """Undo at the end of the ``with`` block what its calls of `forward` did to the variables of the model.

        Calls from other threads that would change them wait until then.
        """
        if not self._changes_state:
            yield
            return
        variables = {id(variable): variable for function in self._pass.functions for variable in function.variables}
        with self._state_lock:
            values = {key: tf.identity(variable) for key, variable in variables.items()}
            try:
                yield
            finally:
                for key, variable in variables.items():
                    variable.assign(values[key])

    @property
    def notes(self) -> tuple[str, ...]:
        """Why answers may differ from Keras's, evaluations from a single device's, or why these run on one replica."""
        found = [
            f"{reason}, so each batch is scored whole on one replica" for reason in self._scorers.needs_whole_batches()
        ]
        found += [
            f"the input {name!r} is ragged, so padding counts as values: send examples of different lengths in batches "
            "of their own"
            for name in self._interface.ragged_inputs
        ]
        if self._pass.draws_random_numbers:
            found.append("the model draws random numbers at inference, so no two evaluations are alike")
        if (precision := precision_note(self.devices)) is not None:
            found.append(precision)
        return tuple(found)

    def load(self, model_file: Path) -> bool:
        """Assign the weights of another checkpoint to the variables, normally without tracing.

        Functions are traced again only if the checkpoint changes their constants, such as the statistics of a
        ``Normalization`` layer, or if it has its own functions, as a SavedModel does.

        Returns:
            Whether the previous model was dropped.

        Raises:
            ArchitectureMismatchError: The checkpoint holds another model, or the same model compiled differently.
            LoadError: It is damaged. Load the slot again before using it.
        """
        if self._loader.architecture_of(model_file) != self.architecture:
            raise ArchitectureMismatchError(
                f"the model in {model_file.name} is not the one this slot was built for; load it into a slot of its own"
            )
        self.thaw()
        with self._assigning():
            is_assigned = self._loader.assign(self._model, model_file)
        if not is_assigned:
            self._drop_model()
            self._build(model_file)
            return True
        if self._frozen.changed():
            self._trace()
            self._scorers.retraced(self._pass)
            self._frozen = FrozenState(self._model)
            return True
        return False

    def warm_up(self) -> None:
        """Run every kind of batch, so that no request is the first of its kind.

        If one function splits batches, the batch sizes are 1, N-1, N, N+1 and the maximum. If each replica has a
        function, they are all the sizes of its calls, the largest first, which determines the memory that is needed.

        A function that was warmed up before only runs one example: new weights need no new warm-up, which would
        compete with requests for the cores. The variables are as before at the end.

        Raises:
            LoadError: The model fails to run.
        """
        with self.keeping_variables():
            self._warm_up()

    def _warm_up(self) -> None:
        if self._pass.limits.restore():
            self._warm = None
        if self._warm is self._pass:
            sizes: Iterable[int] = (1,)
        elif isinstance(self._pass, ReplicaForward):
            sizes = reversed(self._pass.plan.sizes)
        else:
            sizes = self._warm_up_sizes()
        for examples in sizes:
            with _load_errors("the model"):
                self._probe.run(examples, by=self._warm_up_outputs if self._warm is not self._pass else None)
        self._warm = self._pass
        if self._constants.forward is not None:
            self._run(self._probe.example(1))

    def freeze(self, *, limit_mib: int, check_wanted: Callable[[], None], largest: int | None = None) -> int:
        """Make constants of the weights for `forward` and `launch`, until `thaw` or `load` is called.

        Evaluations keep the variables. Takes up to some seconds, while other threads may use the slot.

        Args:
            limit_mib: The memory that the constants may take.
            check_wanted: Called between the parts of the work; raises FreezingCancelledError.
            largest: The most examples to compare and time on; by default as many as one pass takes.

        Returns:
            The memory that the constants take, in bytes, about.

        Raises:
            NotFrozenError: The slot keeps its variables, for this reason.
        """
        return self._constants.freeze(
            self._pass, samples=lambda: self._samples(largest), limit_mib=limit_mib, check_wanted=check_wanted
        )

    def thaw(self) -> None:
        """Use the variables again. A batch that runs with constants finishes with them."""
        self._constants.thaw()

    @property
    def predict_note(self) -> str:
        """Whether `forward` uses constants for the weights, and why not."""
        return self._constants.note

    def try_out(self) -> None:
        """Run one generated example on every replica, and keep the variables; raise the runtime's errors."""
        with self.keeping_variables():
            if isinstance(self._pass, ReplicaForward):
                self._pass.run_on_each(self._probe.example(1))
            else:
                self.forward(self._probe.example(self.replicas))

    def generated_inputs(self, examples: int) -> Arrays:
        """Return inputs on which the model ran, ``[examples, ...]``, the same each time."""
        return self._probe.example(examples)

    def forward(self, inputs: Arrays) -> dict[str, Array]:
        """Run the model.

        Args:
            inputs: Every input by name, ``[examples, ...]`` with at least one example, accepted by `check_inputs`.

        Returns:
            Every output by name, ``[examples, ...]``, in the order of the examples.

        Raises:
            InvalidInputError: An id is outside the model's tables, or the model itself refuses a value.
        """
        if self._pass.input_ranges:
            check_values("input", inputs, self._pass.input_ranges)
        return _on_host(self._run(inputs))

    def launch(self, inputs: Arrays) -> Callable[[], dict[str, Array]]:
        """Launch the model; return a function that waits for the outputs. Both raise as `forward` does.

        On GPUs, the next batch can be launched meanwhile.
        """
        check_values("input", inputs, self._pass.input_ranges)
        if isinstance(self._pass, ReplicaForward):
            with self._exclusive():
                fetch = self._pass.launch(inputs)
            return lambda: _on_host(fetch()[0])
        outputs = self._run(inputs)
        return lambda: _on_host(outputs)

    def _run(self, inputs: Arrays) -> Tensors:
        """Run the model: with constants if it is frozen; if they fail where the variables do not, drop them."""
        constants, failure = self._constants.forward, None
        if constants is not None:
            try:
                return constants(inputs)[0]
            except Exception as error:  # noqa: BLE001 - the variables show whether constants are the cause
                failure = error
        with self._exclusive():
            outputs = self._pass(inputs)[0]
        if failure is not None:
            self._constants.drop(failure)
        return outputs

    def _exclusive(self) -> contextlib.AbstractContextManager[object]:
        """Let one call at a time change the variables, if calls do."""
        return self._state_lock if self._changes_state else _UNLOCKED

    @property
    def scores_whole(self) -> tuple[str, ...]:
        """Why the score needs more than the outputs, so that they cannot be computed elsewhere; empty if they can."""
        return self._scorers.needs_more_than_outputs()

    def compute(self, inputs: Arrays) -> tuple[dict[str, Array], dict[str, Array]]:
        """Run the model with its variables, as a scorer does.

        Args:
            inputs: See `forward`.

        Returns:
            The outputs by name, and the Keras masks of those that have one, each ``[examples, ...]``.

        Raises:
            InvalidInputError: See `forward`.
        """
        check_values("input", inputs, self._pass.input_ranges)
        with tf.device("CPU:0"):  # each device copies its share from there
            tensors = {name: tf.convert_to_tensor(array) for name, array in inputs.items()}
        outputs, masks = self._pass(tensors)
        return _on_host(outputs), _on_host(masks)

    @contextlib.contextmanager
    def _assigning(self) -> Iterator[None]:
        """Enter the strategy's scope, in which a loader creates and assigns variables."""
        transfer = through_first_device(self._strategy) if self._per_replica else contextlib.nullcontext()
        with self._strategy.scope(), transfer:
            yield

    def _drop_model(self) -> None:
        """Free the memory of the model, because another is built."""
        self._model = self._warm = None
        self._constants.forget()
        for part in ("_pass", "_probe", "_compilation", "_scorers", "scorer", "scorer_of_outputs", "_frozen"):
            vars(self).pop(part, None)  # they are missing if the last load failed
        gc.collect()

    def _traced(self) -> None:
        self.traces += 1
        self._on_trace()

    def _trace(self) -> None:
        kind, size = (ReplicaForward, 1) if self._per_replica else (ForwardPass, self.replicas)
        self._pass = kind(
            self._model,
            self._interface,
            self._strategy,
            max_batch_size=self._max_batch_size * size,
            on_trace=self._traced,
        )
        self._changes_state = any(map(state_changes, self._pass.functions))

    def _warm_up_sizes(self) -> list[int]:
        replicas = self.replicas
        return sorted({1, replicas - 1, replicas, replicas + 1, self._max_batch_size * replicas} - {0})

    def _samples(self, largest: int | None) -> Iterator[Arrays]:
        sizes = (size for size in self._warm_up_sizes() if largest is None or size <= largest)
        return itertools.chain.from_iterable(map(self._probe.examples_of_each_kind, sizes))

    def _outputs(self, inputs: Arrays) -> Tensors:
        check_values("input", inputs, self._pass.input_ranges)
        return self._pass(inputs)[0]

    def _warm_up_outputs(self, inputs: Arrays) -> Tensors:
        """Run a batch on every replica if each has its own function."""
        return self._pass.warm_up(inputs)[0] if isinstance(self._pass, ReplicaForward) else self._outputs(inputs)


class _InputCheck:
    """Checks inputs against a signature, with a cache of forms that have passed. Thread-safe.

    Args:
        specs: The model's inputs.
    """

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = specs
        self._passed: dict[Hashable, int] = {}
        self._passed_forms: dict[Hashable, int] = {}

    def examples_of(self, inputs: Arrays) -> int:
        """Return the number of examples. Raises as `check_inputs` does."""
        form = tuple([(name, array.dtype, array.shape) for name, array in inputs.items()])
        examples = self._passed.get(form)
        if examples is None:
            examples = check_inputs(inputs, self._specs)
            _remember(self._passed, form, examples)
        return examples

    def examples_of_forms(self, forms: Mapping[str, ArrayForm]) -> int:
        """Return the number of examples of inputs that need not be built yet. Raises as `check_forms` does."""
        form = tuple(forms.items())
        examples = self._passed_forms.get(form)
        if examples is None:
            examples = check_forms(forms, self._specs)
            _remember(self._passed_forms, form, examples)
        return examples


def _remember(passed: dict[Hashable, int], form: Hashable, examples: int) -> None:
    if len(passed) >= _REMEMBERED_FORMS:
        passed.clear()
    passed[form] = examples


def _on_host(outputs: Tensors) -> dict[str, Array]:
    return {name: output if isinstance(output, np.ndarray) else output.numpy() for name, output in outputs.items()}


def _check_stateless(model: Any) -> None:
    """Raise LoadError if a recurrent layer starts from its state after the last batch, perhaps another caller's."""
    layers = layers_of(model) if isinstance(model, keras.Model) else []
    stateful = [layer.name for layer in layers if isinstance(layer, keras.layers.RNN) and layer.stateful]
    if stateful:
        raise LoadError(
            f"the layers {stateful} keep their state from one batch to the next, but all callers share a model: "
            "expected stateful=False; build the model so, and load the weights into it"
        )


@contextlib.contextmanager
def _load_errors(what: str) -> Iterator[None]:
    try:
        yield
    except LoadError:
        raise
    except Exception as error:
        raise LoadError(f"{what} cannot run: {first_line(error)}") from error
