"""Following an evaluator over the network: its decisions, and its checkpoints where no folder is shared."""

from __future__ import annotations

import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, replace
from pathlib import Path
from typing import Protocol

from understudy.checkpoints.atomic import write_bytes, write_json
from understudy.checkpoints.checkpoint_errors import CheckpointError, DamagedCheckpointError
from understudy.checkpoints.detached import INNER_NAME
from understudy.checkpoints.found_checkpoints import FoundCheckpoints
from understudy.checkpoints.fs import remove_folder, sweep
from understudy.checkpoints.layout import MANIFEST_FILE, MAX_STEP, RunDir
from understudy.checkpoints.local_checkpoint import open_local_checkpoint, read_private_manifest
from understudy.checkpoints.manifest import SIGNATURE_FILE, FileEntry, Manifest, verify_files
from understudy.checkpoints.pauses import doubling_pause
from understudy.checkpoints.run_source import RunSource
from understudy.checkpoints.signing import AcceptedKeys
from understudy.checkpoints.source import Changes, Checkpoint, PublishedCheckpoint
from understudy.evaluator.evaluator_errors import AnotherEvaluatorError, OutOfResourcesError
from understudy.evaluator.serving.decision_file import ServingDecision, ServingReport, decode_decision
from understudy.evaluator.types import CheckpointKey

FOLLOWED_FILE = "followed.json"
"""In the state folder: the last decision, for a restart while the evaluator is gone."""

DOWNLOADS_DIR = "followed"
"""In the state folder: the checkpoints that the evaluator sent, in the layout of a run folder."""

CONTACT_SECONDS = 10.0
"""How long a server that starts waits for the evaluator before it serves what it served last."""

_RECHECK_SECONDS = 1.0
_SHARED_FOLDER_SECONDS = 0.5
"""How long a checkpoint may take to be visible in a shared folder."""

_FIRST_RETRY_SECONDS = 0.2
_LONGEST_RETRY_SECONDS = 10.0
_SMALL_FILE_BYTES = 2**24
_KEPT = 4
"""How many downloaded checkpoints are kept at most, besides those that are in use."""

_DIGEST = re.compile(r"[0-9a-f]{64}")

_log = logging.getLogger(__name__)


class EvaluatorLink(Protocol):
    """A connection to one of several addresses of an evaluator. Thread-safe."""

    def start(self, on_decision: Callable[[ServingDecision], None]) -> None:
        """Connect, and connect again after every break, until `close`.

        Args:
            on_decision: Called on a thread of the link with the present decision after each connection, and with every
                later one. If it raises AnotherEvaluatorError or ValueError, the link tries the next address.
        """

    def report(self, report: ServingReport) -> None:
        """Send the last of these reports to the evaluator, now and after each connection."""

    def read(self, decision: ServingDecision, path: str, *, offset: int = 0) -> Iterator[bytes]:
        """Yield the rest of a file of the decided checkpoint from an offset on. Blocks.

        Raises:
            FileNotFoundError: The evaluator has no such file.
            ConnectionError: It cannot be reached, or the connection broke.
        """

    @property
    def problem(self) -> str:
        """Why there is no connection; empty if there is one."""

    def close(self) -> None:
        """Disconnect and join the threads. Idempotent."""


class NetworkFollowing:
    """Follows an evaluator through a link. It is a `FollowedEvaluator` and a `CheckpointSource`.

    A checkpoint is downloaded if the shared run folder, if any, does not have it. A download goes on after a break
    where it was, is checked against the manifest, and then appears as a whole. A later decision cancels it.

    Args:
        link: The connection.
        state_dir: The state folder of this server.
        run: The shared run folder; None if there is none.
        accepted: The keys of which one must have signed each checkpoint; None if they need not be signed.
        max_download_mib: The most that downloaded checkpoints may take, in MiB.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        link: EvaluatorLink,
        *,
        state_dir: Path,
        run: RunDir | None,
        accepted: AcceptedKeys | None,
        max_download_mib: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._file = state_dir / FOLLOWED_FILE
        self._downloads = RunDir(state_dir / DOWNLOADS_DIR)
        self._partial = self._downloads.root / "partial"
        self._run = run
        self._accepted = accepted
        self._max_mib = max_download_mib
        self._clock = clock
        self._downloaded = RunSource(self._downloads, accepted=accepted, is_private=True)
        self._shared = None if run is None else RunSource(run, accepted=accepted)
        self._is_shared_lost = False
        self._found = FoundCheckpoints()
        self._changed_steps: set[int] = set()
        self._lock = threading.Lock()
        self._remembered = _remembered(self._file)
        self._decision: ServingDecision | None = None
        self._seen: ServingDecision | None = None
        self._failure = ""
        self._verified: set[CheckpointKey] = set()
        self._is_replaced = False
        self._alone_from = 0.0
        self._on_downloaded: Callable[[CheckpointKey], None] = lambda _: None
        self._on_decision: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run_downloads, name="understudy-download")

    def start(self, *, on_decision: Callable[[], None], on_downloaded: Callable[[CheckpointKey], None]) -> None:
        """Connect, and start the thread of the downloads.

        Args:
            on_decision: Called when there is a new decision.
            on_downloaded: Called with step and digest before a downloaded checkpoint appears.
        """
        self._on_decision, self._on_downloaded = on_decision, on_downloaded
        self._downloads.checkpoints.mkdir(parents=True, exist_ok=True)
        sweep(self._downloads.checkpoints)
        self._alone_from = self._clock() + CONTACT_SECONDS
        self._link.start(self._accept)
        self._thread.start()

    def close(self) -> None:
        """Disconnect and end the thread. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._link.close()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def current(self) -> ServingDecision | None:
        """See `FollowedEvaluator`. Without a connection it is the last decision of an earlier process, after a wait."""
        with self._lock:
            if self._decision is None and self._alone_from and self._clock() >= self._alone_from:
                return self._remembered
            return self._decision

    @property
    def problem(self) -> str:
        """See `FollowedEvaluator`."""
        return self._failure or self._link.problem

    def refresh(self) -> bool:
        """See `FollowedEvaluator`."""
        current = self.current
        changed, self._seen = current != self._seen, current
        return changed

    def report(self, report: ServingReport) -> None:
        """See `FollowedEvaluator`."""
        self._link.report(report)

    @property
    def is_complete(self) -> bool:
        """See `CheckpointSource`."""
        return self._downloaded.is_complete and (self._shared is None or self._shared.is_complete)

    @property
    def missing(self) -> str:
        """See `CheckpointSource`. The evaluator has what is missing here."""
        return ""

    @property
    def unread(self) -> str:
        """See `CheckpointSource`."""
        return self._downloaded.unread or ("" if self._shared is None else self._shared.unread)

    @property
    def found(self) -> Sequence[Checkpoint]:
        """See `CheckpointSource`."""
        return self._found.in_order()

    def poll(self, wanted: Collection[int] = ()) -> Changes:
        """See `CheckpointSource`. A downloaded checkpoint goes before another one of the same step."""
        with self._changed:
            self._changed.notify_all()  # the accepted keys may have changed
        self._changed_steps |= self._downloaded.poll(wanted).keys()
        if self._shared is not None:
            self._changed_steps |= self._poll_shared(self._shared, wanted)
        for step in self._changed_steps:
            shared = None if self._shared is None else self._shared.find(step)
            self._found.set(step, self._downloaded.find(step) or shared)
        self._changed_steps.clear()
        return self._found.take_changes()

    def _poll_shared(self, shared: RunSource, wanted: Collection[int]) -> AbstractSet[int]:
        """Return the steps that changed in the shared folder; while it cannot be read, the evaluator sends files."""
        try:
            changes = shared.poll(wanted)
        except OSError as error:
            if not self._is_shared_lost:
                _log.warning("the shared run folder cannot be read: %s", error)
            self._is_shared_lost = True
            return set()
        self._is_shared_lost = False
        return changes.keys()

    def peek(self) -> object:
        """See `CheckpointSource`."""
        return self._downloaded.peek(), None if self._shared is None else self._shared.peek()

    def _accept(self, decision: ServingDecision) -> None:
        """Accept a decision that the evaluator sent.

        Raises:
            AnotherEvaluatorError: Another evaluator sent it.
            ValueError: It names no checkpoint. A folder is called as its digest, which must not lead elsewhere.
        """
        for named in _named_checkpoints(decision):
            if not (_DIGEST.fullmatch(named.digest) and 0 <= named.step <= MAX_STEP):
                raise ValueError(
                    f"it decided for step {named.step} with the digest {named.digest[:80]!r}, which is no checkpoint"
                )
        with self._lock:
            known = self._decision or self._remembered
            _check_evaluator(decision, known)
            if decision == self._decision:
                return
            self._decision = self._remembered = decision
            self._failure = ""
            self._is_replaced |= known is not None and known.evaluator_id != decision.evaluator_id
        if known is not None and known.evaluator_id != decision.evaluator_id:
            _log.info(
                "going over to the evaluator that replaces the one followed so far",
                extra={"now": decision.evaluator_id},
            )
        elif known is not None and decision.sequence > known.sequence + 1:
            _log.info("decisions passed over", extra={"last": known.sequence, "sequence": decision.sequence})
        try:
            write_json(self._file, asdict(decision))
        except OSError as error:
            _log.warning("cannot keep the decision for a restart", extra={"reason": str(error)})
        with self._changed:
            self._changed.notify_all()
        self._on_decision()

    def _run_downloads(self) -> None:
        failures = 0
        tried = None
        while not self._closing:
            decision = self.current
            if decision != tried:
                tried, failures = decision, 0
            wanted = decision
            try:
                self._discard_replaced(decision)
                for wanted in _named_checkpoints(decision):
                    if not self._has(wanted):
                        self._download(wanted)
                failures = 0
                self._failure = ""
            except _SupersededError:
                failures = 0
            except Exception as error:  # noqa: BLE001 - tried again until there is another decision
                failures += 1
                self._failed(wanted, error, failures)
            retry = doubling_pause(failures, first=_FIRST_RETRY_SECONDS, longest=_LONGEST_RETRY_SECONDS)
            self._wait(decision, retry if failures else _RECHECK_SECONDS)

    def _discard_replaced(self, decision: ServingDecision | None) -> None:
        """Delete the downloads of an evaluator that was replaced; those in use are linked elsewhere."""
        with self._lock:
            is_replaced, self._is_replaced = self._is_replaced, False
        if is_replaced:
            wanted = {each.key for each in _named_checkpoints(decision)}
            for step in self._downloads.committed_steps():
                if (step, _digest(self._downloads, step, self._accepted, is_private=True)) not in wanted:
                    remove_folder(self._downloads.checkpoint(step))

    def _wait(self, decision: ServingDecision | None, seconds: float) -> None:
        """Wait, until there is another decision, other keys are accepted, or this is closed at most."""
        keys = self._accepted_now()
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or self.current != decision or self._accepted_now() != keys, seconds
            )

    def _accepted_now(self) -> frozenset[str]:
        return frozenset() if self._accepted is None else self._accepted.identifiers

    def _failed(self, decision: ServingDecision | None, error: Exception, failures: int) -> None:
        step = None if decision is None else decision.step
        self._failure = f"cannot download step {step} from the evaluator: {error}"
        if failures == 1:
            _log.warning(self._failure)
        self._on_decision()  # so that the link reports it to the evaluator

    def _has(self, decision: ServingDecision) -> bool:
        """Return whether the decided checkpoint is in a folder; wait a moment for the shared one."""
        if _digest(self._downloads, decision.step, self._accepted, is_private=True) == decision.digest:
            return self._is_whole(decision)
        if self._run is None:
            return False
        until = self._clock() + _SHARED_FOLDER_SECONDS
        while _digest(self._run, decision.step, self._accepted) != decision.digest:
            self._wait(self.current, _SHARED_FOLDER_SECONDS / 10)
            self._check_wanted(decision)
            if self._clock() >= until:
                return False
        return True

    def _is_whole(self, decision: ServingDecision) -> bool:
        """Return whether a download has what its manifest says, of which a power cut may have left less."""
        if decision.key not in self._verified:
            folder = self._downloads.checkpoint(decision.step)
            try:
                open_local_checkpoint(folder, accepted=self._accepted)
            except CheckpointError as error:
                _log.warning("a download is damaged and made again", extra={"reason": str(error)})
                return False
            self._note_verified(decision)
        return True

    def _note_verified(self, decision: ServingDecision) -> None:
        self._verified = {decision.key, *(self._verified & {wanted.key for wanted in _named_checkpoints(self.current)})}

    def _download(self, decision: ServingDecision) -> None:
        folder = self._partial / decision.digest
        for other in self._partial.glob("*"):
            if other != folder:
                shutil.rmtree(other)
        folder.mkdir(parents=True, exist_ok=True)
        manifest = self._fetch_manifest(decision, folder)
        self._make_room(decision, manifest, missing=_size(manifest) - _folder_size(folder))
        for entry in manifest.files:
            self._fetch_file(decision, entry, folder)
        try:
            verify_files(folder, manifest)
        except DamagedCheckpointError:
            shutil.rmtree(folder)
            raise
        self._check_wanted(decision)
        target = self._downloads.checkpoint(decision.step)
        remove_folder(target)
        self._on_downloaded(decision.key)
        folder.rename(target)
        self._note_verified(decision)
        _log.info("downloaded", extra={"step": decision.step, "bytes": _size(manifest)})

    def _fetch_manifest(self, decision: ServingDecision, folder: Path) -> Manifest:
        names = [MANIFEST_FILE, *([SIGNATURE_FILE, INNER_NAME] if self._accepted is not None else [])]
        for name in names:
            try:
                write_bytes(folder / name, self._read_small(decision, name))
            except FileNotFoundError:
                if name == MANIFEST_FILE:
                    raise
        manifest = read_private_manifest(folder, self._accepted)
        if (manifest.step, manifest.digest) != decision.key:
            raise DamagedCheckpointError(f"the evaluator sent step {manifest.step} with digest {manifest.digest}")
        if any(entry.path in names for entry in manifest.files):
            raise DamagedCheckpointError(f"its manifest lists one of {', '.join(names)}")
        return manifest

    def _read_small(self, decision: ServingDecision, name: str) -> bytes:
        content = bytearray()
        for piece in self._link.read(decision, name):
            content += piece
            if len(content) > _SMALL_FILE_BYTES:
                raise DamagedCheckpointError(f"{name} has more than {_SMALL_FILE_BYTES} bytes")
        return bytes(content)

    def _fetch_file(self, decision: ServingDecision, entry: FileEntry, folder: Path) -> None:
        path = folder / entry.path
        path.parent.mkdir(parents=True, exist_ok=True)
        offset = path.stat().st_size if path.exists() else 0
        if offset >= entry.size_bytes > 0:
            return
        with path.open("ab") as file:
            for piece in self._link.read(decision, entry.path, offset=offset):
                self._check_wanted(decision)
                offset += len(piece)
                if offset > entry.size_bytes:
                    raise DamagedCheckpointError(
                        f"{entry.path} is longer than the {entry.size_bytes} bytes in its manifest"
                    )
                file.write(piece)

    def _make_room(self, decision: ServingDecision, manifest: Manifest, *, missing: int) -> None:
        """Remove old downloads; the checkpoints in use are linked elsewhere.

        Args:
            decision: Names the checkpoint.
            manifest: Its manifest.
            missing: How many bytes are still to come.

        Raises:
            OutOfResourcesError: The checkpoint is larger than all downloads may be, or than the room on the disk.
        """
        limit = self._max_mib * 2**20
        kept = {wanted.step for wanted in _named_checkpoints(self.current)} - {decision.step}
        needed = _size(manifest) + sum(_folder_size(self._downloads.checkpoint(step)) for step in kept)
        if needed > limit:
            others = f" with step {', '.join(map(str, kept))}" if kept else ""
            raise OutOfResourcesError(
                f"it takes {needed / 2**20:.1f} MiB{others}, and follow_download_mib is {self._max_mib}"
            )
        steps = [step for step in self._downloads.committed_steps() if step not in kept | {decision.step}]
        sizes = {step: _folder_size(self._downloads.checkpoint(step)) for step in steps}
        oldest_first = sorted(steps, key=lambda step: self._downloads.checkpoint(step).stat().st_mtime_ns)
        while oldest_first and (
            len(oldest_first) >= _KEPT
            or sum(sizes[step] for step in oldest_first) + needed > limit
            or self._free_bytes() < missing
        ):
            remove_folder(self._downloads.checkpoint(oldest_first.pop(0)))
        if (free := self._free_bytes()) < missing:
            raise OutOfResourcesError(
                f"it takes {missing / 2**20:.1f} MiB more, and {free / 2**20:.1f} MiB are free at "
                f"{self._downloads.root}; make room there, or give a state folder on a larger disk with --state-dir"
            )

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self._downloads.root).free

    def _check_wanted(self, decision: ServingDecision) -> None:
        if self._closing or decision.key not in [wanted.key for wanted in _named_checkpoints(self.current)]:
            raise _SupersededError


class _SupersededError(Exception):
    """The download is no longer wanted."""


def _check_evaluator(decision: ServingDecision, known: ServingDecision | None) -> None:
    """Raise AnotherEvaluatorError unless the evaluator of a decision is the known one, or replaces it."""
    if known is None or known.evaluator_id in (decision.evaluator_id, *decision.replaces):
        return
    raise AnotherEvaluatorError(
        f"it is another evaluator ({decision.evaluator_id}) than the one that was followed so far "
        f"({known.evaluator_id}), and is not known to replace it; correct the address, or, if its run was trained anew "
        f"while no evaluator watched it, start that evaluator with --replaces-evaluator {known.evaluator_id}, "
        f"for all servers"
    )


def _named_checkpoints(decision: ServingDecision | None) -> tuple[ServingDecision, ...]:
    """Return the decision, and the same for its shadow: each names a checkpoint that is to be here."""
    if decision is None:
        return ()
    shadow = decision.shadow
    if shadow is None:
        return (decision,)
    return decision, replace(decision, step=shadow.step, digest=shadow.digest, shadow=None)


def _remembered(file: Path) -> ServingDecision | None:
    try:
        return decode_decision(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.warning("cannot read the last decision that was followed", extra={"file": str(file), "error": str(error)})
        return None


def _digest(run: RunDir, step: int, accepted: AcceptedKeys | None, *, is_private: bool = False) -> str | None:
    try:
        return PublishedCheckpoint.read(run.checkpoint(step), accepted, is_private=is_private).digest
    except (OSError, CheckpointError):
        return None


def _size(manifest: Manifest) -> int:
    return sum(entry.size_bytes for entry in manifest.files)


def _folder_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
