"""What a caller may do on the page, and what a confirmation says about it."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from understudy.evaluator.evaluator import Evaluator
from understudy.evaluator.evaluator_errors import InvalidInputError, NotReadyError, VersionNotFoundError
from understudy.evaluator.types import EvaluationOutcome, VersionState
from understudy.service.page.operations import Operations
from understudy.service.page.views import CheckpointRow, Views

_MODEL: Final = "/understudy.v1.ModelService"
_EVALUATION: Final = "/understudy.v1.EvaluationService"


class Act(enum.StrEnum):
    """Something that changes or computes."""

    PIN = "pin"
    UNPIN = "unpin"
    ROLL_BACK = "roll-back"
    EVALUATE = "evaluate"
    COMPARE = "compare"
    RESEND = "resend-events"
    DROP = "drop-events"


METHOD_OF: Final[Mapping[Act, str]] = {
    Act.PIN: f"{_MODEL}/Promote",
    Act.UNPIN: f"{_MODEL}/Promote",
    Act.ROLL_BACK: f"{_MODEL}/Promote",
    Act.EVALUATE: f"{_EVALUATION}/EvaluateDataset",
    Act.COMPARE: f"{_EVALUATION}/Compare",
}
"""The method that does an act, for its callers and with its line in the audit log."""

OWN_METHODS: Final[Mapping[Act, str]] = {Act.RESEND: "ResendEvents", Act.DROP: "DropEvents"}
"""The names of acts that no gRPC method does; their callers need the group ``promote``."""

SERVING, PINNED, STEP, FIRST, SECOND = "serving", "pinned", "step", "first", "second"
"""The names of the hidden fields of forms."""
DATASET: Final = "dataset"
DESTINATION, FIRST_LETTER, LAST_LETTER = "destination", "first_letter", "last_letter"
"""The hidden fields of forms about dead letters: who was to receive them, and which were shown."""
LETTER: Final = "letter"
"""The parameter of a question about a single dead letter."""

_NONE: Final = "none"
_LONG: Final = "That may take a while. The next page tells how far it is; leaving that page cancels it."


@dataclass(frozen=True, kw_only=True)
class Confirmation:
    """What a caller confirms.

    Attributes:
        act: The act.
        title: What it is.
        sentences: What will happen.
        button: The text of the button.
        rows: The checkpoints that it concerns, each with its role.
        datasets: The datasets to choose from; none if the act needs none.
        fields: The hidden fields of the form.
    """

    act: Act
    title: str
    sentences: Sequence[str]
    button: str
    rows: Sequence[tuple[str, CheckpointRow]]
    datasets: Sequence[str] = ()
    fields: Mapping[str, str]


class Confirmations:
    """Says what each act will do. Its methods block.

    Args:
        evaluator: The evaluator.
        views: Reads the checkpoints.
        operations: Reads the dead letters.
        policy: The version policy.
    """

    def __init__(self, evaluator: Evaluator, views: Views, operations: Operations, policy: str) -> None:
        self._evaluator = evaluator
        self._views = views
        self._operations = operations
        self._policy = policy

    def state(self) -> dict[str, str]:
        """Return what is served and pinned, as hidden fields that a form brings back."""
        serving, pinned = self._evaluator.serving_step, self._evaluator.pinned_step
        return {
            SERVING: _NONE if serving is None else str(serving),
            PINNED: _NONE if pinned is None else str(pinned),
        }

    def of(
        self,
        act: Act,
        *,
        step: int | None,
        first: int | None,
        second: int | None,
        destination: str,
        letter: int | None,
    ) -> Confirmation:
        """Return what an act will do.

        Args:
            act: The act.
            step: The step to pin or to evaluate.
            first: The step to compare with.
            second: The step that is compared.
            destination: Whose dead letters are sent again or dropped.
            letter: The sequence number of the only one of them; None for all.

        Raises:
            InvalidInputError: A step is missing.
            VersionNotFoundError: There is no such checkpoint, nothing to return to, or no dead letter.
            NotReadyError: Nothing is serving yet.
            LedgerError: The ledger cannot be read.
        """
        if act is Act.PIN:
            return self._pin(_required(step, STEP))
        if act is Act.UNPIN:
            return self._unpin()
        if act is Act.ROLL_BACK:
            return self._roll_back()
        if act is Act.EVALUATE:
            return self._evaluate(_required(step, STEP))
        if act in OWN_METHODS:
            return self._letters(act, destination, letter)
        return self._compare(_required(first, FIRST), _required(second, SECOND))

    def _pin(self, step: int) -> Confirmation:
        row = self._existing(step)
        sentences = [f"{self._change_to(step)} It stays served, also after a restart, until it is unpinned."]
        sentences.append(f"Meanwhile the version policy ({self._policy}) and the gate do not apply.")
        if row.state in (EvaluationOutcome.REFUSED.value, EvaluationOutcome.UNDECIDED.value):
            sentences.append(f"The gate's decision on step {step} is {row.state}: {row.reason}")
        return self._promotion(
            Act.PIN,
            title=f"Serve step {step}",
            sentences=sentences,
            button=f"Serve and pin step {step}",
            target=step,
            fields={STEP: str(step)},
        )

    def _unpin(self) -> Confirmation:
        pinned = self._evaluator.pinned_step
        if pinned is None:
            raise VersionNotFoundError("no step is pinned, so there is nothing to unpin")
        target = self._evaluator.step_without_pin()
        if target is None:
            target = self._evaluator.serving_step
        after = "" if target is None else f" {self._change_to(target)}"
        return self._promotion(
            Act.UNPIN,
            title=f"Unpin step {pinned}",
            sentences=[f"The version policy ({self._policy}) and the gate decide again what is served.{after}"],
            button=f"Unpin step {pinned}",
            target=target,
        )

    def _roll_back(self) -> Confirmation:
        target = self._evaluator.previous_step
        if target is None:
            raise VersionNotFoundError(
                "no version that may serve again is known to have served before; pin a step instead"
            )
        sentence = f"{self._change_to(target)} It stays served, also after a restart, until it is unpinned."
        return self._promotion(
            Act.ROLL_BACK,
            title=f"Roll back to step {target}",
            sentences=[sentence],
            button=f"Roll back to step {target}",
            target=target,
            fields={STEP: str(target)},
        )

    def _evaluate(self, step: int) -> Confirmation:
        row = self._existing(step)
        known = {score.dataset for score in row.scores}
        sentences = [f"Step {step} is scored on the dataset that you choose, and the score is recorded in the ledger."]
        sentences += [
            f"It has a score on {name} already, which is kept and not computed again if the dataset has not changed."
            for name in self._evaluator.dataset_names
            if name in known
        ]
        sentences.append(_LONG)
        return Confirmation(
            act=Act.EVALUATE,
            title=f"Evaluate step {step}",
            sentences=sentences,
            button="Evaluate",
            rows=[("evaluated", row)],
            datasets=self._datasets(),
            fields={STEP: str(step)},
        )

    def _compare(self, first: int, second: int) -> Confirmation:
        if first == second:
            raise InvalidInputError(f"step {first} would be compared with itself; choose another step")
        rows = [("compared with", self._existing(first)), ("compared", self._existing(second))]
        return Confirmation(
            act=Act.COMPARE,
            title=f"Compare step {second} with step {first}",
            sentences=[
                "Both are scored now, on the same batches of the dataset that you choose.",
                "What is not loaded is loaded for it. The ledger records nothing.",
                _LONG,
            ],
            button="Compare",
            rows=rows,
            datasets=self._datasets(),
            fields={FIRST: str(first), SECOND: str(second)},
        )

    def _letters(self, act: Act, destination: str, letter: int | None) -> Confirmation:
        letters = self._operations.letters_to(destination, letter or 0, letter)
        count = "1 dead letter" if len(letters) == 1 else f"{len(letters)} dead letters"
        steps = sorted({letter.event.step for letter in letters})
        about = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        kinds = ", ".join(dict.fromkeys(letter.event.type.value for letter in letters))
        if act is Act.RESEND:
            title, button = f"Send {count} again", "Send again"
            sentence = "Each keeps its id, so that the receiver can tell what it has seen."
        else:
            title, button = f"Drop {count}", "Drop"
            sentence = "What is dropped is removed for good; the receiver never gets it."
        return Confirmation(
            act=act,
            title=title,
            sentences=[
                f"To {destination}, about {about}: {kinds}. {sentence}",
                f"Last error: {letters[-1].error}",
            ],
            button=button,
            rows=(),
            fields={
                DESTINATION: destination,
                FIRST_LETTER: str(letters[0].sequence),
                LAST_LETTER: str(letters[-1].sequence),
            },
        )

    def _promotion(
        self,
        act: Act,
        *,
        title: str,
        sentences: Sequence[str],
        button: str,
        target: int | None,
        fields: Mapping[str, str] | None = None,
    ) -> Confirmation:
        serving = self._evaluator.serving_step
        rows = [] if serving is None else [("served now", self._views.row(serving))]
        if target is not None and target != serving:
            rows.append(("would be served", self._views.row(target)))
        return Confirmation(
            act=act,
            title=title,
            sentences=sentences,
            button=button,
            rows=rows,
            fields={**self.state(), **(fields or {})},
        )

    def _change_to(self, step: int) -> str:
        serving = self._evaluator.serving_step
        if serving == step:
            return f"Step {step} is served already, and stays."
        loaded = any(
            status.step == step and status.state is VersionState.AVAILABLE for status in self._evaluator.status()
        )
        when = "It is loaded, so that takes effect with the next batch." if loaded else "It is loaded first."
        instead = "" if serving is None else f" instead of step {serving}"
        return f"Step {step} will be served{instead}. {when}"

    def _existing(self, step: int) -> CheckpointRow:
        if all(info.step != step for info in self._evaluator.checkpoints()):
            raise VersionNotFoundError(f"the checkpoint of step {step} does not exist any more, or never did")
        return self._views.row(step)

    def _datasets(self) -> Sequence[str]:
        names = self._evaluator.dataset_names
        if not names:
            raise NotReadyError("this server has no dataset; name one with --eval-data, or in the experiment")
        return names


def _required(value: int | None, name: str) -> int:
    if value is None:
        raise InvalidInputError(f"the parameter {name} is missing; give a step")
    return value
